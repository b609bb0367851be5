"""`lmhead geometry`: the shape of a head."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmhead.cli.options import (
    Force,
    Json,
    ModelArgument,
    ModelOption,
    PlotFile,
    one_model,
    token_given,
)  # fmt: skip
from lmhead.models.registry import DEFAULT_MODEL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmhead.inspect.geometry import Geometry, RowToken


def geometry(
    argument: ModelArgument = None,
    model: ModelOption = None,
    near: Annotated[
        str | None,
        typer.Option("--near", metavar="TOKEN", help="Show the rows nearest to this token's row."),
    ] = None,
    vector: Annotated[
        Path | None,
        typer.Option(
            "--vector",
            metavar="FILE",
            help="Show which tokens a steering vector raises and lowers.",
        ),
    ] = None,
    top: Annotated[
        int, typer.Option("--top", min=1, help="How many rows to show in each list.")
    ] = 10,
    plot: PlotFile = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Describe a head's rows: norms, spectrum, effective rank, untrained and duplicate rows.

    Only the head is read, memory-mapped and in chunks. Rows listed as untrained are a guess:
    special tokens that were added after training look the same.
    """
    name = one_model(argument, model, DEFAULT_MODEL)
    from lmhead.cli import render

    if plot is not None:
        from lmhead.cli.plots import check_plot

        check_plot(plot, force)
    added, from_block = None, False
    if vector is not None:
        from lmhead.steer import SteeringVector

        loaded = SteeringVector.load(vector)
        added, from_block = loaded.added, loaded.layer != "head"
    from lmhead.inspect.geometry import geometry as measure

    result = measure(
        name, near=token_given(near), vector=added, from_block=from_block, top=top,
        progress=render.progress,
    )  # fmt: skip
    if plot is not None:
        from lmhead.cli.plots import draw_geometry

        draw_geometry(result, plot)
        render.note(f"wrote {plot}")
    if json:
        render.print_json(result.to_dict())
    else:
        _show(result)


def _show(result: "Geometry") -> None:
    from lmhead.cli import render

    s, q = result.spectrum, result.norm_quantiles
    facts = render.Facts(f"The head of {result.model}")
    facts("rows x width", f"{result.rows:,} x {result.width:,}, {result.dtype}")
    facts("tied", "yes, it is the input embedding" if result.tied else "no")
    facts(
        "row norms",
        f"{q[0]:.4g} to {q[4]:.4g}, median {q[2]:.4g}, half in {q[1]:.4g} to {q[3]:.4g}",
    )
    facts(
        "effective rank",
        f"{s.effective_rank:.1f} of {result.width:,}; {s.centred_effective_rank:.1f} centred",
    )
    facts("first direction", f"{render.percent(s.first_share)} of the squares")
    facts("mean cosine", f"{s.mean_cosine:.3f} between two rows")
    if result.rows_without_token is not None:
        facts("without a token", f"{render.plural(result.rows_without_token, 'row')}")
    if result.placeholder_rows:
        facts("placeholders", render.plural(result.placeholder_rows, "row"))
    facts("equal rows", f"{render.plural(result.duplicate_rows, 'row')} equal to one before")
    special = f", and {render.plural(result.untrained_special, 'special token')}"
    rows = render.plural(result.untrained_count, "row")
    facts("look untrained", rows + (special if result.untrained_special else ""))
    facts.print()
    _list("look untrained", "cosine", result.untrained)
    if not result.near_to and not result.raised:
        _list("shortest rows", "norm", result.shortest)
        _list("longest rows", "norm", result.longest)
    for group in result.duplicates:
        names = ", ".join(f"{t.text!r} ({t.id})" for t in group)
        render.say(f"equal: {names}")
    if result.near_to:
        _list(f"nearest to {result.near_to.text!r}", "cosine", result.near)
    _list("raised most", "delta logit", result.raised)
    _list("lowered most", "delta logit", result.lowered)


def _list(title: str, what: str, rows: "Sequence[RowToken]") -> None:
    from lmhead.cli import render

    if not rows:
        return
    table = render.table(title, "id", what)
    for row in rows:
        table.add_row(render.token(row.text), str(row.id), f"{row.value:.4f}")
    render.out().print()
    render.out().print(table)
