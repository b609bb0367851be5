"""Drawing from what top_p and min_p leave of the softmax of all logits, exactly.

A token is drawn from the full softmax, as `rejection.py` does, and taken if it is in what the cuts
leave; else there is another draw. What is taken follows the softmax of what is left. Whether a
token is left is decided by intervals of the mass above it and of the normaliser (`known.py`).
Tokens that are certainly out are not drawn in the first place, and often all of it is decided by
the rows that are scored first: then there is nothing to reject.
"""

import math

import numpy as np
import torch

from lmhead.head.screening.bounds import Float32, Float64
from lmhead.head.screening.known import Known
from lmhead.head.screening.query import Query
from lmhead.head.screening.ranking import Scored, Transform
from lmhead.head.screening.rejection import TRIES, Drawn, each_chance, float32_from, pick


def draw_cut(
    query: Query,
    touched: Scored,
    transform: Transform,
    temperature: float,
    top_p: float | None,
    min_p: float | None,
    weights: Float32,
    sums: Float64,
    generator: torch.Generator | None,
    first: Float64 | None = None,
) -> Drawn:
    """Draw one token of those that top_p and then min_p leave; `first` are chances to begin with.

    `touched` holds rows that left the screen with their logits. `weights [rows]` and `sums
    [blocks]` are room to work in.
    """
    known = Known(query, touched, transform, temperature)
    least = known.best + temperature * math.log(min_p) if min_p else -math.inf
    p = 1.0 if top_p is None else top_p
    loose = 0.0
    if not known.gave_up:
        slope, shift, slack = known.exponent
        loose = query.kernels.weigh(
            query.upper, float32_from(known.cut), slope, shift + slack,
            transform.cap / transform.factor, weights, sums,
        )  # fmt: skip
        known.bound(loose)
    ids, y, w, before = known.ids, known.y, known.w, known.before
    low, high = known.normaliser
    some = len(y) if top_p is None else max(1, int(np.searchsorted(before, p * high)))
    some = min(some, int(np.searchsorted(-y, -least, side="right")))
    # Nothing that was not scored is left: the best one alone is the nucleus, or what was not scored
    # is below one that is certainly out.
    alone = top_p is not None and p * high <= w[0]
    out = alone or least >= known.floor or (some < len(y) and y[some] > known.floor)
    if known.gave_up or out:
        loose = 0.0
        if top_p is None or before[some - 1] < p * low or some == 1:
            token = int(ids[:some][pick(y[:some], temperature, generator)])
            return Drawn(token, 1, "temperature" if known.gave_up else None)
    mass = np.cumsum(w[:some])
    inside = float(mass[-1])
    tried = 0
    for tried, (place, chance) in enumerate(each_chance(generator, first), 1):
        if tried > TRIES:
            break
        place *= inside + loose
        if place < inside:
            at = int(mass.searchsorted(place, side="right"))
            token, logit = int(ids[at]), float(y[at])
        else:
            token = query.kernels.propose(weights, sums, place - inside)
            weight = float(weights[token])
            if weight == 0:  # only by rounding, at the very edge of a block
                continue
            logit = float(transform(query.score(np.array([token])).z)[0])
            if not chance * weight < math.exp((logit - known.best) / temperature):
                continue
        if logit >= least and (top_p is None or known.holds(p, logit, token)):
            return Drawn(token, tried, "top_p" if known.gave_up else None)
    known.score_all()
    stays = known.y >= least
    if top_p is not None:
        stays &= known.before < p * known.exact
    stays[0] = True
    token = int(known.ids[stays][pick(known.y[stays], temperature, generator)])
    return Drawn(token, tried, "tries")
