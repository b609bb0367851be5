"""`lmhead next`: what the head makes of a prompt's last position."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmhead.cli.options import (
    Body,
    Chat,
    Device,
    Dtype,
    Json,
    Model,
    choose_body,
    parse_order,
    read_prompt,
)
from lmhead.cli.sampling import with_controls
from lmhead.models.registry import DEFAULT_MODEL

if TYPE_CHECKING:
    from lmhead.generation import NextTokens
    from lmhead.sampling import Trace


@with_controls(
    without=("logprobs", "logprobs_mode"),
    temperature="Divide the logits by this (1 by default); 0 keeps only the best token.",
    min_tokens="If above 0, tokens that end the text are excluded.",
    seed="A seed that makes XTC's choices reproducible.",
)
def next_(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text, or - for stdin.")],
    model: Model = DEFAULT_MODEL,
    top: Annotated[int, typer.Option("--top", min=1, help="How many tokens to show.")] = 10,
    chat: Chat = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="Show what every sampling filter keeps and cuts.")
    ] = False,
    order: Annotated[
        str, typer.Option(help="hf, vllm, llama.cpp, or filters separated by commas.")
    ] = "hf",
    body: Body = "auto",
    device: Device = None,
    dtype: Dtype = None,
    json: Json = False,
    *,
    controls: dict[str, Any],
) -> None:
    """Show the most probable next tokens after a prompt.

    With sampling controls, the table also shows each token's probability after sampling filters;
    tokens that were cut come last.
    """
    text = read_prompt(prompt)
    from lmhead.cli import launch, render
    from lmhead.generation import next_tokens
    from lmhead.sampling import SamplingParams, check_sampling

    params = SamplingParams.from_dict(controls) if controls or trace else None
    parsed = parse_order(order)
    if params is not None:
        check_sampling(params, parsed)
    chosen = choose_body(body, model, device, dtype)
    loaded, head = launch.prepared(model, device, dtype, chosen)
    if params is not None:
        params = launch.seeded(params)
    result = next_tokens(
        text,
        loaded,
        head=head,
        top=top,
        chat=chat,
        params=params,
        order=parsed,
        progress=render.progress,
    )
    if not trace:
        result = replace(result, trace=None)
    if json:
        render.print_json(result.to_dict())
        return
    _show(result, filtered=bool(controls))
    if result.trace is not None:
        _show_trace(result.trace)


def _show(result: "NextTokens", filtered: bool) -> None:
    from lmhead.cli import render

    last = "after" if filtered else "cumulative"
    table = render.table("token", "id", "logit", "probability", last, "", title=None)
    table.columns[-1].justify = "left"
    for row in result.tokens:
        left = row.after or 0.0
        table.add_row(
            render.token(row.token),
            str(row.id),
            f"{row.logit:.3f}",
            render.percent(row.probability),
            (render.percent(left) if left else "cut")
            if filtered
            else render.percent(row.cumulative),
            f"[cyan]{render.bar(left if filtered else row.probability)}[/cyan]",
        )
    table.add_section()
    rest_after = result.rest_after or 0.0
    table.add_row(
        f"[dim]the other {result.rest_count:,}[/dim]",
        "",
        "",
        render.percent(result.rest),
        render.percent(rest_after if filtered else 1.0),
        f"[dim]{render.bar(rest_after if filtered else result.rest)}[/dim]",
    )
    render.out().print(table)


def _show_trace(trace: "Trace") -> None:
    from lmhead.cli import render
    from lmhead.sampling import SamplingParams

    defaults = SamplingParams().to_dict()
    funnel = render.table("filter", "settings", "tokens left", "mass cut", "moved", left=2)
    for step in trace.steps:
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
