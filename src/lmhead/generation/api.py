"""`generate` and `stream`: the two ways to continue prompts from Python."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from lmhead.errors import BadInput, LMHeadWarning
from lmhead.generation.engine import Engine
from lmhead.generation.prompts import Prompt, Prompts, Source, check_head, encoded, listed
from lmhead.generation.request import Event, Generation, Request, Steering
from lmhead.head import Head
from lmhead.loading import Model, load
from lmhead.models.registry import DEFAULT_MODEL
from lmhead.progress import Progress, silent
from lmhead.sampling import Sampler, SamplingParams, check_sampling

_NOT_STREAMED = ("samples", "beams", "batch_size", "progress")


def generate(
    prompts: Prompts,
    model: Source = DEFAULT_MODEL,
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
    tokenizer: Any = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    body: str | None = None,
    progress: Progress = silent,
    **controls: Any,
) -> list[Generation]:
    """Continue prompts; return `samples` continuations of each, in the order of the prompts.

    >>> generate("The capital of France is", "smollm2-135m", max_tokens=2)[0].text
    ' Paris.'

    - `prompts`: a text, the ids of one (a list of whole numbers), a conversation (a list of
      `{"role": "system", "user" or "assistant", "content": text}`), or a list of these.
    - `controls` are the fields of SamplingParams (temperature, top_p, seed, ...), if `params` is
      not given. Decoding is greedy unless one of them calls for sampling (temperature, top_k,
      top_p, min_p, ...); the temperature is then 1 by default. Bans, biases, penalties and grammars
      do not call for sampling.
    - `order`: `hf`, `vllm`, `llama.cpp`, or a list of filters.
    - `stop`: texts that end a continuation; they are not part of it.
    - `beams` above 1: beam search, which does not sample and takes no controls.
    - `head`: an engine to use instead of the model's own head.
    - `tokenizer`, `device`, `dtype`, `body`: as in `load`; a transformers model in memory needs its
      tokenizer.

    A text that `max_tokens` cut off has the finish_reason `length`; if a grammar was not yet
    complete there, a warning says so.
    """
    given = listed(prompts)
    check_head(head)
    chosen = checked(
        params, controls, max_tokens=max_tokens, order=order, stop=stop, samples=samples,
        beams=beams, batch_size=batch_size,
    )  # fmt: skip
    loaded = load(
        model, tokenizer=tokenizer, device=device, dtype=dtype, body=body, progress=progress
    )
    if beams > 1:
        from lmhead.generation.beam import beam_search

        results = []
        with progress("generating", total=len(given)) as advance:
            for prompt in given:
                results.append(beam_search(loaded, prompt, beams, max_tokens, chat, head))
                advance(1)
        return results
    found: dict[int, Generation] = {}
    with progress("generating", total=len(given) * samples) as advance:
        for event in events(
            given,
            loaded,
            max_tokens=max_tokens,
            params=chosen,
            order=order,
            stop=stop,
            samples=samples,
            chat=chat,
            batch_size=batch_size,
            head=head,
        ):
            if event.result is not None:
                found[event.id] = event.result
                advance(1)
    return [found[i] for i in range(len(given) * samples)]


def stream(
    prompt: Prompt,
    model: Source = DEFAULT_MODEL,
    *,
    max_tokens: int = 64,
    params: SamplingParams | None = None,
    order: str | Sequence[str] = "hf",
    stop: str | Sequence[str] = (),
    chat: bool = False,
    head: Head | None = None,
    tokenizer: Any = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    body: str | None = None,
    **controls: Any,
) -> Iterator[str]:
    """Continue one prompt, piece by piece; the options are those of `generate` for one text.

    Pieces are whole characters, and never part of a stop string.
    """
    for name in _NOT_STREAMED:
        if name in controls:
            raise BadInput(
                f"{name} is an option of generate; stream yields one text as it is generated"
            )
    given = listed(prompt)
    if not isinstance(prompt, str) and len(given) != 1:
        raise BadInput(f"stream got {len(given)} prompts; expected one: use generate for several")
    check_head(head)
    chosen = checked(params, controls, max_tokens=max_tokens, order=order, stop=stop)
    loaded = load(model, tokenizer=tokenizer, device=device, dtype=dtype, body=body)
    encoded(
        loaded, given[0], chat=chat
    )  # what is wrong with it is said now, not at the first piece
    running = events(
        given, loaded, params=chosen, max_tokens=max_tokens, order=order, stop=stop, chat=chat,
        head=head,
    )  # fmt: skip
    return (event.text for event in running if event.text)


def params_of(params: SamplingParams | None, controls: dict[str, Any]) -> SamplingParams:
    """Return the parameters; greedy where nothing asks for randomness."""
    if params is None:
        return SamplingParams.asked(controls)
    if controls:
        raise BadInput(
            f"params is given together with {', '.join(controls)}; give one or the other",
            names=list(controls),
        )
    if not isinstance(params, SamplingParams):
        raise BadInput(f"params is a {type(params).__name__}; expected SamplingParams")
    return params


def checked(
    params: SamplingParams | None,
    controls: dict[str, Any],
    *,
    max_tokens: int = 64,
    order: str | Sequence[str] = "hf",
    stop: str | Sequence[str] = (),
    samples: int = 1,
    beams: int = 1,
    batch_size: int = 8,
) -> SamplingParams:
    """Return the parameters, or say what is wrong with the options, before a model is loaded."""
    _count(max_tokens=max_tokens, samples=samples, beams=beams, batch_size=batch_size)
    stops = _texts(stop)
    if beams > 1:
        also = [*controls] if params is None else ["params"]
        also += ["stop"] * bool(stops) + ["samples"] * (samples != 1)
        if also:
            raise BadInput(
                f"beams is given together with {', '.join(also)}; beam search does not sample and "
                "takes no sampling controls, stop or samples: give one or the other",
                names=["beams", *also],
            )
    chosen = params_of(params, controls)
    check_sampling(chosen, order)
    return chosen


def events(
    prompts: Sequence[Prompt],
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
    steering: Callable[[], Steering] | None = None,
) -> Iterator[Event]:
    """Continue prompts together; yield events of each sequence, by its place, as it grows and ends.

    `steering` is called once for each sequence, in their order, and gives what steers it.
    """
    _count(batch_size=batch_size)
    asked = requests(
        prompts, model, params=params, max_tokens=max_tokens, order=order, stop=stop,
        samples=samples, chat=chat, steering=steering,
    )  # fmt: skip
    engine = Engine(model, head, batch_size=batch_size)
    for request in asked:
        engine.submit(request)
    cut = 0
    for event in engine.run():
        if event.error is not None:
            raise event.error
        yield event
        cut += event.result is not None and cut_short(asked[event.id], event.result)
    warn_of_cut(cut, asked)


def cut_short(request: Request, result: Generation) -> bool:
    """Tell whether a text ended before the grammar it keeps was complete."""
    return result.finish_reason == "length" and not request.sampler.complete(result.ids)


def warn_of_cut(cut: int, asked: Sequence[Request]) -> None:
    """Warn if that many of the texts asked for ended before their grammar was complete."""
    if cut:
        which = "the text" if len(asked) == 1 else f"{cut} of {len(asked)} texts"
        _warn(
            f"{which} ended at max_tokens, before the grammar was complete; raise max_tokens "
            f"(now {asked[0].max_tokens})",
            names=["max_tokens"],
        )


def requests(
    prompts: Sequence[Prompt],
    model: Model,
    *,
    params: SamplingParams,
    max_tokens: int = 64,
    order: str | Sequence[str] = "hf",
    stop: str | Sequence[str] = (),
    samples: int = 1,
    chat: bool = False,
    steering: Callable[[], Steering] | None = None,
) -> list[Request]:
    """Return what the engine is asked for: `samples` sequences for each prompt, one after another.

    Every prompt is checked before any of them is continued.
    """
    _count(max_tokens=max_tokens, samples=samples)
    stops = _texts(stop)
    if samples > 1 and not params.random:
        _warn(
            f"samples is {samples}, but nothing asks for randomness, so the {samples} texts of a "
            "prompt are all the same; give a temperature above 0",
            names=["samples"],
        )
    params = replace(params, stop_ids=(*model.stop_ids, *params.stop_ids))
    sampler = Sampler.from_params(
        params, order, vocab_size=model.reachable, tokenizer=model.tokenizer
    )
    read = [encoded(model, prompt, chat=chat) for prompt in prompts]
    return [
        Request(
            ids, sampler, max_tokens, stops, index=j,
            steering=None if steering is None else steering(), prompt=text,
        )
        for text, ids in read
        for j in range(samples)
    ]  # fmt: skip


def _warn(message: str, names: Sequence[str]) -> None:
    warnings.warn(LMHeadWarning(message, names=names), stacklevel=3)


def _texts(stop: str | Sequence[str]) -> tuple[str, ...]:
    if not isinstance(stop, str | Iterable):
        raise BadInput(f"stop is {stop!r}; expected a text, or a list of texts", names=["stop"])
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    for text in stops:
        if not isinstance(text, str):
            raise BadInput(f"stop holds {text!r}; expected texts", names=["stop"])
        if not text:
            raise BadInput(
                "stop holds an empty text; expected texts of at least one character",
                names=["stop"],
            )
    return stops


def _count(**counts: int) -> None:
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadInput(
                f"{name} is {value!r}; expected a whole number of at least 1", names=[name]
            )
