"""Leaving blocks out of a run: they answer with what is given, and compute nothing.

Hooks cannot keep a module from computing. So a block that is to be left out becomes, once and for
good, an instance of a subclass of its class whose `forward` first looks into a ContextVar: unless
whoever runs the model now leaves this block out, it goes on to the class's own `forward`.
Threads share a model as they do with the tap. The subclass has the name of the class; a copy or
a pickle of the block is one of the class itself.
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
class _LeftOut:
    blocks: frozenset[nn.Module]
    answer: Any  # what they return
    asked: set[nn.Module] = field(default_factory=set)  # those that the model came by


_left_out: ContextVar[_LeftOut | None] = ContextVar("lmhead_left_out", default=None)
_lock = Lock()
_open = 0  # how many threads leave something out; as in the tap, for torch.compile


@cache
def _skippable(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of a block's class that can be left out."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        out = _left_out.get() if _open else None
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
def left_out(blocks: Iterable[nn.Module], answer: Any) -> Iterator[None]:
    """While it lasts, and in this thread alone, each of the blocks returns `answer`."""
    global _open
    out = _LeftOut(frozenset(blocks), answer)
    token = _left_out.set(out)
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
        _left_out.reset(token)
    if out.asked != out.blocks:
        kind = type(next(iter(out.blocks - out.asked))).__name__
        raise UnsupportedModel(
            f"{len(out.blocks - out.asked)} blocks of class {kind} ran although they were to be "
            "skipped: something wraps their forward (accelerate's hooks, for example); load the "
            "model without it"
        )
