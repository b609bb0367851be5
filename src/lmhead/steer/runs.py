"""Texts held at one layer, so that a vector added there needs only the blocks above to run again.

Symbols: N texts, B of them in a run, T tokens; x `[T, d]` what the layer puts out, h `[T, d]` what
enters the head. At the layer `"head"` they are the same, and nothing runs at all.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lmhead.body.blocks import Blocks
from lmhead.body.states import BATCH, layer_states
from lmhead.loading import Model
from lmhead.progress import Progress, silent
from lmhead.steer.learn.data import Row
from lmhead.steer.states import encode
from lmhead.steer.vector import HEAD


@contextmanager
def frozen(model: Model) -> Iterator[None]:
    """While it lasts, gradients pass through the weights but not into them: half the work."""
    weights = [p for p in model.body.model.parameters() if p.requires_grad]
    for p in weights:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in weights:
            p.requires_grad_(True)


@dataclass
class Runs:
    """The texts of one split at one layer."""

    blocks: Blocks
    layer: int | str
    encoded: list[tuple[list[int], int]]
    x: list[Tensor]  # [T, d] each
    _unsteered: list[Tensor] = field(default_factory=list)  # h of every text, [T, d] each

    @classmethod
    def read(
        cls,
        model: Model,
        rows: Sequence[Row | str],
        layer: int | str,
        *,
        blocks: Blocks | None = None,
        progress: Progress = silent,
    ) -> "Runs":
        """Run the texts as far as the layer."""
        blocks = blocks or Blocks(model.body)
        encoded = encode(model, rows)
        x: list[Tensor] = [torch.zeros(0)] * len(rows)
        for batch, states in layer_states(blocks, encoded, layer, progress=progress):
            for b, i in enumerate(batch.rows.tolist()):
                x[i] = states[b, : int(batch.last[b]) + 1].clone()
        return cls(blocks, layer, encoded, x)

    def __len__(self) -> int:
        return len(self.x)

    def chunks(self, indices: Sequence[int], size: int = BATCH) -> "Iterator[Run]":
        """Put the texts at `indices` together by length, `size` at a time."""
        order = sorted(range(len(indices)), key=lambda k: len(self.x[indices[k]]))
        for start in range(0, len(order), size):
            part = order[start : start + size]
            yield Run(self, part, [indices[k] for k in part])

    @torch.no_grad()
    def last(self, added: Tensor | None) -> Tensor:
        """Return what enters the head at the last token of every text, `[N, d]`."""
        result = torch.zeros(len(self), self.x[0].shape[1])
        for run in self.chunks(range(len(self))):
            result[run.indices] = run.at_last(run.run(added)).float()
        return result

    @torch.no_grad()
    def unsteered(self) -> list[Tensor]:
        """Return h of every text without a vector, `[T, d]` each; computed when first asked for.

        Always in the same batches, so that a training that resumes gets the same bits.
        """
        if not self._unsteered:
            self._unsteered = [torch.zeros(0)] * len(self)
            for run in self.chunks(range(len(self))):
                h = run.run(None)
                for b, i in enumerate(run.indices):
                    self._unsteered[i] = h[b, : int(run.lengths[b])].clone()
        return self._unsteered

    @torch.no_grad()
    def compare(self, added: Tensor, texts: int | None = None) -> tuple[Tensor, Tensor]:
        """Return h without and with the vector at all tokens of the first `texts`, `[P, d]`."""
        before, after = [], []
        for run in self.chunks(range(len(self) if texts is None else min(texts, len(self)))):
            before.append(run.unsteered()[run.real])
            after.append(run.run(added)[run.real])
        return torch.cat(before), torch.cat(after)


class Run:
    """Some texts that run together, padded on the right."""

    def __init__(self, runs: Runs, order: list[int], indices: list[int]) -> None:
        self.runs, self.order, self.indices = runs, order, indices
        self.lengths = torch.tensor([len(runs.x[i]) for i in indices])
        self.x = torch.nn.utils.rnn.pad_sequence([runs.x[i] for i in indices], batch_first=True)

    @property
    def real(self) -> Tensor:
        """Which tokens are no padding, `[B, T]` bool."""
        return torch.arange(self.x.shape[1]) < self.lengths[:, None]

    def run(self, added: Tensor | None) -> Tensor:
        """Add a vector `[d]` at every token, and run the blocks above: h `[B, T, d]`."""
        x = self.x if added is None else self.x + added.to(self.x.dtype)
        return x if self.runs.layer == HEAD else self.runs.blocks.above(int(self.runs.layer), x)

    def at_last(self, h: Tensor) -> Tensor:
        """Take the last token's out of `[B, T, d]`, in float32 whatever the model computes in."""
        return h[torch.arange(len(h)), self.lengths - 1].float()

    def unsteered(self) -> Tensor:
        """Return h without a vector, `[B, T, d]`; it is computed once for every text."""
        known = self.runs.unsteered()
        found = [known[i] for i in self.indices]
        return torch.nn.utils.rnn.pad_sequence(found, batch_first=True)

    def positions(self, h: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw tokens; return what enters the head there without and with the vector, `[P, d]`."""
        real = self.real
        before, after = self.unsteered()[real], h[real]
        chosen = torch.randperm(len(before), generator=generator)[:count]
        return before[chosen], after[chosen]
