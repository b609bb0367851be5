"""What OpenAI's interface does not have: `/v1/choices`, `/v1/next` and `/v1/lens`."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from fastapi import APIRouter, Request

from lmhead.errors import BadInput
from lmhead.generation.next import next_tokens
from lmhead.generation.score import scores, split
from lmhead.inspect.lens import lens
from lmhead.sampling import check_sampling
from lmhead.serve.api.answering import while_there
from lmhead.serve.api.errors import Json, Refused
from lmhead.serve.api.requests import check_length, params_of, read_prompt
from lmhead.serve.api.schemas import (
    CONTROLS,
    ChoicesBody,
    ChoicesReply,
    LensBody,
    LensReply,
    NextBody,
    NextReply,
)
from lmhead.serve.api.server import Server

router = APIRouter()
_AT_ONCE = 512  # tokens that are scored between two steps


@router.post("/v1/choices", response_model=None, responses={200: {"model": ChoicesReply}})
async def choices(body: ChoicesBody, http: Request) -> Json:
    """Score given continuations of a prompt.

    Where each is one token behind the same ids, only those rows of the head are read, and the
    probabilities are those among them. Else the log-probabilities of all tokens are added up.
    """
    server: Server = http.app.state.server
    server.check_model(body.model)
    texts = [text for text in body.choices if isinstance(text, str)]
    if not all(body.choices):
        raise Refused(400, "choices contains an empty text; expected some text", param="choices")
    if texts and not isinstance(body.prompt, str):
        raise Refused(
            400,
            "prompt is ids, but choices are texts; expected both of the same kind",
            param="choices",
        )
    if not texts and isinstance(body.prompt, str):
        raise Refused(
            400,
            "prompt is a text, but choices are ids; expected both of the same kind",
            param="choices",
        )
    read = await read_prompt(server, body.prompt)
    pairs = []
    for choice in body.choices:
        if isinstance(choice, str):
            before, ids = split(server.model, read.text, choice)
        else:
            before, ids = read.ids, server.model.encode(choice)
        check_length(server, len(before) + len(ids))
        pairs.append((before, ids))
    single = all(len(ids) == 1 and before == pairs[0][0] for before, ids in pairs)
    used = len(pairs[0][0]) + sum(len(ids) for _, ids in pairs)

    def rows() -> list[float]:
        wanted = torch.tensor([ids[0] for _, ids in pairs])
        with torch.inference_mode():
            h = server.model.last_hidden(pairs[0][0])
            return [float(z) for z in server.worker.engine.head.score(h, wanted)]

    def whole() -> Any:  # a few between two steps of those who generate
        found: list[float] = []
        while len(found) < len(pairs):
            few = _few(pairs[len(found) :])
            for one in scores(few, server.model, head=server.worker.engine.head):
                found.append(one.logprob)
            yield
        return found

    sums = await while_there(server, http, server.worker.call(rows if single else whole))
    best = max(range(len(sums)), key=sums.__getitem__)
    shares = [math.exp(value - sums[best]) for value in sums]
    server.metrics.prompt_tokens.inc(used)
    return Json(
        {
            "model": server.name,
            "best": best,
            "rows_read": len(pairs) if single else None,
            "choices": [
                {
                    "index": i,
                    "text": c if isinstance(c, str) else server.model.decode(ids),
                    "ids": ids,
                    "score": score,
                    "probability": share / sum(shares),
                }
                for i, (c, (_, ids), score, share) in enumerate(
                    zip(body.choices, pairs, sums, shares, strict=True)
                )
            ],
            "usage": {"prompt_tokens": used, "completion_tokens": 0, "total_tokens": used},
        }
    )


@router.post("/v1/next", response_model=None, responses={200: {"model": NextReply}})
async def next_(body: NextBody, http: Request) -> Json:
    """Tell the best next tokens; with sampling controls, what each filter leaves and cuts."""
    server: Server = http.app.state.server
    server.check_model(body.model)
    read = await read_prompt(server, body.prompt)
    given = any(getattr(body, name) is not None for name in CONTROLS)
    params, order = params_of(server, body, {}) if given else (None, "hf")
    if params is not None:
        check_sampling(params, order)

    def work() -> dict[str, Any]:
        try:
            found = next_tokens(
                read.ids, server.model, top=body.top or 10, params=params, order=order
            )
        except BadInput:
            raise
        except ValueError as error:  # of a grammar's compiler
            raise BadInput(" ".join(str(error).split())[:200]) from error
        return found.to_dict()

    answer = await while_there(server, http, server.worker.call(work))
    server.metrics.prompt_tokens.inc(len(read.ids))
    return Json(_finite({**answer, "model": server.name, "prompt": read.text}))


@router.post("/v1/lens", response_model=None, responses={200: {"model": LensReply}})
async def lens_(body: LensBody, http: Request) -> Json:
    """Tell what the head would say after every block, at the last positions of a prompt."""
    server: Server = http.app.state.server
    server.check_model(body.model)
    read = await read_prompt(server, body.prompt)

    def work() -> dict[str, Any]:
        found = lens(
            read.ids, server.model, token=body.token, top=body.top or 5, last=body.last or 8
        )
        return found.to_dict()

    answer = await while_there(server, http, server.worker.call(work))
    server.metrics.prompt_tokens.inc(len(read.ids))
    return Json(_finite({**answer, "model": server.name, "prompt": read.text}))


def _few(pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[list[int], list[int]]]:
    """Return the first pairs, as many as the model reads in about a step of long prompts."""
    longest = count = 0
    for before, ids in pairs:
        longest = max(longest, len(before) + len(ids))
        if count and longest * (count + 1) > _AT_ONCE:
            break
        count += 1
    return list(pairs[:count])


def _finite(value: Any) -> Any:
    """Leave out numbers that JSON does not have."""
    if isinstance(value, dict):
        return {str(name): _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
