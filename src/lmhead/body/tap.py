"""The tap: see, change or take what passes a module, in one run alone.

A module that is tapped carries two hooks. They are put there once and stay; they hold nothing and
do nothing, unless a ContextVar says that whoever runs the model now wants something of this
module. So threads share a model: each has its own context, and what one taps no other sees. The
hooks are plain functions: a copy of a model has them as well, and a model with them is freed,
saved and pickled like any other.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Lock
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _Wish:
    """What becomes of the first tensor that enters a module, and of the first that leaves it."""

    enter: Change | None = None
    leave: Change | None = None
    see: Callable[[Any], None] | None = None  # is shown all that leaves it, as it was


_Wishes = Mapping[nn.Module, tuple[_Wish, ...]]
_wishes: ContextVar[_Wishes] = ContextVar("lmhead_tap", default=MappingProxyType({}))
_lock = Lock()
# How many taps are open, in all threads. Where none is, the hooks need not look into the context,
# which torch.compile cannot follow: a compiled model stays one graph.
_open = 0


def _enter(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if not _open:
        return None
    changes = [wish.enter for wish in _wishes.get().get(module, ()) if wish.enter is not None]
    for change in changes:
        if args:
            args = (change(args[0]), *args[1:])
        else:  # given by its name
            name = next(n for n, value in kwargs.items() if isinstance(value, Tensor))
            kwargs = {**kwargs, name: change(kwargs[name])}
    return (args, kwargs) if changes else None


def _leave(module: nn.Module, _args: tuple[Any, ...], result: Any) -> Any:
    if not _open:
        return None
    for wish in _wishes.get().get(module, ()):
        if wish.see is not None:
            wish.see(result)
        if wish.leave is not None:
            if isinstance(result, tuple):
                result = (wish.leave(result[0]), *result[1:])
            else:
                result = wish.leave(result)
    return result


def install(module: nn.Module) -> None:
    """Put the hooks on a module that has none of ours yet."""
    if _leave in module._forward_hooks.values():
        return
    with _lock:
        if _leave not in module._forward_hooks.values():
            module.register_forward_pre_hook(_enter, with_kwargs=True)
            module.register_forward_hook(_leave)


def is_ours(hook: Callable[..., Any]) -> bool:
    """Tell whether a module's hook is one of the tap's."""
    return hook is _enter or hook is _leave


def is_tapped(module: nn.Module) -> bool:
    """Tell whether whoever runs now already sees or changes what passes the module."""
    return bool(_wishes.get().get(module))


@contextmanager
def tapped(
    module: nn.Module,
    *,
    enter: Change | None = None,
    leave: Change | None = None,
    see: Callable[[Any], None] | None = None,
) -> Iterator[None]:
    """While it lasts, and in this thread alone, change what enters and what leaves the module.

    `enter` and `leave` are given the first tensor and return what goes on in its place; `see` is
    shown everything that the module returns.
    Several wishes for one module are carried out in the order in which they were made. Never
    `yield` from a generator inside: what consumes it would see the tap as well.
    """
    global _open
    install(module)
    before = _wishes.get()
    token = _wishes.set({**before, module: (*before.get(module, ()), _Wish(enter, leave, see))})
    with _lock:
        _open += 1
    try:
        yield
    finally:
        with _lock:
            _open -= 1
        _wishes.reset(token)


@contextmanager
def taking_input(layer: nn.Module) -> Iterator[list[Tensor]]:
    """While it lasts, the output layer gives its input h away into the list, and computes nothing.

    The layer sees h without its rows, and the model gets one column of h for its logits, so that
    whatever it does to them is done to next to nothing.
    """
    caught: list[Tensor] = []

    def take(h: Tensor) -> Tensor:
        caught.append(h)
        return h.narrow(-2, 0, 0) if h.ndim > 1 else h

    def stand_in(_logits: Tensor) -> Tensor:
        return caught[-1][..., :1]

    with tapped(layer, enter=take, leave=stand_in):
        yield caught
