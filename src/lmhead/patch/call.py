"""One call of `generate` on a patched model: it takes h, and stands for all the processors.

Symbols: B rows of the batch, n candidates of each, V logits, h what enters the output layer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmhead.errors import LMHeadError
from lmhead.patch import certain
from lmhead.patch.asked import Asked
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

    def enter(self, h: Tensor) -> Tensor:
        """Take what enters the output layer, and let none of its rows through."""
        if not self.armed or h.ndim != 3 or h.dtype != torch.float32:
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
        found = self._screened(input_ids, h[:, -1].contiguous())
        if found is not None:
            self.count("step")
            return found
        self.count("dense step")
        logits = self.ready.head.dense(h)[:, -1].to(copy=True, dtype=torch.float32)
        return self._dense(input_ids, logits)

    def _dense(self, input_ids: Tensor, logits: Tensor) -> Tensor:
        scores: Tensor = self.processors(input_ids, logits)
        return scores

    def _screened(self, input_ids: Tensor, h: Tensor) -> Tensor | None:
        """Answer states `[B, d]` from the screen, or give None where one is not certain."""
        if not h.isfinite().all():
            return None
        asked, V, B = self.asked, self.ready.vocab_size, len(h)
        touched = asked.touched(input_ids, V)
        try:
            ids, z = self.ready.head.candidates(h, min(asked.top_k + _SPARE, V), touched)  # [B, n]
        except LMHeadError:  # another thread writes to the weights
            return None
        scores = z.new_full((B, V + 1), -torch.inf).scatter_(1, ids, z)[:, :V]
        for change in asked.changes:
            scores = change(input_ids, scores)
        if asked.temperature != 1:
            scores = scores / asked.temperature
        real = ids < V
        y = scores.gather(1, ids.clamp(max=V - 1)).masked_fill(~real, -torch.inf).double().numpy()
        if not (y < np.inf).all():  # NaN, or divided by next to nothing
            return None
        rest = self._rest(h, ids, z, touched)
        e = asked.factor * self.ready.errors(h, ids.numpy()) / asked.temperature
        finite = np.isfinite(y)
        rounding = 2 * (len(asked.changes) + 2) * asked.factor * certain.U
        e = np.where(finite, e + rounding * np.abs(np.where(finite, y, 0)), 0)
        if not asked.draws:
            at = [certain.best(*row) for row in zip(y, e, rest, strict=True)]
            return None if None in at else scores
        q = _numbers_to_come(scores).gather(1, ids.clamp(max=V - 1)).double().numpy()
        kept = [
            certain.drawn(*row, asked)
            for row in zip(y, e, rest, np.log(q), strict=True)
        ]  # fmt: skip
        if any(columns is None for columns in kept):
            return None
        stay = torch.from_numpy(np.stack(kept)) & real  # type: ignore[arg-type]
        cut = scores.new_full((B, V + 1), -torch.inf)
        there = scores.gather(1, ids.clamp(max=V - 1)).masked_fill(~stay, -torch.inf)
        return cut.scatter_(1, ids, there)[:, :V]

    def _rest(self, h: Tensor, ids: Tensor, z: Tensor, touched: list[Tensor] | None) -> list[float]:
        """Bound the scores of all tokens that are no candidates, for each state."""
        V = self.ready.vocab_size
        worst = self.ready.errors(h, np.full((len(h), 1), V))[:, 0]
        bounds = []
        for n in range(len(h)):
            real = ids[n] < V
            free = real if touched is None else real & ~torch.isin(ids[n], touched[n])
            if int(real.sum()) == V or not bool(free.any()):
                bounds.append(-float("inf"))
                continue
            floor = float(z[n][free].min())
            top = floor + float(worst[n])
            bounds.append((top + 4 * certain.U * abs(top)) / self.asked.temperature)
        return bounds


def _numbers_to_come(scores: Tensor) -> Tensor:
    """Give the exponential numbers `[B, V]` that torch.multinomial is going to draw.

    From a copy of the global generator: it is not moved.
    """
    generator = torch.Generator()
    generator.set_state(torch.get_rng_state())
    return torch.empty_like(scores, memory_format=torch.contiguous_format).exponential_(
        1, generator=generator
    )
