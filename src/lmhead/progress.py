"""How a long computation tells how far it is, without knowing who is looking.

A function that may take more than a second takes `progress: Progress = silent` and writes

    with progress("counting tokens", total=n) as advance:
        advance(1)

Only `cli/` (a bar on stderr) and `serve/` give it a face. `total=None` means unknown.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

Advance = Callable[[int], None]


class Progress(Protocol):
    """Opens one step with a title and a total, and yields the function that advances it."""

    def __call__(self, title: str, total: int | None = None) -> AbstractContextManager[Advance]: ...


@contextmanager
def silent(title: str, total: int | None = None) -> Iterator[Advance]:
    """Show nothing: the default, for use from Python."""
    yield lambda _n: None


def titled(progress: Progress, title: str) -> Progress:
    """Show every step under one title, where its own would mean nothing to the user."""
    return lambda _title, total=None: progress(title, total)


def part_of(advance: Advance) -> Progress:
    """Show every step as a part of one that is open already."""

    @contextmanager
    def opened(title: str, total: int | None = None) -> Iterator[Advance]:
        yield advance

    return opened
