"""`lmhead next`: what the head makes of a prompt's last position."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmhead.cli.options import Chat, Json, Model, parse_order, read_prompt
from lmhead.cli.sampling import with_controls
from lmhead.errors import BadInput
from lmhead.models.registry import DEFAULT_MODEL

if TYPE_CHECKING:
    from lmhead.next import NextTokens


@with_controls
def next_(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text, or - for stdin.")],
    model: Model = DEFAULT_MODEL,
    top: Annotated[int, typer.Option("--top", min=1, help="How many tokens to show.")] = 10,
    chat: Chat = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="Show what every sampling filter leaves and cuts.")
    ] = False,
    order: Annotated[
        str, typer.Option(help="hf, vllm, llama.cpp, or filters separated by commas.")
    ] = "hf",
    json: Json = False,
    *,
    controls: dict[str, Any],
) -> None:
    """Show the most probable next tokens of a prompt, and the mass of the rest."""
    if controls and not trace:
        raise BadInput("sampling controls act on the trace only; add --trace")
    text = read_prompt(prompt)
    from lmhead.cli import render
    from lmhead.loading import load
    from lmhead.next import next_tokens
    from lmhead.sampling import SamplingParams

    params = SamplingParams.from_dict(controls) if trace else None
    loaded = load(model, progress=render.progress)
    result = next_tokens(loaded, text, top=top, chat=chat, params=params, order=parse_order(order))
    if json:
        render.print_json(result.to_dict())
        return
    _show(result)


def _show(result: "NextTokens") -> None:
    from lmhead.cli import render

    table = render.table("token", "id", "logit", "probability", "cumulative", "", title=None)
    table.columns[-1].justify = "left"
    for row in result.tokens:
        table.add_row(
            render.token(row.token),
            str(row.id),
            f"{row.logit:.3f}",
            render.percent(row.probability),
            render.percent(row.cumulative),
            f"[cyan]{render.bar(row.probability)}[/cyan]",
        )
    table.add_section()
    rest = f"the other {result.rest_count:,}"
    table.add_row(
        f"[dim]{rest}[/dim]",
        "",
        "",
        render.percent(result.rest),
        render.percent(1.0),
        f"[dim]{render.bar(result.rest)}[/dim]",
    )
    render.out().print(table)
    if result.trace is None:
        return
    from lmhead.sampling import SamplingParams

    defaults = SamplingParams().to_dict()
    funnel = render.table("filter", "settings", "tokens left", "mass cut", "moved", left=2)
    for step in result.trace.steps:
        changed = {n: v for n, v in step.settings.items() if v != defaults.get(n)}
        settings = ", ".join(f"{name}={value}" for name, value in changed.items())
        funnel.add_row(
            step.name,
            settings,
            render.count(step.left),
            render.percent(step.cut),
            render.percent(step.moved),
        )
    render.out().print()
    render.out().print(funnel)
