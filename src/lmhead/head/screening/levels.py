"""How much weight the rows have that were not scored, level by level; compiled by numba.

A row whose score is bounded by `upper` from above is bounded from below as well, by

    upper_i - 2 (|h| r_i + |h - t g| n_i)        (symbols and proof: bounds.py)

with the enlarged factors of the scan, which cover its roundings twice. So exp(y_i / T) has an
interval, and so has any sum of them. `levels` adds up the ends of these intervals for the rows
between one threshold and the next: whoever scores the rows of the first levels exactly knows what
is left. `portable.py` has the same in numpy.
"""

from typing import Any

import numpy as np
from numba import njit, prange

from lmhead.head.screening.bounds import BLOCK, Float32, Float64
from lmhead.head.screening.intrinsics import float_of

_FAST = {"reassoc", "contract", "nsz"}
_NO_ROW = np.float32(-np.inf)
_PART = 64  # blocks that one thread counts at a time


@njit(cache=True, nogil=True, fastmath=_FAST, inline="always")  # type: ignore[untyped-decorator]
def _power(y: Any) -> Any:
    """Give 2^y for y in [-100, 100], off by less than 1 in 10,000."""
    whole = np.int32(y + np.float32(128.5)) - np.int32(128)
    part = (y - np.float32(whole)) * np.float32(0.6931471805599453)
    e = np.float32(1 / 120)
    e = e * part + np.float32(1 / 24)
    e = e * part + np.float32(1 / 6)
    e = e * part + np.float32(0.5)
    e = e * part + np.float32(1)
    e = e * part + np.float32(1)
    return np.float64(e * float_of(np.int32((whole + np.int32(127)) << np.int32(23))))


@njit(parallel=True, cache=True, nogil=True, fastmath=_FAST)  # type: ignore[untyped-decorator]
def _levels(
    upper: Any, peaks: Any, residual: Any, norm: Any, rho: Any, epsilon: Any, extra: Any,
    cut: Any, thresholds: Any, width: Any, slope: Any, shift: Any, slack: Any, cap: Any,
    found: Any,
) -> None:  # fmt: skip
    K = len(thresholds)
    for part in prange(found.shape[0]):
        out = found[part]
        last = min((part + 1) * _PART, len(peaks))
        for block in range(part * _PART, last):
            if peaks[block] == _NO_ROW:
                continue
            for i in range(block * BLOCK, block * BLOCK + BLOCK):
                x = upper[i]
                if not (_NO_ROW < x < cut):
                    continue
                at: Any = min(np.int64((cut - x) / width), K - 1)
                while at < K - 1 and x < thresholds[at]:
                    at += 1
                while at > 0 and x >= thresholds[at - 1]:
                    at -= 1
                low = x - (rho * residual[i] + epsilon * norm[i]) - extra
                if cap > 0:
                    x = np.tanh(x / cap) * cap
                    low = np.tanh(low / cap) * cap
                high = x * slope + shift + slack
                low = low * slope + shift - slack
                out[0, at] += 1
                out[1, at] += _power(min(max(high, np.float32(-100)), np.float32(100)))
                if low > np.float32(-100):
                    out[2, at] += _power(min(low, np.float32(100)))


def levels(
    upper: Float32,
    peaks: Float32,
    residual: Float32,
    norm: Float32,
    spread: tuple[float, float, float],
    cut: float,
    thresholds: Float32,
    width: float,
    exponent: tuple[float, float, float],
    cap: float,
) -> Float64:
    """Count the rows whose bound is below cut, and add up both ends of their weights: `[3, K]`.

    Level k has the rows whose bound is below the threshold of level k - 1 (cut, for the first) and
    not below `thresholds[k]`, which descend by the width; the last level has all the rest.
    `spread` are the factors of the width of a row's interval, `exponent` slope, shift and slack.
    """
    f = np.float32
    found = np.zeros((-(-len(peaks) // _PART), 3, len(thresholds)))
    _levels(
        upper, peaks, residual, norm, *map(f, spread), f(cut), thresholds, f(width),
        *map(f, exponent), f(cap), found,
    )  # fmt: skip
    total: Float64 = found.sum(0)
    return total
