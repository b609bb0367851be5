"""`generate` and `stream`: the two ways to continue prompts from Python."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lmhead.errors import BadInput
from lmhead.generation.loop import Event, Generation, Ongoing, decode
from lmhead.generation.text import TextStream
from lmhead.head import Head
from lmhead.loading import Model, load
from lmhead.models.registry import DEFAULT_MODEL
from lmhead.progress import Progress, silent
from lmhead.sampling import Sampler, SamplingParams


def generate(
    prompts: str | Sequence[str],
    model: str | Path | Model = DEFAULT_MODEL,
    *,
    max_tokens: int = 64,
    params: SamplingParams | None = None,
    order: str | Sequence[str] = "hf",
    stop: str | Sequence[str] = (),
    samples: int = 1,
    beams: int = 1,
    chat: bool = False,
    batch_size: int = 8,
    head: Head | None = None,
    progress: Progress = silent,
    **controls: Any,
) -> list[Generation]:
    """Continue prompts; return `samples` continuations of each, in the order of the prompts.

    - `controls` are the fields of SamplingParams (temperature, top_p, seed, ...), if `params` is
      not given. With none of them the choice is greedy; with some, the temperature is 1 unless
      it is one of them.
    - `order`: `hf`, `vllm`, `llama.cpp`, or a list of filters.
    - `stop`: texts that end a continuation; they are not part of it.
    - `beams` above 1: beam search, which draws nothing and takes no controls.
    - `head`: an engine to use instead of the model's own head.
    """
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    if beams > 1:
        from lmhead.generation.beam import beam_search

        if params is not None or controls or stop or samples != 1:
            raise BadInput(
                "beams is given together with sampling controls, stop or samples; beam search "
                "takes none of them: give either"
            )
        loaded = load(model, progress=progress)
        results = []
        with progress("generating", total=len(texts)) as advance:
            for prompt in texts:
                results.append(beam_search(loaded, prompt, beams, max_tokens, chat, head))
                advance(1)
        return results
    found: dict[int, Generation] = {}
    with progress("generating", total=len(texts) * samples) as advance:
        for event in events(
            texts,
            load(model, progress=progress),
            max_tokens=max_tokens,
            params=params_of(params, controls),
            order=order,
            stop=stop,
            samples=samples,
            chat=chat,
            batch_size=batch_size,
            head=head,
        ):
            if event.result is not None:
                found[event.index] = event.result
                advance(1)
    return [found[i] for i in range(len(texts) * samples)]


def stream(prompt: str, model: str | Path | Model = DEFAULT_MODEL, **options: Any) -> Iterator[str]:
    """Continue one prompt, piece by piece; the options are those of `generate`.

    Pieces are whole characters, and never part of a stop string.
    """
    names = ("max_tokens", "order", "stop", "chat", "head")
    given = {name: options.pop(name) for name in names if name in options}
    params = params_of(options.pop("params", None), options)
    for event in events([prompt], load(model), params=params, **given):
        if event.text:
            yield event.text


def params_of(params: SamplingParams | None, controls: dict[str, Any]) -> SamplingParams:
    """Return the parameters; greedy where nothing was asked for."""
    if params is not None:
        if controls:
            raise BadInput(
                f"params is given together with {', '.join(controls)}; give one or the other"
            )
        return params
    chosen = set(controls) - {"seed", "logprobs", "logprobs_mode", "stop_ids", "min_tokens"}
    if not chosen:
        controls = {"temperature": 0.0, **controls}
    return SamplingParams.from_dict(controls)


def events(
    prompts: Sequence[str],
    model: Model,
    *,
    params: SamplingParams,
    max_tokens: int = 64,
    order: str | Sequence[str] = "hf",
    stop: str | Sequence[str] = (),
    samples: int = 1,
    chat: bool = False,
    batch_size: int = 8,
    head: Head | None = None,
) -> Iterator[Event]:
    """Continue prompts in batches; tell of each sequence as it grows and as it ends."""
    _check(max_tokens=max_tokens, samples=samples, batch_size=batch_size)
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if "" in stops:
        raise BadInput("stop holds an empty text; expected texts of at least one character")
    params = replace(params, stop_ids=(*model.stop_ids, *params.stop_ids))
    sampler = Sampler.from_params(
        params, order, vocab_size=model.reachable, tokenizer=model.tokenizer
    )
    # every prompt is checked before the first is continued
    encoded = [model.encode(prompt, chat=chat) for prompt in prompts]
    todo = [(i, j) for i in range(len(prompts)) for j in range(samples)]
    for first in range(0, len(todo), batch_size):
        batch = [
            Ongoing(
                index=i * samples + j,
                prompt=prompts[i],
                prompt_ids=encoded[i],
                max_tokens=model.room(encoded[i], max_tokens),
                state=sampler.start(encoded[i], index=j),
                text=TextStream(model.decode, stops),
            )
            for i, j in todo[first : first + batch_size]
        ]
        yield from decode(model, head or model.head, sampler, batch)


def _check(**counts: int) -> None:
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadInput(f"{name} is {value!r}; expected a whole number of at least 1")
