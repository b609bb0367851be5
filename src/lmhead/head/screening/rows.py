"""One state's logits, as far as they are known: three questions, two ways to answer them."""

from typing import NamedTuple, Protocol

import numpy as np
import torch

from lmhead.head.answers import ranked
from lmhead.head.screening.bounds import Float32, Float64
from lmhead.head.screening.query import NOTHING, Query
from lmhead.head.screening.ranking import Scored, Transform
from lmhead.head.screening.rejection import Drawn, draw, pick


class Row(Protocol):
    """One state. `Scored.z` holds logits here: scaled, softcapped and edited."""

    def best(self, k: int) -> Scored:
        """Return the k best tokens, best first."""
        ...

    def near(self, margin: float) -> Scored:
        """Return the tokens whose logit is at most margin below the largest."""
        ...

    def candidates(self, k: int) -> Scored:
        """Return the edited tokens and the k best of the others."""
        ...

    def draw(
        self, temperature: float, generator: torch.Generator | None, first: Float64 | None = None
    ) -> Drawn:
        """Draw from the softmax of all logits; `first` are chances to begin with."""
        ...


class DenseRow(NamedTuple):
    """All logits y `[V]`."""

    y: Float64

    def best(self, k: int) -> Scored:
        """Return the k best tokens, best first."""
        top = ranked(torch.from_numpy(self.y), k)
        return Scored(top.ids.numpy(), top.logits.numpy())

    def near(self, margin: float) -> Scored:
        """Return the tokens whose logit is at most margin below the largest."""
        ids = np.flatnonzero(self.y >= self.y.max() - margin)
        return Scored(ids, self.y[ids])

    def candidates(self, k: int) -> Scored:
        """Return every token: among them are the edited ones."""
        return Scored(np.arange(len(self.y)), self.y)

    def draw(
        self, temperature: float, generator: torch.Generator | None, first: Float64 | None = None
    ) -> Drawn:
        """Draw from the softmax of all logits."""
        return Drawn(pick(self.y, temperature, generator))


class ScreenedRow(NamedTuple):
    """Bounds of all scores, and the logits of those tokens that an edit touched.

    `weights [rows]` and `sums [blocks]` are room to work in.
    """

    query: Query
    touched: Scored
    transform: Transform
    weights: Float32
    sums: Float64

    def best(self, k: int) -> Scored:
        """Return the k best tokens, best first."""
        best = self.candidates(k)
        if len(self.touched.ids):
            ids, z = best.ordered()
            best = Scored(ids[:k], z[:k])
        return best

    def near(self, margin: float) -> Scored:
        """Return the tokens whose logit is at most margin below the largest."""
        low = self.best(1).z[0] - margin
        least = self.transform.score_below(low) - 2 * self.query.error
        near = self._logits(self.query.reaching(least)).join(self.touched)
        kept = near.z >= low
        return Scored(near.ids[kept], near.z[kept])

    def candidates(self, k: int) -> Scored:
        """Return the edited tokens and the k best of the others."""
        return self._logits(self.query.best(k)).join(self.touched)

    def draw(
        self, temperature: float, generator: torch.Generator | None, first: Float64 | None = None
    ) -> Drawn:
        """Draw from the softmax of all logits; `first` are chances to begin with."""
        return draw(
            self.query, self.touched, self.transform, temperature,
            self.weights, self.sums, generator, first,
        )  # fmt: skip

    def _logits(self, scored: Scored) -> Scored:
        return Scored(scored.ids, self.transform(scored.z)) if len(scored.ids) else NOTHING
