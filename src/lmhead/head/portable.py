"""What `kernels.py` does, in torch and numpy, for where numba is not installed.

Same answers, not the same speed: torch has no fast product of an int8 matrix with a vector, so
every block is widened to float32 on its way. The float32 inner product errs by at most
`gamma_d |s_i q_i| |t g|`, gamma_n = n u / (1 - n u), in whatever order it is added up; that is
added to the bound here, for the integer kernels have no such error.
"""

import numpy as np
import torch

from lmhead.head.bounds import (
    BLOCK,
    SMALLEST_STEP,
    TINY,
    Float32,
    Float64,
    Ints,
    Quantised,
    Screen,
    State,
    largest_step,
)
from lmhead.head.ranking import largest

_ROWS = 1024  # widened together: small enough to stay in the cache


def quantise(h: Float32, columns: int) -> Quantised:
    """Turn states h `[B, d]` into int16 numbers and a step each."""
    cap = largest_step(columns)
    x = h.astype(np.float64)
    with np.errstate(invalid="ignore"):  # a state that is not finite is told by its norm
        peak = np.abs(x).max(1)
        step = (peak / cap * (1 + 2.0**-22)).astype(np.float32)  # never too small
        step[~(step >= SMALLEST_STEP)] = 1  # such a state counts as 0; epsilon knows
        whole = np.rint(x / step[:, None])
        g = np.zeros((len(h), columns), np.int16)
        g[:, : h.shape[1]] = whole
        near = whole * step[:, None]
        rho, eta, epsilon = (np.sqrt(np.square(v).sum(1)) for v in (x, near, x - near))
    return Quantised(g, step, rho, eta, epsilon)


def scan(screen: Screen, base: Float32, state: State, upper: Float32, peaks: Float32) -> None:
    """Fill `upper [B, rows]` with bounds of every score, `peaks [B, blocks]` with their maxima."""
    V, columns = screen.vocab_size, screen.q.shape[1]
    step, rho, epsilon = (x[:, None] for x in (state.step, state.rho, state.epsilon))
    g = state.g.astype(np.float32)  # [B, columns], exact
    gamma = columns * 2.0**-24 / (1 - columns * 2.0**-24)
    inner = np.linalg.norm(g.astype(np.float64) * step, axis=1, keepdims=True) * gamma * 1.01
    epsilon = epsilon + inner.astype(np.float32)
    scale, residual, norm = (t.numpy() for t in (screen.scale, screen.residual, screen.norm))
    for first in range(0, V, _ROWS):
        part = slice(first, min(first + _ROWS, V))
        # numpy's product: torch's may be told to do float32 in bfloat16, out of all bounds
        sums = g @ screen.q[part].float().numpy().T  # [B, n]
        bound = rho * residual[part] + epsilon * norm[part] + np.float32(TINY)
        upper[:, part] = sums * (scale[part] * step) + bound
    if base.size:
        upper[:, :V] += base[:V]
    peaks[:] = upper.reshape(*peaks.shape, BLOCK).max(-1)


def rows_between(upper: Float32, peaks: Float32, low: float, high: float) -> Ints:
    """List the rows whose bound is at least low, not at least high (NaN: no limit), not -inf."""
    wide = upper.astype(np.float64)  # numpy would round low and high to float32
    return np.flatnonzero((wide >= low) & ~(wide >= high) & (wide > -np.inf))


def scores(weight: torch.Tensor, ids: Ints, h: Float32) -> Float64:
    """Take the inner products of some rows of a weight `[V, d]` with h `[d]`, in float64."""
    rows = weight[torch.from_numpy(ids)].double()  # [n, d]
    # Row by row: a matrix product may add up equal rows in different orders.
    z: Float64 = (rows * torch.from_numpy(h).double()).sum(1).numpy()
    return z


def shortlist(
    weight: torch.Tensor,
    bias: Float64,
    h: Float32,
    upper: Float32,
    peaks: Float32,
    k: int,
    error: float,
) -> tuple[Ints, Float64]:
    """Score every row that can be among the k best: ids and scores, best first.

    First the rows with the k largest bounds; k of them reach some score, which is the floor: a
    row whose bound is lower is left alone. `bias` is empty where there is none.
    """

    def score(rows: Ints) -> Float64:
        z = scores(weight, rows, h)
        return z + bias[rows] if bias.size else z

    cut = largest(upper, min(k, len(upper)))
    ids = rows_between(upper, peaks, cut, np.nan)
    z = score(ids)
    if len(ids) >= k and not (floor := largest(z, k) - 2 * error) >= cut:
        more = rows_between(upper, peaks, floor, cut)
        ids, z = np.concatenate((ids, more)), np.concatenate((z, score(more)))
    order = np.lexsort((ids, -z))
    return ids[order], z[order]


def weigh(
    upper: Float32, high: float, slope: float, shift: float, cap: float, q: Float32, sums: Float64
) -> None:
    """Fill `q [rows]` with 2^(f slope + shift) where the bound is below high, 0 where not or -inf.

    f is the bound itself, or `cap tanh(bound / cap)` where cap is above 0. The exponent is held
    within [-100, 100]; q errs by less than 1 in 10,000. `sums [blocks]` are the sums of q.
    """
    f = upper.astype(np.float64)
    if cap > 0:
        f = np.tanh(f / cap) * cap
    inside = (upper < np.float32(high)) & (upper > -np.inf)
    q[:] = np.where(inside, np.exp2(np.clip(f * slope + shift, -100, 100)), 0)
    sums[:] = q.reshape(-1, BLOCK).sum(1, dtype=np.float64)
