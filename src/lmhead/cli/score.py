"""`lmhead score`: how probable a text is, token by token."""

import json as json_lines
import sys
from collections.abc import Iterator
from itertools import tee
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmhead.cli.options import Body, Chat, Device, Dtype, Json, Model, choose_body
from lmhead.cli.rows import Row, is_json_lines, rows_of
from lmhead.errors import BadInput
from lmhead.models.registry import DEFAULT_MODEL

if TYPE_CHECKING:
    from lmhead.generation import TextScore

_FILES = (".jsonl", ".ndjson", ".txt")


def score(
    texts: Annotated[
        list[str],
        typer.Argument(
            metavar="TEXT...|FILE",
            help='Texts, or files: one text per line, or .jsonl with {"text": ...} and '
            'optionally a "prompt" ("completion" works for "text" too). - is stdin.',
        ),
    ],
    model: Model = DEFAULT_MODEL,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", help="A prompt before every text; it is not scored itself."),
    ] = None,
    chat: Chat = False,
    whole: Annotated[
        bool, typer.Option("--whole", help="Treat a file as one text instead of line by line.")
    ] = False,
    stride: Annotated[
        int | None,
        typer.Option(
            "--stride",
            min=1,
            help="Read texts longer than the context in windows that move by this many tokens.",
        ),
    ] = None,
    summary: Annotated[
        bool, typer.Option("--summary", help="Print only the totals, not every token.")
    ] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="How many texts run together.")] = 8,
    body: Body = "auto",
    device: Device = None,
    dtype: Dtype = None,
    json: Json = False,
) -> None:
    """Show the log-probability of every token of a text, their sum, and the perplexity.

    Logarithms are natural. The first token has no log-probability unless it follows a prompt or a
    token that the tokenizer adds. For a .jsonl file the output is JSON lines too: each row with all
    its fields and a "score".
    """
    sources = [_source(text, whole) for text in texts]
    files = [source for source in sources if isinstance(source, Path)]
    if whole and files:
        raise BadInput("--whole takes a file as one text, but .jsonl holds rows; leave out one")
    total = _total(sources, prompt)
    from lmhead.cli import launch, render
    from lmhead.generation.score import check_scoring, perplexity, scores

    # a row may have a prompt of its own
    prompted = prompt is not None or bool(files)
    check_scoring(chat=chat, prompted=prompted, stride=stride, batch_size=batch_size)
    chosen = choose_body(body, model, device, dtype)
    loaded, head = launch.prepared(model, device, dtype, chosen)
    rows, read = tee(_rows(sources))
    results = scores(
        (_pair(row, prompt) for row in read), loaded, chat=chat, stride=stride,
        batch_size=batch_size, head=head,
    )  # fmt: skip
    kept: list[TextScore] = []
    with render.progress("scoring", total=total) as advance:
        for row, result in zip(rows, results, strict=True):
            advance(1)
            if row.from_json and not json:
                line = row.with_result({"score": _fields(result, summary)})
                sys.stdout.write(json_lines.dumps(line, ensure_ascii=False) + "\n")
                sys.stdout.flush()
            else:
                kept.append(result)
    if json:
        made = [r.to_dict(tokens=not summary) for r in kept]
        render.print_json({"model": model, "scores": made, "perplexity": perplexity(kept)})
    elif len(kept) == 1 and not summary:
        _show_tokens(kept[0])
    elif kept:
        _show_texts(kept)


def _source(text: str, whole: bool) -> Path | Row:
    if not text:
        raise BadInput("a text is empty; expected some text, a file, or - for stdin")
    path = Path(text)
    try:
        there = text == "-" or path.is_file()
    except OSError:  # too long for the name of a file
        there = False
    if not there:
        if path.suffix in _FILES and not any(map(str.isspace, text)):
            raise BadInput(f"there is no file {text}; expected a text, a file, or - for stdin")
        return Row("the text", {"text": text}, from_json=False)
    if whole and not is_json_lines(path):
        try:
            data = sys.stdin.buffer.read() if text == "-" else path.read_bytes()
            return Row(text, {"text": data.decode("utf-8")}, from_json=False)
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"cannot read {text}: {error}") from error
    return path


def _rows(sources: list[Path | Row]) -> Iterator[Row]:
    for source in sources:
        if isinstance(source, Row):
            yield source
        else:
            yield from rows_of(source, "text", "completion")


def _total(sources: list[Path | Row], prompt: str | None) -> int | None:
    """Count the texts, and refuse a wrong row, before the model is loaded; stdin is read later."""
    if any(str(source) == "-" for source in sources):
        return None
    return sum(1 for row in _rows(sources) if _pair(row, prompt))


def _pair(row: Row, prompt: str | None) -> tuple[str | None, str]:
    row.check_fields(["score"])
    if "prompt" not in row.fields:
        return prompt, row.text("completion", "text")
    if prompt is not None:
        raise BadInput(f'{row.where} has a "prompt", and --prompt is given too; expected one')
    return row.text("prompt"), row.text("completion", "text")


def _fields(result: "TextScore", summary: bool) -> dict[str, Any]:
    data = result.to_dict(tokens=not summary)
    return {name: value for name, value in data.items() if name not in ("text", "prompt")}


def _show_tokens(result: "TextScore") -> None:
    from math import exp

    from lmhead.cli import render

    table = render.table("token", "id", "log-probability", "probability", "")
    table.columns[-1].justify = "left"
    for i, token, value in zip(result.ids, result.tokens, result.logprobs, strict=True):
        if value is None:
            table.add_row(render.token(token), str(i), "", "", "[dim]nothing before it[/dim]")
            continue
        bar = f"[cyan]{render.bar(exp(value))}[/cyan]"
        table.add_row(render.token(token), str(i), f"{value:.4f}", render.percent(exp(value)), bar)
    table.add_section()
    table.add_row("[dim]sum[/dim]", "", f"{result.logprob:.4f}", "", "")
    render.out().print(table)
    if result.perplexity is None:
        render.out().print("no perplexity: the only token has nothing before it")
    else:
        render.out().print(f"perplexity {result.perplexity:.4g} over {_tokens(result.scored)}")


def _show_texts(results: "list[TextScore]") -> None:
    from lmhead.cli import render
    from lmhead.generation import perplexity

    table = render.table("text", "tokens", "log-probability", "perplexity")
    for result in results:
        table.add_row(
            render.token(result.text), *_numbers(result.scored, result.logprob, result.perplexity)
        )
    if len(results) > 1:
        table.add_section()
        scored, total = sum(r.scored for r in results), sum(r.logprob for r in results)
        table.add_row(
            f"[dim]all {len(results):,}[/dim]", *_numbers(scored, total, perplexity(results))
        )
    render.out().print(table)


def _numbers(scored: int, logprob: float, perplexity: float | None) -> tuple[str, str, str]:
    shown = "" if perplexity is None else f"{perplexity:.4g}"
    return f"{scored:,}", f"{logprob:.4f}", shown


def _tokens(n: int) -> str:
    return "1 token" if n == 1 else f"{n:,} tokens"
