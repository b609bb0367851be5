"""`/v1/chat/completions`: conversations, answered."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request

from lmhead.sampling import Logprobs
from lmhead.serve.api.answering import Choice, begin, events, finished, streamed, usage
from lmhead.serve.api.errors import Json, Refused
from lmhead.serve.api.requests import Read, about, check_length, wanted
from lmhead.serve.api.schemas import ChatBody, ChatReply, Message
from lmhead.serve.api.server import Server, new_id

router = APIRouter()
# What OpenAI's interface has and we do not: refused where it asks for something.
UNSUPPORTED = ("tools", "functions", "function_call", "audio", "prediction", "web_search_options")
_ROLES = {"developer": "system"}


@router.post("/v1/chat/completions", response_model=None, responses={200: {"model": ChatReply}})
async def chat(body: ChatBody, http: Request) -> Any:
    """Answer a conversation of system, user and assistant."""
    server: Server = http.app.state.server
    server.check_model(body.model)
    _refuse(server, body)
    messages = [_message(message) for message in body.messages]
    with about("messages"):
        ids = await asyncio.to_thread(server.model.encode_chat, messages)
    check_length(server, len(ids), "messages")
    prompt = Read(messages[-1]["content"], ids)
    asked = body.max_completion_tokens
    asked = body.max_tokens if asked is None else asked
    if asked == 0:
        raise Refused(400, "max_tokens is 0; expected at least 1", param="max_tokens")
    if asked is None:  # as many as there is room for
        room = server.settings.max_tokens if server.context is None else server.context - len(ids)
        asked = max(1, min(server.settings.max_tokens, room))
    controls = _format(body)
    if body.logprobs:
        controls["logprobs"] = body.top_logprobs or 0
    made = await wanted(server, body, [prompt], max_tokens=asked, controls=controls)
    choices = begin(server, made, http)
    head = {
        "id": new_id("chatcmpl"),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": server.name,
    }
    if body.stream:
        include = bool(body.stream_options and body.stream_options.include_usage)
        head["object"] = "chat.completion.chunk"
        chunks = _chunks(server, choices, head, include)
        return await streamed(server, http, choices, chunks)
    await finished(server, http, choices)
    replies = [_whole(server, choice, bool(body.logprobs)) for choice in choices]
    return Json({**head, "choices": replies, "usage": usage(choices)})


def _refuse(server: Server, body: ChatBody) -> None:
    more = body.model_extra or {}
    for name in UNSUPPORTED:
        if more.get(name) not in (None, [], "none"):
            raise Refused(400, f"{name} is not supported; leave it out", param=name)
    if more.get("tool_choice") not in (None, "none", "auto"):
        raise Refused(400, "tool_choice is not supported; leave it out", param="tool_choice")
    if more.get("modalities") not in (None, ["text"]):
        raise Refused(400, "modalities other than text are not supported", param="modalities")
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise Refused(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        if body.top_logprobs > server.settings.max_logprobs:
            raise Refused(
                400,
                f"top_logprobs is {body.top_logprobs}; expected at most "
                f"{server.settings.max_logprobs}",
                param="top_logprobs",
            )


def _message(message: Message) -> dict[str, str]:
    more = message.model_extra or {}
    for name in ("tool_calls", "function_call", "audio", "tool_call_id"):
        if more.get(name):
            raise Refused(400, f"{name} in a message is not supported", param="messages")
    content = message.content
    if isinstance(content, list):
        for part in content:
            if part.type != "text" or part.text is None:
                raise Refused(
                    400, "a message holds a part that is not a text; expected text alone",
                    param="messages",
                )  # fmt: skip
        content = "".join(part.text or "" for part in content)
    return {"role": _ROLES.get(message.role, message.role), "content": content or ""}


def _format(body: ChatBody) -> dict[str, Any]:
    """Return the controls that the form of the answer asks for."""
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return {}
    if wanted.type == "json_object":
        return {"json_schema": {"type": "object"}}
    schema = wanted.json_schema and wanted.json_schema.schema_
    if not schema:
        raise Refused(
            400, "response_format has no json_schema.schema; expected a JSON schema",
            param="response_format",
        )  # fmt: skip
    return {"json_schema": schema}


def _logprobs(server: Server, rows: Sequence[Logprobs]) -> dict[str, Any]:
    def token(id: int, logprob: float) -> dict[str, Any]:
        raw = server.pieces.bytes_of(id)
        return {"token": server.pieces.text_of(id), "logprob": max(logprob, -9999.0),
                "bytes": list(raw)}  # fmt: skip

    content = [
        token(row.id, row.logprob)
        | {"top_logprobs": [token(id, logprob) for id, logprob in row.top.items()]}
        for row in rows
    ]
    return {"content": content, "refusal": None}


def _whole(server: Server, choice: Choice, logprobs: bool) -> dict[str, Any]:
    assert choice.result is not None
    steering = choice.report()
    return {
        "index": choice.index,
        "message": {"role": "assistant", "content": choice.text, "refusal": None},
        "logprobs": _logprobs(server, choice.logprobs) if logprobs else None,
        "finish_reason": choice.result.finish_reason,
        **({} if steering is None else {"steering": steering}),
    }


async def _chunks(
    server: Server, choices: Sequence[Choice], head: dict[str, Any], include_usage: bool
) -> AsyncIterator[dict[str, Any]]:
    begun: set[int] = set()
    more = {"usage": None} if include_usage else {}
    async for choice, event in events(server, choices):
        first = choice.index not in begun
        begun.add(choice.index)
        logprobs = None if event.logprobs is None else _logprobs(server, [event.logprobs])
        reason = None if event.result is None else event.result.finish_reason
        if not (event.text or logprobs or reason or first):
            continue
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        if event.text or first:
            delta["content"] = event.text
        one: dict[str, Any] = {
            "index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": reason,
        }  # fmt: skip
        if reason is not None and (steering := choice.report()) is not None:
            one["steering"] = steering
        yield {**head, "choices": [one], **more}
    if include_usage:
        yield {**head, "choices": [], "usage": usage(choices)}
