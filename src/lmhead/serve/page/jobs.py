"""Slow work for the page: in its turn, telling how far it is, and ended when nobody listens.

A reply is lines of JSON: `{"progress": {"title", "done", "total"}}` any number of times, and then
`{"result": ...}` or `{"error": "..."}`. When the browser closes the connection, the next step of
the work's own progress ends it.
"""

import asyncio
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse

from lmhead.errors import LMHeadError
from lmhead.progress import Advance, Progress

_LISTENING = 0.25  # seconds between two looks whether anybody does
_SENT = 0.05  # seconds at least between two lines of progress

Run = Callable[[Callable[[], Any]], Awaitable[Any]]

log = logging.getLogger("lmhead.page")


class Cancelled(Exception):
    """Nobody waits for the result any more."""


class Job:
    """One piece of work; `run` does it where the others of its kind are done, in turn."""

    def __init__(self, work: Callable[[Progress], Any], run: Run) -> None:
        self._work = work
        self._loop = asyncio.get_running_loop()
        self._began = False
        self.lines: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.cancelled = threading.Event()
        self._leading = asyncio.create_task(self._lead(run))

    def _tell(self, line: dict[str, Any] | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self.lines.put_nowait, line)
        except RuntimeError:  # the server is gone
            self.cancelled.set()

    def _check(self) -> None:
        if self.cancelled.is_set():
            raise Cancelled

    @contextmanager
    def _progress(self, title: str, total: int | None = None) -> Iterator[Advance]:
        done, sent = 0, 0.0

        def advance(n: int) -> None:
            nonlocal done, sent
            self._check()
            done += n
            if time.monotonic() - sent > _SENT or done == total:
                sent = time.monotonic()
                self._tell({"progress": {"title": title, "done": done, "total": total}})

        advance(0)
        yield advance
        self._check()

    async def _lead(self, run: Run) -> None:
        try:
            running = asyncio.ensure_future(run(self._do))
            await asyncio.wait([running], timeout=_SENT)
            if not self._began and not running.done():  # others are at work
                self._tell({"progress": {"title": "waiting", "done": 0, "total": None}})
            self._tell({"result": await running})
        except Cancelled:
            pass
        except LMHeadError as error:
            self._tell({"error": str(error)})
        except Exception:
            log.exception("the page's work failed")
            self._tell({"error": unexpected()})
        finally:
            self._tell(None)

    def _do(self) -> Any:
        self._began = True
        self._check()
        return self._work(self._progress)


def unexpected() -> str:
    """Say what to do about an error that nobody foresaw."""
    return "something went wrong in the server; the terminal that runs lmhead explore shows what"


def streamed(request: Request, work: Callable[[Progress], Any], run: Run) -> StreamingResponse:
    """Answer with the lines of a job."""
    return ndjson(_lines(request, Job(work, run)))


def ndjson(lines: AsyncIterator[dict[str, Any]]) -> StreamingResponse:
    """Send each dictionary as a line as soon as it is there."""

    async def encoded() -> AsyncIterator[bytes]:
        async for line in lines:
            yield json.dumps(line, ensure_ascii=False, allow_nan=False).encode() + b"\n"

    return StreamingResponse(encoded(), media_type="application/x-ndjson")


async def _lines(request: Request, job: Job) -> AsyncIterator[dict[str, Any]]:
    try:
        while True:
            try:
                line = await asyncio.wait_for(job.lines.get(), _LISTENING)
            except TimeoutError:
                if await request.is_disconnected():
                    return
                continue
            if line is None:
                return
            yield line
    finally:
        job.cancelled.set()
