"""`lmhead lens`: what the head would say after every block."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmhead.cli.options import (
    Chat,
    Device,
    Dtype,
    Force,
    Json,
    Model,
    PlotFile,
    read_prompt,
    token_given,
)  # fmt: skip
from lmhead.models.registry import DEFAULT_MODEL

if TYPE_CHECKING:
    from lmhead.inspect.lens import Lens


def lens(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text, or - for stdin.")],
    model: Model = DEFAULT_MODEL,
    token: Annotated[
        str | None,
        typer.Option("--token", help="Follow this token through the blocks: its text, or #ID."),
    ] = None,
    position: Annotated[
        int,
        typer.Option(
            "--position", help="Show what follows the token at this position; -1 is the last."
        ),
    ] = -1,
    all_positions: Annotated[
        bool, typer.Option("--all", help="Show the best token at every position and block.")
    ] = False,
    top: Annotated[int, typer.Option("--top", min=1, help="Tokens per cell in --json.")] = 5,
    chat: Chat = False,
    plot: PlotFile = None,
    force: Force = False,
    device: Device = None,
    dtype: Dtype = None,
    json: Json = False,
) -> None:
    """Show what the head would predict after every block (logit lens).

    For one position, it shows the best token and its probability, the entropy, the rank of the
    final answer and the KL to it; --json has every position. Each run checks that the last row
    equals the model's own logits.
    """
    text = read_prompt(prompt)
    wanted = token_given(token)
    from lmhead.cli import render
    from lmhead.errors import BadInput

    if plot is not None:
        from lmhead.cli.plots import check_plot

        check_plot(plot, force)
    from lmhead.inspect.lens import lens as look
    from lmhead.loading import load

    loaded = load(model, device=device, dtype=dtype, progress=render.progress)
    T = len(loaded.encode(text, chat=chat))
    if not -T <= position < T:
        raise BadInput(
            f"position is {position}; the prompt has {T} tokens, from 0 to {T - 1}",
            names=["position"],
        )
    # a long text has many positions that nobody will see
    last = T
    if not json and plot is None:
        last = min(T, _most_columns()) if all_positions else T - position % T
    result = look(
        text, loaded, token=wanted, top=top if json else 1, last=last, chat=chat,
        progress=render.progress,
    )  # fmt: skip
    _draw(plot, result)
    if json:
        render.print_json(result.to_dict())
    elif all_positions:
        _show_all(result, T)
    else:
        _show(result, position % T - (T - last))


def _draw(plot: Path | None, result: "Lens") -> None:
    from lmhead.cli import render

    if plot is not None:
        from lmhead.cli.plots import draw_lens

        draw_lens(result, plot)
        render.note(f"wrote {plot}")


def _show(result: "Lens", position: int) -> None:
    from lmhead.cli import render

    answer = result.rows[-1].cells[position].top[0]
    followed = result.token
    names = ["block", "says", "probability", "entropy", "rank", "KL", ""]
    table = render.table(*names, left=2)
    table.columns[-1].justify = "left"
    for row in reversed(result.rows):
        cell = row.cells[position]
        best = cell.top[0]
        rank = cell.rank if followed is None else (cell.token_rank or 0)
        share = cell.probability if followed is None else (cell.token_probability or 0.0)
        table.add_row(
            "input" if row.block is None else str(row.block),
            render.token(best.text),
            render.percent(best.probability),
            f"{cell.entropy:.2f}",
            render.count(rank),
            f"{cell.kl:.2f}",
            f"[cyan]{render.bar(share)}[/cyan]",
        )
    render.out().print(table)
    whose = answer.text if followed is None else followed.text
    behind = result.tokens[position]
    render.say(f"rank and bar: {whose!r} after {behind!r}; KL: to the model's prediction")
    _say_exact(result)


def _show_all(result: "Lens", T: int) -> None:
    from lmhead.cli import render

    first = _first_that_fits(result)
    if (shown := len(result.ids) - first) < T:
        render.note(f"only the last {shown} of {T} positions fit here")
    table = render.table("block", *(render.shown(t) for t in result.tokens[first:]))
    for row in reversed(result.rows):
        cells = [render.token(cell.top[0].text) for cell in row.cells[first:]]
        table.add_row("input" if row.block is None else str(row.block), *cells)
    render.out().print(table)
    _say_exact(result)


def _most_columns() -> int:
    """Return how many positions the terminal has room for at most."""
    from lmhead.cli import render

    return max(1, render.out().width // 4)


def _first_that_fits(result: "Lens") -> int:
    """Return the first of the last positions that the terminal has room for."""
    from lmhead.cli import render

    room, first = render.out().width - 5, len(result.ids)
    while first > 0:
        column = [result.tokens[first - 1], *(r.cells[first - 1].top[0].text for r in result.rows)]
        room -= 3 + max(render.token(text).cell_len for text in column)
        if room < 0:
            break
        first -= 1
    return min(first, len(result.ids) - 1)


def _say_exact(result: "Lens") -> None:
    from lmhead.cli import render

    if result.exact:
        render.say("the last row equals the model's own logits, bit by bit")
    else:
        render.say("the last row equals the model's own logits up to rounding")
