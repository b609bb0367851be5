"""What is known of one state's probabilities: some logits exactly, the rest of the mass roughly.

The rows with the largest bounds are scored. Of all others the sum of exp((y - best) / T) has an
interval (`levels.py`), so the normaliser has one, and so has the mass of what is better than a
token. Where an interval is too wide to decide something, more rows are scored, those with the
largest bounds first, up to `Known.most`.

Symbols: y logits, T temperature, w = exp((y - best) / T) the weight of a token, Z their sum.
"""

import math

import numpy as np

from lmhead.head.screening.bounds import Float64, Ints
from lmhead.head.screening.query import Query
from lmhead.head.screening.ranking import Scored, Transform
from lmhead.head.screening.rejection import (
    SCORED_FIRST,
    WIDEST,
    exponent_of,
    float32_from,
    require_finite,
)

SHARE = 4
"""One row in so many is scored at most to decide something; past that many all of them are."""
LEAST = 1024
"""So many may be scored in any case."""
_LEVELS = 192
_WIDTH = 0.25  # of a level, in units of T: a factor of 1.28 of the weight
_SURE = 1e-11  # float64 sums of weights are closer than that, relative to Z


class Undecided(Exception):
    """More rows than are allowed would have to be scored."""


class Known:
    """The logits of some tokens, best first, and the interval of the others' mass.

    `gave_up` says that all rows were scored, because fewer did not decide. Where it may not give
    up (`gives_up` is false), it raises Undecided instead.
    """

    def __init__(
        self,
        query: Query,
        touched: Scored,
        transform: Transform,
        temperature: float,
        *,
        gives_up: bool = True,
    ) -> None:
        self._query, self._transform, self.temperature = query, transform, temperature
        scored, self.cut = query.shortlist(SCORED_FIRST, 1, 0.0)
        found = Scored(scored.ids, transform(scored.z)).join(touched)
        self.best = require_finite(float(found.z.max(initial=-np.inf)))
        self.most = max(LEAST, len(query.upper) // SHARE)
        self.gave_up, self._gives_up = False, gives_up
        self.tail = 0.0, math.inf  # the mass of what was not scored: its ends
        self._table: Float64 | None = None  # [3, K]: rows, and both ends of their mass
        self._thresholds = np.empty(0, np.float32)
        self._level = -1  # rows of the levels up to this one are scored
        self._rows = len(scored.ids)
        self._take(found)
        slope, shift, slack = exponent_of(query.reach, self.best, transform.factor, temperature)
        self.exponent = slope, shift, slack
        self.coarse = not (query.fits and slack <= WIDEST)
        if self.coarse:
            self.score_all()

    def _take(self, found: Scored) -> None:
        self.ids, self.y = found.ordered()
        self.w: Float64 = np.exp((self.y - self.best) / self.temperature)  # [n]
        self.before: Float64 = np.cumsum(self.w) - self.w  # [n], of what is better
        self.exact = float(self.w.sum())

    @property
    def floor(self) -> float:
        """The logit that no token reaches that was not scored."""
        if self.cut == -math.inf:
            return -math.inf
        return float(self._transform(np.array([self.cut]))[0])

    @property
    def normaliser(self) -> tuple[float, float]:
        """Both ends of Z."""
        low, high = self.tail
        return (self.exact + low) * (1 - _SURE), (self.exact + high) * (1 + _SURE)

    def bound(self, high: float) -> None:
        """Say what the mass of the tokens that were not scored is at most, where that is known."""
        if self._table is None and not self.gave_up:
            self.tail = 0.0, high

    def above(self, y: float, id: int) -> float:
        """Sum the weights of scored tokens that are better than a token."""
        n = int(np.searchsorted(-self.y, -y))
        while n < len(self.y) and self.y[n] == y and self.ids[n] < id:
            n += 1
        return float(self.before[n]) if n < len(self.y) else self.exact

    def holds(self, p: float, y: float, id: int) -> bool:
        """Tell whether a token is in the nucleus of p: what is better weighs less than p Z."""
        while True:
            above = self.above(y, id)
            low, high = self.normaliser
            if above > 0 and above >= p * high:
                return False
            # all that could be better is scored
            if y > self.floor and (above == 0 or above < p * low):
                return True
            if self.gave_up:
                return above == 0 or above < p * self.exact
            self._more(p, y, above)

    def widest_log(self) -> float:
        """Give half the width of the interval of log Z."""
        low, high = self.normaliser
        return math.log(high / low) / 2

    def narrow(self, error: float) -> None:
        """Score more rows until log Z is known up to an error."""
        while self.widest_log() > error and not self.gave_up:
            table = self.measure()
            left = np.cumsum(table[:, ::-1], 1)[:, ::-1] - table  # beyond each level
            scored = np.cumsum(table[0])
            middle = np.sqrt(table[1] * table[2])
            after = self.exact + np.cumsum(middle) - middle[: self._level + 1].sum()
            good = (left[1] - left[2] < error * after) & (scored > 0)
            good[: self._level + 1] = False
            self._score_to(int(good.argmax()) if good.any() else len(scored))

    def measure(self) -> Float64:
        """Learn both ends of the mass of what was not scored, level by level: `[3, K]`."""
        if self._table is None:
            query = self._query
            width = _WIDTH * self.temperature / self._transform.factor
            cut = float32_from(self.cut)
            steps = cut - width * np.arange(1, _LEVELS + 1)
            self._thresholds = steps.astype(np.float32)
            spread = query.spread
            self._table = query.kernels.levels(
                query.upper, query.peaks, spread.residual, spread.norm, tuple(spread[2:]),
                cut, self._thresholds, width, self.exponent,
                self._transform.cap / self._transform.factor,
            )  # fmt: skip
            self.tail = float(self._table[2].sum()), float(self._table[1].sum())
        return self._table

    def _more(self, p: float, y: float, above: float) -> None:
        """Score as many more rows as are likely to decide on a token."""
        fresh = self._table is None
        table = self.measure()
        if fresh:
            return  # both ends are known now: that may have decided
        K = len(self._thresholds)
        middle = np.sqrt(table[1] * table[2])  # a guess of the mass of each level
        middle[: self._level + 1] = 0
        left = [np.append(np.cumsum(row[::-1])[::-1][1:], 0.0) for row in (table[1], table[2])]
        guess = np.append(np.cumsum(middle[::-1])[::-1][1:], 0.0)  # [K], beyond each level
        score = self._transform.score_below(y)
        deep = int(np.searchsorted(-self._thresholds.astype(float), -score))  # its own level
        better = above + float(middle[:deep].sum())
        whole = self.exact + float(middle.sum())
        gap = better - p * whole
        known = np.arange(K) >= deep  # scored so far down, all that is better is known
        scored_mass = np.minimum(above + np.cumsum(middle), better)
        out = scored_mass >= p * (whole - guess + left[0])
        inside = known & (gap < 0) & (0.95 * -gap >= p * (guess - left[1]))
        good = (out | inside) & (np.arange(K) > self._level)
        self._score_to(int(good.argmax()) if good.any() else K)

    def _score_to(self, level: int) -> None:
        table = self.measure()
        level = max(level, self._level + 1)
        if level >= len(self._thresholds) - 1 or (
            self._rows + table[0, self._level + 1 : level + 1].sum() > self.most
        ):
            self.score_all()
            return
        query, low = self._query, float(self._thresholds[level])
        high = float32_from(self.cut) if self._level < 0 else self.cut
        rows: Ints = query.kernels.rows_between(query.upper, query.peaks, low, high)
        more = query.score(rows)
        self.cut, self._level = low, level
        self._rows += len(rows)
        self.tail = float(table[2, level + 1 :].sum()), float(table[1, level + 1 :].sum())
        self._take(Scored(self.ids, self.y).join(Scored(more.ids, self._transform(more.z))))

    def score_all(self) -> None:
        """Give up the screen: score every row."""
        if not self._gives_up:
            raise Undecided
        query = self._query
        high = float32_from(self.cut) if self._level < 0 else self.cut
        more = query.score(query.kernels.rows_between(query.upper, query.peaks, -np.inf, high))
        self.cut, self.tail, self.gave_up = -math.inf, (0.0, 0.0), True
        if len(more.ids):
            self._take(Scored(self.ids, self.y).join(Scored(more.ids, self._transform(more.z))))
