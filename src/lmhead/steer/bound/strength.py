"""How strong vectors may be: as much as a budget leaves them.

At the head that is proved. Below it is measured on plain sentences; what these did not foresee,
the guard holds back at every token. A guard alone keeps the budget of any vector, but of one that
is far too strong it mixes in a little of a wrecked answer; lowered first, a vector keeps its sense.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from lmhead.body.adding import adding
from lmhead.body.blocks import Blocks
from lmhead.errors import BadInput
from lmhead.head import LMHead
from lmhead.loading import Model
from lmhead.progress import Progress, silent
from lmhead.steer.bound.certificate import alpha_for, check_budget, share_within
from lmhead.steer.bound.steering import Vectors, additions, torch_body, with_alpha
from lmhead.steer.measure import AIM, harm, token_head
from lmhead.steer.prompts import NEUTRAL
from lmhead.steer.runs import Runs
from lmhead.steer.vector import HEAD, SteeringVector

PLAIN_RANGE = 4.0  # logits: with no more than that on plain texts, no vector was seen to loop
STEP = 2.0**-20  # the least by which a vector is lowered, when rounding is all that is too much
_HALVINGS, _BISECTIONS = 20, 5
_FEW = 4  # texts that are measured before all are


def fitted(
    model: Model,
    vectors: Vectors,
    budget: float | None = None,
    kl_cap: float | None = None,
    *,
    progress: Progress = silent,
) -> list[SteeringVector]:
    """Lower all vectors by one share until together they keep the limits; never raise them.

    With a KL cap alone, the range of delta on plain texts is held to `PLAIN_RANGE` as well: a guard
    that has to hold back nearly all of a vector keeps its cap, and still lets it loop.
    """
    if budget is None and kl_cap is None:
        raise BadInput("neither a budget nor a KL cap is given to fit to; expected one of them")
    if kl_cap is not None:
        check_budget(kl_cap, "the KL cap")
    budget = PLAIN_RANGE if budget is None else budget
    check_budget(budget)
    most = math.inf if kl_cap is None else kl_cap
    chosen = with_alpha(vectors, None)
    body, head = torch_body(model), token_head(model)
    added = additions(body, chosen)
    if not any(v.any() for v in added.values()):
        return chosen
    if set(added) == {HEAD}:
        chosen = _certified(model, chosen, budget)
        if kl_cap is None:
            return chosen
        added = additions(body, chosen)
    below = [int(layer) for layer in added if layer != HEAD]
    lowest: int | str = min(below) if below else HEAD
    others = {layer: v for layer, v in added.items() if layer != lowest}
    neutral = Runs.read(model, NEUTRAL, lowest, blocks=Blocks(body), progress=progress)
    neutral.unsteered()  # before anything is added above

    def kept(share: float, texts: int) -> bool:
        with adding(body.model, {layer: share * v for layer, v in others.items()}):
            h, steered = neutral.compare(share * added[lowest], texts)
        if HEAD in others:
            steered = steered + share * others[HEAD]
        seen = harm(head, h, steered)
        return float(seen.range.max()) <= budget * AIM and float(seen.kl.max()) <= most * AIM

    def within(share: float) -> bool:
        # what is far too much is so on the first few as well
        return kept(share, _FEW) and (len(neutral) <= _FEW or kept(share, len(neutral)))

    with progress("fitting the strength"):
        share = _largest(within, 1.0, min(budget, most), grow=False)
    return [replace(v, alpha=v.alpha * share) for v in chosen]


def _certified(model: Model, vectors: list[SteeringVector], budget: float) -> list[SteeringVector]:
    """Lower vectors at the head until what they add, as it is rounded then, keeps the budget."""
    while (share := share_within(model, _sum(vectors), budget)) < 1:
        share = min(share, 1 - STEP)
        vectors = [replace(v, alpha=v.alpha * share) for v in vectors]
    return vectors


def _sum(vectors: list[SteeringVector]) -> Tensor:
    """Return what vectors of one layer add together, `[d]`."""
    total = vectors[0].added
    for v in vectors[1:]:
        total = total + v.added
    return total


def alpha_within(head: LMHead, neutral: Runs, v: Tensor, budget: float) -> float:
    """Return the largest alpha that keeps the budget: proved at the head, else as measured.

    What is returned was itself measured, on the neutral texts, to be within.
    """
    if not v.any():
        raise BadInput("the direction is all zeros: nothing was learned from the pairs; give more")
    if neutral.layer == HEAD:
        return alpha_for(head, v, budget)

    def within(alpha: float) -> bool:
        h, steered = neutral.compare(alpha * v)
        return float(harm(head, h, steered).range.max()) <= budget * AIM

    # A vector a tenth as long as the states is a strong one already.
    length = float(torch.cat([x.norm(dim=-1) for x in neutral.x]).median())
    return _largest(within, 0.1 * length / float(v.norm()), budget, grow=True)


def _largest(within: Callable[[float], bool], start: float, budget: float, grow: bool) -> float:
    """Look for the largest strength: by halving, doubling if it may grow, then bisection."""
    low = start
    for _ in range(_HALVINGS):
        if within(low):
            break
        low /= 2
    else:
        raise BadInput(f"no strength of this direction keeps the limit {budget:g}; raise it")
    if low == start and not grow:
        return low
    high = 2 * low
    for _ in range(_HALVINGS if low == start else 0):
        if not within(high):
            break
        low, high = high, 2 * high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle) else (low, middle)
    return low
