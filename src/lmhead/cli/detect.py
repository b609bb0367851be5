"""`lmhead detect`: how likely a detector finds each text true."""

import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from lmhead.cli.options import Device, Dtype, Json, Model
from lmhead.errors import BadInput
from lmhead.models.registry import DEFAULT_MODEL


def detect(
    vector: Annotated[
        Path, typer.Argument(metavar="VECTOR", help="A detector: a .safetensors file.")
    ],
    texts: Annotated[
        list[str], typer.Argument(metavar="TEXT...", help="The texts; - reads lines from stdin.")
    ],
    model: Model = DEFAULT_MODEL,
    device: Device = None,
    dtype: Dtype = None,
    lines: Annotated[
        bool,
        typer.Option("--lines", help="Print one JSON object per text, as soon as it is scored."),
    ] = False,
    json: Json = False,
) -> None:
    """Score texts with a detector: near 1 a text looks true to the model, near 0 false."""
    if lines and json:
        raise BadInput("--lines and --json are both given; expected one form of output")
    given: Iterable[str] = chain.from_iterable(_lines() if t == "-" else [t] for t in texts)
    from lmhead.cli import render
    from lmhead.loading import load
    from lmhead.steer import SteeringVector
    from lmhead.steer.judge.detector import detect as run
    from lmhead.steer.judge.detector import detect_stream, require_detector

    loaded_vector = SteeringVector.load(vector)
    require_detector(loaded_vector)
    if lines:
        loaded = load(model, device=device, dtype=dtype, progress=render.progress)
        for d in detect_stream(loaded_vector, given, loaded):
            typer.echo(dumps(d.to_dict(), ensure_ascii=False))
            sys.stdout.flush()
        return
    if not (rows := list(given)):
        raise BadInput("stdin holds no text to score; expected one per line")
    found = run(
        loaded_vector,
        rows,
        load(model, device=device, dtype=dtype, progress=render.progress),
        progress=render.progress,
    )
    if json:
        render.print_json({"results": [d.to_dict() for d in found]})
        return
    table = render.table("text", "score", "")
    table.columns[0].no_wrap = False
    for d in found:
        table.add_row(render.token(d.text), f"{d.score:.3f}", f"[cyan]{render.bar(d.score)}[/cyan]")
    table.columns[-1].justify = "left"
    render.out().print(table)


def _lines() -> Iterator[str]:
    """Read stdin line by line; an empty line is not a text."""
    try:
        for line in sys.stdin.buffer:
            if text := line.decode("utf-8").strip():
                yield text
    except UnicodeDecodeError as error:
        raise BadInput(f"stdin is not UTF-8 (byte {error.start}); convert it first") from error
