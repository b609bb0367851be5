"""Watch a model run once, and tell which call made which tensor.

Every torch function and every module call of the run becomes a `Call`, in the order in which they
ended; so of the calls that return one and the same tensor, the innermost stands first. The run
costs one forward pass over two tokens, or nothing on the meta device, where tensors have shapes
but no data.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True, eq=False)
class Call:
    """One call of the run: of a module, or of a torch function."""

    what: nn.Module | Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    start: int  # how many calls had ended when this one began

    @property
    def name(self) -> str:
        """The function's name, without underscores: `__mul__`, `mul_` and `mul` are one."""
        return str(getattr(self.what, "__name__", type(self.what).__name__)).strip("_")

    @property
    def inputs(self) -> list[Tensor]:
        """All tensors among the arguments."""
        return list(tensors_in((self.args, self.kwargs)))

    @property
    def constants(self) -> tuple[list[Any], dict[str, Any]]:
        """The arguments that are no tensors."""
        args = [a for a in self.args if not isinstance(a, Tensor)]
        return args, {k: v for k, v in self.kwargs.items() if not isinstance(v, Tensor)}

    def again(self, x: Tensor) -> Tensor:
        """Repeat the call of a function on another tensor in the place of its only one."""
        args = [x if isinstance(a, Tensor) else a for a in self.args]
        kwargs = {k: x if isinstance(v, Tensor) else v for k, v in self.kwargs.items()}
        z: Tensor = self.what(*args, **kwargs)
        return z


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested tuples, lists and mappings (a ModelOutput is one)."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)


def record(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[list[Call], Any]:
    """Run `model(**inputs)` as in inference; return all calls and what the model returned."""
    tape = _Tape()
    starts: list[int] = []

    def begin(_module: nn.Module, _args: Any, _kwargs: Any) -> None:
        starts.append(len(tape.calls))

    def end(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        tape.calls.append(Call(module, args, kwargs, result, starts.pop()))

    with ExitStack() as stack:
        for module in model.modules():
            before = module.register_forward_pre_hook(begin, with_kwargs=True)
            after = module.register_forward_hook(end, with_kwargs=True)
            stack.callback(before.remove)
            stack.callback(after.remove)
        stack.enter_context(_inference(model))
        if all(p.is_meta for p in model.parameters()):
            stack.enter_context(torch.device("meta"))
            stack.enter_context(_NoData())  # type: ignore[no-untyped-call]
        stack.enter_context(tape)
        result = model(**inputs)
    return tape.calls, result


@contextmanager
def _inference(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


class _Tape(TorchFunctionMode):
    """Notes every torch function that makes or changes a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        start = len(self.calls)
        result = func(*args, **kwargs)
        # z[i] = x returns nothing and changes z all the same.
        changed = args[0] if func is Tensor.__setitem__ else result
        if isinstance(changed, Tensor):
            self.calls.append(Call(func, args, kwargs, changed, start))
        return result


class _NoData(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers, on the meta device, the few questions that need data.

    The run is watched for its structure alone, so any answer will do that lets it go on: no
    element is chosen, every number is 0, every condition holds.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        aten = torch.ops.aten
        first = next((a for a in args if isinstance(a, Tensor)), None)
        if first is not None and first.is_meta:
            if func is aten._local_scalar_dense.default:
                return first.dtype == torch.bool or 0
            if func is aten.equal.default:
                return True
            if func is aten.nonzero.default:
                return first.new_empty((0, first.ndim), dtype=torch.long)
            if func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
                args = (args[0], [i for mask in args[1] for i in _no_rows(mask)], *args[2:])
            if func is aten.split_with_sizes.default:
                _, sizes, dim = (*args, 0)[:3]
                rest = first.shape[dim] - sum(sizes)  # the sizes were read from nowhere
                args = (first, [sizes[0] + rest, *sizes[1:]], dim)
            if func is aten._to_copy.default and kwargs.get("device") == torch.device("cpu"):
                return first.new_zeros(first.shape, device="cpu", dtype=kwargs.get("dtype"))
        return func(*args, **kwargs)


def _no_rows(index: Tensor | None) -> list[Tensor | None]:
    """Replace a mask by the empty indices that it stands for, one for every dimension."""
    if index is None or index.dtype != torch.bool:
        return [index]
    return [index.new_empty((0,), dtype=torch.long) for _ in range(index.ndim)]
