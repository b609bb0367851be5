"""Which token the dense layer would have led to, for certain, from logits known to an error.

The model's logits differ from the exact ones in their last bits, by an amount that is bounded but
not known: it depends on the order in which a library adds up. So each candidate has an interval,
and a token is the answer only if it is the answer for all logits in the intervals. Where that
cannot be told, nothing is returned, and the dense layer is asked.

Symbols: low and high `[n]`, both ends of the scores of the candidates of one state; `rest` the
largest score that any other token can have.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lmhead.patch.asked import Asked

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
U = 2.0**-24
"""Half the distance from 1 to the next float32."""
ROUNDING = 2e-5
"""What exp, the normaliser and a division can do to a logarithm of p / q in float32."""
DEEP, DEEPEST = 60.0, 80.0
"""So far below the best, float32 probabilities are still precise; and begin to lose digits."""


def best(low: Floats, high: Floats, rest: float) -> bool:
    """Tell whether it is certain which score is the largest, or that several are equal and largest.

    Among equal ones argmax takes the first.
    """
    top = float(low.max())
    if not math.isfinite(top) or not top > rest:
        return False
    first = high >= top
    return int(first.sum()) == 1 or bool((low[first] == high[first]).all())


def drawn(low: Floats, high: Floats, rest: float, log_q: Floats, asked: Asked) -> Bools | None:
    """Give columns to draw from, such that the draw is the one from all logits.

    torch.multinomial takes the largest p / q, q being exponential random numbers `[n]`. The
    columns are those that may be left by the cuts; the winner is certainly left, and certainly
    beats all of them.
    """
    possible = high > -np.inf
    if not possible.any():
        return None
    cut = _Cut(low, high, low > -np.inf, possible)
    if not cut.top_k(asked.top_k, rest):
        return None
    if asked.top_p is not None:
        cut.top_p(asked.top_p)
    if asked.min_p:
        cut.min_p(math.log(asked.min_p))
    if not cut.certain.any():
        return None
    top = float(high.max())
    keys = np.where(cut.certain, low - log_q, -np.inf)
    others = np.where(cut.possible, np.maximum(high, top - DEEPEST + 1) - log_q, -np.inf)
    at = int(keys.argmax())
    others[at] = -np.inf
    if low[at] < top - DEEP or not keys[at] - ROUNDING > others.max() + ROUNDING:
        return None
    return cut.possible


@dataclass
class _Cut:
    """Which columns certainly and which possibly stay, one cut of transformers after the other."""

    low: Floats
    high: Floats
    certain: Bools
    possible: Bools

    def top_k(self, k: int, rest: float) -> bool:
        """Keep what has fewer than k above it; False if others than these may stay as well."""
        low, high = np.sort(self.low), np.sort(self.high)
        n = len(low)
        if rest > -np.inf and int((self.low > rest).sum()) < k:
            return False
        above_at_most = n - np.searchsorted(high, self.low, "right") - (self.high > self.low)
        above_at_least = n - np.searchsorted(low, self.high, "right")
        self.certain &= (above_at_most < k) & (self.low > rest)
        self.possible &= above_at_least < k
        return True

    def top_p(self, p: float) -> None:
        """Take away what is, with all below it, at most 1 - p of what is left; never the best."""
        top = self.high[self.possible].max()
        p_low, p_high = np.exp(self.low - top), np.exp(self.high - top)
        c, m = self.certain, self.possible
        below_low = _sum_below(self.high[c], p_low[c], self.low, "left") + p_low
        below_high = _sum_below(self.low[m], p_high[m], self.high, "right")
        above_low = p_low[c].sum() - _sum_below(self.low[c], p_low[c], self.high, "right")
        above_high = p_high[m].sum() - _sum_below(self.high[m], p_high[m], self.low, "left")
        above_high = np.maximum(above_high - np.where(m, p_high, 0), 0)
        share_low = below_low / (below_low + above_high)
        share_high = below_high / np.maximum(below_high + np.maximum(above_low, 0), 1e-300)
        slack = (4 * len(self.low) + 64) * U
        best_low = self.low[self.possible].max()
        is_best = (self.low == best_low) & (int((self.high[m] >= best_low).sum()) == 1)
        may_be_best = self.high >= best_low
        self.certain &= (share_low > 1 - p + slack) | is_best
        self.possible &= (share_high > 1 - p - slack) | may_be_best

    def min_p(self, log_p: float) -> None:
        """Take away what is less than that share of the best."""
        best_low, best_high = self.low[self.possible].max(), self.high[self.possible].max()
        is_best = (self.low == best_low) & (int((self.high[self.possible] >= best_low).sum()) == 1)
        self.certain &= (self.low - best_high > log_p + ROUNDING) | is_best
        self.possible &= self.high - best_low > log_p - ROUNDING


def _sum_below(at: Floats, mass: Floats, limit: Floats, side: str) -> Floats:
    """Sum, for each limit `[n]`, the mass `[m]` that stands below it (left: or at it, right)."""
    order = np.argsort(at)
    sums = np.concatenate([[0.0], np.cumsum(mass[order])])
    found: Floats = sums[np.searchsorted(at[order], limit, side)]  # type: ignore[call-overload]
    return found
