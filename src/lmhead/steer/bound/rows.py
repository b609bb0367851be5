"""Steered and guarded models whose body adds vectors by rows, and has no blocks to hook into.

`steering.py` and `guarding.py` do the same inside a model of transformers. Here every row of a
batch says what is added to it, which any body can do that runs rows (`Body.run`).

Symbols: B sequences, T tokens, h `[B, T, d]`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lmhead.body import HEAD, Additions
from lmhead.body.llama_cpp import LlamaBody
from lmhead.body.torch_body import sha256_with
from lmhead.errors import BadInput


class RowsBody:
    """What steered and guarded bodies share: the body below, and `n` of its rows for each row."""

    def __init__(self, body: LlamaBody, added: Mapping[int | str, Tensor]) -> None:
        self._body, self.added = body, added
        self.model, self.joining = body.model, body.joining
        self.config, self.generation_config = body.config, body.generation_config
        self.context, self.vocab_size = body.context, body.vocab_size

    @property
    def sha256(self) -> str:
        """What the body is, and what it adds, as one hexadecimal number."""
        return sha256_with(self._body.sha256, self.added)

    @property
    def each(self) -> tuple[Additions, ...]:
        """What is added to each of the n rows that one row stands for."""
        return (self.added,)

    def answer(self, h: Tensor) -> Tensor:
        """Make of h `[B * n, ..., d]` what the head is given, `[B, ..., d]`."""
        return h

    def __call__(self, input_ids: Tensor, **inputs: Any) -> tuple[Tensor, Any]:
        """Run `[B, T]` ids; return h as the head reads it, and no output."""
        if unknown := set(inputs) - {"use_cache"}:
            raise BadInput(f"{', '.join(sorted(unknown))} cannot be given; expected ids alone")
        return self.run(input_ids)[0], None

    def run(
        self, ids: Tensor, state: Any = None, *, rows: Sequence[Additions] | None = None
    ) -> tuple[Tensor, Any]:
        """Read ids `[B, T]` behind what `state` remembers; return h and the memory."""
        _refuse(rows)
        each = self.each
        ids = ids.repeat_interleave(len(each), dim=0)
        h, state = self._body.run(ids, state, rows=[*each] * (len(ids) // len(each)))
        state.each = len(each)
        return self.answer(h), state

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        rows: Sequence[Additions] | None = None,
        room: int = 0,
        whole: bool = False,
    ) -> tuple[Tensor, Any]:
        """Read prompts of any lengths; return h of their last tokens, or all, and the memory."""
        _refuse(rows)
        each = self.each
        twice = [prompt for prompt in prompts for _ in each]
        h, state = self._body.prefill(twice, rows=[*each] * len(prompts), room=room, whole=whole)
        state.each = len(each)
        return self.answer(h), state


class GuardedRows(RowsBody):
    """Runs every row unsteered and steered, and returns both states side by side, `[..., 2d]`."""

    @property
    def each(self) -> tuple[Additions, ...]:
        """Nothing, and the vectors; at the head, both states come from one row."""
        return (None,) if set(self.added) == {HEAD} else (None, self.added)

    def answer(self, h: Tensor) -> Tensor:
        """Put the two states side by side."""
        if len(self.each) == 2:
            return torch.cat([h[::2], h[1::2]], dim=-1)
        return torch.cat([h, h + self.added[HEAD].to(h)], dim=-1)


def _refuse(rows: Sequence[Additions] | None) -> None:
    if rows is not None:
        raise BadInput("rows is given for a steered model; expected a model that is not")
