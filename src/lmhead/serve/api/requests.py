"""From what a client sent to requests for the generation engine."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from lmhead.errors import BadInput
from lmhead.generation import Request
from lmhead.sampling import Sampler, SamplingParams
from lmhead.serve.api.errors import Refused
from lmhead.serve.api.schemas import CONTROLS, Generating
from lmhead.serve.api.server import Server
from lmhead.serve.api.vectors import Steered

_BREAKERS = 64
_GRAMMARS = ("json_schema", "regex", "grammar")
_QUICK = 20_000  # characters that the tokenizer reads while others wait


@dataclass(frozen=True)
class Read:
    """A prompt: its text and its ids."""

    text: str
    ids: list[int]


@dataclass(frozen=True)
class Wanted:
    """A choice to make: which prompt it continues, the request, and what steers it."""

    index: int
    prompt: Read
    request: Request
    steered: Steered | None


async def read_prompts(server: Server, prompt: Any) -> list[Read]:
    """Read one prompt or several, texts or ids."""
    several = isinstance(prompt, list) and not all(isinstance(i, int) for i in prompt)
    given = prompt if several else [prompt]
    if isinstance(prompt, list) and not prompt:
        raise Refused(400, "prompt is an empty list; expected a text, or ids", param="prompt")
    if len(given) > server.settings.max_prompts:
        raise Refused(
            400,
            f"prompt has {len(given)} entries; expected at most {server.settings.max_prompts}",
            param="prompt",
        )
    return [await read_prompt(server, one) for one in given]


async def read_prompt(server: Server, prompt: str | Sequence[int]) -> Read:
    """Read one prompt; it must fit into the model's context with one token to follow."""
    if isinstance(prompt, str):
        if not prompt:
            raise Refused(400, "the prompt is empty; expected some text", param="prompt")
        ids = await encode(server, prompt, special=True)
        text = prompt
    else:
        ids = list(prompt)
        if not ids:
            raise Refused(400, "the prompt holds no token; expected some", param="prompt")
        check_length(server, len(ids))
        with about("prompt"):
            ids = server.model.encode(ids)  # ids that the model has
        text = server.model.decode(ids)
    check_length(server, len(ids))
    return Read(text, ids)


@contextmanager
def about(param: str) -> Iterator[None]:
    """Name the field that is wrong, where what raised did not know its name."""
    try:
        yield
    except BadInput as error:
        if error.names:
            raise
        raise Refused(400, str(error), param=param) from None


async def encode(server: Server, text: str, *, special: bool) -> list[int]:
    """Turn a text into ids; a long one in another thread, so that nobody waits for it."""

    def work() -> list[int]:
        found = server.model.tokenizer(text, add_special_tokens=special, verbose=False)
        return list(found["input_ids"])

    return work() if len(text) < _QUICK else await asyncio.to_thread(work)


def check_length(server: Server, count: int, param: str = "prompt") -> None:
    """Refuse a prompt that the model cannot read, and tell both lengths."""
    context = server.context
    if count == 0:
        raise Refused(400, "the prompt holds no token; expected some text", param=param)
    if context is not None and count > context:
        raise Refused(
            400,
            f"the prompt has {count:,} tokens, but {server.name} reads at most {context:,}; "
            "shorten it",
            param=param,
            code="context_length_exceeded",
        )


async def wanted(
    server: Server,
    body: Generating,
    prompts: Sequence[Read],
    *,
    max_tokens: int,
    controls: dict[str, Any] | None = None,
    prompt_logprobs: int | None = None,
) -> list[Wanted]:
    """Make the requests of a body: n for each prompt, those of one prompt together."""
    n = body.n or 1
    if n * len(prompts) > server.settings.max_prompts:
        raise Refused(
            400,
            f"n is {n} for {len(prompts)} prompts; expected at most "
            f"{server.settings.max_prompts} choices in all",
            param="n",
        )
    if max_tokens > server.settings.max_tokens:
        raise Refused(
            400,
            f"max_tokens is {max_tokens:,}; this server allows {server.settings.max_tokens:,}",
            param="max_tokens",
        )
    stop = stops(server, body.stop)
    sampler = await sampler_for(server, body, controls or {})
    steered = await steering_of(server, body)
    found = []
    for p, prompt in enumerate(prompts):
        for j in range(n):
            own = None if steered is None else steered.alone()
            request = Request(
                prompt.ids,
                sampler,
                max_tokens=max(1, max_tokens),
                stop=stop,
                index=j,
                steering=None if own is None else own.guard,
                prompt_logprobs=prompt_logprobs,
            )
            found.append(Wanted(p * n + j, prompt, request, own))
    return found


async def steering_of(server: Server, body: Generating) -> Steered | None:
    """Make what steers a request, where it names vectors."""
    asked = body.steering
    if not asked:
        return None
    for one in asked:
        server.vectors.get(one.name)  # said before the work begins
    return await server.worker.call(lambda: server.vectors.steering(asked))


async def sampler_for(server: Server, body: Any, more: dict[str, Any]) -> Sampler:
    """Make the sampler: OpenAI's defaults, our controls."""
    params, order = params_of(server, body, more)

    def work() -> Sampler:
        return Sampler.from_params(
            params, order, vocab_size=server.model.reachable, tokenizer=server.model.tokenizer
        )

    guided = any(getattr(params, name) is not None for name in _GRAMMARS)
    if not guided:
        return work()
    own = next((name for name in _GRAMMARS if getattr(body, name) is not None), None)
    field = own or "response_format"
    try:
        with about(field):
            return await asyncio.to_thread(work)
    except (BadInput, Refused):
        raise
    except Exception as error:  # whatever the grammar's compiler raises
        reason = " ".join(str(error).split())[:200]
        raise Refused(400, f"the grammar cannot be used: {reason}", param=field) from None


def params_of(
    server: Server, body: Any, more: dict[str, Any]
) -> tuple[SamplingParams, str | list[str]]:
    """Return the sampling parameters of a body, and the order of the filters."""
    given = {name: value for name in CONTROLS if (value := getattr(body, name)) is not None}
    for name in ("allowed_ids", "banned_ids", "stop_ids", "dry_sequence_breakers"):
        if name in given:
            given[name] = tuple(given[name])
    given |= more
    seed = getattr(body, "seed", None)
    if seed is not None:
        given["seed"] = seed % 2**64
    given.setdefault("logprobs_mode", "raw")
    if "logit_bias" in given and len(given["logit_bias"]) > 4096:
        raise Refused(400, "logit_bias has more than 4,096 entries", param="logit_bias")
    if len(given.get("dry_sequence_breakers", ())) > _BREAKERS:  # each is read by the tokenizer
        raise Refused(
            400,
            f"dry_sequence_breakers has {len(given['dry_sequence_breakers']):,} texts; expected at "
            f"most {_BREAKERS}",
            param="dry_sequence_breakers",
        )
    params = SamplingParams(**given)
    params = replace(params, stop_ids=(*server.model.stop_ids, *params.stop_ids))
    return params, getattr(body, "order", None) or "hf"


def stops(server: Server, stop: str | list[str] | None) -> tuple[str, ...]:
    """Return the stop texts."""
    texts = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(texts) > server.settings.max_stop:
        raise Refused(
            400,
            f"stop has {len(texts)} texts; expected at most {server.settings.max_stop}",
            param="stop",
        )
    if any(not text or len(text) > 1000 for text in texts):
        raise Refused(400, "stop holds an empty or very long text", param="stop")
    return texts
