"""`lmhead read`: a text in the colours of the model's surprise."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmhead.cli.options import Body, Device, Dtype, Force, Json, Model, choose_body, read_text
from lmhead.models.registry import DEFAULT_MODEL

if TYPE_CHECKING:
    from lmhead.inspect.reading import Reading


def read(
    text: Annotated[
        str, typer.Argument(metavar="TEXT|FILE", help="A text, a file, or - for stdin.")
    ],
    model: Model = DEFAULT_MODEL,
    surprises: Annotated[
        bool, typer.Option("--surprises", help="Show a table, the least probable tokens first.")
    ] = False,
    top: Annotated[int, typer.Option("--top", min=1, help="How many surprises to show.")] = 20,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a page that works offline."),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            "--stride",
            min=1,
            help="Read a text longer than the context in windows that move by this many tokens.",
        ),
    ] = None,
    force: Force = False,
    body: Body = "auto",
    device: Device = None,
    dtype: Dtype = None,
    json: Json = False,
) -> None:
    """Show a text coloured by how probable each token was, given the text before it.

    --surprises and --json give the log-probability, rank, entropy and what the model expected.
    """
    given = read_text(text)
    from lmhead.cli import render
    from lmhead.files.whole import refuse_existing, written_whole

    if html is not None:
        refuse_existing(html, force=force, folder=False)
    from lmhead.inspect.reading import read as read_it

    chosen = choose_body(body, model, device, dtype)
    result = read_it(
        given, model, stride=stride, device=device, dtype=dtype, body=chosen,
        progress=render.progress,
    )  # fmt: skip
    if html is not None:
        with written_whole(html, force=True) as staging:
            staging.write_text(result.to_html(), encoding="utf-8")
        render.note(f"wrote {html}")
    if json:
        render.print_json(result.to_dict())
    elif surprises:
        _show_surprises(result, top)
    else:
        _show(result)


def _show(result: "Reading") -> None:
    from rich.text import Text

    from lmhead.cli import render
    from lmhead.inspect.reading import SURE, surprise

    line = Text()
    for token in result.tokens:
        line.append(render.running(token.text), style=render.heat(surprise(token)))
    render.out().print(line, soft_wrap=False)
    scored = sum(token.logprob is not None for token in result.tokens)
    scale = Text("\nexpected ")
    for step in range(5):
        scale.append("  ", style=render.heat(step / 4))
    scale.append(f" not at all (-{SURE:g} and less)")
    render.out().print(scale)
    if result.perplexity is not None:
        render.say(f"perplexity {result.perplexity:.4g} over {render.plural(scored, 'token')}")


def _show_surprises(result: "Reading", top: int) -> None:
    from lmhead.cli import render

    table = render.table("token", "after", "log-probability", "rank", "entropy", "expected", left=2)
    table.columns[-1].justify = "left"
    for i in result.surprises()[:top]:
        token = result.tokens[i]
        before = "".join(t.text for t in result.tokens[max(0, i - 4) : i])
        best = token.guesses[0] if token.guesses else None
        table.add_row(
            render.token(token.text),
            render.token(before),
            f"{token.logprob:.3f}",
            render.count(token.rank or 0),
            f"{token.entropy:.2f}",
            "" if best is None else render.token(best.text),
        )
    render.out().print(table)
