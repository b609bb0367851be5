"""ScreenedHead: the head's answers from a quarter of its bytes.

At one token the head is bound by memory: it reads V x d weights to name one token. This engine
reads an int8 copy instead. It knows for every row how wrong that can be, and scores exactly the
few rows that could still matter. The answer is exact, not approximate: the
order of the float64 scores, equal ones in the order of their ids. `screening/` has the parts.

Symbols: h hidden state `[..., d]`, W weight `[V, d]`, z scores, y logits, V vocabulary rows.
"""

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lmhead.head.answers import (
    Generators,
    TopK,
    check_draw,
    check_error,
    check_k,
    each,
)
from lmhead.head.base import GREEDY_BELOW, Head, check_ids, joined
from lmhead.head.dense import LMHead
from lmhead.head.edits import Edit, Edits, check_edit
from lmhead.head.screening.bounds import Float32, Ints, Screen, build_screen
from lmhead.head.screening.checks import check_copy, check_head, check_rows
from lmhead.head.screening.entering import Entering, array_of, own_ids
from lmhead.head.screening.file import load_screen, save_first, screen_paths
from lmhead.head.screening.loops import Kernels, loops, survive_forks
from lmhead.head.screening.ranking import Scored, Transform
from lmhead.head.screening.rejection import Chances, nucleus, pick
from lmhead.head.screening.rows import Row, ScreenedRow, dense_row, touch
from lmhead.head.screening.scanner import TOGETHER, Scanner
from lmhead.head.screening.stats import Stats
from lmhead.head.screening.weights import Weights
from lmhead.progress import Progress, silent

Logits = TypeVar("Logits", np.float32, np.float64)


class ScreenedHead(Head):
    """The answers of a dense head, from an int8 copy and a few exact rows.

    `dense` stays in use: its weight is read when a row is scored exactly. `kernels` is numba's
    compiled loops if numba is available, otherwise torch; `path` is the file that the copy is
    mapped from, if any.
    """

    def __init__(
        self,
        dense: LMHead,
        screen: Screen,
        kernels: Kernels = "auto",
        path: Path | None = None,
    ) -> None:
        check_head(dense)
        check_copy(screen, dense)
        self.dense = dense
        self.screen = screen
        self.path = path
        self.stats = Stats()
        self._run_on(loops(kernels))
        factor = 1.0 if dense.scale is None else dense.scale.factor
        self._transform = Transform(factor, dense.softcap or 0.0)
        self._states = Entering(dense)
        self._V = dense.vocab_size
        self._bare = factor == 1 and not dense.softcap  # a logit is the score itself
        self._made_of = Weights(dense)
        self._chances = Chances()
        survive_forks(self)

    @classmethod
    def from_head(
        cls,
        head: LMHead,
        folder: Path | None = None,
        *,
        save: bool = False,
        rebuild: bool = False,
        kernels: Kernels = "auto",
        progress: Progress = silent,
    ) -> "ScreenedHead":
        """Map the head's int8 copy if there is one, otherwise make it.

        The copy is looked for in `folder` (the model's) and in the cache. `save` stores a new one
        in the folder, or in the cache if the folder is not writable; `rebuild` makes it again.
        """
        check_head(head)
        paths = screen_paths(folder, head.sha256) if save or folder is not None else []
        for path in [] if rebuild else paths:
            if (screen := load_screen(path, head.sha256)) is not None:
                check_rows(screen, head, path)
                return cls(head, screen, kernels, path)
        screen = build_screen(head.weight.detach(), head.vocab_size, progress)
        if not save:
            return cls(head, screen, kernels)
        path = save_first(screen, paths, head.sha256)
        mapped = load_screen(path, head.sha256)  # from now on in the page cache, shared by all
        return cls(head, mapped or screen, kernels, path)

    def _run_on(self, kernels: ModuleType) -> None:
        self.kernels = kernels
        self._compiled = hasattr(kernels, "best")
        self._scanner = Scanner(kernels, self.screen, self.dense)
        self._lock = threading.Lock()  # one scanner, and numba's threads serve one caller at a time

    def _go_portable(self) -> None:
        """Leave the compiled loops: their threads are not in a forked child."""
        if self._compiled:
            self._run_on(loops("torch"))

    @property
    def vocab_size(self) -> int:
        """V, the number of logits."""
        return self.dense.vocab_size

    @property
    def hidden_size(self) -> int:
        """d, the width of what enters the projection."""
        return self.dense.hidden_size

    @property
    def compiled(self) -> bool:
        """Whether numba's compiled loops are used."""
        return self._compiled

    @property
    def sha256(self) -> str:
        """What the projection is: that of the dense head."""
        return self.dense.sha256

    def __call__(self, h: Tensor, *, from_block: bool = False) -> Tensor:
        """Score every token, with the dense head, since this needs all the weights."""
        return self.dense(h, from_block=from_block)  # type: ignore[no-any-return]

    def topk(
        self,
        h: Tensor,
        k: int,
        *,
        from_block: bool = False,
        edits: Edits = None,
        limit: int | None = None,
    ) -> TopK:
        """Return the k best tokens, ids and logits `[..., k]` each, best first.

        The logits are the exact ones, rounded to float32. `edits`, one for all states or one for
        each, change logits first; `limit` leaves out the rows from there on.
        """
        V = self._limit(limit)
        check_k(k, V)
        states = self._states(h, from_block)
        with self._lock:
            ids, y = self._best(states, k, edits, V, np.float32)
        top = TopK(torch.from_numpy(ids), torch.from_numpy(y))
        shape = states.shape[:-1]
        if len(shape) == 1:
            return top
        return TopK(top.ids.view(*shape, k), top.logits.view(*shape, k))

    def sample(
        self,
        h: Tensor,
        temperature: float = 1.0,
        top_k: int | None = None,
        *,
        generator: Generators = None,
        from_block: bool = False,
        top_p: float | None = None,
        min_p: float | None = None,
        top_n_sigma: float | None = None,
        edits: Edits = None,
        limit: int | None = None,
    ) -> Tensor:
        """Draw the next token: ids `[...]`.

        Edits first, then temperature (0 is greedy), top_n_sigma, top_k, top_p, min_p. One generator
        for all states, or one for each. Every distribution is the exact one; if the screen cannot
        decide on a token after scoring one row in four, all rows are scored and a fall-back is
        counted.
        """
        V = self._limit(limit)
        check_draw(temperature, top_k, top_p, min_p, top_n_sigma, V)
        top_p = None if top_p == 1 else top_p
        if temperature < GREEDY_BELOW:
            return self.topk(h, 1, from_block=from_block, edits=edits, limit=limit).ids[..., 0]
        states = self._states(h, from_block)
        shape = states.shape[:-1]
        generators = each(generator, math.prod(shape), "generators")
        if top_k is None and top_p is None and not min_p and not top_n_sigma:
            with self._lock:
                ids = self._draw(states, temperature, generators, edits, V)
            return torch.from_numpy(ids if len(shape) == 1 else ids.reshape(shape))
        drawn = np.empty(len(generators), np.int64)

        def choose(n: int, kept: Scored) -> None:
            kept = nucleus(kept, temperature, top_p, min_p)
            drawn[n] = kept.ids[pick(kept.z, temperature, generators[n])]

        with self._lock:
            if top_k is not None and not top_n_sigma:
                best = self._best(states, top_k, edits, V, np.float64)
                for n, (ids, y) in enumerate(zip(*best, strict=True)):
                    choose(n, Scored(ids, y))
            elif top_n_sigma:
                for n, row in enumerate(self._rows(array_of(states), edits, V)):
                    near = row.near(top_n_sigma * row.deviation(self._scanner.moments)).ordered()
                    choose(n, Scored(near.ids[:top_k], near.z[:top_k]))
            else:
                first = self._chances.draw(generators)  # [B, pairs, 2]
                for n, row in enumerate(self._rows(array_of(states), edits, V)):
                    one = row.draw_cut(temperature, top_p, min_p, generators[n], first[n])
                    drawn[n] = one.id
                    self.stats.count(one)
        return torch.from_numpy(drawn).view(shape)

    def candidates(
        self,
        h: Tensor,
        k: int,
        touched: Sequence[Tensor] | None = None,
        *,
        limit: int | None = None,
        from_block: bool = False,
    ) -> TopK:
        """Return the touched ids of each state and the k best of the others, with plain logits.

        Whatever is then done to the logits of the touched ids, the k best of all are among these.
        States with fewer are filled up with the id `limit` (or V) and the logit -inf.
        """
        V = self._limit(limit)
        k = min(k, V)
        if touched is None:
            return self.topk(h, k, limit=limit, from_block=from_block)
        check_k(k, V)
        states = self._states(h, from_block)
        plain = [Edit(check_ids(ids, V), _unchanged) for ids in touched]
        with self._lock:
            rows = [row.candidates(k) for row in self._rows(array_of(states), plain, V)]
        found = [TopK(torch.from_numpy(one.ids), torch.from_numpy(one.z).float()) for one in rows]
        return joined(found, V, states)

    @contextmanager
    def rows(self, h: Tensor, touched: Sequence[Tensor] | None = None) -> Iterator[Iterator[Row]]:
        """Give each state as a row to ask, and keep others waiting; touched ids are left out."""
        V, given = self._V, touched
        plain = None if given is None else [Edit(check_ids(ids, V), _unchanged) for ids in given]
        with self._lock:
            yield self._rows(array_of(self._states(h)), plain, V)

    def score(self, h: Tensor, ids: Tensor, *, from_block: bool = False) -> Tensor:
        """Score just these tokens, logits `[..., n]`, in float64 and rounded once to float32.

        These are the numbers that `topk` gives. `ids` are `[n]`, the same for every state, or
        `[..., n]`, different ones for each.
        """
        states = self._states(h, from_block)
        own, shape = own_ids(ids, states, self._V)
        z = np.empty(own.shape)
        scanner = self._scanner
        with self._lock:
            self._made_of.check()
            for n, state in enumerate(array_of(states)):
                if own.shape[1]:
                    z[n] = self.kernels.scores(scanner.numbers, scanner.bias, own[n], state)
        return torch.from_numpy(self._transform(z)).float().view(shape)

    def logprobs(
        self,
        h: Tensor,
        ids: Tensor,
        *,
        error: float = 0.0,
        limit: int | None = None,
        from_block: bool = False,
    ) -> Tensor:
        """Give the log-probabilities `[..., n]` of tokens, each off by at most `error`, proven.

        With 0 the dense head answers.
        """
        check_error(error)
        if not error:
            return super().logprobs(h, ids, limit=limit, from_block=from_block)
        V = self._limit(limit)
        states = self._states(h, from_block)
        own, shape = own_ids(ids, states, V)
        logprobs = np.empty(own.shape)
        with self._lock:
            for n, row in enumerate(self._rows(array_of(states), None, V)):
                logprobs[n], fallback = row.logprobs(own[n], error)
                if fallback:
                    self.stats.fallbacks["logprobs"] += 1
        return torch.from_numpy(logprobs).float().view(shape)

    def loss(
        self, h: Tensor, targets: Tensor, *, from_block: bool = False, **options: Any
    ) -> Tensor:
        """Give the cross-entropy of `targets [...]`, with gradients: the dense head's."""
        return self.dense.loss(h, targets, from_block=from_block, **options)

    def _best(
        self, states: Tensor, k: int, edits: Edits, V: int, dtype: type[Logits]
    ) -> tuple[Ints, npt.NDArray[Logits]]:
        """Give the k best tokens of states, ids and logits `[B, k]`; under the lock."""
        shape = math.prod(states.shape[:-1]), k
        ids = np.empty(shape, np.int64)
        y = np.empty(shape, dtype if self._bare else np.float64)
        if edits is None and self._compiled:
            self._made_of.check()
            counts = self._scanner.best(states.data_ptr(), k, V, ids, y)
            self.stats.add(shape[0], counts)
            if not self._bare:
                y = self._transform(y)
            if not counts.unsettled and y.dtype == dtype:
                return ids, y
            left = np.flatnonzero(ids[:, 0] < 0)
        else:
            left = np.arange(shape[0])
        with np.errstate(over="ignore"):  # what float32 cannot hold is infinite
            for n, row in zip(left, self._rows(array_of(states)[left], edits, V), strict=True):
                ids[n], y[n] = row.best(k)
            return ids, y.astype(dtype, copy=False)

    def _draw(
        self,
        states: Tensor,
        temperature: float,
        generators: Sequence[torch.Generator | None],
        edits: Edits,
        V: int,
    ) -> Ints:
        """Draw one token for each of some states, `[B]`; under the lock."""
        ids = np.empty(len(generators), np.int64)
        first = self._chances.draw(generators)  # [B, pairs, 2]
        if edits is None and self._compiled:
            self._made_of.check()
            counts = self._scanner.draw(
                states.data_ptr(), self._transform, temperature, first, V, ids
            )
            self.stats.add(len(ids), counts)
            self.stats.draws += len(ids) - counts.unsettled
            left = np.flatnonzero(ids < 0).tolist() if counts.unsettled else []
        else:
            left = list(range(len(ids)))
        if left:
            rows = self._rows(array_of(states)[left], edits, V)
            for n, row in zip(left, rows, strict=True):
                one = row.draw(temperature, generators[n], first[n])
                ids[n] = one.id
                self.stats.count(one)
        return ids

    def _rows(self, states: Float32, edits: Edits, V: int) -> Iterator[Row]:
        """Give every state `[B, d]` as a row to ask; call it under the lock."""
        self._made_of.check()
        changes = each(edits, len(states), "edits")
        for edit in changes if edits is not None else ():
            check_edit(edit, V)
        self.stats.states += len(states)
        for first in range(0, len(states), TOGETHER):
            part = states[first : first + TOGETHER]
            queries = self._scanner.read(part, V)
            for h, edit, query in zip(part, changes[first:], queries, strict=False):
                if query is None:
                    self.stats.fallbacks["not finite"] += 1
                    yield dense_row(self.dense, h, edit, V)
                    continue
                if not query.fits:
                    self.stats.fallbacks["range"] += 1
                touched = touch(query, edit, self._transform)
                scanner = self._scanner
                yield ScreenedRow(query, touched, self._transform, scanner.weights, scanner.sums, V)
                self.stats.rescored += query.rescored

    def __repr__(self) -> str:
        share = self.screen.nbytes / (self.vocab_size * self.hidden_size * 4)
        loops = "numba" if self.compiled else "torch"
        return f"ScreenedHead({self.dense!r}, copy={share:.1%} of float32, loops={loops})"


def _unchanged(z: Tensor) -> Tensor:
    return z
