"""Matrix products whose rows do not depend on each other, compiled by numba.

A product of several rows by BLAS rounds each of them as the number of rows has it. Here every row
is added up in one order, whatever stands beside it: four rows at a time, because a weight that has
to come from memory leaves time for four; where rows are missing, the last one is taken again.

Symbols: x `[M, K]`, W weight `[N, K]`, the product `[M, N]`; all float32, row by row in memory.
"""

import threading
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, prange, types
from numba.extending import intrinsic
from torch import Tensor

from lmhead.head.screening.intrinsics import prefetch
from lmhead.head.screening.kernels import _FAST, _use_threads

_ROWS = 4
_PART = 32  # rows of the weight that one thread takes at a time
_LINE = 64  # bytes that memory gives at a time
_lock = threading.Lock()  # numba's threads serve one caller at a time


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(typing: Any, address: Any) -> Any:
    """Take a number for the address that it is."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.intp), generate


@njit(cache=True, nogil=True, fastmath=_FAST)  # type: ignore[untyped-decorator]
def _four(row: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Multiply a row of the weight by four rows of x, all `[K]`."""
    first, second = np.float32(0), np.float32(0)
    third, fourth = np.float32(0), np.float32(0)
    for k in range(row.shape[0]):
        w = row[k]
        first += w * a[k]
        second += w * b[k]
        third += w * c[k]
        fourth += w * d[k]
    return first, second, third, fourth


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _between(x: Any, weight: Any, out: Any, first: Any, last: Any) -> None:
    M, nbytes, start = x.shape[0], weight.strides[0], weight.ctypes.data
    for n in range(first, last):
        ahead = start + nbytes * (n + 1)
        for line in range(0, nbytes, _LINE):
            prefetch(ahead + line)
        for m in range(0, M, _ROWS):
            d = min(m + _ROWS, M) - 1
            b, c = min(m + 1, d), min(m + 2, d)
            out[m, n], out[b, n], out[c, n], out[d, n] = _four(weight[n], x[m], x[b], x[c], x[d])


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _alone(x: Any, weight: Any, out: Any, M: Any, N: Any, K: Any) -> None:
    rows = carray(_pointer(x), (M, K), np.float32)
    numbers = carray(_pointer(weight), (N, K), np.float32)
    _between(rows, numbers, carray(_pointer(out), (M, N), np.float32), 0, N)


@njit(parallel=True, cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _together(x: Any, weight: Any, out: Any, M: Any, N: Any, K: Any) -> None:
    rows = carray(_pointer(x), (M, K), np.float32)
    numbers = carray(_pointer(weight), (N, K), np.float32)
    found = carray(_pointer(out), (M, N), np.float32)
    for part in prange((N + _PART - 1) // _PART):
        _between(rows, numbers, found, part * _PART, min((part + 1) * _PART, N))


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply the rows of x by those of the weight; both lie in one piece."""
    (M, K), N = x.shape, weight.shape[0]
    out = torch.empty(M, N)
    if torch.get_num_threads() == 1:
        _alone(x.data_ptr(), weight.data_ptr(), out.data_ptr(), M, N, K)
        return out
    with _lock:
        _use_threads()
        _together(x.data_ptr(), weight.data_ptr(), out.data_ptr(), M, N, K)
    return out
