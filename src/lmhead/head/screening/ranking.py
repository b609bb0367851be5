"""The order of exact scores.

The score of a token is the real number W_i . h + bias_i, rounded once to float64; equal scores
stand in the order of their ids. A float64 sum comes close to it: only where two scores are nearer
to each other than such sums can err does the order need the exact sum, which `math.fsum` gives
(products of float32 numbers are exact in float64).
"""

import math
from typing import NamedTuple

import numpy as np
import torch

from lmhead.head.screening.bounds import Float32, Float64, Ints


class Scored(NamedTuple):
    """Some rows of one state, ids and float64 scores `[n]` each."""

    ids: Ints
    z: Float64

    def join(self, other: "Scored") -> "Scored":
        """Put two together."""
        if not len(other.ids):
            return self
        return Scored(np.concatenate((self.ids, other.ids)), np.concatenate((self.z, other.z)))

    def ordered(self) -> "Scored":
        """Put the best first, equal ones in the order of their ids."""
        order = np.lexsort((self.ids, -self.z))
        return Scored(self.ids[order], self.z[order])


class Transform(NamedTuple):
    """How a score becomes a logit: cap * tanh(factor * z / cap), or factor * z where cap is 0."""

    factor: float
    cap: float

    def __call__(self, z: Float64) -> Float64:
        """Give the logits of scores, of any shape."""
        y = z if self.factor == 1 else z * self.factor
        return np.tanh(y / self.cap) * self.cap if self.cap else y

    def score_below(self, y: float) -> float:
        """Give a score whose logit is at most y, and hardly less."""
        if not self.cap:
            z = y / self.factor
        elif y <= -self.cap:
            return -math.inf
        else:
            z = math.atanh(min(y / self.cap, 1 - 2.0**-53)) * self.cap / self.factor
        return z - 1e-9 * (1 + abs(z))


def largest(z: Float64 | Float32, k: int) -> float:
    """Give the k-th largest of z `[n]`, n >= k."""
    if k == 1:
        return float(z.max())
    return float(np.partition(z, len(z) - k)[len(z) - k])


def settle(
    scored: Scored,
    k: int,
    error: float,
    weight: torch.Tensor,
    h: Float32,
    bias: Float64,
) -> Scored:
    """Return the k best of some rows, best first; each score is off by at most `error`.

    Scores that are too close to each other to tell their order are taken exactly.
    """
    ids, z = scored.ordered()
    close = z[:-1] - z[1:] <= 2 * error
    # Without an error (h is 0) equal scores are equal.
    if error > 0 and close[:k].any():
        # Beyond the k best only what hangs together with the last of them matters.
        apart = np.flatnonzero(~close[k - 1 :])
        end = k + int(apart[0]) if len(apart) else len(z)
        ids, z, close = ids[:end], z[:end].copy(), close[: end - 1]
        unclear = np.append(close, False) | np.append(False, close)
        z[unclear] = exact_scores(weight, ids[unclear], h, bias)
        ids, z = Scored(ids, z).ordered()
    return Scored(ids[:k], z[:k])


def exact_scores(weight: torch.Tensor, ids: Ints, h: Float32, bias: Float64) -> Float64:
    """Give the scores of rows ids `[n]` with a single rounding each; bias `[V]`, or empty."""
    state = h.astype(np.float64)
    known: dict[tuple[bytes, float], float] = {}  # of many equal rows, one is enough
    z = np.empty(len(ids))
    for n, i in enumerate(ids.tolist()):
        row = weight[i].float().numpy()
        b = float(bias[i]) if bias.size else 0.0
        key = row.tobytes(), b
        if key not in known:
            known[key] = math.fsum([*(row.astype(np.float64) * state).tolist(), b])
        z[n] = known[key]
    return z
