"""`lmhead why`: what pushed a token's logit up or down."""

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
    from lmhead.inspect.attribution import Reason, Why


def why(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text, or - for stdin.")],
    model: Model = DEFAULT_MODEL,
    token: Annotated[
        str | None,
        typer.Option(
            "--token", help="The token to explain: its text, or #ID; by default the best one."
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            "--against", help="Explain why that token rather than this one: its text, or #ID."
        ),
    ] = None,
    position: Annotated[
        int,
        typer.Option(
            "--position", help="Explain what follows the token at this position; -1 is the last."
        ),
    ] = -1,
    heads: Annotated[bool, typer.Option("--heads", help="Split attention into its heads.")] = False,
    neurons: Annotated[
        int | None,
        typer.Option(
            "--neurons",
            min=0,
            metavar="BLOCK",
            help="Split the MLP of this block into its neurons.",
        ),
    ] = None,
    top: Annotated[
        int,
        typer.Option(
            "--top", min=1, help="How many parts to show, and how many neurons on either side."
        ),
    ] = 20,
    in_order: Annotated[
        bool, typer.Option("--in-order", help="Show every part in order, from the embedding up.")
    ] = False,
    chat: Chat = False,
    plot: PlotFile = None,
    force: Force = False,
    device: Device = None,
    dtype: Dtype = None,
    json: Json = False,
) -> None:
    """Show what each attention and MLP adds to a token's logit; the parts add up to it.

    This is the direct effect, through the final norm, scale and softcap; what a block contributes
    through later blocks is credited to them. If a model's blocks cannot be separated, it says why.
    """
    text = read_prompt(prompt)
    wanted, other = token_given(token), token_given(against)
    from lmhead.cli import render

    if plot is not None:
        from lmhead.cli.plots import check_plot

        check_plot(plot, force)
    from lmhead.inspect.attribution import why as explain

    result = explain(
        text, model, token=wanted, against=other, position=position, heads=heads,
        neurons=neurons, top=top, chat=chat, device=device, dtype=dtype,
        progress=render.progress,
    )  # fmt: skip
    if plot is not None:
        from lmhead.cli.plots import draw_why

        draw_why(result, plot)
        render.note(f"wrote {plot}")
    if json:
        render.print_json(result.to_dict())
        return
    _show(result, None if in_order else top)
    if result.neurons:
        _show_neurons(result)


def _show(result: "Why", top: int | None) -> None:
    from lmhead.cli import render

    shown = [r for r in result.reasons if r.kind != "rounding"]
    if top is not None:
        shown = sorted(shown, key=lambda r: -abs(r.value))[:top]
    largest = max((abs(r.value) for r in shown), default=0.0) or 1.0
    columns = ["part", "adds", ""]
    if result.against is not None:
        columns[2:2] = [render.shown(result.token.text), render.shown(result.against.text)]
    table = render.table(*columns)
    table.columns[-1].justify = "left"
    for reason in shown:
        colour = "cyan" if reason.value > 0 else "red"
        bar = f"[{colour}]{render.bar(abs(reason.value) / largest)}[/{colour}]"
        table.add_row(reason.name, *_numbers(reason, result), bar)
    rest = [r for r in result.reasons if r not in shown]
    table.add_section()
    if others := [r for r in rest if r.kind != "rounding"]:
        table.add_row(f"[dim]the other {len(others)}[/dim]", *_sums(others, result), "")
    table.add_row("[dim]sum[/dim]", *_sums(result.reasons, result), "")
    render.out().print(table)
    what = f"the logit of {result.token.text!r}"
    if result.against is not None:
        what += f" less that of {result.against.text!r}"
    render.say(f"{what} is {result.logit:.4f}; rounding leaves {result.rounding:.1e} unexplained")


def _numbers(reason: "Reason", result: "Why") -> list[str]:
    values = [reason.value]
    if result.against is not None:
        values += [reason.to_token, reason.to_against or 0.0]
    return [f"{value:+.4f}" for value in values]


def _sums(reasons: "list[Reason] | tuple[Reason, ...]", result: "Why") -> list[str]:
    values = [sum(r.value for r in reasons)]
    if result.against is not None:
        values += [sum(r.to_token for r in reasons), sum(r.to_against or 0.0 for r in reasons)]
    return [f"{value:+.4f}" for value in values]


def _show_neurons(result: "Why") -> None:
    from lmhead.cli import render

    largest = max(abs(n.value) for n in result.neurons) or 1.0
    table = render.table("neuron", "activation", "adds", "", title=None)
    table.columns[-1].justify = "left"
    for neuron in result.neurons:
        colour = "cyan" if neuron.value > 0 else "red"
        bar = f"[{colour}]{render.bar(abs(neuron.value) / largest)}[/{colour}]"
        table.add_row(
            f"block {neuron.block} neuron {neuron.neuron}",
            f"{neuron.activation:.3f}",
            f"{neuron.value:+.4f}",
            bar,
        )
    render.out().print()
    render.out().print(table)
