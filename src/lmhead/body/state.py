"""What a body remembers of a batch: keys and values, and which columns are padding.

Symbols: B sequences, S columns read so far. Prompts of several lengths are padded on the left.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class State:
    """The memory of a batch; a new one remembers nothing."""

    past: Any = None  # the model's own cache
    mask: Tensor | None = None  # [B, S]: 1 where a token is; None where nothing is padded
    length: int = 0  # S

    @classmethod
    def of_prompts(cls, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, "State"]:
        """Return the ids of the prompts, `[B, T]` padded on the left, and a state to read them."""
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros(len(prompts), longest, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        padded = any(len(p) < longest for p in prompts)
        return ids, cls(mask=mask if padded else None)

    def inputs(self, ids: Tensor, names: Collection[str]) -> dict[str, Any]:
        """Return what a model that knows these argument names needs to read ids `[B, T]` next."""
        T = ids.shape[1]
        given: dict[str, Any] = {"use_cache": True}
        if self.past is not None:
            given["past_key_values"] = self.past
        # Without padding every token sees all before it, which is the models' default.
        if self.mask is not None:
            new = self.length + T - self.mask.shape[1]
            self.mask = F.pad(self.mask, (0, new), value=1) if new else self.mask
            self.mask = self.mask.to(ids.device)
            given["attention_mask"] = self.mask
            if "position_ids" in names:
                given["position_ids"] = (self.mask.cumsum(-1) - 1).clamp_(min=0)[:, -T:]
        return given

    def advance(self, output: Any, T: int) -> None:
        """Note that T more columns were read, and what the model's output remembers of them."""
        self.past = output.past_key_values
        self.length += T

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows of the batch."""
        index = torch.tensor(rows)
        self.past.batch_select_indices(index)
        if self.mask is not None:
            self.mask = self.mask[index]

    def reorder(self, rows: Tensor) -> None:
        """Let row i go on from what row rows[i] was."""
        self.past.reorder_cache(rows)
        if self.mask is not None:
            self.mask = self.mask[rows]
