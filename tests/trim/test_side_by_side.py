"""Continuations in two threads of one process: the same texts, and one failure ends both."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from lmhead.loading import Model, load
from lmhead.progress import silent
from lmhead.trim import observations, observing
from lmhead.trim.observations import _continued, _parted
from lmhead.trim.observing import Group, observe_continuations
from lmhead.trim.workers import Here

PROMPTS = [list(range(300 + n, 304 + n % 7 + n)) for n in range(120)]
GROUPS = (Group(PROMPTS[:60], states=10), Group(PROMPTS[60:], whole=False, states=8))


@pytest.fixture(scope="module")
def model(make_model: Callable[..., Path]) -> Model:
    return load(make_model("byte_level", "llama"))


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("large", [0, 2**40])
def test_two_sides_say_what_one_says(
    model: Model, two_threads: None, monkeypatch: pytest.MonkeyPatch, large: int
) -> None:
    monkeypatch.setattr(observing, "LARGE", large)  # with the screen of the head, and without
    seen: set[str] = set()
    real = observations.observe_continuations

    def noted(*args: object, **options: object) -> object:
        seen.add(threading.current_thread().name)
        assert torch.get_num_threads() == 1
        return real(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(observations, "observe_continuations", noted)
    done: list[int] = []

    @contextmanager
    def progress(_title: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        yield done.append
        assert sum(done) == total == len(PROMPTS) * 9

    said = _continued(Here(lambda: model), GROUPS, 9, progress)
    assert len(seen) == 2
    assert threading.main_thread().name not in seen
    assert torch.get_num_threads() == 2
    for one, other in zip(said, observe_continuations(model, *GROUPS, max_tokens=9), strict=True):
        assert one.texts == other.texts
        assert one.seen.positions == other.seen.positions
        assert torch.equal(one.seen.choices, other.seen.choices)
        torch.testing.assert_close(one.seen.mass, other.seen.mass, rtol=1e-4, atol=1e-6)
        for a, b in zip(one.states, other.states, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("threads", "prompts", "sides", "each"),
    [(1, 120, 1, 1), (2, 120, 2, 1), (2, 95, 1, 2), (2, 400, 4, 1), (3, 120, 2, 1), (8, 120, 1, 8)],
)
def test_how_prompts_are_parted(
    monkeypatch: pytest.MonkeyPatch, threads: int, prompts: int, sides: int, each: int
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    parts, count = _parted([Group([[1, 2]] * prompts)])
    assert (len(parts), count) == (sides, each)
    sizes = [len(group.prompts) for part in parts for group in part]
    assert sum(sizes) == prompts
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_ends_both_sides_at_once(
    model: Model, two_threads: None, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    real, steps = observations.observe_continuations, []

    def spoiled(given: Model, *groups: Group, **options: object) -> object:
        if PROMPTS[0] in groups[0].prompts:
            time.sleep(0.3)
            raise error("spoiled")
        return real(given, *groups, **{**options, "max_tokens": 100_000})  # type: ignore[arg-type]

    monkeypatch.setattr(observations, "observe_continuations", spoiled)

    @contextmanager
    def progress(_title: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        yield steps.append

    start = time.perf_counter()
    with pytest.raises(error, match="spoiled"):
        _continued(Here(lambda: model), GROUPS, 9, progress)
    assert steps
    assert time.perf_counter() - start < 60  # so many steps would take hours
    assert torch.get_num_threads() == 2
    monkeypatch.setattr(observations, "observe_continuations", real)
    assert _continued(Here(lambda: model), GROUPS, 2, silent)[0].texts  # it can be asked again
