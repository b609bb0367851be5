"""One thread that owns the generation engine, and what asyncio code asks of it.

    worker = Worker(Engine(model), queue=64)
    stream = worker.submit(Request(model.encode("Once upon a time"), sampler))
    async for event in stream:
        print(event.text)
    answer = await worker.call(lambda: next_tokens("The capital of France is", model))
    await worker.close(within=30)

Nobody but this thread touches the model. A request joins the running batch at the next step, and
leaves it within a step when its reader cancels. Work that is no request (`call`) is done between
two steps; a function that gives an iterator is advanced by one item between two steps, so that
long work does not hold up those who generate.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from lmhead.errors import LMHeadError
from lmhead.generation.engine import Engine
from lmhead.generation.request import Event, Generation, Request

_T = TypeVar("_T")
GIVEN_UP = "the server shut down before the request was at its end"


class QueueFull(LMHeadError):
    """As many requests wait as are allowed; try again later."""


class Closed(LMHeadError):
    """The worker takes no requests any more, or gave up this one because it had to end."""


class Stream(AsyncIterator[Event]):
    """The events of one request, as they come; the last one holds the result.

    Where the request failed, reading raises its error. Whoever stops reading early cancels it: by
    `cancel`, or by leaving `async with stream:`.
    """

    def __init__(self, worker: "Worker", request: Request) -> None:
        self.request = request
        self.started = time.monotonic()  # when it was submitted
        self.ended = False  # no event will come any more
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event | BaseException | None] = asyncio.Queue()
        self._id: int | None = None  # the engine's number, once it has one

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Event:
        if self.ended and self._events.empty():
            raise StopAsyncIteration
        event = await self._events.get()
        if event is None:  # cancelled
            self.ended = True
            raise StopAsyncIteration
        if isinstance(event, BaseException):
            self.ended = True
            raise event
        if event.error is not None:
            self.ended = True
            raise event.error
        self.ended = event.result is not None
        return event

    async def result(self) -> Generation:
        """Read to the end, and return what became of the request."""
        async for event in self:
            if event.result is not None:
                return event.result
        raise Closed("the request was cancelled before its end")

    def cancel(self) -> None:
        """Let the request leave the batch before its next step; at its end it does nothing."""
        self._worker._cancel(self)

    async def __aenter__(self) -> "Stream":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()


@dataclass
class Counts:
    """What the thread did since it began."""

    steps: int = 0  # steps that drew tokens
    tokens: int = 0
    seconds: float = 0.0  # of these steps
    batch: int = 0  # requests in the last one
    ended: int = 0  # requests that came to their end
    cancelled: int = 0
    failed: int = 0


class _Job:
    """Work between two steps, and who waits for it."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()
        self.pieces: Iterator[Any] | None = None

    def advance(self) -> bool:
        """Do a piece; tell whether that was the last one."""
        try:
            if self.pieces is None:
                value = self.work()
                if not isinstance(value, Iterator):
                    return self._settle(value, None)
                self.pieces = value
            next(self.pieces)
        except StopIteration as end:
            return self._settle(end.value, None)
        except BaseException as error:  # whatever it is, it is told to the one who waits
            return self._settle(None, error)
        return False

    def _settle(self, value: Any, error: BaseException | None) -> bool:
        self.give_up(value, error)
        return True

    def give_up(self, value: Any, error: BaseException | None) -> None:
        def settle() -> None:
            if self.future.done():  # the one who waited has gone
                return
            if error is not None:
                self.future.set_exception(error)
            else:
                self.future.set_result(value)

        _tell(self.loop, settle)


class Worker:
    """The thread. It begins at once; `close` ends it.

    `queue` requests may wait beside the `engine.batch_size` that run; more are refused at once
    with `QueueFull`.
    """

    def __init__(self, engine: Engine, *, queue: int = 64) -> None:
        self.engine, self.queue, self.counts = engine, queue, Counts()
        self._changed = threading.Condition()
        self._open: set[Stream] = set()  # submitted, and not at their end
        self._incoming: deque[Stream] = deque()
        self._cancelled: deque[Stream] = deque()
        self._jobs: deque[_Job] = deque()
        self._by_id: dict[int, Stream] = {}  # only the thread uses it
        self._closing = self._giving_up = False
        self._thread = threading.Thread(target=self._run, name="lmhead-worker", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """How many requests are in the batch."""
        return self.engine.running

    @property
    def waiting(self) -> int:
        """How many requests wait for a place in the batch."""
        return max(0, len(self._open) - self.engine.running)

    @property
    def alive(self) -> bool:
        """Whether the thread runs and takes requests."""
        return self._thread.is_alive() and not self._closing

    def submit(self, request: Request) -> Stream:
        """Hand over a request; raise BadInput, QueueFull or Closed at once."""
        return self.submit_all([request])[0]

    def submit_all(self, requests: Sequence[Request]) -> list[Stream]:
        """Hand over several requests, all of them or none."""
        for request in requests:
            self.engine.check(request)
        streams = [Stream(self, request) for request in requests]
        with self._changed:
            self._check_open()
            room = self.engine.batch_size + self.queue - len(self._open)
            if len(streams) > room:
                raise QueueFull(
                    f"{len(self._open)} requests are running or waiting, and there is room for "
                    f"{max(room, 0)} more; got {len(streams)}: try again later"
                )
            self._open.update(streams)
            self._incoming.extend(streams)
            self._changed.notify_all()
        return streams

    async def call(self, work: Callable[[], _T]) -> _T:
        """Do some work in the thread between two steps; return what it returns.

        Work that gives an iterator (a generator function) is advanced by one item between two
        steps, and what the generator returns is the answer: `await worker.call(generator)`.
        """
        job = _Job(work)
        with self._changed:
            self._check_open()
            if len(self._jobs) >= self.queue:
                raise QueueFull(f"{len(self._jobs)} calls are waiting already; try again later")
            self._jobs.append(job)
            self._changed.notify_all()
        answer: _T = await job.future
        return answer

    async def close(self, within: float = 30.0) -> None:
        """Take nothing more, finish what was taken within so many seconds, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        end = time.monotonic() + within
        while self._thread.is_alive() and time.monotonic() < end:
            await asyncio.sleep(0.01)
        with self._changed:
            self._giving_up = True
            left, jobs = list(self._open), list(self._jobs)
            self._open.clear()
            self._jobs.clear()
            self._changed.notify_all()
        error = Closed(GIVEN_UP)
        for job in jobs:
            job.give_up(None, error)
        self._deliver([(stream, error) for stream in left])  # a step may still run: not waited for
        while self._thread.is_alive():  # at most the rest of a step
            await asyncio.sleep(0.01)

    def _check_open(self) -> None:
        if self._closing or not self._thread.is_alive():
            raise Closed("the server is shutting down and takes no more requests")

    def _cancel(self, stream: Stream) -> None:
        with self._changed:
            if stream in self._open:
                self._open.discard(stream)
                self._cancelled.append(stream)
                self._changed.notify_all()

    # What follows runs in the thread.

    def _run(self) -> None:
        while self._wait():
            self._take()
            if self.engine.busy:
                self._step()
            with self._changed:
                job = self._jobs.popleft() if self._jobs else None
            if job is not None and not job.future.cancelled() and not job.advance():
                self._put_back(job)

    def _put_back(self, job: _Job) -> None:
        with self._changed:
            if not self._giving_up:
                self._jobs.append(job)  # the others first
                return
        job.give_up(None, Closed(GIVEN_UP))

    def _wait(self) -> bool:
        """Sleep until there is something to do; False: it is over."""
        with self._changed:
            while not (self._incoming or self._cancelled or self._jobs or self.engine.busy):
                if self._closing:
                    return False
                self._changed.wait()
            return not self._giving_up

    def _take(self) -> None:
        """Let in who came since the last step, and let go who cancelled."""
        with self._changed:
            incoming, self._incoming = self._incoming, deque()
            cancelled, self._cancelled = self._cancelled, deque()
            # whom no event will reach any more
            incoming = deque(stream for stream in incoming if stream in self._open)
        for stream in incoming:
            try:
                stream._id = self.engine.submit(stream.request)
                self._by_id[stream._id] = stream
            except Exception as error:
                self.counts.failed += 1
                self._deliver([(stream, error)])
        for stream in cancelled:
            if stream._id is not None:
                self.engine.cancel(stream._id)
                self._by_id.pop(stream._id, None)
        self.counts.cancelled += len(cancelled)
        self._deliver([(stream, None) for stream in cancelled])

    def _step(self) -> None:
        began, batch = time.perf_counter(), set(self._by_id)
        try:
            stepped = self.engine.step()
        except Exception as error:  # the model could not run: who was in the batch is lost
            left = set(self.engine.ids)
            lost = [self._by_id.pop(id) for id in batch - left]
            self.counts.failed += len(lost)
            self._deliver([(stream, error) for stream in lost])
            return
        self.counts.seconds += time.perf_counter() - began
        self.counts.steps += 1
        self.counts.batch = len(stepped)
        events: list[tuple[Stream, Event | BaseException | None]] = []
        for event in stepped:
            stream = self._by_id.get(event.id)
            if event.error is not None:
                self.counts.failed += 1
            else:
                self.counts.tokens += 1
                self.counts.ended += event.result is not None
            if event.result is not None or event.error is not None:
                self._by_id.pop(event.id, None)
            if stream is not None:
                events.append((stream, event))
        self._deliver(events)

    def _deliver(self, events: Sequence[tuple[Stream, Event | BaseException | None]]) -> None:
        """Hand events to the loops that wait for them, all of a loop in one go."""
        by_loop: dict[asyncio.AbstractEventLoop, list[Any]] = {}
        with self._changed:
            for stream, event in events:
                over = not isinstance(event, Event) or event.result or event.error
                if over:
                    self._open.discard(stream)
                by_loop.setdefault(stream._loop, []).append((stream, event))
        for loop, batch in by_loop.items():

            def put(batch: list[Any] = batch) -> None:
                for stream, event in batch:
                    stream._events.put_nowait(event)

            _tell(loop, put)


def _tell(loop: asyncio.AbstractEventLoop, what: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(what)
    except RuntimeError:  # the loop is closed, and nobody waits any more
        return
