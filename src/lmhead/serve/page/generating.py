"""Generation for the page: a request for the engine, and its events as lines."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from fastapi import Request

from lmhead.errors import BadInput, LMHeadError
from lmhead.generation.request import Request as Wanted
from lmhead.generation.request import Steering
from lmhead.loading import Model
from lmhead.sampling import Sampler, SamplingParams, check_sampling
from lmhead.serve.page.asked import Generate
from lmhead.serve.page.explorer import ALTERNATIVES
from lmhead.serve.page.jobs import log, unexpected
from lmhead.serve.worker import Stream

LONGEST = 4096  # tokens
_LISTENING = 0.25  # seconds between two looks whether anybody does


def request_of(model: Model, asked: Generate, steering: Steering | None) -> Wanted:
    """Make the engine's request of what the page asked, or say what is wrong with it."""
    if not 1 <= asked.max_tokens <= LONGEST:
        raise BadInput(f"max_tokens is {asked.max_tokens}; expected 1 to {LONGEST:,}")
    params = SamplingParams.from_dict(asked.params)
    check_sampling(params, asked.order)
    params = replace(params, stop_ids=(*model.stop_ids, *params.stop_ids), logprobs=ALTERNATIVES)
    sampler = Sampler.from_params(
        params, asked.order, vocab_size=model.reachable, tokenizer=model.tokenizer
    )
    return Wanted(model.encode(asked.ids), sampler, asked.max_tokens, steering=steering)


async def generated(
    stream: Stream, request: Request, model: Model
) -> AsyncIterator[dict[str, Any]]:
    """Tell each token with its log-probability and alternatives; last, why it ended."""
    try:
        async with stream:
            events = aiter(stream)
            coming = asyncio.ensure_future(anext(events, None))
            while True:
                done, _ = await asyncio.wait({coming}, timeout=_LISTENING)
                if not done:
                    if await request.is_disconnected():
                        coming.cancel()
                        return
                    continue
                event = coming.result()
                if event is None:
                    return
                coming = asyncio.ensure_future(anext(events, None))
                if event.token is not None and event.logprobs is not None:
                    row = event.logprobs
                    yield {
                        "token": {
                            "id": event.token,
                            "text": model.token_text(event.token),
                            "logprob": row.logprob,
                            "top": [[i, lp, model.token_text(i)] for i, lp in _pairs(row.top)],
                        }
                    }
                if event.result is not None:
                    steering = stream.request.steering
                    guard = getattr(steering, "log", None)
                    yield {
                        "result": {
                            "finish_reason": event.result.finish_reason,
                            "text": event.result.text,
                            "guard": guard and guard.to_dict(),
                        }
                    }
    except LMHeadError as error:
        yield {"error": str(error)}
    except Exception:
        log.exception("generation failed")
        yield {"error": unexpected()}


def _pairs(top: Any) -> list[tuple[int, float]]:
    return list(top.items()) if isinstance(top, dict) else [(int(i), p) for i, p in top]
