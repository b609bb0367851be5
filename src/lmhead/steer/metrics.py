"""Figures that say how well scores tell true from false, and how sure that is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmhead.errors import BadInput


@dataclass(frozen=True)
class Interval:
    """A figure and the 95 % interval around it."""

    value: float
    low: float
    high: float

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {"value": self.value, "low": self.low, "high": self.high}


def auroc(scores: Tensor, y: Tensor) -> float:
    """How often a true row scores above a false one, ties counting half; scores and y are `[N]`."""
    true, false = scores[y == 1].double(), scores[y == 0].double()
    if not len(true) or not len(false):
        raise BadInput("there is only one class to tell apart; expected both true and false rows")
    ordered = false.sort().values
    below = torch.searchsorted(ordered, true) + torch.searchsorted(ordered, true, right=True)
    return float(below.double().mean() / (2 * len(false)))


def auroc_interval(scores: Tensor, y: Tensor, *, seed: int = 0, resamples: int = 1000) -> Interval:
    """Return the AUROC with its bootstrap interval; each class is resampled by itself."""
    true, false = scores[y == 1], scores[y == 0]
    labels = torch.cat([torch.ones(len(true)), torch.zeros(len(false))])

    def draw(generator: torch.Generator) -> float:
        picked = [
            part[torch.randint(len(part), (len(part),), generator=generator)]
            for part in (true, false)
        ]
        return auroc(torch.cat(picked), labels)

    return _interval(auroc(scores, y), draw, seed, resamples)


def mean_interval(values: Tensor, *, seed: int = 0, resamples: int = 2000) -> Interval:
    """Return the mean of `[N]` with its bootstrap interval."""

    def draw(generator: torch.Generator) -> float:
        picked = torch.randint(len(values), (len(values),), generator=generator)
        return float(values[picked].double().mean())

    return _interval(float(values.double().mean()), draw, seed, resamples)


def _interval(
    value: float, draw: Callable[[torch.Generator], float], seed: int, resamples: int
) -> Interval:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.tensor([draw(generator) for _ in range(resamples)], dtype=torch.float64)
    low, high = torch.quantile(drawn, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Interval(value, low, high)
