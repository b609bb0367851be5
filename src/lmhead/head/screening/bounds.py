"""The int8 copy of a head, and how wrong a score taken from it can be.

Symbols: W weight `[V, d]`, h the state that enters the projection, z = W h + bias. Per row i:
`q_i` int8 and `s_i` its scale, so that `s_i q_i` stands for W_i; `r_i >= |W_i - s_i q_i|` and
`n_i >= |s_i q_i|` (Euclidean norms, rounded up). Per state: int16 numbers g and a step t, so that
`t g` stands for h; `u = 2^-24`, half the distance from 1 to the next float32.

Why the bound holds. For every row

    z_i - bias_i = s_i t (q_i . g)  +  s_i q_i . (h - t g)  +  (W_i - s_i q_i) . h

and Cauchy-Schwarz bounds the last two terms by `n_i |h - t g|` and `r_i |h|`. So z_i is at most

    upper_i = s_i t (q_i . g) + |h - t g| n_i + |h| r_i + bias_i

The inner product `q_i . g` is exact: g is made so small that no partial sum leaves int32. What is
left are at most ten float32 operations on numbers whose magnitudes add up to at most
`M_i = |t g| n_i + |h - t g| n_i + |h| r_i + |bias_i|`; every term of the sum passes through at most
eight of them, in whatever order they are done, so together they err by at most
`((1 + u)^8 - 1) M_i < 9 u M_i`. The factors that the scan gets are therefore larger than the norms
by `SLACK = 32 u` of what they stand for, with a like share for the bias, and `TINY` covers numbers
so small that float32 drops them to 0. The norms themselves are taken in float64 and enlarged by
1e-9, far more than the `d 2^-52` that their own rounding can cost. A state for which float32 could
overflow is not screened at all.

The exact score. A product of two float32 numbers is exact in float64, so a float64 sum of d of
them, in any order, errs by at most `gamma_d |W_i| |h|`, with gamma_n = n v / (1 - n v), v = 2^-53.
`factors_of` gives that bound over all rows; where two scores are closer than it allows, the sum is
taken exactly (`ranking.py`).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lmhead.errors import BadCheckpoint, BadInput
from lmhead.progress import Progress, silent

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

BLOCK = 64  # rows that share one maximum
LANES = 16  # columns that a kernel reads together
SLACK = 32 * 2.0**-24
TINY = 2.0**-90
LARGEST = 2.0**120  # a score that could be larger is not screened: float32 ends at 2^128
_ENLARGE = 1 + 1e-9
_ROUND = 1 + 2 * SLACK
SMALLEST_STEP = 2.0**-100
_NORMAL = 2.0**-126  # a processor may take float32 numbers below this for 0
_CHUNK = 2**21  # weights quantised together


@dataclass(frozen=True)
class Screen:
    """The int8 copy: everything the scan reads, `[V...]` padded to whole blocks and lanes.

    q `[rows, columns]` int8; scale, residual and norm `[rows]` float32 are s, r and n above.
    """

    q: Tensor
    scale: Tensor
    residual: Tensor
    norm: Tensor
    vocab_size: int
    hidden_size: int

    @property
    def nbytes(self) -> int:
        """What the copy adds to the memory of the head."""
        return sum(t.nbytes for t in (self.q, self.scale, self.residual, self.norm))


class Buffers(NamedTuple):
    """What is known of B states after one pass over the copy; rows that take no part are -inf."""

    g: npt.NDArray[np.int16]  # [B, columns]; columns beyond d stay 0
    factors: Float32  # [B, 3]: the step t; |h|; |h - t g| + SLACK |t g|, both enlarged
    limits: Float64  # [B, 2]: the error of a float64 score; what no score or bound exceeds
    upper: Float32  # [B, rows]
    peaks: Float32  # [B, blocks]
    hints: Float32  # [B]: what bounds had to reach last time, to be scored exactly

    def first(self, n: int) -> "Buffers":
        """Give the part for n states."""
        return Buffers(
            self.g[:n], self.factors[:n], self.limits[:n],
            self.upper[:n], self.peaks[:n], self.hints[:n],
        )  # fmt: skip


def padded(size: int, unit: int) -> int:
    """Round a size up to whole units."""
    return -(-size // unit) * unit


def build_screen(weight: Tensor, vocab_size: int, progress: Progress = silent) -> Screen:
    """Quantise the first `vocab_size` rows of a weight `[>= V, d]`, of floats of 32 or 16 bits."""
    V, d = vocab_size, weight.shape[1]
    rows, columns = padded(V, BLOCK), padded(d, LANES)
    q = torch.zeros(rows, columns, dtype=torch.int8)
    scale, residual, norm = (torch.zeros(rows, dtype=torch.float32) for _ in range(3))
    step = max(1, _CHUNK // d)
    with torch.inference_mode(), progress("quantising the head", total=V) as advance:
        for first in range(0, V, step):
            part = slice(first, min(first + step, V))
            W = weight[part].to(torch.float64)  # [n, d]
            if not W.isfinite().all():
                raise BadCheckpoint(
                    "the head's weight holds NaN or infinity; expected finite numbers: "
                    "fetch the model again"
                )
            s = (W.abs().amax(1) / 127).float()
            s[s < SMALLEST_STEP] = 0
            s64 = s.double().unsqueeze(1)  # what is stored, so that the residual is of that
            steps = (W / s64.where(s64 > 0, 1)).round_().clamp_(-127, 127)
            steps = steps.where(s64 > 0, 0)
            q[part, :d] = steps.to(torch.int8)
            copy = steps.mul_(s64)
            norm[part] = _norm_up(copy)
            residual[part] = _norm_up(W.sub_(copy))
            scale[part] = s
            advance(W.shape[0])
    return Screen(q, scale, residual, norm, V, d)


def _norm_up(rows: Tensor) -> Tensor:
    """Give the norms of rows `[n, d]` float64 as float32 `[n]`, never too small."""
    exact = rows.square().sum(1).sqrt_().mul_(_ENLARGE)
    up = torch.nextafter(exact.float(), torch.tensor(torch.inf, dtype=torch.float32))
    up = up.clamp_(min=_NORMAL)
    return up.where(exact > 0, 0)


def extremes(screen: Screen, bias: Float64 | None) -> Float64:
    """Look up the largest row norm, residual norm and bias, `[3]`."""
    largest = 0.0 if bias is None else float(np.abs(bias).max())
    return np.array([float(screen.norm.max()), float(screen.residual.max()), largest])


def largest_step(columns: int) -> int:
    """Give the largest int16 number for which no sum of products with int8 leaves int32."""
    cap = min(32767, (2**31 - 1) // (127 * columns))
    if cap < 1:
        raise BadInput(f"the hidden size is {columns:,}; a screened head takes up to 16,000,000")
    return cap


def factors_of(
    rho: float, eta: float, epsilon: float, d: int, norm: float, residual: float, bias: float
) -> tuple[float, float, float, float]:
    """Give the two factors of a state's bounds, its error and its reach, as `Buffers` has them.

    rho is |h|, eta |t g|, epsilon |h - t g| in plain float64; norm, residual and bias are the
    head's extremes. What is not finite in rho is not finite in reach.
    """
    gamma = (d + 8) * 2.0**-53 * 1.01
    rho, eta, epsilon = rho * _ENLARGE, eta * _ENLARGE, epsilon * _ENLARGE
    error = gamma * ((norm + residual) * rho + bias)
    reach = 1.01 * ((eta + epsilon) * norm + rho * residual + bias)
    if not reach >= rho:
        reach = rho
    # Rounding to float32 costs less than the slack, but must not end below what a processor
    # takes for 0.
    first = max(rho * _ROUND, _NORMAL)
    second = max((epsilon + eta * SLACK) * _ROUND, _NORMAL)
    return first, second, error, reach


def base_of(bias: Float64 | None, rows: int) -> Float32:
    """Give the bias as the scan adds it, `[rows]`, never too small; empty where there is none."""
    if bias is None:
        return np.empty(0, np.float32)
    base = np.zeros(rows, np.float32)
    base[: len(bias)] = _up(bias + SLACK * np.abs(bias))
    return base


def _up(x: Float64) -> Float32:
    """Round to float32, never down; what is too large becomes infinite."""
    with np.errstate(over="ignore"):
        near = x.astype(np.float32)
    return np.where(near < x, np.nextafter(near, np.float32(np.inf)), near)
