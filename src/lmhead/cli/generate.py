"""`lmhead generate`: continue a prompt, or a file of prompts."""

import itertools
import json as json_lines
import sys
from collections.abc import Iterator
from pathlib import Path
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
    renamed,
)
from lmhead.cli.rows import Row, rows_of
from lmhead.cli.sampling import with_controls
from lmhead.cli.steering import Alpha, Budget, FitTexts, KlCap, Steering, note_guard
from lmhead.errors import BadInput
from lmhead.models.registry import DEFAULT_MODEL

if TYPE_CHECKING:
    from lmhead.generation import Generation
    from lmhead.generation.request import Event


@with_controls()
def generate(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The text, or - for stdin.")
    ] = None,
    model: Model = DEFAULT_MODEL,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", min=1, help="The most tokens to generate.")
    ] = 64,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="Stop before this text; may be repeated.")
    ] = None,
    samples: Annotated[
        int, typer.Option(min=1, help="How many continuations to generate for each prompt.")
    ] = 1,
    beams: Annotated[
        int, typer.Option(min=1, help="Number of beams; above 1 selects beam search.")
    ] = 1,
    order: Annotated[
        str, typer.Option(help="hf, vllm, llama.cpp, or filters separated by commas.")
    ] = "hf",
    chat: Chat = False,
    stream: Annotated[
        bool, typer.Option("--stream/--no-stream", help="Print the text as it is generated.")
    ] = True,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            help='A file of prompts: one per line, or .jsonl with {"prompt": ...}, a text or a '
            "conversation; - for stdin.",
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="How many sequences run together.")] = 8,
    engine: Annotated[
        str,
        typer.Option(help="dense, screened, max (for GPT-2), or auto: the fastest here."),
    ] = "auto",
    keepset: Annotated[
        Path | None,
        typer.Option("--keepset", help="Use only the rows of this keep-set file."),
    ] = None,
    head: Annotated[Path | None, typer.Option("--head", hidden=True)] = None,
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
    fit: FitTexts = None,
    body: Body = "auto",
    device: Device = None,
    dtype: Dtype = None,
    json: Json = False,
    *,
    controls: dict[str, Any],
) -> None:
    """Continue a prompt, or every prompt in a file.

    Decoding is greedy unless you give a control that calls for sampling (temperature, top-k, top-p,
    min-p, ...); bans, biases, penalties and grammars do not. A single text is streamed. A file of
    prompts gives one line of JSON per continuation, in order, as soon as it is ready; other fields
    of a .jsonl file are kept.
    """
    if (prompt is None) == (prompts is None):
        raise BadInput("expected either PROMPT or --prompts FILE")
    if "logprobs" in controls and not (json or prompts):
        raise BadInput("--logprobs reports in JSON only; add --json")
    if steer and engine == "max":
        raise BadInput(
            "--engine max runs a model as one graph, which cannot be steered; leave it out"
        )
    if engine == "max" and (device or dtype):
        raise BadInput(
            "--engine max runs in float32 on the CPU; leave out --device and --dtype, or --engine"
        )
    if engine == "max" and body not in ("auto", "max"):
        raise BadInput(f"--engine max runs the blocks too; leave out --body {body}, or --engine")
    keepset = renamed("--head", head, "--keepset", keepset)
    if keepset is not None and not keepset.is_file():
        raise BadInput(
            f"--keepset is {keepset}, but there is no such file; see lmhead trim --form head"
        )
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "stop": tuple(stop or ()),
        "samples": samples,
        "order": parse_order(order),
        "batch_size": batch_size,
    }
    from lmhead.generation.api import checked, events
    from lmhead.generation.engines import check_engine

    # what is wrong with the call is said before the model is loaded
    params = checked(None, controls, beams=beams, **options)
    check_engine(engine)
    if engine == "max":
        from lmhead.models.max_runtime import require_max

        require_max()
    steering = Steering.of(steer or (), alpha, budget, kl_cap, fit)
    rows = _rows(prompt, prompts)
    texts = [row.prompt() for row in rows]
    from lmhead.cli import launch, render
    from lmhead.generation import generate as run
    from lmhead.generation.engines import engine as engine_of
    from lmhead.loading import load

    body = "max" if engine == "max" else choose_body(body, model, device, dtype)
    loaded = load(model, body=body, device=device, dtype=dtype, progress=render.progress)
    shared = launch.group()
    chosen = engine_of(loaded, engine, keepset=keepset, group=shared, progress=render.progress)
    params = launch.seeded(params)
    log, each = None, None
    if steering is not None:
        steering = steering.fitted(loaded)
        if beams > 1:  # a search is one request, whose hypotheses share what the guard notes
            loaded, chosen, log = steering.apply(loaded, chosen)
        else:
            each = steering.requests(loaded)
    options |= {"head": chosen, "chat": chat}
    if each is not None and not each.keeps:
        options["steering"] = each
    if beams > 1:
        results: Iterator[Generation] = iter(
            run(texts, loaded, beams=beams, progress=render.progress, **options)
        )
    elif each is not None and each.keeps:  # no text is shown before it was compared
        kept = each.kept(texts, loaded, params=params, **options)
        results = _in_order(kept, len(texts) * samples)
    elif stream and not json and samples == 1 and prompts is None:
        _stream(rows[0].text("prompt"), events(texts, loaded, params=params, **options), chat)
        if each:
            each.note()
        return
    else:
        ended = _ended(events(texts, loaded, params=params, **options))
        results = _in_order(ended, len(texts) * samples)
    if json:
        made = []
        for i, result in enumerate(results):
            made.append(_record(rows[i // samples], result) | (each.record(i) if each else {}))
        log = each.log if each else log
        steered = {"steering": steering.to_dict(log)} if steering else {}  # what the guard noted
        render.print_json({"model": model, **steered, "generations": made})
        return
    for i, result in enumerate(results):
        if prompts is not None:
            record = _record(rows[i // samples], result) | (each.record(i) if each else {})
            line = json_lines.dumps(record, ensure_ascii=False)
            sys.stdout.write(line + "\n")
        else:
            if samples > 1:
                render.note(f"[{i + 1} of {samples}]")
            sys.stdout.write((result.text if chat else result.prompt + result.text) + "\n")
        sys.stdout.flush()
    if each:
        each.note()
    else:
        note_guard(log)


def _rows(prompt: str | None, prompts: Path | None) -> list[Row]:
    if prompts is None:
        return [Row("the prompt", {"prompt": read_prompt(prompt or "")}, from_json=False)]
    from dataclasses import fields

    from lmhead.generation import Generation

    rows = list(rows_of(prompts, "prompt", "messages"))
    names = [field.name for field in fields(Generation) if field.name != "prompt"]
    for row in rows:
        row.check_fields(names)
    if not rows:
        raise BadInput(f"--prompts {prompts} holds no prompt; expected one per line")
    return rows


def _record(row: Row, result: "Generation") -> dict[str, Any]:
    return row.with_result(result.to_dict(), given=["prompt"])


def _ended(started: "Iterator[Event]") -> "Iterator[tuple[int, Generation]]":
    return ((event.id, event.result) for event in started if event.result is not None)


def _in_order(ended: "Iterator[tuple[int, Generation]]", total: int) -> "Iterator[Generation]":
    """Yield the results in the order of the prompts, each as soon as those before it are there."""
    from lmhead.cli import render

    waiting: dict[int, Generation] = {}
    turn = 0
    with render.progress("generating", total=total) as advance:
        for place, result in ended:
            waiting[place] = result
            advance(1)
            while turn in waiting:
                yield waiting.pop(turn)
                turn += 1


def _stream(text: str, started: "Iterator[Event]", chat: bool) -> None:
    first = next(started)  # what is wrong with the prompt is said before anything is printed
    sys.stdout.write("" if chat else text)
    ended = False
    try:
        for event in itertools.chain([first], started):
            ended = event.result is not None
            sys.stdout.write(event.text + "\n" * ended)
            sys.stdout.flush()
    finally:  # Ctrl-C keeps what was written
        if not ended:
            sys.stdout.write("\n")
            sys.stdout.flush()
