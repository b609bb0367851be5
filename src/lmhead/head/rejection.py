"""Drawing from the softmax of all logits without computing them all.

The rows with the largest bounds are scored exactly; every other row i weighs

    w_i >= exp((y_i - M) / T),    from its bound instead of its logit y_i

M being the largest logit. A row is proposed in proportion to its weight. A scored row is taken as
it is; another one is scored now and taken with probability exp((y_i - M) / T) / w_i, else there is
another proposal. What is taken follows the softmax exactly (von Neumann's rejection), up to the
rounding of float64 sums.
"""

import math
from typing import NamedTuple

import numpy as np
import torch

from lmhead.errors import BadInput
from lmhead.head.bounds import BLOCK, Float32, Float64
from lmhead.head.query import Query
from lmhead.head.ranking import Scored, Transform

SCORED_FIRST = 64
TRIES = 64
"""Proposals for one draw; past that many the draw is made from all logits, and counted."""
_LOG2E = math.log2(math.e)
_WIDEST = 4.0  # bits of slack beyond which float32 weights are too coarse to propose from


class Drawn(NamedTuple):
    """The token, how many were proposed, and why all logits were needed, if they were."""

    id: int
    proposals: int = 0
    fallback: str | None = None


def draw(
    query: Query,
    touched: Scored,
    transform: Transform,
    temperature: float,
    weights: Float32,
    sums: Float64,
    generator: torch.Generator | None,
) -> Drawn:
    """Draw one token. `touched` holds rows that left the screen with their logits, not scores."""
    scored, cut = query.first(SCORED_FIRST)
    if len(scored.z) and scored.z.max() < cut:  # then no row that is left can exceed the best
        low = float(scored.z.max())
        scored, cut = scored.join(query.reaching(low, cut)), low
    ids = np.concatenate((scored.ids, touched.ids))
    y = np.concatenate((transform(scored.z), touched.z))
    best = require_finite(float(y.max(initial=-np.inf)))
    exact = np.cumsum(np.exp((y - best) / temperature))  # [n]

    slope = _LOG2E * transform.factor / temperature
    shift = -best * _LOG2E / temperature
    # The exponent is a float32: 16 half-units for its roundings, 1e-3 for the series in `weigh`.
    slack = 2.0**-20 * (query.reach * slope + abs(shift)) + 1e-3
    if not slack <= _WIDEST:
        return _from_all(query, touched, transform, temperature, generator, 0, "temperature")
    cap = transform.cap / transform.factor
    query.kernels.weigh(query.upper, cut, slope, shift + slack, cap, weights, sums)
    loose = np.cumsum(sums)
    total = exact[-1] + loose[-1]

    for proposals in range(1, TRIES + 1):
        place, chance = torch.rand(2, dtype=torch.float64, generator=generator).tolist()
        place *= total
        if place < exact[-1]:
            return Drawn(int(ids[np.searchsorted(exact, place, side="right")]), proposals)
        block = min(int(np.searchsorted(loose, place - exact[-1], side="right")), len(sums) - 1)
        place = max(place - exact[-1] - (loose[block] - sums[block]), 0.0)
        inside = np.cumsum(weights[block * BLOCK : (block + 1) * BLOCK], dtype=np.float64)
        row = block * BLOCK + min(int(np.searchsorted(inside, place, side="right")), BLOCK - 1)
        if weights[row] == 0:  # only by rounding, at the very edge of a block
            continue
        logit = float(transform(query.score(np.array([row])).z)[0])
        if chance * float(weights[row]) < math.exp((logit - best) / temperature):
            return Drawn(row, proposals)
    return _from_all(query, touched, transform, temperature, generator, TRIES, "tries")


def _from_all(
    query: Query,
    touched: Scored,
    transform: Transform,
    temperature: float,
    generator: torch.Generator | None,
    proposals: int,
    why: str,
) -> Drawn:
    scored = query.everything()
    y = np.concatenate((transform(scored.z), touched.z))
    ids = np.concatenate((scored.ids, touched.ids))
    return Drawn(int(ids[pick(y, temperature, generator)]), proposals, why)


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
