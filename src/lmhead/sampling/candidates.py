"""The tokens that can still be drawn, and their logits.

A pipeline begins with every token of the vocabulary (dense) and, once a filter has cut most of
them, goes on with the few that are left (compact), so that later filters and the draw cost next
to nothing. Both forms keep their columns in ascending id order: "the first column" means "the
lowest id" in either, and a filter that only looks at logits need not know which form it got.
Candidates live on the CPU: the same seed gives the same tokens whatever device the model is on.

Symbols: `z` logits `[B, N]`, -inf for a token that cannot be drawn; `V` vocabulary rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from lmhead.errors import BadInput
from lmhead.sampling.filters import alive

COMPACT_BELOW = 0.25
"""Go compact when at most this share of the columns is kept: gathering costs more than masking."""


class NothingLeft(BadInput):
    """The filters together left no token to draw; the message says which ones."""


@dataclass(frozen=True)
class Candidates:
    """Logits z `[B, N]` of the candidates and their ids `[B, N]`.

    ids is None when column j is token j. In the compact form ids ascend along a row, and unused
    columns at its end hold the id V and the logit -inf.
    """

    z: Tensor
    ids: Tensor | None
    V: int

    @classmethod
    def dense(cls, logits: Tensor) -> "Candidates":
        """Take logits `[B, V]` of the whole vocabulary, from any device."""
        return cls(logits.detach().float().cpu().contiguous(), None, logits.shape[-1])

    @classmethod
    def of(cls, ids: Tensor, z: Tensor, V: int) -> "Candidates":
        """Take logits z `[B, K]` of ids `[B, K]` in any order, as `head.topk` gives them."""
        ids, order = ids.cpu().sort(dim=-1)
        return cls(z.detach().float().cpu().gather(-1, order), ids, V)

    def left(self) -> Tensor:
        """Count the tokens that can still be drawn, `[B]`."""
        return torch.from_numpy(np.count_nonzero(self.z.numpy() > -np.inf, axis=-1))

    def keep(self, mask: Tensor) -> "Candidates":
        """Keep the columns where mask `[B, N]` is true."""
        N = self.z.shape[-1]
        counts = [int(np.count_nonzero(row)) for row in mask.numpy()]
        most = max(counts, default=0)
        if most > COMPACT_BELOW * N:
            masked = np.where(mask.numpy(), self.z.numpy(), np.float32(-np.inf))
            return replace(self, z=torch.from_numpy(masked))
        z = self.z.new_full((len(counts), max(most, 1)), -torch.inf)
        ids = torch.full(z.shape, self.V)
        for row, count in enumerate(counts):
            columns = torch.from_numpy(np.flatnonzero(mask[row].numpy()))
            z[row, :count] = self.z[row, columns]
            ids[row, :count] = columns if self.ids is None else self.ids[row, columns]
        return Candidates(z, ids, self.V)

    def only(self, columns: Tensor) -> "Candidates":
        """Keep one column of each row, `[B]`."""
        at = columns.unsqueeze(-1)
        return Candidates(self.z.gather(-1, at), self.tokens(columns).unsqueeze(-1), self.V)

    def tokens(self, columns: Tensor) -> Tensor:
        """Give the token ids `[B]` of one column in each row, `[B]`."""
        if self.ids is None:
            return columns
        return self.ids.gather(-1, columns.unsqueeze(-1)).squeeze(-1)

    def locate(self, row: int, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Find ids `[n]` in a row: their columns, and which of the n were found.

        Ids that are no candidate, or outside the vocabulary, are left out.
        """
        if self.ids is None:
            found = ((ids >= 0) & (ids < self.V)).nonzero().squeeze(-1)
            return ids[found], found
        columns = torch.searchsorted(self.ids[row], ids).clamp_(max=self.z.shape[-1] - 1)
        found = ((self.ids[row, columns] == ids) & (ids < self.V)).nonzero().squeeze(-1)
        return columns[found], found

    def edit(
        self, ids: Sequence[Tensor], change: Callable[[Tensor, int, Tensor], Tensor]
    ) -> "Candidates":
        """Replace the logits of ids[row] by change(logits, row, which of ids[row] these are)."""
        z = self.z.clone()
        for row, wanted in enumerate(ids):
            columns, found = self.locate(row, wanted)
            if columns.numel():
                z[row, columns] = change(z[row, columns], row, found)
        return replace(self, z=z)

    def without(self, ids: Sequence[Tensor]) -> "Candidates":
        """Forbid ids[row] in each row."""
        return self.edit(ids, lambda z, row, found: torch.full_like(z, -torch.inf))

    def among(self, ids: Tensor) -> "Candidates":
        """Forbid every id but ids `[n]`, in all rows."""
        table = torch.zeros(self.V + 1, dtype=torch.bool)
        table[ids] = True
        mask = table[: self.V].expand_as(self.z) if self.ids is None else table[self.ids]
        return self.keep(mask & alive(self.z))

    def probs(self) -> Tensor:
        """Give the probabilities over the whole vocabulary, `[B, V]` float32."""
        p = self.z.double().softmax(-1).float()
        if self.ids is None:
            return p
        full = p.new_zeros(p.shape[0], self.V + 1)
        return full.scatter_(-1, self.ids, p)[:, : self.V]
