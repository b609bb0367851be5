"""One call of `generate` on a patched model: it takes h, and stands for all the processors.

Symbols: B rows of the batch, n candidates of each, V logits, h what enters the output layer.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmhead.errors import LMHeadError
from lmhead.head.screening.rows import ScreenedRow
from lmhead.patch import certain
from lmhead.patch.asked import Asked
from lmhead.patch.certain import Floats
from lmhead.patch.contest import Contest, Ints, Tokens
from lmhead.patch.screen import Ready

_SPARE = 8
"""How many more candidates are looked for than are asked for, so that the last ones are apart."""


@dataclass
class Call:
    """One call of `generate` that is under way; it stands for all the processors of the call."""

    count: Callable[[str], None]
    model: Any
    ready: Ready
    asked: Asked
    processors: Any
    armed: bool = False  # the model's next pass is the loop's own, and nobody else's
    taken: bool = False  # its output layer is passed just now
    h: Tensor | None = None  # [B, T, d]
    _scores: Tensor | None = field(default=None, repr=False)  # [B, V], -inf but for the last answer
    _last: list[int] = field(default_factory=list, repr=False)

    def enter(self, h: Tensor) -> Tensor:
        """Take what enters the output layer, and let none of its rows through."""
        if not self.armed or h.ndim != 3 or h.dtype != self.ready.layer.weight.dtype:
            return h
        self.armed, self.taken, self.h = False, True, h
        return h.narrow(-2, 0, 0)

    def leave(self, logits: Tensor) -> Tensor:
        """Give the model a stand-in for its logits, `[B, T, 1]`."""
        if not self.taken or self.h is None:
            return logits
        self.taken = False
        return self.h[..., :1]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Give scores `[B, V]` that lead to the token that all logits would have led to."""
        h, self.h, self.armed = self.h, None, False
        if h is None or scores.shape != (len(h), 1) or self.ready.vocab_size == 1:
            self.count("dense step")  # the model went another way: these are its logits
            return self._dense(input_ids, scores)
        found = self._screened(input_ids, h[:, -1].float().contiguous())
        if found is not None:
            self.count("step")
            return found
        self.count("dense step")
        logits = self.ready.dense(h)[:, -1].to(copy=True, dtype=torch.float32)
        return self._dense(input_ids, logits)

    def _dense(self, input_ids: Tensor, logits: Tensor) -> Tensor:
        scores: Tensor = self.processors(input_ids, logits)
        return scores

    def _screened(self, input_ids: Tensor, h: Tensor) -> Tensor | None:
        """Answer states `[B, d]` from the screen, or give None where one is not certain."""
        if not math.isfinite(h.sum().item()):
            return None
        touched = self.asked.touched(input_ids, self.ready.vocab_size)
        try:
            if self.asked.draws and not self.asked.top_k:
                return self._from_all(input_ids, h, touched)
            return self._from_best(input_ids, h, touched)
        except LMHeadError:  # another thread writes to the weights
            return None

    def _from_best(
        self, input_ids: Tensor, h: Tensor, touched: list[Tensor] | None
    ) -> Tensor | None:
        """Answer from the best tokens and the touched ones."""
        asked, V, ready = self.asked, self.ready.vocab_size, self.ready
        spare = _SPARE if ready.layer.weight.dtype == torch.float32 else _SPARE + asked.top_k
        ids, z = ready.head.candidates(h, min(asked.top_k + spare, V), touched)  # [B, n]
        if touched is None and not asked.draws and ready.leads(h, ids.numpy(), z.numpy()):
            return self._only(ids[:, 0].tolist())
        real = ids < V
        e = torch.from_numpy(ready.errors(h, ids.numpy()))
        low, high = (
            self._changed(input_ids, ids, end.masked_fill(~real, -torch.inf))
            for end in ready.ends(z.masked_fill(~real, 0.0), e)
        )
        y = [end.double().numpy() for end in (low, high)]
        if not all((end < np.inf).all() for end in y):  # NaN, or divided by next to nothing
            return None
        rest = self._rest(h, ids, z, touched)
        if not asked.draws:
            if not all(certain.best(*row) for row in zip(*y, rest, strict=True)):
                return None
            kept = None
        else:
            q = _numbers_to_come(len(h), V).gather(1, ids.clamp(max=V - 1)).double().numpy()
            columns = [
                certain.drawn(low_n, high_n, rest_n, log_q, asked)
                for low_n, high_n, rest_n, log_q in zip(*y, rest, np.log(q), strict=True)
            ]
            if any(row is None for row in columns):
                return None
            kept = torch.from_numpy(np.stack(columns))  # type: ignore[arg-type]
        stay = real if kept is None else kept & real
        scores = low.new_full((len(h), V + 1), -torch.inf)
        return scores.scatter_(1, ids, low.masked_fill(~stay, -torch.inf))[:, :V]

    def _changed(self, input_ids: Tensor, ids: Tensor, logits: Tensor) -> Tensor:
        """Do to logits `[B, n]` of ids what the processors before the cuts do; V is not an id."""
        V = self.ready.vocab_size
        if self.asked.changes:
            scores = logits.new_full((len(ids), V + 1), -torch.inf).scatter_(1, ids, logits)[:, :V]
            for change in self.asked.changes:
                scores = change(input_ids, scores)
            logits = scores.gather(1, ids.clamp(max=V - 1)).masked_fill(ids == V, -torch.inf)
        return logits if self.asked.temperature == 1 else logits / self.asked.temperature

    def _rest(self, h: Tensor, ids: Tensor, z: Tensor, touched: list[Tensor] | None) -> list[float]:
        """Bound the scores of all tokens that are no candidates, for each state."""
        V = self.ready.vocab_size
        worst = torch.from_numpy(self.ready.errors(h, np.full((len(h), 1), V)))[:, 0]
        floors = z.new_full((len(h),), -torch.inf)
        if touched is None and ids.shape[1] < V:
            floors = z[:, -1]  # best first
        for n, own in enumerate(touched or ()):
            real = ids[n] < V
            free = real & ~torch.isin(ids[n], own)
            if int(real.sum()) < V and bool(free.any()):
                floors[n] = z[n][free].min()
        none = floors == -torch.inf
        _, top = self.ready.ends(floors.masked_fill(none, 0.0), worst)
        top = top.masked_fill(none, -torch.inf) / self.asked.temperature
        bounds: list[float] = top.tolist()
        return bounds

    def _from_all(
        self, input_ids: Tensor, h: Tensor, touched: list[Tensor] | None
    ) -> Tensor | None:
        """Answer a draw from all tokens: give the one that multinomial is going to draw."""
        asked, V, ready = self.asked, self.ready.vocab_size, self.ready
        log_q = _numbers_to_come(len(h), V).log_().double().numpy()  # [B, V]
        if not np.isfinite(log_q).all():
            return None
        worst = ready.errors(h, np.full((len(h), 1), V))[:, 0]
        scale = ready.transform.factor
        drawn = []
        with ready.head.rows(h, touched) as rows:
            for n, row in enumerate(rows):
                if not isinstance(row, ScreenedRow):
                    return None

                def ends(ids: Ints, z: Floats, n: int = n) -> tuple[Floats, Floats]:
                    e = torch.from_numpy(ready.errors(h[n : n + 1], ids[None])[0])
                    low, high = ready.ends(torch.from_numpy(z), e)
                    return _wide(low / asked.temperature), _wide(high / asked.temperature)

                def uppers(n: int = n, row: ScreenedRow = row) -> Floats:
                    upper = torch.from_numpy(row.query.upper.astype(np.float64))
                    e = torch.full_like(upper, worst[n])
                    none = upper == -torch.inf
                    _, high = ready.ends(upper.masked_fill(none, 0.0), e)
                    return _wide(high.masked_fill(none, -torch.inf) / asked.temperature)

                def shaken(size: float, n: int = n) -> float:
                    return float(worst[n] * scale + ready.unit * size) + certain.U * size

                ids = row.touched.ids
                changed = Tokens(ids, *(np.empty(0),) * 2)
                if len(ids):
                    at, e = torch.from_numpy(ids)[None], ready.errors(h[n : n + 1], ids[None])
                    both = ready.ends(torch.from_numpy(row.touched.z)[None], torch.from_numpy(e))
                    own = input_ids[n : n + 1]
                    low, high = (_wide(self._changed(own, at, end)[0]) for end in both)
                    if not (high < np.inf).all() or not (low < np.inf).all():
                        return None
                    changed = Tokens(ids, low, high)
                contest = Contest(
                    row.query, ready.transform, changed, ends, uppers, log_q[n], asked, shaken
                )
                token = contest.winner()
                if token is None:
                    return None
                drawn.append(token)
        return self._only(drawn)

    def _only(self, ids: Iterable[int]) -> Tensor:
        """Give scores `[B, V]` that lead to one token each, the greatest of all or the one drawn.

        The loop looks at them once: V numbers are written at the first step alone.
        """
        found = list(ids)
        if self._scores is None or len(self._scores) != len(found):
            shape = len(found), self.ready.vocab_size
            self._scores = torch.full(shape, -torch.inf, dtype=torch.float32)
        else:
            for n, id in enumerate(self._last):
                self._scores[n, id] = -torch.inf
        for n, id in enumerate(found):
            self._scores[n, id] = 0.0
        self._last = found
        return self._scores


def _wide(x: Tensor) -> Floats:
    y: Floats = x.double().numpy()
    return y


def _numbers_to_come(B: int, V: int) -> Tensor:
    """Give the exponential numbers `[B, V]` that torch.multinomial is going to draw.

    From a copy of the global generator: it is not moved.
    """
    generator = torch.Generator()
    generator.set_state(torch.get_rng_state())
    return torch.empty(B, V, dtype=torch.float32).exponential_(1, generator=generator)
