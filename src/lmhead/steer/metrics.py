"""Figures that say how well scores tell true from false, and how sure that is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmhead.errors import BadInput

_BLOCK = 512  # true rows that are compared with all false ones at a time


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
    return interval(auroc(scores, y), resampled([scores], y, seed, resamples)[0])


def auroc_gain(
    scores: Tensor, others: Tensor, y: Tensor, *, seed: int = 0, resamples: int = 1000
) -> Interval:
    """Return by how much the AUROC of `scores` is above that of `others`, paired: on the same rows.

    Both are resampled together, so what makes a draw of rows easy or hard cancels.
    """
    mine, theirs = resampled([scores, others], y, seed, resamples)
    return interval(auroc(scores, y) - auroc(others, y), mine - theirs)


def resampled(many: Sequence[Tensor], y: Tensor, seed: int = 0, resamples: int = 1000) -> Tensor:
    """Return the AUROC of each scores on resampled rows, the same for all of them, `[S, R]`."""
    generator = torch.Generator().manual_seed(seed)
    counts = []  # how often each row of a class is drawn, `[R, n]`
    for c in (1, 0):
        n = int((y == c).sum())
        drawn = torch.randint(n, (resamples, n), generator=generator)
        ones = torch.ones(1, dtype=torch.float32).expand(drawn.shape)
        counts.append(torch.zeros(resamples, n).scatter_add_(1, drawn, ones))
    true, false = counts
    found = []
    for scores in many:
        won = torch.zeros(resamples)
        # who wins against whom, a block of true rows at a time
        for above, weight in zip(
            torch.split(scores[y == 1], _BLOCK), torch.split(true, _BLOCK, dim=1), strict=True
        ):
            below = scores[y == 0]
            wins = (above[:, None] > below).float() + 0.5 * (above[:, None] == below).float()
            won += ((weight @ wins) * false).sum(1)
        found.append(won.double() / (true.shape[1] * false.shape[1]))
    return torch.stack(found)


@dataclass(frozen=True)
class Bin:
    """Rows of about the same probability: what was said of them, and what they were."""

    rows: int
    said: float  # the mean probability
    true: float  # the share of true rows

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {"rows": self.rows, "said": self.said, "true": self.true}


@dataclass(frozen=True)
class Calibration:
    """Whether a probability means what it says."""

    brier: float  # mean squared error of the probability; 0.25 is that of always saying 0.5
    error: float  # mean distance of what was said from what was true, over the bins
    bins: tuple[Bin, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        bins = [b.to_dict() for b in self.bins]
        return {"brier": self.brier, "error": self.error, "bins": bins}


def calibration(p: Tensor, y: Tensor, bins: int = 5) -> Calibration:
    """Compare probabilities `[N]` with labels, in bins of equal width; empty ones are left out."""
    p, y = p.double(), y.double()
    place = (p * bins).long().clamp(max=bins - 1)
    found = []
    for b in range(bins):
        here = place == b
        if here.any():
            found.append(Bin(int(here.sum()), float(p[here].mean()), float(y[here].mean())))
    error = sum(b.rows * abs(b.said - b.true) for b in found) / max(1, len(p))
    return Calibration(float((p - y).square().mean()), error, tuple(found))


def mean_interval(values: Tensor, *, seed: int = 0, resamples: int = 2000) -> Interval:
    """Return the mean of `[N]` with its bootstrap interval."""
    generator = torch.Generator().manual_seed(seed)
    n = len(values)
    drawn = values.double()[torch.randint(n, (resamples, n), generator=generator)].mean(1)
    return interval(float(values.double().mean()), drawn)


def interval(value: float, drawn: Tensor) -> Interval:
    """Put the 95 % interval of what was drawn, `[R]`, around a figure."""
    low, high = torch.quantile(
        drawn.double(), torch.tensor([0.025, 0.975], dtype=torch.float64)
    ).tolist()
    return Interval(value, low, high)
