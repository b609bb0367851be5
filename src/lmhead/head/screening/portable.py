"""What `kernels.py` does, in torch and numpy, for where numba is not installed.

Same answers, not the same speed: torch has no fast product of an int8 matrix with a vector, so
every block is widened to float32 on its way. The float32 inner product errs by at most
`gamma_d |s_i q_i| |t g|`, gamma_n = n u / (1 - n u), in whatever order it is added up; that is
added to the bound here, for the integer kernels have no such error.
"""

from typing import Any

import numpy as np
import torch

from lmhead.head.screening.bounds import (
    BLOCK,
    SMALLEST_STEP,
    TINY,
    Buffers,
    Float32,
    Float64,
    Ints,
    factors_of,
)
from lmhead.head.screening.ranking import largest

_ROWS = 1024  # widened together: small enough to stay in the cache


def read(
    copy: tuple[Any, ...], most: Float64, h: Float32, cap: int, V: int, buffers: Buffers
) -> None:
    """Fill the buffers with what is known of states h `[B, d]`: the bounds of the first V rows."""
    x = h.astype(np.float64)
    # A state that is not finite, or too large, is told by its reach.
    with np.errstate(invalid="ignore", over="ignore"):
        step = (np.abs(x).max(1) / cap * (1 + 2.0**-22)).astype(np.float32)  # never too small
        step[~(step >= SMALLEST_STEP)] = 1  # such a state counts as 0; epsilon knows
        whole = np.rint(x / step[:, None])
        buffers.g[:, : h.shape[1]] = whole
        near = whole * step[:, None]
        norms = [np.sqrt(np.square(v).sum(1)) for v in (x, near, x - near)]
        buffers.factors[:, 0] = step
        for b, (rho, eta, epsilon) in enumerate(zip(*norms, strict=True)):
            known = factors_of(rho, eta, epsilon, h.shape[1], *most.tolist())
            buffers.factors[b, 1:], buffers.limits[b] = known[:2], known[2:]
        _scan(copy, V, buffers)


def _scan(copy: tuple[Any, ...], V: int, buffers: Buffers) -> None:
    q, scale, residual, norm, base = copy
    step, rho, epsilon = buffers.factors.T[:, :, None]  # [B, 1] each
    g = buffers.g.astype(np.float32)  # [B, columns], exact
    gamma = g.shape[1] * 2.0**-24 / (1 - g.shape[1] * 2.0**-24)
    inner = np.linalg.norm(g.astype(np.float64) * step, axis=1, keepdims=True) * gamma * 1.01
    epsilon = epsilon + inner.astype(np.float32)
    buffers.factors[:, 2:] = epsilon  # `levels` needs them as they were used
    for first in range(0, V, _ROWS):
        part = slice(first, min(first + _ROWS, V))
        # numpy's product: torch's may be told to do float32 in bfloat16, out of all bounds
        sums = g @ q[part].astype(np.float32).T  # [B, n]
        bound = rho * residual[part] + epsilon * norm[part] + np.float32(TINY)
        buffers.upper[:, part] = sums * (scale[part] * step) + bound
    if base.size:
        buffers.upper[:, :V] += base[:V]
    buffers.upper[:, V:] = -np.inf
    buffers.peaks[:] = buffers.upper.reshape(*buffers.peaks.shape, BLOCK).max(-1)


def rows_between(upper: Float32, peaks: Float32, low: float, high: float) -> Ints:
    """List the rows whose bound is at least low, not at least high (NaN: no limit), not -inf."""
    wide = upper.astype(np.float64)  # numpy would round low and high to float32
    return np.flatnonzero((wide >= low) & ~(wide >= high) & (wide > -np.inf))


def scores(weight: torch.Tensor, bias: Float64, ids: Ints, h: Float32) -> Float64:
    """Score some rows of a weight `[V, d]` for h `[d]` in float64; bias `[V]`, or empty."""
    rows = weight[torch.from_numpy(ids)].double()  # [n, d]
    # Row by row: a matrix product may add up equal rows in different orders.
    z: Float64 = (rows * torch.from_numpy(h).double()).sum(1).numpy()
    return z + bias[ids] if bias.size else z


def shortlist(
    weight: torch.Tensor,
    bias: Float64,
    h: Float32,
    upper: Float32,
    peaks: Float32,
    k: int,
    place: int,
    margin: float,
) -> tuple[Ints, Float64, float]:
    """Score the rows with the k largest bounds, and all that can compete with them.

    The best of them but `place - 1` reaches some score; less the margin that is the floor. Every
    row whose bound is at least the last number that is returned has been scored.
    """
    cut = largest(upper, min(k, len(upper)))
    ids = rows_between(upper, peaks, cut, np.nan)
    z = scores(weight, bias, ids, h)
    if len(ids) >= place and not (floor := largest(z, place) - margin) >= cut:
        more = rows_between(upper, peaks, floor, cut)
        ids, z = np.append(ids, more), np.append(z, scores(weight, bias, more, h))
        cut = floor
    return ids, z, cut


def numbers(weight: torch.Tensor) -> torch.Tensor:
    """Give a weight as `scores` takes it."""
    return weight


def weigh(
    upper: Float32, high: float, slope: float, shift: float, cap: float, q: Float32, sums: Float64
) -> float:
    """Fill `q [rows]` with 2^(f slope + shift) where the bound is below high, 0 where not or -inf.

    f is the bound itself, or `cap tanh(bound / cap)` where cap is above 0. The exponent is held
    within [-100, 100]; q errs by less than 1 in 10,000. `sums [blocks]` are the sums of q; what
    they add up to is returned.
    """
    f = upper.astype(np.float64)
    if cap > 0:
        f = np.tanh(f / cap) * cap
    inside = (upper < np.float32(high)) & (upper > -np.inf)
    q[:] = np.where(inside, np.exp2(np.clip(f * slope + shift, -100, 100)), 0)
    sums[:] = q.reshape(-1, BLOCK).sum(1, dtype=np.float64)
    return float(sums.sum())


def propose(q: Float32, sums: Float64, place: float) -> int:
    """Find the row at which the running sum of `q [rows]` passes a place; `sums` are its blocks."""
    ends = np.cumsum(sums)
    block = min(int(np.searchsorted(ends, place, side="right")), len(sums) - 1)
    inside = np.cumsum(q[block * BLOCK : (block + 1) * BLOCK], dtype=np.float64)
    place -= float(ends[block] - sums[block])
    return block * BLOCK + min(int(np.searchsorted(inside, place, side="right")), BLOCK - 1)


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
    rows = np.flatnonzero((upper < np.float32(cut)) & (upper > -np.inf))
    high = upper[rows].astype(np.float64)
    K = len(thresholds)
    at = np.minimum(K - np.searchsorted(thresholds[::-1], upper[rows], side="right"), K - 1)
    rho, epsilon, extra = spread
    low = high - (rho * residual[rows].astype(np.float64) + epsilon * norm[rows]) - extra
    if cap > 0:
        high, low = np.tanh(high / cap) * cap, np.tanh(low / cap) * cap
    slope, shift, slack = exponent
    high = np.exp2(np.clip(high * slope + shift + slack, -100, 100))
    low = np.exp2(np.minimum(low * slope + shift - slack, 100))
    return np.stack(
        [np.bincount(at, mass, minlength=K).astype(float) for mass in (None, high, low)]
    )
