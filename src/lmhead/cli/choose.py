"""`lmhead choose`: which of some continuations is the most probable."""

from typing import TYPE_CHECKING, Annotated

import typer

from lmhead.cli.options import Chat, Device, Dtype, Json, Model, read_prompt
from lmhead.errors import BadInput
from lmhead.models.registry import DEFAULT_MODEL

if TYPE_CHECKING:
    from lmhead.generation.choose import Choice


def choose(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text, or - for stdin.")],
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            "-o",
            metavar="TEXT",
            help="A continuation, taken literally: include its leading space. Give several.",
        ),
    ] = None,
    model: Model = DEFAULT_MODEL,
    chat: Chat = False,
    engine: Annotated[
        str, typer.Option("--engine", help="Which head: auto, dense or screened.")
    ] = "auto",
    device: Device = None,
    dtype: Dtype = None,
    json: Json = False,
) -> None:
    """Score several continuations of a prompt, and show which is the most probable.

    The log-probability is shown for the whole continuation and per token, which does not favour
    short ones. With a screened head (`lmhead screen`), only the rows that matter are read.
    """
    text = read_prompt(prompt)
    if len(option or ()) < 2:
        raise BadInput(
            f"{'one option is' if option else 'no option is'} given; expected at least two: "
            "--option TEXT --option TEXT"
        )
    if engine == "max":
        raise BadInput("--engine max runs a model as one graph; expected auto, dense or screened")
    from lmhead.cli import render
    from lmhead.generation.choose import choose as run

    result = run(
        text,
        option or [],
        model,
        chat=chat,
        engine_name=engine,
        device=device,
        dtype=dtype,
        progress=render.progress,
    )
    if json:
        render.print_json({"model": model, **result.to_dict()})
    else:
        _show(result)


def _show(result: "Choice") -> None:
    from lmhead.cli import render

    table = render.table("option", "tokens", "log-probability", "per token", "share", "")
    table.columns[-1].justify = "left"
    for n, one in enumerate(result.options):
        marks = ["most probable"] * (n == result.best)
        marks += ["most probable per token"] * (n == result.best_by_mean != result.best)
        table.add_row(
            render.token(one.text), f"{len(one.ids):,}", f"{one.logprob:.4f}",
            f"{one.mean:.4f}", render.percent(one.share), ", ".join(marks),
        )  # fmt: skip
    render.out().print(table)
