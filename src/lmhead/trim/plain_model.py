"""A model for a proof, from its files alone: importing transformers takes longer than the proof."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from lmhead.body.base import Additions
from lmhead.body.joining import Joining
from lmhead.body.state import State
from lmhead.body.torch_body import TorchBody
from lmhead.files.checkpoint import Checkpoint
from lmhead.head.dense import LMHead
from lmhead.loading import Model
from lmhead.models.gpt2 import KVCache
from lmhead.models.llama import Llama, LlamaOutput, known
from lmhead.trim.folder import ModelFolder
from lmhead.trim.plain_tokenizer import PlainTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PlainBody(TorchBody):
    """A Llama of our own, which reads prompts of several lengths side by side.

    What it has read once, and was told to remember, it does not read again.
    """

    joining = Joining(pads=True)
    _rows: Sequence[tuple[int, ...]] = ()
    _h: Tensor
    _cache: KVCache

    def remember(self, rows: Sequence[Sequence[int]], h: Tensor, cache: KVCache) -> None:
        """Remember what came of rows of ids, filled up behind: h `[n, T, d]`, and the cache."""
        self._rows, self._h, self._cache = [tuple(row) for row in rows], h, cache

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        rows: Sequence[Additions] | None = None,
        room: int = 0,
        whole: bool = False,
    ) -> tuple[Tensor, State]:
        """Read prompts, as any body does; beginnings of what is remembered are not run again."""
        begun = [
            next((at for at, row in enumerate(self._rows) if row[: len(p)] == tuple(p)), None)
            for p in prompts
        ]
        if rows or whole or None in begun:
            return super().prefill(prompts, rows=rows, room=room, whole=whole)
        ids, state = State.of_prompts(prompts)
        places = [(at, len(p)) for at, p in zip(begun, prompts, strict=True) if at is not None]

        def moved(whole: Tensor) -> Tensor:
            """Put the beginnings of `[n, K, T, n]` at the end of their rows."""
            found = whole.new_zeros(len(places), whole.shape[1], ids.shape[1], whole.shape[3])
            for row, (at, length) in enumerate(places):
                found[row, :, -length:] = whole[at, :, :length]
            return found

        cache = KVCache()
        cache.keys = [moved(keys) for keys in self._cache.keys]
        cache.values = [moved(values) for values in self._cache.values]
        h = torch.stack([self._h[at, length - 1] for at, length in places])  # [B, d]
        state.take(ids, LlamaOutput(h, cache))
        return h, state


def is_plain(folder: ModelFolder) -> bool:
    """Tell whether the files of a folder say all that it takes to run it."""
    return isinstance(folder.hf_tokenizer, PlainTokenizer) and known(folder.checkpoint) is not None


def plain_model(folder: ModelFolder, blocks: Checkpoint | None = None) -> Model | None:
    """Return the model of a folder, None where its files do not say all that it takes.

    `blocks`: a folder to take the blocks from, where they are known to be the same.
    """
    if not isinstance(folder.hf_tokenizer, PlainTokenizer):
        return None
    if (model := Llama.of(folder.checkpoint, blocks)) is None:
        return None
    head = LMHead(model.lm_head.weight, norm=model.norm, tied=model.config.tie_word_embeddings)
    tokenizer = cast("PreTrainedTokenizerBase", folder.hf_tokenizer)
    where: Path = folder.folder
    return Model(str(where), where, PlainBody(model), head, tokenizer)
