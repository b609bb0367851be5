"""The final norm as a linear map, at the one state that it works on.

A norm divides by the size of its input. With that one number held at what it is, the rest is
linear, so the parts of a state go through it one by one and still add up:

    norm(x) = g * (x - mean(x)) * s + b      with s held: LayerNorm; without the mean: RMSNorm

Nothing is read off a module but its answers: g, b and whether the mean is taken out are measured,
and the map must give the module's own answer again. What is no such norm, and not linear either,
is refused.

Symbols: d the width of a state, x `[d]`, parts `[n, d]`.
"""

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lmhead.errors import UnsupportedModel

_CLOSE = 1e-5  # of the largest entry; many norms work in float32 whatever they are given


@dataclass(frozen=True)
class Passed:
    """What became of a state's parts, and what was added on the way."""

    parts: Tensor  # [n, d] float64
    bias: Tensor  # [d] float64


@torch.no_grad()
def passed(steps: Iterable[nn.Module], x: Tensor, parts: Tensor, who: str) -> Passed:
    """Send the parts `[n, d]` of a state x `[d]` through its steps, linear at x; all float64."""
    bias = torch.zeros_like(x)
    for step in steps:
        step = deepcopy(step).double().eval()
        rows, x = _step(step, x, torch.cat([parts, bias.unsqueeze(0)]), who)
        parts, bias = rows[:-1], rows[-1] + _run(step, torch.zeros(1, parts.shape[-1]))[0]
    return Passed(parts, bias)


def _step(step: nn.Module, x: Tensor, rows: Tensor, who: str) -> tuple[Tensor, Tensor]:
    """Return what a step makes of rows `[n, d]` without its bias, and of x."""
    d = x.shape[-1]
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (d,), generator=generator).double() * 2 - 1
    u = signs * (1 + torch.rand(d, generator=generator, dtype=torch.float64))  # nowhere near 0
    y, at_u, at_both, b = _run(step, torch.stack([x, u, x + u, torch.zeros_like(x)]))
    if _close(at_both - b, (y - b) + (at_u - b)):
        return _run(step, rows) - b, y
    moved = x + 2 * x.square().mean().sqrt()
    centred = _close(_run(step, moved.unsqueeze(0))[0], y)

    def out(values: Tensor) -> Tensor:
        return values - values.mean(-1, keepdim=True) if centred else values

    if y.shape == x.shape:
        g = (at_u - b) / out(u)
        shape = g * out(x)  # what y is, but for one number
        s = (shape @ (y - b)) / (shape @ shape)
        if _close(s * shape, y - b):
            return s * g * out(rows), y
    raise UnsupportedModel(
        f"{type(step).__name__} in {who} is neither a norm nor linear, so the parts that enter it "
        "cannot be told apart; expected a LayerNorm or an RMSNorm"
    )


def _run(step: nn.Module, rows: Tensor) -> Tensor:
    made: Tensor = step(rows.double().unsqueeze(0))
    return made.squeeze(0).double()


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a - b).abs() <= _CLOSE * b.abs().max() + 1e-30).all())
