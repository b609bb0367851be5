"""One pass over the int8 copy for some states, and the buffers it works in."""

import math
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from lmhead.head.dense import LMHead
from lmhead.head.screening.bounds import (
    BLOCK,
    LARGEST,
    SLACK,
    TINY,
    Buffers,
    Float32,
    Float64,
    Ints,
    Screen,
    base_of,
    extremes,
    largest_step,
)
from lmhead.head.screening.moments import Moments
from lmhead.head.screening.query import Query, Spread
from lmhead.head.screening.ranking import Transform
from lmhead.head.screening.rejection import SCORED_FIRST

TOGETHER = 16
"""States per pass over the copy."""
_TWICE = 2 * (1 + 2.0**-18)  # with room for the rounding of what it multiplies


class Counts(NamedTuple):
    """How many rows were scored and proposed, and how many states are not settled."""

    rescored: int
    proposed: int
    unsettled: int


class Scanner:
    """The arrays that the kernels take: the copy, the exact weight, and buffers to work in.

    Not for two threads at once.
    """

    def __init__(self, kernels: ModuleType, screen: Screen, head: LMHead) -> None:
        bias: Float64 | None = None
        if head.bias is not None:
            bias = head.bias.detach()[: head.vocab_size].double().numpy()
        self.kernels = kernels
        self.weight = head.weight.detach()  # [>= V, d]
        self.numbers = kernels.numbers(self.weight)
        self.bias = np.empty(0) if bias is None else bias  # [V]
        self._V = screen.vocab_size
        self._d = screen.hidden_size
        self._stride = 4 * self._d  # bytes from one state to the next
        self._copy: tuple[Any, ...] = (
            *(t.numpy() for t in (screen.q, screen.scale, screen.residual, screen.norm)),
            base_of(bias, len(screen.scale)),
        )
        self._most = extremes(screen, bias)
        self._cap = largest_step(screen.q.shape[1])
        self._views: dict[int, tuple[Float32, Buffers]] = {}  # views of the largest one
        self._moments: dict[int, Moments] = {}
        rows = len(screen.scale)
        self.weights = np.empty(rows, np.float32)  # for a draw
        self.sums = np.empty(rows // BLOCK, np.float64)

    def read(self, h: Float32, V: int) -> list[Query | None]:
        """Read the copy once for states h `[B, d]`, B <= TOGETHER: one query for each.

        Rows from V on take no part. None for a state that is not finite.
        """
        _, buffers = self._buffers(len(h))
        self.kernels.read(self._copy, self._most, h, self._cap, V, buffers)
        return [self._query(h[n], n, V, buffers) for n in range(len(h))]

    def best(self, address: int, k: int, V: int, ids: Ints, z: Float32 | Float64) -> Counts:
        """Read the copy once for the states at an address and rank their best rows of the first V.

        Fills ids and z `[B, k]`. Compiled loops only: what they cannot settle has the first id -1.
        """
        if len(ids) > TOGETHER:
            return _sum(
                self.best(address + at * self._stride, k, V, ids[part], z[part])
                for at, part in _parts(len(ids))
            )
        h, buffers = self._buffers(len(ids))
        return Counts(
            *self.kernels.best(
                self._copy, self._most, address, h, self._cap, V, buffers,
                self.numbers, self.bias, k, ids, z,
            )
        )  # fmt: skip

    def draw(
        self,
        address: int,
        transform: Transform,
        temperature: float,
        chances: Float64,
        V: int,
        ids: Ints,
    ) -> Counts:
        """Read the copy once for the states at an address and draw one of the first V rows each.

        Fills ids `[B]`. Compiled loops only: what they cannot settle is -1.
        """
        if len(ids) > TOGETHER:
            return _sum(
                self.draw(
                    address + at * self._stride, transform, temperature, chances[part], V, ids[part]
                )
                for at, part in _parts(len(ids))
            )
        h, buffers = self._buffers(len(ids))
        return Counts(
            *self.kernels.draw(
                self._copy, self._most, address, h, self._cap, V, buffers,
                self.numbers, self.bias, SCORED_FIRST, transform, temperature,
                chances, self.weights, self.sums, ids,
            )
        )  # fmt: skip

    def moments(self, V: int) -> Moments:
        """Give the sums over the first V rows that mean and deviation of all scores need."""
        if V not in self._moments:
            self._moments = {V: Moments(self.weight, self.bias, V)}
        return self._moments[V]

    def _query(self, h: Float32, n: int, V: int, buffers: Buffers) -> Query | None:
        error, reach = buffers.limits[n].tolist()
        if not math.isfinite(reach) and not np.isfinite(h).all():
            return None
        upper, peaks = buffers.upper[n], buffers.peaks[n]
        fits = reach < LARGEST
        if not fits:
            upper[:V] = peaks[: -(-V // BLOCK)] = np.inf
        return Query(
            self.kernels, self.weight, self.numbers, self.bias,
            h, error, reach, upper, peaks, fits, self._spread(buffers.factors[n]),
        )  # fmt: skip

    def _spread(self, factors: Float32) -> Spread:
        """Say how wide the interval of a score is: twice the bound, and what rounding adds."""
        _, rho, epsilon = factors.tolist()
        extra = 4 * SLACK * float(self._most[2]) + 4 * TINY
        return Spread(self._copy[2], self._copy[3], _TWICE * rho, _TWICE * epsilon, extra)

    def _buffers(self, states: int) -> tuple[Float32, Buffers]:
        """Give buffers for states `[B, d]`, and for what is found of them."""
        if states not in self._views:
            largest = max(self._views, default=0)
            if states < largest:
                h, buffers = self._views[largest]
                self._views[states] = h[:states], buffers.first(states)
            else:
                rows, columns = self._copy[0].shape
                buffers = Buffers(
                    np.zeros((states, columns), np.int16),
                    np.empty((states, 3), np.float32),
                    np.empty((states, 2)),
                    np.empty((states, rows), np.float32),
                    np.empty((states, rows // BLOCK), np.float32),
                    np.full(states, np.inf, np.float32),
                )
                self._views = {states: (np.empty((states, self._d), np.float32), buffers)}
        return self._views[states]


def _parts(states: int) -> Iterator[tuple[int, slice]]:
    """Part many states into those that are read together."""
    for first in range(0, states, TOGETHER):
        yield first, slice(first, first + TOGETHER)


def _sum(counts: Iterable[Counts]) -> Counts:
    return Counts(*map(sum, zip(*counts, strict=True)))
