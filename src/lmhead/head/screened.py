"""ScreenedHead: the head's answers from a quarter of its bytes.

At one token the head is bound by memory: it reads V x d weights to name one token. This engine
reads an int8 copy instead. It knows for every row how wrong that can be (`bounds.py`), and scores
exactly the few rows that could still matter (`query.py`). The answer is not nearly the right one,
it is the right one: the order of the float64 scores, equal ones in the order of their ids
(`ranking.py`).

Symbols: h hidden state `[..., d]`, W weight `[V, d]`, z scores, y logits, V vocabulary rows.
"""

import math
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from lmhead.errors import BadInput, LMHeadError, MissingExtra, UnsupportedModel
from lmhead.head.base import TopK, check_k, check_temperature
from lmhead.head.bounds import (
    BLOCK,
    LARGEST,
    Float32,
    Float64,
    Screen,
    base_of,
    bound_states,
    build_screen,
    extremes,
)
from lmhead.head.dense import LMHead
from lmhead.head.edits import Edit
from lmhead.head.query import NOTHING, Query
from lmhead.head.ranking import Scored, Transform
from lmhead.head.rejection import Drawn, pick
from lmhead.head.rows import DenseRow, Row, ScreenedRow
from lmhead.head.screen_file import load_screen, save_screen, screen_paths
from lmhead.progress import Progress, silent

TOGETHER = 16  # states per pass over the copy
_GREEDY_BELOW = torch.finfo(torch.float32).tiny

Edits = Edit | Sequence[Edit | None] | None
Generators = torch.Generator | Sequence[torch.Generator] | None
Kernels = Literal["auto", "numba", "torch"]
T = TypeVar("T", Edit, torch.Generator)


@dataclass
class Stats:
    """What a screened head did since it was made, or since `clear`.

    - states: how many were asked about; rescored: rows scored exactly for them
    - draws, proposals: full-softmax draws, and rows proposed for them
    - fallbacks: how often the dense head answered instead, and why
    """

    states: int = 0
    rescored: int = 0
    draws: int = 0
    proposals: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)

    def count(self, drawn: Drawn) -> None:
        """Count one full-softmax draw."""
        self.draws += 1
        self.proposals += drawn.proposals
        if drawn.fallback:
            self.fallbacks[drawn.fallback] += 1

    def clear(self) -> None:
        """Begin again at 0."""
        self.states = self.rescored = self.draws = self.proposals = 0
        self.fallbacks.clear()


@dataclass(frozen=True)
class _Scratch:
    upper: Float32  # [B, rows]; rows beyond V stay -inf
    peaks: Float32  # [B, blocks]
    weights: Float32  # [rows]
    sums: Float64  # [blocks]


class ScreenedHead:
    """The answers of a dense head, from an int8 copy and a few exact rows.

    `dense` stays in use: its weight is read where a row is scored exactly. `kernels` is numba's
    compiled loops where the extra `fast` is installed, else torch; `path` is the file that the copy
    is mapped from, if it is.
    """

    def __init__(
        self,
        dense: LMHead,
        screen: Screen,
        kernels: Kernels = "auto",
        path: Path | None = None,
    ) -> None:
        _check(dense)
        if (screen.vocab_size, screen.hidden_size) != (dense.vocab_size, dense.hidden_size):
            raise BadInput(
                f"the int8 copy is of {screen.vocab_size} x {screen.hidden_size}, the head has "
                f"{dense.vocab_size} x {dense.hidden_size}; expected the head's own copy"
            )
        self.dense = dense
        self.screen = screen
        self.path = path
        self.kernels = _kernels(kernels)
        self.stats = Stats()
        bias = None if dense.bias is None else dense.bias.detach()[: dense.vocab_size]
        self._bias: Float64 | None = None if bias is None else bias.double().numpy()
        self._base = base_of(self._bias, len(screen.scale))
        self._most = extremes(screen, self._bias)
        factor = 1.0 if dense.scale is None else dense.scale.factor
        self._transform = Transform(factor, dense.softcap or 0.0)
        self._made_of = _identity(dense)
        self._scratch: _Scratch | None = None
        self._lock = threading.Lock()  # one scratch, and numba's threads serve one caller at a time

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
        """Map the head's int8 copy where there is one, else make it.

        The copy is looked for in `folder` (the model's) and in the cache. `save` keeps a new one in
        the folder, or in the cache where the folder cannot be written; `rebuild` makes it anew.
        """
        _check(head)
        paths = screen_paths(folder, head.sha256) if save or folder is not None else []
        for path in [] if rebuild else paths:
            if (screen := load_screen(path, head.sha256)) is not None:
                return cls(head, screen, kernels, path)
        screen = build_screen(head.weight.detach(), head.vocab_size, progress)
        if not save:
            return cls(head, screen, kernels)
        path = _save(screen, paths, head.sha256)
        mapped = load_screen(path, head.sha256)  # from now on in the page cache, shared by all
        return cls(head, mapped or screen, kernels, path)

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
        """Whether numba's loops are at work."""
        return self.kernels.__name__.endswith(".kernels")

    @property
    def sha256(self) -> str:
        """What the projection is: that of the dense head."""
        return self.dense.sha256

    def __call__(self, h: Tensor, normed: bool = False) -> Tensor:
        """Score every token: the dense head does, for it takes all the weights."""
        return self.dense(h, normed=normed)  # type: ignore[no-any-return]

    @torch.no_grad()
    def topk(
        self,
        h: Tensor,
        k: int,
        normed: bool = False,
        *,
        edits: Edits = None,
        limit: int | None = None,
    ) -> TopK:
        """Return the k best tokens, ids and logits `[..., k]` each, best first.

        The logits are the exact ones, rounded to float32. `edits`, one for all states or one for
        each, change logits first; `limit` leaves out the rows from there on.
        """
        V = self._limit(limit)
        check_k(k, V)
        states, shape = self._states(h, normed)
        ids = np.empty((len(states), k), np.int64)
        y = np.empty((len(states), k))
        with self._lock:
            for n, row in enumerate(self._rows(states, edits, V)):
                ids[n], y[n] = row.best(k)
        return TopK(
            torch.from_numpy(ids).view(*shape, k), torch.from_numpy(y).float().view(*shape, k)
        )

    @torch.no_grad()
    def sample(
        self,
        h: Tensor,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: Generators = None,
        normed: bool = False,
        *,
        top_p: float | None = None,
        min_p: float | None = None,
        edits: Edits = None,
        limit: int | None = None,
    ) -> Tensor:
        """Draw the next token: ids `[...]`.

        Edits first, then temperature (0 is greedy), top_k, top_p, min_p. One generator for all
        states, or one for each. top_p over the whole vocabulary (without top_k) takes the dense
        head, and is counted as a fall-back.
        """
        check_temperature(temperature)
        _check_share("top_p", top_p)
        _check_share("min_p", min_p)
        if temperature < _GREEDY_BELOW:
            return self.topk(h, 1, normed, edits=edits, limit=limit).ids[..., 0]
        V = self._limit(limit)
        if top_k is not None:
            check_k(top_k, V)
        states, shape = self._states(h, normed)
        generators = _each(generator, len(states), "generators")
        ids = np.empty(len(states), np.int64)
        whole = top_k is None and top_p is not None
        with self._lock:
            for n, row in enumerate(self._rows(states, edits, V, dense=whole)):
                if top_k is None and top_p is None and min_p is None:
                    drawn = row.draw(temperature, generators[n])
                    ids[n] = drawn.id
                    self.stats.count(drawn)
                    continue
                if top_k is not None or top_p is not None:
                    kept = row.best(top_k or V)
                else:
                    kept = row.near(temperature * -math.log(min_p) if min_p else math.inf)
                kept = _nucleus(kept, temperature, top_p, min_p)
                ids[n] = kept.ids[pick(kept.z, temperature, generators[n])]
        return torch.from_numpy(ids).view(shape)

    @torch.no_grad()
    def candidates(
        self,
        h: Tensor,
        k: int,
        touched: Sequence[Tensor] | None = None,
        normed: bool = False,
        *,
        limit: int | None = None,
    ) -> TopK:
        """Return the touched ids of each state and the k best of the others, with plain logits.

        Whatever is then done to the logits of the touched ids, the k best of all are among these.
        States with fewer are filled up with the id `limit` (or V) and the logit -inf.
        """
        V = self._limit(limit)
        k = min(k, V)
        check_k(k, V)
        states, shape = self._states(h, normed)
        plain = None if touched is None else [Edit(ids, _unchanged) for ids in touched]
        with self._lock:
            found = [row.candidates(k) for row in self._rows(states, plain, V)]
        widest = max((len(scored.ids) for scored in found), default=0)
        ids = torch.full((len(found), widest), V, dtype=torch.int64)
        y = torch.full((len(found), widest), -torch.inf)
        for n, scored in enumerate(found):
            ids[n, : len(scored.ids)] = torch.from_numpy(scored.ids)
            y[n, : len(scored.ids)] = torch.from_numpy(scored.z)
        return TopK(ids.view(*shape, widest), y.view(*shape, widest))

    def _rows(self, states: Tensor, edits: Edits, V: int, dense: bool = False) -> Iterator[Row]:
        """Give every state `[B, d]` as a row to ask; call it under the lock."""
        if _identity(self.dense) != self._made_of:
            raise LMHeadError(
                "the head's weights changed after its int8 copy was made; "
                "make it again with ScreenedHead.from_head"
            )
        each = _each(edits, len(states), "edits")
        for edit in each:
            _check_ids(edit, V)
        self.stats.states += len(states)
        for first in range(0, len(states), TOGETHER):
            part = states[first : first + TOGETHER]
            queries = [None] * len(part) if dense else self._screened(part)
            for h, edit, query in zip(part, each[first:], queries, strict=False):
                if query is None:
                    self.stats.fallbacks["top_p" if dense else "not finite"] += 1
                    yield self._dense_row(h, edit, V)
                    continue
                if self.vocab_size > V:
                    query.limit(V)
                touched = self._touch(query, edit)
                room = self._room(1)
                yield ScreenedRow(query, touched, self._transform, room.weights, room.sums)
                self.stats.rescored += query.rescored

    def _screened(self, states: Tensor) -> Iterator[Query | None]:
        """Scan the copy once for states `[B, d]`; None for one that is not finite."""
        h = states.float().numpy()
        state = bound_states(h, self.kernels.quantise(h, self.screen.q.shape[1]), self._most)
        room = self._room(len(h))
        upper, peaks = room.upper[: len(h)], room.peaks[: len(h)]
        fits = state.reach < LARGEST
        if fits.any():
            self.kernels.scan(self.screen, self._base, state, upper, peaks)
        for n in range(len(h)):
            if not math.isfinite(state.rho[n]) and not np.isfinite(h[n]).all():
                yield None
                continue
            query = Query(
                self.kernels, self.dense.weight.detach(), self._bias, h[n],
                float(state.error[n]), float(state.reach[n]), upper[n], peaks[n],
            )  # fmt: skip
            if not fits[n]:
                self.stats.fallbacks["range"] += 1
                upper[n, : self.vocab_size] = peaks[n] = np.inf
            yield query

    def _dense_row(self, h: Tensor, edit: Edit | None, V: int) -> DenseRow:
        y = self.dense(h, normed=True)[:V].double()
        if edit is not None:
            y = y.index_copy(0, edit.ids, edit.change(y[edit.ids]).double())
        return DenseRow(y.numpy())

    def _touch(self, query: Query, edit: Edit | None) -> Scored:
        """Take the edited rows out of the screen, and give them with their new logits."""
        if edit is None or not len(edit.ids):
            return NOTHING
        rows = query.score(edit.ids.numpy())
        query.exclude(rows.ids)
        y = edit.change(torch.from_numpy(self._transform(rows.z)))
        return Scored(rows.ids, y.double().numpy())

    def _states(self, h: Tensor, normed: bool) -> tuple[Tensor, torch.Size]:
        """Give what enters the projection, `[B, d]` in the weight's dtype, and h's own shape."""
        h = self.dense.entering(h, normed).detach().to(self.dense.weight.dtype)
        return h.reshape(-1, self.hidden_size), h.shape[:-1]

    def _limit(self, limit: int | None) -> int:
        if limit is None:
            return self.vocab_size
        check_k(limit, self.vocab_size)
        return limit

    def _room(self, states: int) -> _Scratch:
        if self._scratch is None or len(self._scratch.upper) < states:
            rows = len(self.screen.scale)
            self._scratch = _Scratch(
                np.full((states, rows), -np.inf, np.float32),
                np.empty((states, rows // BLOCK), np.float32),
                np.empty(rows, np.float32),
                np.empty(rows // BLOCK, np.float64),
            )
        return self._scratch

    def __repr__(self) -> str:
        share = self.screen.nbytes / (self.vocab_size * self.hidden_size * 4)
        loops = "numba" if self.compiled else "torch"
        return f"ScreenedHead({self.dense!r}, copy={share:.1%} of float32, loops={loops})"


def _check(head: LMHead) -> None:
    """Refuse a head that cannot be screened."""
    weight = head.weight
    if weight.dtype not in (torch.float32, torch.bfloat16) or weight.device.type != "cpu":
        raise UnsupportedModel(
            f"the head's weight is {weight.dtype} on {weight.device}; a screened head takes "
            "float32 or bfloat16 on the cpu: convert it, or use the dense head"
        )
    if head.scale is not None and head.scale.factor < 0:
        raise UnsupportedModel(
            f"the head scales its logits by {head.scale.factor}, which turns their order around; "
            "a screened head takes a scale above 0: use the dense head"
        )


def _kernels(which: Kernels) -> ModuleType:
    if which not in ("auto", "numba", "torch"):
        raise BadInput(f"kernels is {which!r}; expected 'auto', 'numba' or 'torch'")
    has_numba = find_spec("numba") is not None
    if which == "numba" and not has_numba:
        raise MissingExtra("numba is not installed; install it with: pip install 'lmhead[fast]'")
    compiled = has_numba and which != "torch"
    return import_module(f"lmhead.head.{'kernels' if compiled else 'portable'}")


def _save(screen: Screen, paths: Sequence[Path], sha256: str) -> Path:
    """Write to the first of the places that can be written."""
    *others, last = paths
    for path in others:
        try:
            return save_screen(screen, path, sha256)
        except LMHeadError:
            continue  # a model folder that cannot be written is nothing unusual
    return save_screen(screen, last, sha256)


def _identity(head: LMHead) -> tuple[tuple[int, int], ...]:
    """Tell the weights in memory apart: where they lie, and how often they were written to."""
    tensors = [head.weight] if head.bias is None else [head.weight, head.bias]
    return tuple((t.data_ptr(), -1 if t.is_inference() else t._version) for t in tensors)


def _each(
    given: T | Sequence[T | None] | Sequence[T] | None, n: int, what: str
) -> Sequence[T | None]:
    """Give one for every state: the same one, or those of a list as long as there are states."""
    if not isinstance(given, Sequence):
        return [given] * n
    if len(given) != n:
        raise BadInput(f"got {len(given)} {what} for {n} states; expected one, or one for each")
    return given


def _check_ids(edit: Edit | None, V: int) -> None:
    if edit is None or not len(edit.ids):
        return
    low, high = int(edit.ids.min()), int(edit.ids.max())
    if low < 0 or high >= V:
        raise BadInput(
            f"an edit touches the id {low if low < 0 else high}; expected ids from 0 to {V - 1:,}"
        )


def _check_share(name: str, share: float | None) -> None:
    if share is not None and not 0 <= share <= 1:
        raise BadInput(f"{name} is {share}; expected a number from 0 to 1, or None")


def _unchanged(z: Tensor) -> Tensor:
    return z


def _nucleus(kept: Scored, temperature: float, top_p: float | None, min_p: float | None) -> Scored:
    """Cut tokens by their probability: top_p (best first, the one that crosses it stays), min_p."""
    if top_p is None and min_p is None:
        return kept
    p = np.exp((kept.z - kept.z.max()) / temperature)
    stays = np.ones(len(p), bool)
    if top_p is not None:
        before = np.cumsum(p) - p
        stays = before < top_p * p.sum()
        stays[0] = True
    if min_p is not None:
        stays &= p >= min_p * p.max()
    return Scored(kept.ids[stays], kept.z[stays])
