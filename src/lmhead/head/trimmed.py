"""TrimmedHead: the rows of a keep-set, answering in the ids of the whole vocabulary.

Body and tokenizer stay as they are; the projection reads only the kept rows. Every other token has
the logit -inf: it is never drawn.

Symbols: h hidden state `[..., d]`, K kept rows, V rows of the whole head.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmhead.errors import BadInput
from lmhead.head.answers import TopK
from lmhead.head.base import Head, Known, check_ids
from lmhead.head.dense import LMHead
from lmhead.head.own_tensors import OwnTensors
from lmhead.head.projection import block_rows, taken_rows


class TrimmedHead(OwnTensors, Head):
    """A head with the rows of a keep-set only, and the original ids.

    `kept` holds canonical ids, ascending. The kept logits are those of `head`; all others are -inf.
    """

    kept: Tensor  # [K]
    _at: Tensor  # [K]

    def __init__(self, head: LMHead, kept: Sequence[int] | Tensor) -> None:
        super().__init__()
        if not isinstance(head, LMHead):
            raise BadInput(f"the head is a {type(head).__name__}; expected an LMHead to trim")
        ids = torch.as_tensor(kept, dtype=torch.long)
        if ids.ndim != 1 or len(ids) < 2:
            raise BadInput(f"the keep-set has shape {list(ids.shape)}; expected at least 2 ids")
        if bool((ids.diff() <= 0).any()) or int(ids[0]) < 0 or int(ids[-1]) >= head.vocab_size:
            raise BadInput(
                f"the keep-set runs from {int(ids.min())} to {int(ids.max())}; expected ascending, "
                f"distinct ids below {head.vocab_size:,}, the rows of the head"
            )
        kept = ids.to(head.weight.device)
        self.register_buffer("kept", kept)
        self._vocab_size = head.vocab_size
        # A matrix product works on blocks of rows and adds up in another order in what is left at
        # the end. For the same bits, rows from whole blocks are filled up to whole blocks, and the
        # rows left at the end of the whole head stand at the end again, all of them.
        total, block = head.weight.shape[0], block_rows(head.weight.dtype)
        start = total - total % block
        inside = kept[kept < start]
        filled = torch.cat([inside, inside.new_zeros(-len(inside) % block)])
        taken = torch.cat([filled, torch.arange(start, total, device=kept.device)])
        rest = kept[kept >= start] - start + len(filled)
        at = torch.cat([torch.arange(len(inside), device=kept.device), rest])
        self.register_buffer("_at", at)  # [K], where in the product the kept rows are
        self.rows = LMHead(
            taken_rows(head.weight, taken),
            None if head.bias is None else head.bias.detach()[taken],
            head.norm,
            head.softcap,
            head.scale,
            logits_dtype=head.logits_dtype,
            state_size=head.state_size,
        )

    @classmethod
    def from_file(cls, head: LMHead, path: str | Path) -> "TrimmedHead":
        """Make a trimmed head from a keep-set file, which must have been made for `head`."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                kept = file.get_tensor("kept")
        except (OSError, SafetensorError) as error:
            raise BadInput(
                f"{path} is not a keep-set file ({error}); expected what `lmhead trim --form head` "
                "writes"
            ) from error
        if (made_for := metadata.get("head_sha256")) != head.sha256:
            raise BadInput(
                f"{path} was made for the head {str(made_for)[:12]} of {metadata.get('model')}, "
                f"but this is {head.sha256[:12]}; make a keep-set for this model"
            )
        return cls(head, kept)

    @property
    def vocab_size(self) -> int:
        """V, the number of logits, those of dropped tokens included."""
        return self._vocab_size

    @property
    def hidden_size(self) -> int:
        """d, the width of what enters the projection."""
        return self.rows.hidden_size

    @property
    def sha256(self) -> str:
        """What the projection is, as one hexadecimal number; another keep-set is another head."""
        digest = hashlib.sha256(f"trimmed {self._vocab_size} {self.rows.sha256} ".encode())
        digest.update(self.kept.cpu().numpy().tobytes())
        return digest.hexdigest()

    def forward(self, h: Tensor, *, from_block: bool = False) -> Tensor:
        """Score every token: `[..., d]` to logits `[..., V]`, -inf where the row is gone."""
        z = self._kept_logits(h, from_block)
        whole = z.new_full((*z.shape[:-1], self._vocab_size), float("-inf"))
        return whole.index_copy(-1, self.kept, z)

    def score(self, h: Tensor, ids: Tensor, *, from_block: bool = False) -> Tensor:
        """Score just these tokens: logits `[..., n]`, -inf where the row is gone.

        As close to `head(h)` as `LMHead.score` is.
        """
        ids = check_ids(ids, self._vocab_size, "ids").to(self.kept.device).contiguous()
        place = torch.searchsorted(self.kept, ids).clamp_(max=len(self.kept) - 1)
        z = self.rows.score(h, self._at[place], from_block=from_block)
        return z.masked_fill(self.kept[place] != ids, -torch.inf)

    def candidates(
        self,
        h: Tensor,
        k: int,
        touched: Sequence[Tensor] | None = None,
        *,
        limit: int | None = None,
        from_block: bool = False,
    ) -> TopK:
        """Return the touched ids of each state and the k best of the others, with plain logits."""
        if touched is None:  # no more than there are
            k = min(k, int(torch.searchsorted(self.kept, self._limit(limit))) or k)
        return super().candidates(h, k, touched, limit=limit, from_block=from_block)

    def loss(
        self, h: Tensor, targets: Tensor, *, from_block: bool = False, **options: Any
    ) -> Tensor:
        """Give the cross-entropy of `targets [...]` among the kept tokens; inf for a dropped one.

        label_smoothing spreads over the kept tokens alone.
        """
        ignore = options.get("ignore_index", -100)
        there = targets != ignore
        ids = check_ids(
            targets.where(there, self.kept[0]), self._vocab_size, "targets"
        ).contiguous()
        place = torch.searchsorted(self.kept, ids).clamp_(max=len(self.kept) - 1)
        gone = there & (self.kept[place] != ids)
        whole, bias = self.rows, self.rows.bias
        kept = LMHead(
            whole.weight[self._at],
            None if bias is None else bias[self._at],
            whole.norm,
            whole.softcap,
            whole.scale,
            logits_dtype=whole.logits_dtype,
            state_size=whole.state_size,
        )
        loss = kept.loss(h, place.where(there & ~gone, ignore), from_block=from_block, **options)
        if loss.ndim == gone.ndim:
            return loss.masked_fill(gone, torch.inf)
        return loss + torch.inf if bool(gone.any()) else loss

    def _known(self, h: Tensor, from_block: bool) -> Known:
        return Known(self._kept_logits(h, from_block), self.kept)

    def _kept_logits(self, h: Tensor, from_block: bool) -> Tensor:
        z: Tensor = self.rows(h, from_block=from_block)
        return z[..., self._at]  # [..., K]

    def __repr__(self) -> str:
        return f"TrimmedHead({len(self.kept)} of {self._vocab_size} rows, {self.rows!r})"
