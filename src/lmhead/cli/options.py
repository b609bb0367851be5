"""Options that several commands share, spelled once."""

import re
import sys
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from lmhead.errors import BadInput
from lmhead.models.registry import DEFAULT_MODEL

_T = TypeVar("_T")


def built_in_names(incomplete: str) -> list[str]:
    """Complete the name of a built-in model."""
    from lmhead.models.registry import BUILT_IN

    return [name for name in BUILT_IN if name.startswith(incomplete)]


MODEL_HELP = "A folder, a .gguf file, a built-in name (see `lmhead models`) or a Hugging Face id."
Model = Annotated[
    str,
    typer.Option("--model", "-m", metavar="MODEL", help=MODEL_HELP, autocompletion=built_in_names),
]
# Where the model is an argument, `-m` says the same: see `one_model`.
ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help=f"{MODEL_HELP} By default {DEFAULT_MODEL}.",
        autocompletion=built_in_names,
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help="The same as the argument MODEL.",
        autocompletion=built_in_names,
    ),
]
Device = Annotated[
    str | None,
    typer.Option("--device", help="Where the model runs: cpu, cuda, cuda:1, mps; cpu by default."),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype", help="The model's precision: float32, bfloat16 or float16; by default as stored."
    ),
]
Body = Annotated[
    str,
    typer.Option(
        "--body",
        help="What runs the blocks: torch, llama.cpp, max (GPT-2 only), or auto: llama.cpp for "
        ".gguf files if it is installed, otherwise torch.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Chat = Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")]

PlotFile = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Draw a picture into a .png (extra `plot`)."),
]
Force = Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")]


def one_model(argument: str | None, option: str | None, default: str | None = None) -> str:
    """Return the model that was named, as an argument or with `-m`."""
    if argument is not None and option is not None and argument != option:
        raise BadInput(f"two models are named, {argument} and --model {option}; expected one")
    model = argument or option or default
    if model is None:
        raise BadInput("MODEL is missing; name it, or give it with --model")
    return model


def choose_body(body: str, model: str, device: str | None, dtype: str | None) -> str:
    """Check the name of a body, and say which one `auto` takes where it is not torch."""
    from lmhead.loading import check_body, chosen_body

    check_body(body)
    if body != "auto":
        return body
    chosen = chosen_body(model, device=device, dtype=dtype)
    if chosen == "llama.cpp":
        from lmhead.cli import render

        render.note("body: llama.cpp, for this .gguf file (--body torch uses transformers)")
    return chosen


def renamed(old: str, given: _T | None, new: str, value: _T) -> _T:
    """Return what an option says that goes by its `old` name for one more release."""
    if given is None:
        return value
    from lmhead.cli import render

    render.note(f"{old} is now called {new}; the old name will be removed in the next release")
    return given


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
    from lmhead.cli.rows import rows_of

    prompts = [row.text("prompt") for row in rows_of(path, "prompt")]
    if not prompts:
        raise BadInput(f"{path} holds no prompt; expected one per line")
    return prompts


def token_given(token: str | None) -> str | int | None:
    """Return a token as it was typed: its text, or behind a # its id."""
    if token is None or not re.fullmatch(r"#[0-9]{1,9}", token):
        return token
    return int(token[1:])


def read_text(text: str) -> str:
    """Return a text: as it is given, that of a file, or from stdin when it is `-`."""
    if text == "-":
        return _stdin()
    path = Path(text)
    try:
        there = path.is_file()
    except OSError:  # too long for the name of a file
        there = False
    if there:
        try:
            return path.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"cannot read {text}: {error}") from error
    if path.suffix in (".txt", ".md") and not any(map(str.isspace, text)):
        raise BadInput(f"there is no file {text}; expected a text, a file, or - for stdin")
    if not text:
        raise BadInput("the text is empty; expected some text, a file, or - for stdin")
    return text


def _stdin() -> str:
    if sys.stdin.isatty():
        print("reading from the terminal; press Ctrl-D to finish", file=sys.stderr)  # noqa: T201
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(
            f"stdin is not UTF-8 (byte {error.start}); convert it first, e.g. with iconv"
        ) from error
    return text.removesuffix("\n")  # the newline that `echo` adds is not part of the prompt
