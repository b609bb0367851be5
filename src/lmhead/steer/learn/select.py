"""Choosing a layer without ever looking at the test rows, and without spending a label on it.

Every label is used twice: to fit, and, by the folds that leave it out, to compare.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lmhead.body.states import States
from lmhead.steer.learn import linear
from lmhead.steer.learn.folding import folds, out_of_fold
from lmhead.steer.learn.linear import Linear
from lmhead.steer.learn.ridge import ridge_logistic
from lmhead.steer.metrics import auroc
from lmhead.steer.vector import HEAD

Method = Callable[[Tensor, Tensor, Tensor], Linear]  # x, y, every x -> direction
METHODS: dict[str, Method] = {
    "probe": linear.probe,
    "mean-diff": lambda x, y, _every: linear.mean_diff(x, y),
    "pca": linear.pca,
}
_REPEATS = 2


@dataclass(frozen=True)
class Known:
    """The states that training may look at, with labels where it may look at those.

    `groups`: of the labelled rows, what those that belong together share. `unlearned` keeps what
    was computed without labels, by layer; a copy with other labels shares it.
    """

    labelled: States
    y: Tensor
    unlabelled: States
    groups: tuple[str, ...]
    unlearned: dict[int | str, Any] = field(default_factory=dict, repr=False, compare=False)

    def every(self, layer: int | str) -> Tensor:
        """All states without their labels."""
        return torch.cat([self.labelled.at(layer), self.unlabelled.at(layer)])

    def fit(self, method: str, layer: int | str) -> Linear:
        """Fit on all labels."""
        return METHODS[method](self.labelled.at(layer), self.y, self.every(layer))

    def folds(self, seed: int) -> Tensor:
        """Part the labelled rows, no group taken apart: which rows each fold leaves out."""
        return folds(self.y, self.groups, seed, _REPEATS)

    def held_out(self, method: str, layer: int | str, out: Tensor) -> Tensor:
        """Score every labelled row by fits on the folds that leave it out, `[N]`."""
        x, every = self.labelled.at(layer), self.every(layer)
        if method == "probe":  # all folds at once, in the space that the rows span
            mean, spread = every.mean(0), every.std(0, correction=0).clamp(min=1e-6)
            rows, sizes, _ = torch.linalg.svd((x - mean) / spread, full_matrices=False)
            within = (rows * sizes).expand(len(out), -1, -1)
            scores = ridge_logistic(within, self.y, ~out, linear.L2)(within)
            return out_of_fold(scores, out)
        total = torch.zeros(len(x))
        for left in out:
            found = METHODS[method](x[~left], self.y[~left], every)
            scores = found(every)
            total[left] += (found(x[left]) - scores.mean()) / scores.std().clamp(min=1e-6)
        return total


def candidates(layers: int) -> list[int | str]:
    """Return the layers that are worth trying: above the first quarter, and the head's input."""
    return [*range(layers // 4, layers), HEAD]


def choose_layer(
    known: Known, method: str, layers: Sequence[int | str], seed: int
) -> tuple[int | str, dict[str, float]]:
    """Choose the layer whose AUROC, averaged with its neighbours', is best; return all AUROCs.

    One layer's figure on few rows is mostly luck; neighbours share the signal but not the luck.
    """
    out = known.folds(seed)
    found = [auroc(known.held_out(method, layer, out), known.y) for layer in layers]
    smooth = [
        sum(found[max(0, i - 1) : i + 2]) / len(found[max(0, i - 1) : i + 2])
        for i in range(len(found))
    ]
    best = layers[max(range(len(smooth)), key=smooth.__getitem__)]
    return best, {str(layer): a for layer, a in zip(layers, found, strict=True)}
