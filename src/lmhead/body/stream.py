"""The residual stream: everything that a model adds up into the state before its final norm.

Most models carry one state through their blocks, and each attention or MLP adds something to it. A
`Watch` notes which torch function made which tensor, at one position of a run; `lmhead.body.parts`
goes back from the last state through every sum, scale and move to what was added. So a part is
what really entered the sum: behind a norm that follows the MLP, times a multiplier.

Nothing is known of single architectures. What cannot be taken apart like this is refused: a norm
across the stream itself (post-norm models), several streams, a step that was not seen.

Symbols: T positions, d the width of the stream, x `[d]` the state at one position.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lmhead.body.units import Unit
from lmhead.head.find.trace import tensors_in

_NODE = "_lmhead_node"  # where a tensor carries what is known of it, while a run is watched
_ALIASES = {
    "radd": "add",
    "subtract": "sub",
    "rmul": "mul",
    "multiply": "mul",
    "truediv": "div",
    "true_divide": "div",
    "divide": "div",
    "iadd": "add",
    "isub": "sub",
    "imul": "mul",
    "itruediv": "div",
}
_IN_PLACE = {"iadd", "isub", "imul", "itruediv", "setitem"}
_LIKE = {"expand_as", "type_as", "view_as"}  # their second tensor is but an example
_CASTS = {"bfloat16", "double", "float", "half", "to", "type", "type_as"}


@dataclass(frozen=True)
class Product:
    """A linear layer's work at one position: `weight @ x + bias`."""

    x: Tensor  # [n]
    weight: Tensor  # [d, n]
    bias: Tensor | None  # [d]


@dataclass(eq=False)
class Node:
    """What is known of a tensor: who made it of what, and its value at the position."""

    verb: str
    parents: tuple["Node", ...] = ()
    value: Tensor | None = None  # [d], where the tensor is d wide
    sums: "tuple[tuple[Node, float | Tensor], ...]" = ()  # it is the sum of these, each times this
    constant: bool = False  # does not depend on what is read
    stream: bool = False  # holds the stream: the embedding, and perhaps more
    unit: Unit | None = None  # it was made inside of this unit
    product: Product | None = None
    norm: "tuple[nn.Module, Node] | None" = None  # a module without matrices made it of this
    at: int = 0  # how many were made before it
    late: bool = False  # when it was made, a unit had run already


class Watch(TorchFunctionMode):
    """Notes every torch function of this thread, at one position of T."""

    def __init__(self, width: int, T: int, position: int) -> None:
        super().__init__()
        self._width, self._T, self._row = width, T, position - T  # counted from the end
        self._made_so_far = 0
        self._inside: list[Unit] = []
        self.began = False  # the first unit has run

    def node(self, tensor: Tensor) -> Node:
        """Return what is known of a tensor; of one that was there before, that it is constant."""
        found: Node | None = getattr(tensor, _NODE, None)
        if found is not None:
            return found
        return Node("given", value=self._at(tensor), constant=True, late=self.began)

    def begin(self, unit: Unit) -> None:
        """Note that a unit begins to run."""
        self._inside.append(unit)
        self.began = True

    def end(self) -> None:
        """Note that the unit that began last is done."""
        self._inside.pop()

    def normed(self, module: nn.Module, before: Node, result: Any) -> None:
        """Note that a module without matrices made a result of a tensor."""
        for tensor in tensors_in(result):
            node = self.node(tensor)
            if node is before or node.stream or node.constant or node.value is None:
                continue
            if before.value is not None and not torch.equal(before.value, node.value):
                node.norm = (module, before)

    def read(self, ids: Tensor) -> Tensor:
        """Return ids as something that results depend on."""
        setattr(ids, _NODE, Node("ids"))
        return ids

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function, and note what it did."""
        kwargs = kwargs or {}
        inputs = list(tensors_in((args, kwargs)))
        parents = tuple(map(self.node, inputs))  # before the call, which may change them
        result = func(*args, **kwargs)
        name = str(getattr(func, "__name__", ""))
        verb = name.strip("_")
        changes = verb in _IN_PLACE or (name.endswith("_") and not name.startswith("_"))
        made = list(tensors_in(result))
        if changes and inputs and not any(t is inputs[0] for t in made):
            made.append(inputs[0])
        for tensor in made:
            if changes or not any(tensor is t for t in inputs):  # else it is handed through
                setattr(tensor, _NODE, self._made(verb, args, kwargs, inputs, parents, tensor))
        return result

    def _made(
        self,
        verb: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[Tensor],
        parents: tuple[Node, ...],
        tensor: Tensor,
    ) -> Node:
        constant = all(p.constant for p in parents)
        if verb in _LIKE and parents:
            constant, parents = parents[0].constant, parents[:1]
        node = Node(verb, () if constant else parents, self._at(tensor), constant=constant)
        node.late = self.began
        self._made_so_far += 1
        node.at = self._made_so_far
        node.unit = self._inside[-1] if self._inside else None
        if node.value is None or constant:
            return node
        if verb in ("linear", "addmm"):
            node.product = self._product(verb, args, kwargs)
        else:
            node.sums = _sums(_ALIASES.get(verb, verb), args, kwargs, inputs, parents, node.value)
        node.stream = not node.late or any(part.stream for part, _ in node.sums)
        return node

    def _product(self, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product | None:
        if verb == "linear":
            x, weight = args[0], args[1] if len(args) > 1 else kwargs["weight"]
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
        else:  # addmm(bias, x, weight): GPT-2's
            if kwargs or len(args) != 3:
                return None
            bias, x, weight = args
            weight = weight.T
        row = self._at(x, x.shape[-1])
        return None if row is None else Product(row, weight, bias)

    def _at(self, tensor: Tensor, width: int | None = None) -> Tensor | None:
        """Copy a tensor at the position: `[d]`, if it is d wide and has one row for each of T."""
        width = width or self._width
        if not tensor.is_floating_point() or tensor.ndim < 1 or tensor.shape[-1] != width:
            return None
        rows = tensor.numel() // width
        if tensor.ndim == 1:
            return tensor.detach().clone()
        if rows < self._T or any(n not in (1, rows) for n in tensor.shape[:-1]):
            return None
        return tensor.detach().reshape(-1, width)[self._row].clone()


def _sums(
    verb: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inputs: list[Tensor],
    parents: tuple[Node, ...],
    value: Tensor,
) -> "tuple[tuple[Node, float | Tensor], ...]":
    """Say a step in the words of a sum of states, each times a number or a constant `[d]`."""
    numbers = [a for a in args if isinstance(a, int | float)]
    alpha = kwargs.get("alpha", 1)
    if verb in ("add", "sub", "rsub") and len(inputs) == 2 and all(_is_state(p) for p in parents):
        first, second = parents
        if verb == "rsub":
            first, second = second, first
        return (first, 1.0), (second, alpha if verb == "add" else -float(alpha))
    if verb in ("mul", "div"):
        if len(inputs) == 1 and len(numbers) == 1 and args[0] is inputs[0]:
            return ((parents[0], numbers[0] if verb == "mul" else 1 / numbers[0]),)
        if len(inputs) == 1 and len(numbers) == 1 and verb == "mul":
            return ((parents[0], numbers[0]),)
        if len(inputs) == 2 and verb == "mul":
            for i in (0, 1):
                node, other, tensor = parents[i], parents[1 - i], inputs[1 - i]
                if other.constant and _is_state(node) and not node.constant:
                    factor = other.value if tensor.numel() > 1 else float(tensor)
                    if factor is not None:
                        return ((node, factor),)
    # whatever else: it hands the state on, where the numbers are the same
    states = [p for p in parents if p.value is not None and not p.constant]
    if len(states) == 1 and states[0].value is not None:
        before = states[0].value
        same = torch.equal(before.to(value.dtype), value)
        if same and (before.dtype == value.dtype or verb in _CASTS):
            return ((states[0], 1.0),)
    return ()


def _is_state(node: Node) -> bool:
    return node.value is not None
