"""`lmhead generate`: continue a prompt, or a file of prompts."""

import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmhead.cli.options import Chat, Json, Model, parse_order, read_prompt, read_prompts
from lmhead.cli.sampling import with_controls
from lmhead.cli.steer import Alpha, Budget, Fit, KlCap, Steering, note_guard
from lmhead.errors import BadInput
from lmhead.models.registry import DEFAULT_MODEL

if TYPE_CHECKING:
    from lmhead.generation import Generation
    from lmhead.loading import Model as Loaded


@with_controls
def generate(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The text, or - for stdin.")
    ] = None,
    model: Model = DEFAULT_MODEL,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", min=1, help="Tokens to add at most.")
    ] = 64,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="End before this text; may be repeated.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Continuations of each prompt.")] = 1,
    beams: Annotated[int, typer.Option(min=1, help="Above 1: beam search.")] = 1,
    order: Annotated[
        str, typer.Option(help="hf, vllm, llama.cpp, or filters separated by commas.")
    ] = "hf",
    chat: Chat = False,
    stream: Annotated[
        bool, typer.Option("--stream/--no-stream", help="Print the text as it comes.")
    ] = True,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            help='A file of prompts: one per line, or .jsonl with {"prompt": ...}; - for stdin.',
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences that run together.")] = 8,
    engine: Annotated[
        str,
        typer.Option(help="dense, screened, max (for GPT-2), or auto: the fastest here."),
    ] = "auto",
    head: Annotated[
        Path | None,
        typer.Option("--head", help="Use only the rows of this keep-set file."),
    ] = None,
    steer: Annotated[
        list[Path] | None,
        typer.Option(
            "--steer",
            metavar="VECTOR",
            help="Add this vector, .safetensors or .gguf; may be repeated.",
            rich_help_panel="Steering",
        ),
    ] = None,
    alpha: Alpha = None,
    budget: Budget = None,
    kl_cap: KlCap = None,
    fit: Fit = False,
    json: Json = False,
    *,
    controls: dict[str, Any],
) -> None:
    """Continue a prompt, or every prompt of a file.

    Greedy without a sampling control. A single text is streamed. A file of prompts gives one
    line of JSON per continuation, in order, each batch written as soon as it is there.
    """
    if (prompt is None) == (prompts is None):
        raise BadInput("expected either PROMPT or --prompts FILE")
    if "logprobs" in controls and not (json or prompts):
        raise BadInput("--logprobs reports in JSON only; add --json")
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "stop": tuple(stop or ()),
        "samples": samples,
        "order": parse_order(order),
        "chat": chat,
        "batch_size": batch_size,
    }
    if steer and engine == "max":
        raise BadInput(
            "the engine max runs a model as one graph, which cannot be steered; leave it out"
        )
    steering = Steering.of(steer or (), alpha, budget, kl_cap, fit)
    texts = [read_prompt(prompt or "")] if prompts is None else read_prompts(prompts)
    from lmhead.cli import render
    from lmhead.generation import generate as run
    from lmhead.generation.api import params_of
    from lmhead.generation.engines import check_engine
    from lmhead.generation.engines import engine as engine_of
    from lmhead.loading import load

    params_of(None, controls)  # a wrong value is told before the model is loaded
    check_engine(engine)
    body = "max" if engine == "max" else "torch"
    loaded = load(model, body=body, progress=render.progress)
    chosen = engine_of(loaded, engine, keepset=head, progress=render.progress)
    log = None
    if steering is not None:
        steering = steering.fitted(loaded)
        loaded, chosen, log = steering.apply(loaded, chosen)
    options["head"] = chosen
    if prompts is not None and not json:
        _lines(texts, loaded, beams, options, controls)
        note_guard(log)
        return
    if stream and not json and samples == 1 and beams == 1:
        _stream(texts[0], loaded, options, controls)
        note_guard(log)
        return
    results = run(texts, loaded, beams=beams, progress=render.progress, **options, **controls)
    if json:
        told = {"steering": steering.to_dict(log)} if steering else {}
        render.print_json({"model": model, **told, "generations": [r.to_dict() for r in results]})
        return
    for i, result in enumerate(results):
        if samples > 1:
            render.note(f"[{i + 1} of {samples}]")
        sys.stdout.write(_shown(result, chat) + "\n")
    note_guard(log)


def _shown(result: "Generation", chat: bool) -> str:
    return result.text if chat else result.prompt + result.text


def _stream(text: str, loaded: "Loaded", options: dict[str, Any], controls: dict[str, Any]) -> None:
    from lmhead.generation.api import events, params_of

    started = events([text], loaded, params=params_of(None, controls), **options)
    first = next(started)  # what is wrong with the call is said before anything is printed
    sys.stdout.write("" if options["chat"] else text)
    try:
        for event in itertools.chain([first], started):
            sys.stdout.write(event.text)
            sys.stdout.flush()
    finally:  # Ctrl-C keeps what was written
        sys.stdout.write("\n")
        sys.stdout.flush()


def _lines(
    prompts: list[str],
    loaded: "Loaded",
    beams: int,
    options: dict[str, Any],
    controls: dict[str, Any],
) -> None:
    import json

    from lmhead.cli import render
    from lmhead.generation import generate as run

    size = max(1, options["batch_size"] // options["samples"])
    total = len(prompts) * options["samples"]
    with render.progress("generating", total=total) as advance:
        for first in range(0, len(prompts), size):
            part = prompts[first : first + size]
            for result in run(part, loaded, beams=beams, **options, **controls):
                sys.stdout.write(json.dumps(result.to_dict(), ensure_ascii=False) + "\n")
                advance(1)
            sys.stdout.flush()
