"""Choosing a method and a layer without ever looking at the test rows.

With validation rows: fit on the labelled ones, compare on the others. Without: out-of-fold scores
of the labelled rows themselves, in repeated stratified folds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmhead.body.states import States
from lmhead.steer.learn import linear
from lmhead.steer.learn.linear import Linear
from lmhead.steer.metrics import auroc
from lmhead.steer.vector import HEAD

Method = Callable[[Tensor, Tensor, Tensor], Linear]  # x, y, every x -> direction
METHODS: dict[str, Method] = {
    "probe": linear.probe,
    "mean-diff": lambda x, y, _every: linear.mean_diff(x, y),
    "pca": linear.pca,
}
BLENDED = 8  # how many of the best linear detectors are added up
FOLDS, REPEATS = 4, 5
_LEAST = 1e-3


@dataclass(frozen=True)
class Known:
    """The states that training may look at, with labels where it may look at those."""

    labelled: States
    y: Tensor
    unlabelled: States
    validation: States
    y_validation: Tensor

    @property
    def y_held_out(self) -> Tensor:
        """The labels that `held_out` scores belong to."""
        return self.y_validation if len(self.validation) else self.y

    @property
    def logprob_held_out(self) -> Tensor:
        """The log-probabilities of the same rows."""
        return (self.validation if len(self.validation) else self.labelled).logprob

    def every(self, layer: int | str) -> Tensor:
        """All states without their labels, of the rows that are fitted on."""
        return torch.cat([self.labelled.at(layer), self.unlabelled.at(layer)])

    def fit(self, method: str, layer: int | str) -> Linear:
        """Fit on all labelled rows."""
        return METHODS[method](self.labelled.at(layer), self.y, self.every(layer))

    def held_out(self, method: str, layer: int | str, seed: int) -> Tensor:
        """Score rows that the fit has not seen: the validation rows, or fold by fold."""
        if len(self.validation):
            return self.fit(method, layer)(self.validation.at(layer))
        x, every = self.labelled.at(layer), self.every(layer)
        total = torch.zeros(len(x))
        for out in _folds(self.y, seed):
            found = METHODS[method](x[~out], self.y[~out], every)
            scores = found(every)
            total[out] += (found(x[out]) - scores.mean()) / scores.std().clamp(min=1e-6)
        return total


def _folds(y: Tensor, seed: int) -> list[Tensor]:
    """Return which rows are left out, `[N]` bool, each row REPEATS times; classes kept even."""
    generator = torch.Generator().manual_seed(seed)
    parts = min(FOLDS, int((y == 0).sum()), int((y == 1).sum()))
    result = []
    for _ in range(REPEATS if parts > 1 else 0):
        fold = torch.zeros(len(y), dtype=torch.long)
        for c in (0, 1):
            rows = (y == c).nonzero().flatten()
            fold[rows[torch.randperm(len(rows), generator=generator)]] = (
                torch.arange(len(rows)) % parts
            )
        result += [fold == k for k in range(parts)]
    return result


def candidates(layers: int) -> list[int | str]:
    """Return the layers that are worth trying: above the first quarter, and the head's input."""
    return [*range(layers // 4, layers), HEAD]


def choose_layer(
    known: Known, method: str, layers: Sequence[int | str], seed: int
) -> tuple[int | str, dict[str, float]]:
    """Choose the layer whose AUROC, averaged with its neighbours', is best; return all AUROCs.

    One layer's figure on few rows is mostly luck; neighbours share the signal but not the luck.
    """
    found = [auroc(known.held_out(method, layer, seed), known.y_held_out) for layer in layers]
    smooth = [
        sum(found[max(0, i - 1) : i + 2]) / len(found[max(0, i - 1) : i + 2])
        for i in range(len(found))
    ]
    best = layers[max(range(len(smooth)), key=smooth.__getitem__)]
    return best, {str(layer): a for layer, a in zip(layers, found, strict=True)}


@dataclass(frozen=True)
class Blend:
    """Several linear detectors and the text's log-probability, as one score."""

    terms: dict[int | str, Linear]  # by layer
    logprob: float
    auroc: float  # on held-out rows; somewhat flattered, because they chose the parts
    parts: tuple[str, ...]


def blend(known: Known, layers: Sequence[int | str], seed: int) -> Blend:
    """Add up the best linear detectors, and weigh the log-probability beside them.

    Which and how much is decided on held-out rows; each part is standardised first.
    """
    held = {
        (method, layer): known.held_out(method, layer, seed)
        for method in ("probe", "mean-diff")
        for layer in layers
    }
    y = known.y_held_out
    best = sorted(held, key=lambda key: -auroc(held[key], y))[:BLENDED]
    total = torch.zeros(len(y))
    terms: dict[int | str, Linear] = {}
    for method, layer in best:
        found = known.fit(method, layer)
        scores = found(known.every(layer))
        scale = 1 / max(float(scores.std()), 1e-6) / len(best)
        part = Linear(found.direction * scale, (found.bias - float(scores.mean())) * scale)
        before = terms.get(layer)
        if before is not None:
            part = Linear(before.direction + part.direction, before.bias + part.bias)
        terms[layer] = part
        own = held[method, layer]
        total += (own - own.mean()) / own.std().clamp(min=1e-6) / len(best)
    every = torch.cat([known.labelled.logprob, known.unlabelled.logprob])
    mean, spread = float(every.mean()), max(float(every.std()), 1e-6)
    both = torch.stack([total, (known.logprob_held_out - mean) / spread], 1)  # [N, 2]
    weights = linear.logistic(both, y, l2=0.01)
    main, other = weights.direction.tolist()
    main = max(main, _LEAST)  # parts that point the wrong way fade out; they are not turned round
    bias = (weights.bias - other * mean / spread) / len(terms)
    return Blend(
        {k: Linear(t.direction * main, t.bias * main + bias) for k, t in terms.items()},
        other / spread,
        auroc(both @ torch.tensor([main, other]), y),
        tuple(f"{method} at {layer}" for method, layer in best),
    )
