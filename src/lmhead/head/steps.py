"""The small things that a model does before or after its output layer, besides norms.

Each repeats the model's own arithmetic, so that the result is the same to the last bit: dividing
by 3 is not multiplying by 1/3.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmhead.errors import BadInput

_POINTWISE = {
    "div": torch.div,
    "gelu": F.gelu,
    "mul": torch.mul,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "tanh": torch.tanh,
}
POINTWISE = frozenset(_POINTWISE)


@dataclass(frozen=True)
class Scale:
    """One number for all logits: `z * by`, or `z / by` where the model divides."""

    by: float
    divide: bool = False

    def __post_init__(self) -> None:
        if not 0 < abs(self.by) < float("inf"):
            raise BadInput(f"the logits' scale is {self.by}; expected a finite number, not 0")

    @property
    def factor(self) -> float:
        """What z is multiplied by, in real numbers."""
        return 1 / self.by if self.divide else self.by

    def __call__(self, z: Tensor) -> Tensor:
        """Scale z, of any shape."""
        return z / self.by if self.divide else z * self.by

    def __str__(self) -> str:
        return f"{'/' if self.divide else '*'} {self.by:g}"


class Pointwise(nn.Module):
    """One of torch's element by element functions with its constants, as a module."""

    def __init__(self, name: str, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.name, self.args, self.kwargs = name, args, kwargs

    def forward(self, h: Tensor) -> Tensor:
        """Map every element of h, of any shape."""
        z: Tensor = _POINTWISE[self.name](h, *self.args, **self.kwargs)  # type: ignore[operator]
        return z

    def extra_repr(self) -> str:
        """Name the function and its constants."""
        named = (f"{key}={value}" for key, value in self.kwargs.items())
        return ", ".join([self.name, *map(str, self.args), *named])


class Cast(nn.Module):
    """A change of dtype that the model makes on the way to its output layer."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, h: Tensor) -> Tensor:
        """Cast h, of any shape."""
        return h.to(self.dtype)

    def extra_repr(self) -> str:
        """Name the dtype."""
        return str(self.dtype).removeprefix("torch.")
