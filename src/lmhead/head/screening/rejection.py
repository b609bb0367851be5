"""Drawing from the softmax of all logits without computing them all.

The rows with the largest bounds are scored exactly; every other row i weighs

    w_i >= exp((y_i - M) / T),    from its bound instead of its logit y_i

M being the largest logit. A row is proposed in proportion to its weight. A scored row is taken as
it is; another one is scored now and taken with probability exp((y_i - M) / T) / w_i, else there is
another proposal. What is taken follows the softmax exactly (von Neumann's rejection), up to the
rounding of float64 sums.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from lmhead.errors import BadInput
from lmhead.head.screening.bounds import Float32, Float64, Ints
from lmhead.head.screening.query import Query
from lmhead.head.screening.ranking import Scored, Transform

SCORED_FIRST = 16
TRIES = 256
"""Proposals for one draw; past that many the draw is made from all logits, and counted."""
WIDEST = 4.0  # bits of slack beyond which float32 weights are too coarse to propose from
_LOG2E = math.log2(math.e)
_PAIRS = 8  # random pairs that are made together: at usual temperatures more than a draw needs


class Drawn(NamedTuple):
    """The token, how many were proposed, and why all logits were needed, if they were."""

    id: int
    proposals: int = 0
    fallback: str | None = None


class Proposals(NamedTuple):
    """What one state's rows are proposed from: exact weights of some rows, loose ones of others.

    `exact [n]` are running sums over the rows `ids`; `loose [rows]` and its block sums are 0 at
    rows that are among them. Weights are relative to exp(best / temperature).
    """

    query: Query
    transform: Transform
    temperature: float
    best: float
    ids: Ints
    exact: Float64
    loose: Float32
    sums: Float64
    total: float

    def draw(
        self, generator: torch.Generator | None, first: Float64 | None = None
    ) -> tuple[int, int]:
        """Return a token and how many were proposed; -1 where TRIES of them were rejected.

        `first` are chances that the generator gave already.
        """
        known = float(self.exact[-1])
        for proposals, (place, chance) in enumerate(each_chance(generator, first), 1):
            if proposals > TRIES:
                break
            place *= self.total
            if place < known:
                return int(self.ids[self.exact.searchsorted(place, side="right")]), proposals
            row = self.query.kernels.propose(self.loose, self.sums, place - known)
            weight = float(self.loose[row])
            if weight == 0:  # only by rounding, at the very edge of a block
                continue
            logit = float(self.transform(self.query.score(np.array([row])).z)[0])
            if chance * weight < math.exp((logit - self.best) / self.temperature):
                return row, proposals
        return -1, TRIES


def proposals(
    query: Query,
    touched: Scored,
    transform: Transform,
    temperature: float,
    weights: Float32,
    sums: Float64,
) -> Proposals | None:
    """Weigh the rows, in the room of `weights [rows]` and `sums [blocks]`.

    `touched` holds rows that left the screen with their logits, not scores. None where the
    temperature is so small that float32 weights are too coarse.
    """
    # Every row that could exceed the best of them is among these.
    scored, cut = query.shortlist(SCORED_FIRST, 1, 0.0)
    ids, y = Scored(scored.ids, transform(scored.z)).join(touched)
    best = require_finite(float(y.max(initial=-np.inf)))
    exact = np.cumsum(np.exp((y - best) / temperature))  # [n]

    slope, shift, slack = exponent_of(query.reach, best, transform.factor, temperature)
    if not slack <= WIDEST:
        return None
    high, cap = float32_from(cut), transform.cap / transform.factor
    loose = query.kernels.weigh(query.upper, high, slope, shift + slack, cap, weights, sums)
    total = float(exact[-1]) + loose
    return Proposals(query, transform, temperature, best, ids, exact, weights, sums, total)


def draw(
    query: Query,
    touched: Scored,
    transform: Transform,
    temperature: float,
    weights: Float32,
    sums: Float64,
    generator: torch.Generator | None,
    first: Float64 | None = None,
) -> Drawn:
    """Draw one token: by proposals, or from all logits where these do not lead to one."""
    made = proposals(query, touched, transform, temperature, weights, sums)
    token, tried = (-1, 0) if made is None else made.draw(generator, first)
    if token >= 0:
        return Drawn(token, tried)
    scored = query.everything()
    ids, y = Scored(scored.ids, transform(scored.z)).join(touched)
    token = int(ids[pick(y, temperature, generator)])
    return Drawn(token, tried, "temperature" if made is None else "tries")


class Chances:
    """Random pairs in [0, 1): where to propose, and whether to take it. For one caller at a time.

    They are made in room that is kept: to make a tensor and an array takes longer than the numbers.
    """

    def __init__(self) -> None:
        self._numbers: Float64 = np.empty((0, _PAIRS, 2))
        self._uniform = torch.from_numpy(self._numbers)

    def draw(self, generators: Sequence[torch.Generator | None]) -> Float64:
        """Make pairs `[B, pairs, 2]`, which last until the next call."""
        states = len(generators)
        if len(self._numbers) != states:
            self._numbers = np.empty((states, _PAIRS, 2))
            with torch.inference_mode(False):  # or it could not be filled outside of that mode
                self._uniform = torch.from_numpy(self._numbers)
        if states == 1 or len(set(generators)) == 1:
            self._uniform.uniform_(generator=generators[0])
        else:
            for one, generator in zip(self._uniform, generators, strict=True):
                one.uniform_(generator=generator)
        return self._numbers


def each_chance(
    generator: torch.Generator | None, first: Float64 | None
) -> Iterator[tuple[float, float]]:
    """Yield pairs of random numbers from [0, 1), the first ones from what was drawn already."""
    more = Chances()
    made = more.draw([generator])[0] if first is None else first
    while True:
        yield from made.tolist()
        made = more.draw([generator])[0]


def exponent_of(
    reach: float, best: float, factor: float, temperature: float
) -> tuple[float, float, float]:
    """Say how a bound becomes the exponent of a weight: slope, shift, and slack to add to it.

    The exponent is a float32: 16 half-units for its roundings, 1e-3 for the series in `weigh`.
    """
    slope = _LOG2E * factor / temperature
    shift = -best * _LOG2E / temperature
    return slope, shift, 2.0**-20 * (reach * slope + abs(shift)) + 1e-3


def float32_from(x: float) -> float:
    """Give the least float32 that is not below x: the same float32 numbers are below either."""
    near = float(np.float32(x))
    return near if near >= x else float(np.nextafter(np.float32(near), np.float32(np.inf)))


def pick(y: Float64, temperature: float, generator: torch.Generator | None) -> int:
    """Draw an index from the softmax of logits y `[n]` / temperature."""
    best = require_finite(float(y.max()))
    total = np.cumsum(np.exp((y - best) / temperature))
    place = float(torch.rand((), dtype=torch.float64, generator=generator)) * total[-1]
    return min(int(np.searchsorted(total, place, side="right")), len(y) - 1)


def require_finite(best: float) -> float:
    """Return the largest logit, or say that there is nothing to draw from."""
    if not math.isfinite(best):
        raise BadInput(
            f"the largest logit is {best}, so there is nothing to sample from; "
            "check the edits, and h for NaN and infinity"
        )
    return best


def nucleus(kept: Scored, temperature: float, top_p: float | None, min_p: float | None) -> Scored:
    """Cut tokens by their probability: top_p (best first, the one that crosses it stays), min_p."""
    if top_p is None and min_p is None:
        return kept
    best = require_finite(float(kept.z.max(initial=-np.inf)))
    p = np.exp((kept.z - best) / temperature)
    stays = np.ones(len(p), bool)
    if top_p is not None:
        before = np.cumsum(p) - p
        stays = before < top_p * p.sum()
        stays[0] = True
    if min_p is not None:
        stays &= p >= min_p * p.max()
    return Scored(kept.ids[stays], kept.z[stays])
