"""One state's logits, as far as they are known: the questions, and two ways to answer them."""

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch

from lmhead.head.answers import ranked
from lmhead.head.dense import LMHead
from lmhead.head.edits import Edit
from lmhead.head.screening.bounds import Float32, Float64, Ints
from lmhead.head.screening.known import Known
from lmhead.head.screening.moments import Moments
from lmhead.head.screening.nucleus import draw_cut
from lmhead.head.screening.query import NOTHING, Query
from lmhead.head.screening.ranking import Scored, Transform
from lmhead.head.screening.rejection import Drawn, draw, nucleus, pick


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

    def draw_cut(
        self,
        temperature: float,
        top_p: float | None,
        min_p: float | None,
        generator: torch.Generator | None,
        first: Float64 | None = None,
    ) -> Drawn:
        """Draw from what top_p and then min_p leave of it."""
        ...

    def deviation(self, moments: Callable[[int], Moments]) -> float:
        """Give the standard deviation of all finite logits."""
        ...

    def logprobs(self, ids: Ints, error: float) -> tuple[Float64, bool]:
        """Give log-probabilities of tokens `[n]` up to an error, and whether all rows were read."""
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

    def draw_cut(
        self,
        temperature: float,
        top_p: float | None,
        min_p: float | None,
        generator: torch.Generator | None,
        first: Float64 | None = None,
    ) -> Drawn:
        """Draw from what top_p and then min_p leave of it."""
        kept = nucleus(self.best(len(self.y)), temperature, top_p, min_p)
        return Drawn(int(kept.ids[pick(kept.z, temperature, generator)]))

    def deviation(self, moments: Callable[[int], Moments]) -> float:
        """Give the standard deviation of all finite logits."""
        return float(self.y[np.isfinite(self.y)].std())

    def logprobs(self, ids: Ints, error: float) -> tuple[Float64, bool]:
        """Give log-probabilities of tokens `[n]`, and that all rows were read."""
        best = self.y.max()
        return self.y[ids] - best - math.log(np.exp(self.y - best).sum()), True


class ScreenedRow(NamedTuple):
    """Bounds of all scores, and the logits of those tokens that an edit touched.

    `weights [rows]` and `sums [blocks]` are room to work in; `rows` take part, V of them.
    """

    query: Query
    touched: Scored
    transform: Transform
    weights: Float32
    sums: Float64
    rows: int

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

    def draw_cut(
        self,
        temperature: float,
        top_p: float | None,
        min_p: float | None,
        generator: torch.Generator | None,
        first: Float64 | None = None,
    ) -> Drawn:
        """Draw from what top_p and then min_p leave of it."""
        return draw_cut(
            self.query, self.touched, self.transform, temperature, top_p, min_p,
            self.weights, self.sums, generator, first,
        )  # fmt: skip

    def deviation(self, moments: Callable[[int], Moments]) -> float:
        """Give the standard deviation of all finite logits.

        A softcap bends every logit: then all of them are computed.
        """
        if self.transform.cap:
            y = self._logits(self.query.everything()).join(self.touched).z
            return float(y[np.isfinite(y)].std())
        factor = self.transform.factor
        total, squares = moments(self.rows).of(self.query.h)
        total, squares = total * factor, squares * factor**2
        count = self.rows - len(self.touched.ids)
        was = self.transform(self.query.score(self.touched.ids).z)
        now = self.touched.z[np.isfinite(self.touched.z)]
        count += len(now)
        total += float(now.sum() - was.sum())
        squares += float(np.square(now).sum() - np.square(was).sum())
        mean = total / count
        return math.sqrt(max(squares / count - mean * mean, 0.0))

    def logprobs(self, ids: Ints, error: float) -> tuple[Float64, bool]:
        """Give log-probabilities of tokens `[n]` up to an error, and whether all rows were read."""
        own = self._logits(self.query.score(ids)).z
        known = Known(self.query, self.touched, self.transform, 1.0)
        known.narrow(error)
        low, high = known.normaliser
        return own - known.best - (math.log(low) + math.log(high)) / 2, known.gave_up

    def _logits(self, scored: Scored) -> Scored:
        return Scored(scored.ids, self.transform(scored.z)) if len(scored.ids) else NOTHING


@torch.no_grad()
def dense_row(head: LMHead, h: Float32, edit: Edit | None, V: int) -> DenseRow:
    """Ask the dense head for all logits of a state `[d]`, and edit them."""
    y = head(torch.from_numpy(h))[:V].double()
    if edit is not None and len(edit.ids):
        y = y.index_copy(0, edit.ids, edit.apply(y[edit.ids]))
    return DenseRow(y.numpy())


@torch.no_grad()
def touch(query: Query, edit: Edit | None, transform: Transform) -> Scored:
    """Take the edited rows out of the screen, and give them with their new logits."""
    if edit is None or not len(edit.ids):
        return NOTHING
    rows = query.score(edit.ids.numpy())
    query.exclude(rows.ids)
    return Scored(rows.ids, edit.apply(torch.from_numpy(transform(rows.z))).numpy())
