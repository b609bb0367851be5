"""Skipping blocks in a run: they return a given value and compute nothing.

Hooks cannot keep a module from computing. So a block that is to be skipped becomes, permanently, an
instance of a subclass of its class whose `forward` first looks at a ContextVar: unless the current
caller skips this block, it calls the original class's `forward`. Threads can share the model, as
with the tap. The subclass has the name of the class; copying or pickling the block gives one of the
original class.
"""

import copyreg
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from threading import Lock
from typing import Any

from torch import nn

from lmhead.errors import UnsupportedModel


@dataclass(frozen=True)
class _Skipped:
    blocks: frozenset[nn.Module]
    answer: Any  # what they return
    asked: set[nn.Module] = field(default_factory=set)  # those that the model came by


_skipped: ContextVar[_Skipped | None] = ContextVar("lmhead_skipped", default=None)
_lock = Lock()
_open = 0  # how many threads skip something; as in the tap, for torch.compile


@cache
def _skippable(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of a block's class whose instances can be skipped."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        out = _skipped.get() if _open else None
        if out is None or self not in out.blocks:
            return kind.forward(self, *args, **kwargs)
        out.asked.add(self)
        return out.answer

    def reduce(self: nn.Module, _protocol: Any) -> Any:
        return copyreg._reconstructor, (kind, object, None), self.__dict__  # type: ignore[attr-defined]

    about = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    members = {"forward": forward, "__reduce_ex__": reduce, "_lmhead_skippable": True, **about}
    return type(kind.__name__, (kind,), members)


@contextmanager
def skipping(blocks: Iterable[nn.Module], answer: Any) -> Iterator[None]:
    """While it lasts, and in this thread alone, each of the blocks returns `answer`."""
    global _open
    out = _Skipped(frozenset(blocks), answer)
    token = _skipped.set(out)
    with _lock:
        for block in out.blocks:
            if not hasattr(block, "_lmhead_skippable"):
                block.__class__ = _skippable(type(block))  # type: ignore[arg-type]
        _open += 1
    try:
        yield
    finally:
        with _lock:
            _open -= 1
        _skipped.reset(token)
    if out.asked != out.blocks:
        kind = type(next(iter(out.blocks - out.asked))).__name__
        raise UnsupportedModel(
            f"{len(out.blocks - out.asked)} blocks of class {kind} ran although they were to be "
            "skipped: something wraps their forward (accelerate's hooks, for example); load the "
            "model without it"
        )
