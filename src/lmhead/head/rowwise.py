"""Products that give a row the same bits, whatever rows stand beside it.

A step of a batch multiplies one row of each sequence. BLAS rounds them as their number has it, so a
sequence gets other logits beside others than alone, in the last bits, and a draw can fall on the
other side of an edge. Who wants each row as it is alone says so in a ContextVar.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from threading import Lock

import torch
import torch.nn.functional as F
from torch import Tensor

from lmhead.head.screening.loops import Forked, can_compile

MOST = 64  # rows; more are a prompt's, which is read alone, and BLAS is faster there

_on: ContextVar[bool] = ContextVar("lmhead_rowwise", default=False)
_lock = Lock()
# How many ask for it, in all threads. Where nobody does, nobody need look into the context, which
# torch.compile cannot follow.
_open = 0


@contextmanager
def rowwise(on: bool = True) -> Iterator[None]:
    """While it lasts, and in this thread alone, `linear` multiplies row by row."""
    global _open
    token = _on.set(on)
    with _lock:
        _open += on
    try:
        yield
    finally:
        with _lock:
            _open -= on
        _on.reset(token)


def can_multiply(weight: Tensor) -> bool:
    """Tell whether a weight is one that can be multiplied row by row, on this machine."""
    plain = weight.dtype == torch.float32 and weight.device.type == "cpu"
    return plain and weight.is_contiguous() and not Forked.child and _compiles()


@cache
def _compiles() -> bool:
    return can_compile()  # it looks for files: too long for every product


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Do what torch's `linear` does: x `[..., K]` by weight `[N, K]` to `[..., N]`."""
    if not _open or not _on.get() or torch.is_grad_enabled() or x.dtype != torch.float32:
        return F.linear(x, weight, bias)
    N, K = weight.shape
    rows = x.numel() // K
    if not 0 < rows <= MOST or not can_multiply(weight):
        return F.linear(x, weight, bias)
    from lmhead.head.screening.products import product

    z = product(x.reshape(rows, K).contiguous(), weight).view(*x.shape[:-1], N)
    return z if bias is None else z + bias
