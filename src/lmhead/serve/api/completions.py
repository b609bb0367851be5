"""`/v1/completions`: texts or ids, continued; with `echo` and `logprobs`, scored."""

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request

from lmhead.generation import Event
from lmhead.sampling import Logprobs
from lmhead.serve.api.answering import Choice, begin, events, finished, streamed, usage
from lmhead.serve.api.errors import Json, Refused
from lmhead.serve.api.pieces import Pieces
from lmhead.serve.api.requests import read_prompts, wanted
from lmhead.serve.api.schemas import CompletionBody, CompletionReply
from lmhead.serve.api.server import Server, new_id

router = APIRouter()
DEFAULT_TOKENS = 16


@router.post("/v1/completions", response_model=None, responses={200: {"model": CompletionReply}})
async def completions(body: CompletionBody, http: Request) -> Any:
    """Continue a text or several; with `echo` the prompts come back, scored with `logprobs`."""
    server: Server = http.app.state.server
    server.check_model(body.model)
    _refuse(server, body)
    prompts = await read_prompts(server, body.prompt)
    asked = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    if asked == 0 and not body.echo:
        raise Refused(
            400, "max_tokens is 0; expected at least 1, or echo to score the prompt alone",
            param="max_tokens",
        )  # fmt: skip
    controls = {} if body.logprobs is None else {"logprobs": body.logprobs}
    made = await wanted(
        server,
        body,
        prompts,
        max_tokens=asked,
        controls=controls,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    choices = begin(server, made, http)
    shape = _Shape(
        server.pieces,
        echo=bool(body.echo),
        drawn=asked > 0,
        logprobs=body.logprobs,
        by_id=bool(body.return_tokens_as_token_ids),
    )
    head = {
        "id": new_id("cmpl"),
        "object": "text_completion",
        "created": int(time.time()),
        "model": server.name,
    }
    if body.stream:
        include = bool(body.stream_options and body.stream_options.include_usage)
        chunks = _chunks(server, choices, shape, head, include)
        return await streamed(server, http, choices, chunks)
    await finished(server, http, choices)
    replies = [shape.whole(choice) for choice in choices]
    return Json({**head, "choices": replies, "usage": usage(choices, drawn=asked > 0)})


def _refuse(server: Server, body: CompletionBody) -> None:
    if body.suffix:
        raise Refused(400, "suffix is not supported; leave it out", param="suffix")
    if body.best_of not in (None, 1):
        raise Refused(400, "best_of is not supported; use n and choose yourself", param="best_of")
    if body.logprobs is not None and body.logprobs > server.settings.max_logprobs:
        raise Refused(
            400,
            f"logprobs is {body.logprobs}; expected at most {server.settings.max_logprobs}",
            param="logprobs",
        )


@dataclass
class _Shape:
    """How a choice looks."""

    pieces: Pieces
    echo: bool
    drawn: bool  # whether what was drawn is shown; with max_tokens 0 it is not
    logprobs: int | None
    by_id: bool
    _before: dict[int, bytes] = field(default_factory=dict)  # of each choice, for text offsets

    def whole(self, choice: Choice) -> dict[str, Any]:
        """Return a choice at its end."""
        result = choice.result
        assert result is not None
        text = choice.text if self.drawn else ""
        text = choice.wanted.prompt.text + text if self.echo else text
        reason = result.finish_reason if self.drawn else "length"
        logprobs = None
        if self.logprobs is not None:
            ids, rows = self._prompt(choice) if self.echo else ([], [])
            if self.drawn:
                ids, rows = [*ids, *result.ids], [*rows, *choice.logprobs]
            logprobs = self._logprobs(choice.index, ids, rows)
        return self._choice(choice, text, logprobs, reason)

    def piece(self, choice: Choice, event: Event, first: bool) -> dict[str, Any]:
        """Return what an event adds to a choice."""
        text = event.text if self.drawn else ""
        if first and self.echo:
            text = choice.wanted.prompt.text + text
        logprobs = None
        if self.logprobs is not None:
            ids, rows = self._prompt(choice) if first and self.echo else ([], [])
            if self.drawn and event.logprobs is not None:
                ids, rows = [*ids, event.logprobs.id], [*rows, event.logprobs]
            logprobs = self._logprobs(choice.index, ids, rows)
        reason = None if event.result is None else event.result.finish_reason
        return self._choice(
            choice, text, logprobs, reason if self.drawn or not reason else "length"
        )

    def _choice(
        self, choice: Choice, text: str, logprobs: dict[str, Any] | None, reason: str | None
    ) -> dict[str, Any]:
        steering = choice.report() if reason is not None else None
        return {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": reason,
            **({} if steering is None else {"steering": steering}),
        }

    def _prompt(self, choice: Choice) -> tuple[list[int], list[Logprobs | None]]:
        return list(choice.wanted.prompt.ids), list(choice.prompt_logprobs)

    def _logprobs(
        self, index: int, ids: Sequence[int], rows: Sequence[Logprobs | None]
    ) -> dict[str, Any]:
        before = self._before.get(index, b"")
        offsets = []
        for id in ids:
            offsets.append(len(before.decode("utf-8", "ignore")))
            before += self.pieces.shown_bytes(id)
        self._before[index] = before
        top = [None if row is None else self._named(row.top) for row in rows]
        return {
            "tokens": [self._name(id) for id in ids],
            "token_logprobs": [None if row is None else _finite(row.logprob) for row in rows],
            "top_logprobs": top if self.logprobs else None,
            "text_offset": offsets,
        }

    def _name(self, id: int) -> str:
        return f"token_id:{id}" if self.by_id else self.pieces.text_of(id)

    def _named(self, top: dict[int, float]) -> dict[str, float]:
        """Key by text; where two tokens have one text, the less likely one by its id."""
        found: dict[str, float] = {}
        for id, logprob in top.items():
            name = self._name(id)
            found[f"token_id:{id}" if name in found else name] = logprob
        return found


def _finite(logprob: float) -> float:
    return max(logprob, -1e30)  # -inf is not JSON


async def _chunks(
    server: Server,
    choices: Sequence[Choice],
    shape: _Shape,
    head: dict[str, Any],
    include_usage: bool,
) -> AsyncIterator[dict[str, Any]]:
    begun: set[int] = set()
    more = {"usage": None} if include_usage else {}
    async for choice, event in events(server, choices):
        first = choice.index not in begun
        begun.add(choice.index)
        piece = shape.piece(choice, event, first)
        if piece["text"] or piece["logprobs"] or piece["finish_reason"] or first:
            yield {**head, "choices": [piece], **more}
    if include_usage:
        yield {**head, "choices": [], "usage": usage(choices, drawn=shape.drawn)}
