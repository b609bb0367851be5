"""Following requests to their end: all at once or as a stream, as long as the client is there."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from lmhead.generation import Event, Generation
from lmhead.sampling import Logprobs
from lmhead.serve.api.errors import Refused, body_of
from lmhead.serve.api.requests import Wanted
from lmhead.serve.api.server import Server
from lmhead.serve.worker import QueueFull, Stream

_T = TypeVar("_T")


@dataclass(eq=False)
class Choice:
    """A choice while it grows."""

    wanted: Wanted
    stream: Stream
    text: str = ""
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: Sequence[Logprobs | None] = ()
    result: Generation | None = None
    last: float = 0.0  # when its last token came

    @property
    def index(self) -> int:
        """Its place in the reply."""
        return self.wanted.index

    def take(self, event: Event, server: Server) -> None:
        """Let it grow by an event."""
        now, metrics = time.monotonic(), server.metrics
        if self.last:
            metrics.each.observe(now - self.last)
        else:
            metrics.first.observe(now - self.stream.started)
        self.last = now
        metrics.generated.inc()
        self.text += event.text
        if event.logprobs is not None:
            self.logprobs.append(event.logprobs)
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        self.result = event.result
        if event.result is not None and self.wanted.steered is not None:
            log = self.wanted.steered.guard.log
            metrics.steered.inc(log.tokens)
            metrics.held_back.inc(log.held_back)

    def report(self) -> dict[str, Any] | None:
        """Tell what steering did to it."""
        return None if self.wanted.steered is None else self.wanted.steered.report()


def begin(server: Server, wanted: Sequence[Wanted], http: HttpRequest) -> list[Choice]:
    """Hand the requests over; a full queue is refused here."""
    tokens = sum(len(one.prompt.ids) for one in {id(w.prompt): w for w in wanted}.values())
    try:
        streams = server.worker.submit_all([one.request for one in wanted])
    except QueueFull:
        server.metrics.refused.inc()
        raise
    server.metrics.prompt_tokens.inc(tokens)
    http.state.logged = {"prompt_tokens": tokens, "choices": len(wanted)}
    if server.settings.log_prompts:
        http.state.logged["prompts"] = list({one.prompt.text for one in wanted})
    return [Choice(one, stream) for one, stream in zip(wanted, streams, strict=True)]


def usage(choices: Sequence[Choice], drawn: bool = True) -> dict[str, int]:
    """Count tokens: those of a prompt once, however many choices it has."""
    prompts = {id(c.wanted.prompt): len(c.wanted.prompt.ids) for c in choices}
    made = sum(len(c.result.ids) for c in choices if c.result is not None) if drawn else 0
    before = sum(prompts.values())
    return {
        "prompt_tokens": before,
        "completion_tokens": made,
        "total_tokens": before + made,
    }


async def events(server: Server, choices: Sequence[Choice]) -> AsyncIterator[tuple[Choice, Event]]:
    """Tell of all choices as they grow; whatever ends this early cancels what is left."""
    queue: asyncio.Queue[tuple[Choice, Event] | BaseException | None] = asyncio.Queue()

    async def follow(choice: Choice) -> None:
        try:
            async for event in choice.stream:
                choice.take(event, server)
                queue.put_nowait((choice, event))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(follow(choice)) for choice in choices]
    try:
        left = len(tasks)
        while left:
            event = await queue.get()
            if event is None:
                left -= 1
            elif isinstance(event, BaseException):
                raise event
            else:
                yield event
    finally:
        for choice in choices:
            choice.stream.cancel()
        for task in tasks:
            task.cancel()


async def finished(server: Server, http: HttpRequest, choices: Sequence[Choice]) -> None:
    """Follow all choices to their end, unless the client goes away or time is up."""

    async def work() -> None:
        async for _ in events(server, choices):
            pass

    await while_there(server, http, work())
    _note(http, choices)


async def while_there(server: Server, http: HttpRequest, work: Awaitable[_T]) -> _T:
    """Do some work as long as the client waits for it, within the time that an answer may take."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(http.receive))
    try:
        await asyncio.wait(
            {task, gone}, timeout=server.settings.time, return_when=asyncio.FIRST_COMPLETED
        )
        if task.done():
            return task.result()
        if gone.done():
            server.metrics.gone.inc()
            raise Refused(499, "the client went away", code="client_closed")
        raise Refused(408, f"the answer took more than {server.settings.time:g} s", code="timeout")
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _note(http: HttpRequest, choices: Sequence[Choice]) -> None:
    http.state.logged["completion_tokens"] = usage(choices)["completion_tokens"]


class EventStream(Response):
    """Server-sent events: every object a line of `data:`, and `[DONE]` at the end."""

    media_type = "text/event-stream"

    def __init__(
        self,
        server: Server,
        http: HttpRequest,
        choices: Sequence[Choice],
        chunks: AsyncIterator[dict[str, Any]],
        first: dict[str, Any],
    ) -> None:
        self.status_code, self.background = 200, None
        self.body = b""
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        if "content-length" in self.headers:
            del self.headers["content-length"]
        self._server, self._http, self._choices = server, http, choices
        self._chunks, self._first = chunks, first

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the events until they end, the client goes, or time is up."""
        writer = asyncio.ensure_future(self._write(send))
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait(
                {writer, gone},
                timeout=self._server.settings.time,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if writer.done():
                writer.result()
            elif gone.done():
                self._server.metrics.gone.inc()
        finally:
            gone.cancel()
            if not writer.done():
                writer.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await writer
            for choice in self._choices:
                choice.stream.cancel()
            _note(self._http, self._choices)

    async def _write(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

        async def line(what: str) -> None:
            body = f"data: {what}\n\n".encode("ascii")
            await send({"type": "http.response.body", "body": body, "more_body": True})

        try:
            await line(_json(self._first))
            async for chunk in self._chunks:
                await line(_json(chunk))
        except Exception as error:
            await line(_json(body_of(error)[1]))
        await line("[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _json(content: Any) -> str:
    return json.dumps(content, allow_nan=False, separators=(",", ":"))


async def streamed(
    server: Server,
    http: HttpRequest,
    choices: Sequence[Choice],
    chunks: AsyncIterator[dict[str, Any]],
) -> EventStream:
    """Begin a stream once its first event is there: what fails before has a status of its own."""
    try:
        first = await while_there(server, http, anext(chunks))
    except BaseException:
        for choice in choices:
            choice.stream.cancel()
        raise
    return EventStream(server, http, choices, chunks, first)
