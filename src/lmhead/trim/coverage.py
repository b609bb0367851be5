"""What the model itself would say: the output side of a keep-set.

A corpus tells which tokens are read. A model may answer with tokens that the corpus does not hold,
and a keep-set without them changes the answer. So watch the model (`observing`): at positions
of the corpus, and along its own greedy continuations of it. Keep its choice at each of these
positions, and then the likeliest ids until a share of all probability is held: the coverage.

A softmax gives every token something, so the last nines of a coverage take most of the vocabulary,
in shares of a millionth; greedy text needs none of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmhead.trim.estimate import Estimate, binomial_interval


@dataclass(frozen=True)
class Observed:
    """What a model said at some positions."""

    mass: Tensor  # [V] float64: the probability of each id, summed over positions
    chosen: Tensor  # [V] bool: the greedy choice somewhere, or as good as
    choices: Tensor  # [V] int64: how often it was the greedy choice
    positions: int

    def __add__(self, other: "Observed") -> "Observed":
        return Observed(
            self.mass + other.mass,
            self.chosen | other.chosen,
            self.choices + other.choices,
            self.positions + other.positions,
        )

    def share(self, ids: Iterable[int]) -> float:
        """Return which share of all probability `ids` hold, averaged over positions."""
        index = torch.tensor(sorted(i for i in ids if i < len(self.mass)), dtype=torch.long)
        return float(self.mass[index].sum() / self.mass.sum())


def nothing(V: int) -> Observed:
    """Return what is known before a model has said anything."""
    return Observed(
        torch.zeros(V, dtype=torch.float64),
        torch.zeros(V, dtype=torch.bool),
        torch.zeros(V, dtype=torch.long),
        0,
    )


def covering(seen: Observed, kept: Iterable[int], share: float) -> set[int]:
    """Return the ids to add to `kept`: every choice, then the likeliest, until `share` is held."""
    held = mask_of(kept, len(seen.mass))
    return set((covered(seen, held, share) & ~held).nonzero()[:, 0].tolist())


def covered(seen: Observed, held: Tensor, share: float) -> Tensor:
    """Return `held [V]` with every choice, and the likeliest, until `share` is held: a mask."""
    found = held | seen.chosen
    outside = seen.mass.masked_fill(found, 0.0)
    lacking = float(outside.sum() - (1 - share) * seen.mass.sum())
    if lacking > 0:
        mass, order = outside.sort(descending=True, stable=True)
        before = mass.cumsum(0) - mass
        found[order[(before < lacking) & (mass > 0)]] = True
    return found


def mask_of(ids: Iterable[int], V: int) -> Tensor:
    """Return which of V ids are among `ids`, `[V]`."""
    mask = torch.zeros(V, dtype=torch.bool)
    mask[torch.tensor([i for i in ids if i < V], dtype=torch.long)] = True
    return mask


def estimate(
    seen: Observed, continuations: Sequence[Sequence[int]], kept: Iterable[int], max_tokens: int
) -> Estimate:
    """Tell how often the model left `kept`, in steps and in whole continuations."""
    ids = set(kept)
    inside = mask_of(ids, len(seen.mass))
    left = sum(any(i not in ids for i in text) for text in continuations)
    low, high = binomial_interval(left, len(continuations))
    return Estimate(
        steps=seen.positions,
        steps_left=int(seen.choices[~inside].sum()),
        texts=len(continuations),
        texts_left=left,
        max_tokens=max_tokens,
        low=low,
        high=high,
    )
