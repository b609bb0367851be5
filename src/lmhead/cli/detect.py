"""`lmhead detect`: how likely a detector finds each text true."""

from pathlib import Path
from typing import Annotated

import typer

from lmhead.cli.options import Device, Dtype, Json, Model, read_prompt
from lmhead.models.registry import DEFAULT_MODEL


def detect(
    vector: Annotated[Path, typer.Argument(metavar="VECTOR", help="A detector's .safetensors.")],
    texts: Annotated[
        list[str], typer.Argument(metavar="TEXT...", help="The texts; - reads lines from stdin.")
    ],
    model: Model = DEFAULT_MODEL,
    device: Device = None,
    dtype: Dtype = None,
    json: Json = False,
) -> None:
    """Score texts with a detector: close to 1 it takes a text for true, close to 0 for false."""
    given = [line for text in texts for line in (_lines() if text == "-" else [text])]
    from lmhead.cli import render
    from lmhead.loading import load
    from lmhead.steer import SteeringVector
    from lmhead.steer.judge.detector import detect as run
    from lmhead.steer.judge.detector import require_detector

    loaded_vector = SteeringVector.load(vector)
    require_detector(loaded_vector)
    found = run(
        loaded_vector,
        given,
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


def _lines() -> list[str]:
    return [line for line in read_prompt("-").splitlines() if line.strip()]
