"""Options that several commands share, spelled once."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from lmhead.errors import BadInput

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help="A folder, a .gguf file, a built-in name (see `lmhead models`) or a Hugging Face id.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Chat = Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")]


def parse_order(order: str) -> str | list[str]:
    """Return the name of an order, or the filters of a list separated by commas."""
    return order.split(",") if "," in order else order


def read_prompt(prompt: str) -> str:
    """Return the prompt, from stdin when it is `-`; refuse an empty one at once."""
    if prompt == "-":
        prompt = _stdin()
    if not prompt:
        raise BadInput("the prompt is empty; expected some text, or - with text on stdin")
    return prompt


def read_prompts(path: Path) -> list[str]:
    """Return the prompts of a file, one per line or JSON lines, from stdin when it is `-`."""
    import json

    if str(path) == "-":
        lines = read_prompt("-").split("\n")
    else:
        try:
            lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"cannot read the prompts of {path}: {error}") from error
    prompts = []
    for number, line in enumerate(lines, 1):
        value: Any = line
        if path.suffix == ".jsonl":
            try:
                value = json.loads(line)["prompt"]
            except (ValueError, KeyError, TypeError) as error:
                raise BadInput(
                    f'line {number} of {path} is no JSON object with a "prompt": {line[:60]!r}'
                ) from error
        if not isinstance(value, str) or not value:
            raise BadInput(f"line {number} of {path} is empty; expected one prompt per line")
        prompts.append(value)
    return prompts


def _stdin() -> str:
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(
            f"stdin is not UTF-8 (byte {error.start}); convert it first, e.g. with iconv"
        ) from error
    return text.removesuffix("\n")  # the newline that `echo` adds is not part of the prompt
