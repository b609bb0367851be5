"""One state against the screen: the rows that can matter, scored exactly.

`upper` holds a bound of every row's score. A row is left alone only when its bound is below a score
that enough other rows are known to reach; -inf marks a row that takes no part.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from lmhead.head.screening.bounds import BLOCK, Float32, Float64, Ints
from lmhead.head.screening.ranking import Scored, settle

NOTHING = Scored(np.empty(0, np.int64), np.empty(0))


class Spread(NamedTuple):
    """How far below its bound a score can be: `rho r_i + epsilon n_i + extra`, for every row i."""

    residual: Float32  # [rows]
    norm: Float32  # [rows]
    rho: float
    epsilon: float
    extra: float


@dataclass(slots=True)
class Query:
    """One state h `[d]`, the bounds of all its scores and their maxima per block.

    `error` is what a float64 score may be off by, `reach` what no score or bound exceeds; where
    that does not fit into float32 (`fits`), all bounds are infinite.
    """

    kernels: ModuleType
    weight: Tensor  # [>= V, d]
    numbers: Any  # the same, as the kernels take it
    bias: Float64  # [V], or empty
    h: Float32
    error: float
    reach: float
    upper: Float32  # [rows]
    peaks: Float32  # [blocks]
    fits: bool
    spread: Spread
    rescored: int = 0

    def exclude(self, ids: Ints) -> None:
        """Take rows out of the screen."""
        self.upper[ids] = -np.inf
        blocks = np.unique(ids // BLOCK)
        self.peaks[blocks] = self.upper.reshape(-1, BLOCK)[blocks].max(1)

    def everything(self) -> Scored:
        """Give up the screen: score every row that takes part."""
        return self.reaching(-np.inf)

    def score(self, ids: Ints) -> Scored:
        """Score rows in float64."""
        if not len(ids):
            return NOTHING
        self.rescored += len(ids)
        return Scored(ids, self.kernels.scores(self.numbers, self.bias, ids, self.h))

    def reaching(self, low: float) -> Scored:
        """Score the rows whose bound is at least low."""
        return self.score(self.kernels.rows_between(self.upper, self.peaks, low, np.nan))

    def shortlist(self, k: int, place: int, margin: float) -> tuple[Scored, float]:
        """Score the rows with the k largest bounds and those that can compete with them.

        Every row whose bound reaches the number that is returned, or the score at `place` less
        the margin, is among them.
        """
        ids, z, cut = self.kernels.shortlist(
            self.numbers, self.bias, self.h, self.upper, self.peaks, k, place, margin
        )
        self.rescored += len(ids)
        return Scored(ids, z), cut

    def best(self, k: int) -> Scored:
        """Return the k best rows, best first, or all where fewer take part."""
        scored, _ = self.shortlist(k, k, 2 * self.error)
        return settle(scored, k, self.error, self.weight, self.h, self.bias)
