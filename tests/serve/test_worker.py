"""The thread that owns the engine: what asyncio code asks of it, and what it is told."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch

from lmhead.errors import BadInput
from lmhead.generation import Engine, Generation, Request
from lmhead.loading import Model
from lmhead.sampling import Sampler, SamplingParams
from lmhead.serve.worker import Closed, QueueFull, Worker

T = TypeVar("T")


def request(model: Model, max_tokens: int = 8, **controls: Any) -> Request:
    params = SamplingParams(**{"temperature": 1.0, "seed": 1, **controls})
    sampler = Sampler.from_params(params, vocab_size=model.reachable)
    return Request([5, 6, 7], sampler, max_tokens)


def alone(model: Model, one: Request) -> Generation:
    engine = Engine(model)
    engine.submit(one)
    return next(event.result for event in engine.run() if event.result)


def run(
    model: Model, work: Callable[[Worker], Awaitable[T]], within: float = 30.0, **settings: Any
) -> T:
    """Run asyncio code with a worker, which is closed at the end."""

    async def whole() -> T:
        queue = settings.pop("queue", 64)
        worker = Worker(Engine(model, **settings), queue=queue)
        try:
            return await asyncio.wait_for(work(worker), 60)
        finally:
            await worker.close(within)
            assert not worker.alive

    return asyncio.run(whole())


def test_requests_at_once_give_what_each_gives_alone(words: Model) -> None:
    asked = [request(words, 5 + i, seed=i) for i in range(20)]
    expected = [alone(words, one) for one in asked]

    async def work(worker: Worker) -> list[Generation]:
        return await asyncio.gather(*(worker.submit(one).result() for one in asked))

    assert run(words, work, batch_size=4) == expected


def test_events_come_one_by_one(words: Model) -> None:
    async def work(worker: Worker) -> None:
        tokens, ended = [], []
        async for event in worker.submit(request(words, 6)):
            tokens.append(event.token)
            ended.append(event.result is not None)
        assert tokens == list(alone(words, request(words, 6)).ids)
        assert ended == [False] * 5 + [True]
        assert worker.counts.tokens == 6

    run(words, work)


def test_a_full_queue_is_refused_and_takes_requests_again(words: Model) -> None:
    async def work(worker: Worker) -> None:
        held = worker.submit_all([request(words, 400) for _ in range(3)])
        with pytest.raises(QueueFull, match="room for 0 more"):
            worker.submit(request(words))
        held[0].cancel()
        with pytest.raises(QueueFull, match="room for 1 more; got 2"):
            worker.submit_all([request(words)] * 2)  # all or none
        for stream in held[1:]:
            stream.cancel()
        assert await worker.submit(request(words)).result() == alone(words, request(words))

    run(words, work, batch_size=1, queue=2)


def test_a_cancelled_request_leaves_within_a_step(words: Model) -> None:
    async def work(worker: Worker) -> None:
        stream = worker.submit(request(words, 400))
        await anext(stream)
        steps = worker.counts.steps
        stream.cancel()
        while worker.engine.busy:
            await asyncio.sleep(0)
        assert worker.counts.cancelled == 1
        at_once = worker.counts.steps - steps
        assert at_once < 100  # of 400: it did not run to its end
        assert [event async for event in stream if event.result] == []
        with pytest.raises(Closed, match="cancelled"):
            await stream.result()
        async with worker.submit(request(words, 400)) as other:
            await anext(other)
        while worker.engine.busy:
            await asyncio.sleep(0)

    run(words, work)


def test_a_request_that_fails_fails_alone(words: Model) -> None:
    class Broken:
        rows = (None,)

        def __init__(self) -> None:
            self.law = object()

        def answer(self, *_: Any) -> None:
            raise ZeroDivisionError("its own fault")

        def alone(self) -> "Broken":
            return self

    class Unreadable(Broken):
        @property
        def rows(self) -> Any:
            return ({99: torch.zeros(32)},)

    async def work(worker: Worker) -> None:
        good = [worker.submit(request(words, 30, seed=i)) for i in range(3)]
        stuck = worker.submit(request(words, 9, allowed_ids=(5,), no_repeat_ngram_size=1))
        broken = worker.submit(replace(request(words), steering=Broken()))
        unreadable = worker.submit(replace(request(words), steering=Unreadable()))
        with pytest.raises(BadInput, match="no token is left"):
            await stuck.result()
        with pytest.raises(ZeroDivisionError):
            await broken.result()
        with pytest.raises(BadInput, match="the layer is 99"):
            await unreadable.result()
        with pytest.raises(BadInput, match="max_tokens"):
            worker.submit(request(words, 0))
        for i, stream in enumerate(good):
            assert await stream.result() == alone(words, request(words, 30, seed=i))
        assert worker.counts.failed == 3

    run(words, work)


def test_a_model_that_fails_loses_its_batch_and_goes_on(words: Model) -> None:
    async def work(worker: Worker) -> None:
        stream = worker.submit(request(words, 400))
        await anext(stream)
        handle = words.body.model.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await stream.result()
        handle.remove()
        assert await worker.submit(request(words)).result() == alone(words, request(words))

    run(words, work)


def test_calls_run_in_the_thread_between_steps(words: Model) -> None:
    async def work(worker: Worker) -> None:
        assert await worker.call(lambda: threading.current_thread().name) == "lmhead-worker"
        with pytest.raises(ZeroDivisionError):
            await worker.call(lambda: 1 / 0)
        stream = worker.submit(request(words, 100))
        await anext(stream)
        seen: list[int] = []

        def pieces() -> Iterator[None]:
            for _ in range(5):
                seen.append(worker.counts.steps)
                yield
            return "told"

        assert await worker.call(pieces) == "told"
        assert len(set(seen)) == 5, "a step between two pieces"
        assert (await stream.result()).ids == alone(words, request(words, 100)).ids

    run(words, work)


def test_closing_finishes_what_runs_and_takes_nothing_more(words: Model) -> None:
    async def work(worker: Worker) -> None:
        stream = worker.submit(request(words, 50))
        closing = asyncio.create_task(worker.close(within=30))
        await asyncio.sleep(0)
        with pytest.raises(Closed):
            worker.submit(request(words))
        assert (await stream.result()) == alone(words, request(words, 50))
        await closing

    run(words, work)


def test_closing_gives_up_at_its_limit(words: Model) -> None:
    async def work(worker: Worker) -> None:
        stream = worker.submit(request(words, 400))
        await anext(stream)
        began = time.monotonic()
        await worker.close(within=0)
        assert time.monotonic() - began < 5
        with pytest.raises(Closed, match="shut down"):
            await stream.result()

    run(words, work)


def test_a_long_prompt_is_read_in_pieces_beside_others(words: Model) -> None:
    """Those who run go on while it is read; what it gives is what it gives alone."""
    long = replace(request(words, 5), ids=[3 + i % 90 for i in range(300)])
    engine = Engine(words, prefill=32)
    first, second = engine.submit(request(words, 40)), engine.submit(long)
    order = [event.id for _ in range(12) for event in engine.step()]
    assert order.index(second) == 10, "300 tokens in pieces of 32 are read by the tenth step"
    reported = {event.id: event.result for event in engine.run() if event.result}
    assert engine.ids == []
    assert reported[first] == alone(words, request(words, 40))
    assert alone(words, long).ids == alone_in_pieces(words, long).ids
    engine.submit(long)
    engine.step()
    assert engine.cancel(engine.ids[0])
    assert not engine.busy


def alone_in_pieces(model: Model, one: Request) -> Generation:
    engine = Engine(model, prefill=32)
    engine.submit(one)
    return next(event.result for event in engine.run() if event.result)
