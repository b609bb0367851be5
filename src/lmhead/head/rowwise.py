"""Products that give a row the same bits, whatever rows stand beside it.

A step of a batch multiplies one row of each sequence. BLAS rounds them as their number has it, so a
sequence gets other logits beside others than alone, in the last bits, and a draw can fall on the
other side of an edge. Who wants each row as it is alone says so in a ContextVar.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lmhead.head.screening.loops import can_compile

MOST = 64  # rows; more are a prompt's, which is read alone, and BLAS is faster there

_on: ContextVar[bool] = ContextVar("lmhead_rowwise", default=False)


@contextmanager
def rowwise(on: bool = True) -> Iterator[None]:
    """While it lasts, and in this thread alone, `linear` multiplies row by row."""
    token = _on.set(on)
    try:
        yield
    finally:
        _on.reset(token)


def can_multiply(weight: Tensor) -> bool:
    """Tell whether a weight is one that can be multiplied row by row, on this machine."""
    plain = weight.dtype == torch.float32 and weight.device.type == "cpu"
    return plain and weight.is_contiguous() and can_compile()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Do what torch's `linear` does: x `[..., K]` by weight `[N, K]` to `[..., N]`."""
    K = weight.shape[1]
    rows = x.numel() // K
    if not _on.get() or not 0 < rows <= MOST or torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    if x.dtype != torch.float32 or not can_multiply(weight):
        return F.linear(x, weight, bias)
    from lmhead.head.screening.products import ROWS, product

    full = -(-rows // ROWS) * ROWS
    states = x.reshape(rows, K)
    if full > rows:
        states = torch.cat([states, states.new_zeros(full - rows, K)])
    out = torch.empty(full, weight.shape[0])
    product(states.contiguous().numpy(), weight.detach().numpy(), out.numpy())
    z = out[:rows].view(*x.shape[:-1], weight.shape[0])
    return z if bias is None else z + bias
