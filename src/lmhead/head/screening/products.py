"""Matrix products whose rows do not depend on each other, compiled by numba.

A product of several rows by BLAS rounds each of them as the number of rows has it. Here every row
is added up in one order, whatever stands beside it: four rows at a time, because that is what a
weight allows that has to come from memory anyway; rows that are missing are filled up with zeros.

Symbols: x `[M, K]`, M a multiple of ROWS, W weight `[N, K]`, the product `[M, N]`.
"""

from typing import Any

import numpy as np
import torch
from numba import njit, prange

from lmhead.head.screening.bounds import Float32
from lmhead.head.screening.intrinsics import prefetch
from lmhead.head.screening.kernels import _FAST, _use_threads

ROWS = 4
_PART = 32  # rows of the weight that one thread takes at a time
_LINE = 64  # bytes that memory gives at a time


@njit(cache=True, nogil=True, fastmath=_FAST)  # type: ignore[untyped-decorator]
def _four(row: Any, x: Any, m: Any, n: Any, out: Any) -> None:
    """Multiply a row of the weight by the rows m to m + 3 of x."""
    a, b, c, d = x[m], x[m + 1], x[m + 2], x[m + 3]
    first, second = np.float32(0), np.float32(0)
    third, fourth = np.float32(0), np.float32(0)
    for k in range(row.shape[0]):
        w = row[k]
        first += w * a[k]
        second += w * b[k]
        third += w * c[k]
        fourth += w * d[k]
    out[m, n], out[m + 1, n], out[m + 2, n], out[m + 3, n] = first, second, third, fourth


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _between(x: Any, weight: Any, out: Any, first: Any, last: Any) -> None:
    nbytes, start = weight.strides[0], weight.ctypes.data
    for n in range(first, last):
        ahead = start + nbytes * (n + 1)
        for line in range(0, nbytes, _LINE):
            prefetch(ahead + line)
        for m in range(0, x.shape[0], ROWS):
            _four(weight[n], x, m, n, out)


@njit(parallel=True, cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _together(x: Any, weight: Any, out: Any) -> None:
    N = weight.shape[0]
    for part in prange((N + _PART - 1) // _PART):
        _between(x, weight, out, part * _PART, min((part + 1) * _PART, N))


def product(x: Float32, weight: Float32, out: Float32) -> None:
    """Fill `out [M, N]` with the products of the rows of x and of the weight."""
    if torch.get_num_threads() == 1:
        _between(x, weight, out, 0, len(weight))
    else:
        _use_threads()
        _together(x, weight, out)
