"""One state against the screen: the rows that can matter, scored exactly.

`upper` holds a bound of every row's score. A row is left alone only when its bound is below a score
that enough other rows are known to reach; -inf marks a row that takes no part.
"""

from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch

from lmhead.head.bounds import BLOCK, Float32, Float64, Ints
from lmhead.head.ranking import Scored, largest, settle

_NONE = np.empty(0)
NOTHING = Scored(np.empty(0, np.int64), _NONE)


@dataclass
class Query:
    """One state h `[d]`, the bounds of all its scores and their maxima per block.

    `error` is what a float64 score may be off by, `reach` what no score or bound exceeds."""

    kernels: ModuleType
    weight: torch.Tensor  # [V, d]
    bias: Float64 | None  # [V]
    h: Float32
    error: float
    reach: float
    upper: Float32  # [rows]
    peaks: Float32  # [blocks]
    rescored: int = 0

    def exclude(self, ids: Ints) -> None:
        """Take rows out of the screen."""
        self.upper[ids] = -np.inf
        blocks = np.unique(ids // BLOCK)
        self.peaks[blocks] = self.upper.reshape(-1, BLOCK)[blocks].max(1)

    def limit(self, V: int) -> None:
        """Take out every row from V on."""
        self.upper[V:] = -np.inf
        self.peaks[V // BLOCK :] = -np.inf
        if V % BLOCK:
            self.peaks[V // BLOCK] = self.upper[V // BLOCK * BLOCK : V].max()

    def everything(self) -> Scored:
        """Give up the screen: score every row that takes part."""
        return self.reaching(-np.inf)

    def score(self, ids: Ints) -> Scored:
        """Score rows in float64."""
        if not len(ids):
            return NOTHING
        self.rescored += len(ids)
        z = self.kernels.scores(self.weight, ids, self.h)
        return Scored(ids, z if self.bias is None else z + self.bias[ids])

    def first(self, k: int) -> tuple[Scored, float]:
        """Score at least k rows, those with the largest bounds, and give the bound they reach.

        Fewer only where fewer take part; every row with a bound that large is among them.
        """
        if k <= len(self.peaks) // 2:
            cut = largest(self.peaks, k)  # k blocks have a row that large
        else:
            cut = largest(self.upper, min(k, len(self.upper)))
        return self.score(self.kernels.rows_between(self.upper, self.peaks, cut, np.nan)), cut

    def reaching(self, low: float, below: float = np.nan) -> Scored:
        """Score the rows whose bound is at least low, but below what was scored before."""
        if low >= below:
            return NOTHING
        return self.score(self.kernels.rows_between(self.upper, self.peaks, low, below))

    def best(self, k: int) -> Scored:
        """Return the k best rows, best first, or all where fewer take part."""
        bias = _NONE if self.bias is None else self.bias
        scored = Scored(
            *self.kernels.shortlist(
                self.weight, bias, self.h, self.upper, self.peaks, k, self.error
            )
        )
        self.rescored += len(scored.ids)
        return settle(scored, k, self.error, self.weight, self.h, self.bias)
