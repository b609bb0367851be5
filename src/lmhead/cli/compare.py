"""`lmhead compare`: two heads side by side."""

from typing import TYPE_CHECKING, Annotated

import typer

from lmhead.cli.options import MODEL_HELP, Json, built_in_names, read_text

if TYPE_CHECKING:
    from lmhead.inspect.compare import Comparison, OnText


def compare(
    a: Annotated[str, typer.Argument(metavar="A", help=MODEL_HELP, autocompletion=built_in_names)],
    b: Annotated[
        str,
        typer.Argument(
            metavar="B",
            help="A fine-tune, trim or quantisation of it.",
            autocompletion=built_in_names,
        ),
    ],
    text: Annotated[
        str | None,
        typer.Option(
            "--text", metavar="TEXT|FILE", help="Also compare their next tokens along this text."
        ),
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="How many rows to show.")] = 10,
    json: Json = False,
) -> None:
    """Compare two heads: the rows that changed most, spectra, next tokens along a text.

    A trimmed model is compared token by token, through the id map in its lmhead_trim.json. Without
    --text, only the heads are read.
    """
    given = None if text is None else read_text(text)
    from lmhead.cli import render
    from lmhead.inspect.compare import compare as side_by_side

    result = side_by_side(a, b, text=given, top=top, progress=render.progress)
    if json:
        render.print_json(result.to_dict())
        return
    _show(result)
    if result.on_text is not None:
        _show_text(result.on_text)


def _show(result: "Comparison") -> None:
    from lmhead.cli import render

    table = render.table("", "A", "B")
    one, other = result.spectrum_a, result.spectrum_b
    table.add_row("rows", render.count(result.rows_a), render.count(result.rows_b))
    table.add_row("effective rank", f"{one.effective_rank:.2f}", f"{other.effective_rank:.2f}")
    table.add_row(
        "the same, centred",
        f"{one.centred_effective_rank:.2f}",
        f"{other.centred_effective_rank:.2f}",
    )
    table.add_row(
        "first direction", render.percent(one.first_share), render.percent(other.first_share)
    )
    table.add_row("mean cosine", f"{one.mean_cosine:.4f}", f"{other.mean_cosine:.4f}")
    render.say(f"A is {result.a}")
    render.say(f"B is {result.b}")
    render.out().print(table)
    render.say(
        f"{result.equal:,} of {result.common:,} rows that both have are equal; distance "
        f"{result.mean_distance:.4g} and cosine {result.mean_cosine:.6f} in the mean"
    )
    if result.moved:
        moved = render.table("moved most", "id", "distance", "cosine")
        for row in result.moved:
            moved.add_row(
                render.token(row.text), str(row.id), f"{row.distance:.4g}", f"{row.cosine:.6f}"
            )
        render.out().print()
        render.out().print(moved)


def _show_text(on_text: "OnText") -> None:
    from lmhead.cli import render

    render.out().print()
    render.say(
        f"next token: {on_text.disagreements:,} of "
        f"{render.plural(on_text.positions, 'position')} differ "
        f"({render.percent(on_text.disagreements / on_text.positions)}); KL(A || B) "
        f"{on_text.mean_kl:.3g} in the mean, {on_text.max_kl:.3g} at most"
    )
    if on_text.worst:
        table = render.table("behind", "A says", "B says", "position", "KL", left=3)
        for row in on_text.worst:
            table.add_row(
                render.token(row.before),
                render.token(row.a.text),
                render.token(row.b.text),
                str(row.position),
                f"{row.kl:.4g}",
            )
        render.out().print(table)
