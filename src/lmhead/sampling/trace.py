"""What each filter did, as data: the funnel from the model's logits to the draw."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmhead.sampling.candidates import Candidates


class TokenProb(NamedTuple):
    """A token id and its probability."""

    id: int
    probability: float


@dataclass(frozen=True)
class FilterStep:
    """One filter's work on one sequence.

    left: the tokens that can still be drawn after it. cut: the probability, before the filter,
    of the tokens it removed. moved: the total variation between the distributions before and
    after (for a filter that only removes, that is `cut`). best: the likeliest tokens after it.
    """

    name: str
    settings: Mapping[str, Any]
    left: int
    cut: float
    moved: float
    best: tuple[TokenProb, ...]


@dataclass(frozen=True)
class Trace:
    """Every step for one sequence; the first, named `logits`, is what the head gave."""

    vocab_size: int
    steps: tuple[FilterStep, ...]

    def to_dict(self) -> dict[str, Any]:
        """Give JSON-safe data: tokens by id, no infinity, no NaN."""
        data = asdict(self)
        for step, record in zip(self.steps, data["steps"], strict=True):
            record["best"] = [{"id": t.id, "probability": t.probability} for t in step.best]
        return data


def step_of(
    name: str, settings: Mapping[str, Any], before: Tensor | None, c: Candidates, top: int
) -> tuple[FilterStep, Tensor]:
    """Report a filter on one row, given the probabilities `[V]` before it; returns those after."""
    after = _probs(c)
    cut = moved = 0.0
    if before is not None:
        alive = torch.zeros_like(after, dtype=torch.bool)
        columns = (c.z[0] > -torch.inf).nonzero().squeeze(-1)
        alive[columns if c.ids is None else c.ids[0, columns]] = True
        cut = float(before[~alive].sum())
        moved = float((after - before).abs().sum() / 2)
    best = after.topk(min(top, after.numel()))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    listed = tuple(TokenProb(i, p) for i, p in pairs if p > 0)
    return FilterStep(name, dict(settings), int(c.left()[0]), cut, moved, listed), after


def _probs(c: Candidates) -> Tensor:
    """Probabilities of a one-row set over the whole vocabulary, `[V]` float64."""
    p = c.z[0].double().softmax(-1).nan_to_num(nan=0.0)  # all -inf: nothing left
    if c.ids is None:
        return p
    return p.new_zeros(c.V + 1).scatter_(0, c.ids[0], p)[: c.V]
