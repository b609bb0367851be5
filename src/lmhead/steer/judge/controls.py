"""Controls of a steering vector: what one moves that knows nothing of true and false.

True endings may become likelier for reasons that have nothing to do with truth: a shift towards
common words, short words, capitals. A vector is shown to move truth only where it gains more than
these do on the same held-out pairs:
- `shuffled labels`: the same training, at the same layer and budget, on pairs of which half, drawn
  by chance, had their endings swapped;
- `orthogonal`: a direction drawn by chance, at right angles to the vector, as strong as the budget
  lets it be.
"""

import random
from dataclasses import dataclass, replace
from typing import Any

import torch

from lmhead.loading import Model
from lmhead.progress import Progress, silent
from lmhead.steer.bound.constraints import Constraints
from lmhead.steer.bound.strength import alpha_within
from lmhead.steer.learn.data import Data, Pair
from lmhead.steer.learn.gradient import DEFAULT_BUDGET, train_steering
from lmhead.steer.learn.request import AUTO, STEERERS, Request
from lmhead.steer.measure import token_head
from lmhead.steer.metrics import Interval
from lmhead.steer.prompts import NEUTRAL
from lmhead.steer.runs import Runs
from lmhead.steer.vector import SteeringVector

SHUFFLED, ORTHOGONAL = "shuffled labels", "orthogonal"


@dataclass(frozen=True)
class Control:
    """One control: what it gains, and by how much the vector gains more, pair by pair."""

    name: str
    gain: Interval
    more: Interval

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {"name": self.name, "gain": self.gain.to_dict(), "more": self.more.to_dict()}


def control_vectors(
    vector: SteeringVector,
    data: Data,
    model: Model,
    *,
    seed: int,
    test: float,
    progress: Progress = silent,
) -> dict[str, SteeringVector]:
    """Return the controls of a vector that was trained on the pairs of `data`.

    A vector of another origin (a GGUF file, say) has no training to repeat, and one control.
    """
    budget = vector.card.budget or DEFAULT_BUDGET
    found = {}
    if vector.card.method in STEERERS and vector.card.method != AUTO:
        request = Request(
            job="steer",
            method=vector.card.method,
            layer=vector.layer,
            test=test,
            seed=seed,
            constraints=Constraints(budget=budget),
        )
        found[SHUFFLED] = train_steering(swapped(data, seed), model, request, progress=progress)
    neutral = Runs.read(model, NEUTRAL, vector.layer)
    v = orthogonal(vector.direction, seed)
    alpha = alpha_within(token_head(model), neutral, v, budget)
    found[ORTHOGONAL] = SteeringVector(v, vector.layer, alpha)
    return found


def swapped(data: Data, seed: int) -> Data:
    """Swap the endings of every second pair, in an order by chance."""
    order = list(range(len(data.pairs)))
    random.Random(seed).shuffle(order)
    turned = set(order[: len(order) // 2])
    pairs = [
        Pair(p.prompt, p.false, p.true, p.about) if i in turned else p
        for i, p in enumerate(data.pairs)
    ]
    return replace(data, pairs=tuple(pairs))


def orthogonal(v: torch.Tensor, seed: int) -> torch.Tensor:
    """Draw a direction of length 1 at right angles to v `[d]`."""
    drawn = torch.randn(len(v), generator=torch.Generator().manual_seed(seed))
    unit = torch.nn.functional.normalize(v, dim=0)
    return torch.nn.functional.normalize(drawn - (drawn @ unit) * unit, dim=0)
