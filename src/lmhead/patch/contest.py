"""The draw from all V tokens that torch.multinomial would have made, from a few of them.

multinomial takes the token with the largest p_i / q_i, q being V exponential random numbers that
are known beforehand. In logarithms: the largest key s_i - log q_i, s being the scores after changes
and temperature. The screen bounds every key from above, so a few tokens are enough to find the
largest one, as they are for the largest logit. Where top_p or min_p stand before the draw, the
winner is the token with the largest key among those that they leave; whether one is left follows
from intervals of the mass above it and of the normaliser.

Every score has an interval here, as wide as the model's own rounding is unknown. Whatever cannot be
decided for all logits within the intervals is not decided, and the dense layer is asked.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lmhead.head.screening.bounds import BLOCK
from lmhead.head.screening.known import Known, Undecided
from lmhead.head.screening.query import Query
from lmhead.head.screening.ranking import Scored, Transform
from lmhead.patch.asked import Asked
from lmhead.patch.certain import DEEP, ROUNDING, Floats, U

_FIRST = 16  # rows with the largest keys that are scored at once
_MOST = 4096  # rows that may compete by their bounds
_NOTHING_LEFT = 40.0  # so far below the best a token weighs nothing

Ints = npt.NDArray[np.int64]
Ends = Callable[[Ints, Floats], tuple[Floats, Floats]]


@dataclass
class Tokens:
    """Some tokens and both ends of their scores, `[n]` each."""

    ids: Ints
    low: Floats
    high: Floats

    def join(self, other: "Tokens") -> "Tokens":
        """Put two together."""
        return Tokens(
            np.concatenate((self.ids, other.ids)),
            np.concatenate((self.low, other.low)),
            np.concatenate((self.high, other.high)),
        )


@dataclass
class Contest:
    """One state's draw.

    `touched` are tokens whose logits were changed; they have left the query. `ends` gives the ends
    of the scores of others from their raw scores, `uppers` those of all rows' bounds `[rows]`.
    `shaken` is how far the model's rounding can move a score that was not looked at.
    """

    query: Query
    transform: Transform
    touched: Tokens
    ends: Ends
    uppers: Callable[[], Floats]
    log_q: Floats  # [V]
    asked: Asked
    shaken: Callable[[float], float]

    def winner(self) -> int | None:
        """Give the token that multinomial would draw, or None where that is not certain."""
        if not self.query.fits:
            return None
        middle = np.where(
            np.isfinite(self.touched.low), (self.touched.low + self.touched.high) / 2, -np.inf
        )
        own = Scored(self.touched.ids, middle * self.asked.temperature)
        try:
            self.known = Known(
                self.query, own, self.transform, self.asked.temperature, gives_up=False
            )
            if self.asked.top_p is not None:
                self.known.measure()
            return self._winner()
        except Undecided:
            return None

    def _winner(self) -> int | None:
        self.dead: set[int] = set()
        self._weigh()
        rows = self.query.upper
        V = len(self.log_q)
        keys = np.full(len(rows), -np.inf)  # of tokens that were not scored: what they cannot pass
        keys[:V] = self.uppers()[:V] - self.log_q
        keys[:V][~(rows[:V] > -np.inf)] = -np.inf
        tokens = self._scored()
        least = self._least()
        keys[:V][keys[:V] + self.log_q < least] = -np.inf
        self.dead.update(tokens.ids[tokens.high < least].tolist())
        keys[tokens.ids] = -np.inf
        peaks = keys.reshape(-1, BLOCK).max(1)
        blocks = np.argpartition(-peaks, min(_FIRST, len(peaks) - 1))[:_FIRST]
        first = blocks * BLOCK + keys.reshape(-1, BLOCK)[blocks].argmax(1)
        tokens = tokens.join(self._score(first[keys[first] > -np.inf], keys))
        while True:
            found = self._leader(tokens)
            if found is None:
                return None
            leader, lead = found
            rest = np.flatnonzero(keys >= lead - 2 * ROUNDING)
            if not len(rest):
                return leader
            if len(rest) > _MOST:
                return None
            tokens = tokens.join(self._score(rest, keys))

    def _least(self) -> float:
        """Give a score below which the cuts certainly leave nothing."""
        least = -math.inf
        if self.asked.min_p:
            least = float(self.low.max()) + math.log(self.asked.min_p) - ROUNDING
        if self.asked.top_p is not None:
            # below so many, all of which are certainly better, a token is out
            order = np.argsort(-self.low)
            above = np.cumsum(self.mass_low[order])
            whole = float(self.mass_high.sum()) + self._tail()[1]
            out = above >= (self.asked.top_p + self._lost()) * whole
            if out.any():
                least = max(least, float(self.low[order][out.argmax()]))
        return least

    def _score(self, rows: Ints, keys: Floats) -> Tokens:
        keys[rows] = -np.inf
        return Tokens(rows, *self.ends(rows, self.query.score(rows).z))

    def _scored(self) -> Tokens:
        return Tokens(self.ids, self.low, self.high)

    def _weigh(self) -> None:
        """Take the ends of the scores of all tokens that are known by now, and their masses."""
        known = self.known
        mine = np.isin(known.ids, self.touched.ids)
        others = known.ids[~mine]
        y = known.y[~mine]
        low, high = self.ends(others, self._raw(y, others))
        self.ids = np.concatenate((others, self.touched.ids))
        self.low = np.concatenate((low, self.touched.low))
        self.high = np.concatenate((high, self.touched.high))
        self.top = float(self.high.max())
        self.mass_low, self.mass_high = np.exp(self.low - self.top), np.exp(self.high - self.top)

    def _raw(self, y: Floats, ids: Ints) -> Floats:
        """Give raw scores; a softcap is not turned back, the rows are scored again."""
        if self.transform.cap:
            return self.query.score(ids).z
        return y / self.transform.factor

    def _leader(self, tokens: Tokens) -> tuple[int, float] | None:
        """Give the token with the largest key among those that are left, and its key at least."""
        while True:
            alive = np.array([i not in self.dead for i in tokens.ids.tolist()])
            alive &= tokens.high > -np.inf
            if not alive.any():
                return None
            log_q = self.log_q[tokens.ids]
            low = np.where(alive, tokens.low - log_q, -np.inf)
            high = np.where(alive, tokens.high - log_q, -np.inf)
            at = int(low.argmax())
            if not math.isfinite(low[at]):
                return None
            if self._left(tokens, at) is False:
                self.dead.add(int(tokens.ids[at]))
                continue
            rivals = np.flatnonzero(high + 2 * ROUNDING >= low[at])
            for rival in rivals[rivals != at]:
                if self._left(tokens, int(rival)) is not False:
                    return None
                self.dead.add(int(tokens.ids[rival]))
            if self._left(tokens, at) is not True or tokens.low[at] < self.top - DEEP:
                return None
            return int(tokens.ids[at]), float(low[at])

    def _left(self, tokens: Tokens, at: int) -> bool | None:
        """Tell whether the cuts leave a token; None where that is not certain."""
        low, high, token = float(tokens.low[at]), float(tokens.high[at]), int(tokens.ids[at])
        verdict: bool | None = True
        if self.asked.min_p:
            level = math.log(self.asked.min_p)
            if high - self.low.max() < level - ROUNDING:
                return False
            best = low == self.low.max() and int((self.high >= low).sum()) == 1
            if not best and low - self.top < level + ROUNDING:
                verdict = None
        if self.asked.top_p is not None:
            inside = self._in_nucleus(low, high, token)
            if inside is None:
                # the exact answer asks for as many more rows as are needed to be sure of it
                self.known.holds(self.asked.top_p, (low + high) / 2 * self.asked.temperature, token)
                self._weigh()
                inside = self._in_nucleus(low, high, token)
            if inside is not True:
                return inside
        return verdict

    def _in_nucleus(self, low: float, high: float, token: int) -> bool | None:
        assert self.asked.top_p is not None
        tail_low, tail_high = self._tail()
        others = self.ids != token
        surely = others & (self.low > high)
        maybe = others & (self.high >= low)
        own_low, own_high = math.exp(low - self.top), math.exp(high - self.top)
        above_low = float(self.mass_low[surely].sum())
        above_high = float(self.mass_high[maybe].sum())
        below_low = float(self.mass_low[others & ~maybe].sum()) + own_low + tail_low
        below_high = float(self.mass_high[others & ~surely].sum()) + own_high + tail_high
        p, lost = self.asked.top_p, self._lost()
        if above_low > 0 and above_low >= (p + lost) * (above_low + below_high):
            return False
        if above_high == 0 and low > self._floor():
            return True  # the best one always stays
        if low > self._floor() and above_high < (p - lost) * (above_high + below_low):
            return True
        return None

    def _lost(self) -> float:
        """Bound what float32 sums of V probabilities lose: of each term u, or the term itself."""
        tail = self._tail()[1] / float(self.mass_low.sum())
        return 4 * U * (len(self.ids) + 64) + 2 * min(len(self.log_q) * U, tail)

    def _floor(self) -> float:
        """Give the score that no token reaches that is not known."""
        floor = self.known.floor
        return (floor + self.shaken(abs(floor))) / self.asked.temperature

    def _tail(self) -> tuple[float, float]:
        """Give both ends of the mass of all that is not known, relative to the largest score."""
        T, known = self.asked.temperature, self.known
        off = self.shaken(abs(known.best) + _NOTHING_LEFT * T) / T
        shift = known.best / T - self.top
        low, high = known.tail
        nothing = len(self.log_q) * math.exp(-_NOTHING_LEFT + off)
        return low * math.exp(shift - off), (high + nothing) * math.exp(shift + off)
