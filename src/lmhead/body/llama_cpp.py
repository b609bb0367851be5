"""The body of a GGUF file, run by llama.cpp: quantised as it is, mapped, on the CPU.

What comes out is h after the final norm, as it enters the head; the head is ours. llama.cpp is
given embeddings and no vocabulary (`llama/blocks_file.py`), so that it computes no head of its own,
and keeps every sequence apart by a number (`llama/memory.py`), so that requests join and leave a
batch without anything being moved.

Symbols: B sequences, T tokens read now, d the width of h `[B, T, d]`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmhead.body.adding import row_changes
from lmhead.body.base import HEAD, Additions
from lmhead.body.joining import Joining
from lmhead.body.llama.blocks_file import blocks_file
from lmhead.body.llama.library import BATCH, Context, Floats, Loaded, most
from lmhead.body.llama.memory import LlamaState, Row, Rows
from lmhead.errors import BadInput, UnsupportedModel
from lmhead.files.checkpoint import open_checkpoint
from lmhead.files.gguf import open_gguf
from lmhead.head import LMHead
from lmhead.models.fetch import content_sha256
from lmhead.models.gguf_architectures import EMBEDDINGS
from lmhead.progress import Progress, silent

_TOGETHER = 8  # rows read at once where no memory of them is kept
_KEPT = 16  # sets of vectors whose buffers are kept ready


class LlamaBody:
    """A GGUF file up to the input of its head; several threads may share it, one pass at a time.

    `config` and `generation_config` are transformers' own, `embedding` is `[V, d]`.
    """

    joining = Joining(pads=True)

    def __init__(
        self,
        gguf: Path,
        embedding: Tensor,
        config: Any,
        generation_config: Any = None,
        progress: Progress = silent,
    ) -> None:
        self.path, self.config, self.generation_config = gguf, config, generation_config
        self._embedding = embedding.detach()
        runs = blocks_file(gguf, self._embedding, progress)
        self._scale = runs.scale
        self.model = model = Loaded(runs.path)
        exact = _is_float32(gguf)
        self._rows = Rows(lambda cells, rows: Context(model, cells, rows, exact=exact), most())
        self._vectors: dict[int, tuple[Additions, Floats]] = {}

    @classmethod
    def from_folder(
        cls, gguf: Path, folder: Path, config: Any, head: LMHead, progress: Progress = silent
    ) -> "LlamaBody":
        """Run a `.gguf` file whose head, configuration and embedding lie in `folder`."""
        from transformers import GenerationConfig

        ends = None
        if (folder / "generation_config.json").is_file():
            ends = GenerationConfig.from_pretrained(folder, local_files_only=True)
        embedding = head.weight
        if not head.tied:
            checkpoint = open_checkpoint(folder)
            embedding = checkpoint.read(next(n for n in EMBEDDINGS if n in checkpoint.tensors))
        return cls(gguf, embedding, config, ends, progress)

    @property
    def vocab_size(self) -> int:
        """How many ids it reads."""
        return int(self._embedding.shape[0])

    @property
    def context(self) -> int | None:
        """The longest sequence the model was made for, where it says so."""
        length = getattr(self.config, "max_position_embeddings", None)
        return int(length) if length and length > 0 else None

    @property
    def layers(self) -> int:
        """How many blocks it has."""
        return self.model.layers

    @property
    def own_head(self) -> bool:
        """Whether llama.cpp computes an output layer of its own, for nobody."""
        return self._scale is None

    @property
    def sha256(self) -> str:
        """What the body is, as one hexadecimal number: that of the file."""
        return content_sha256(self.path)

    def __call__(self, input_ids: Tensor, **inputs: Any) -> tuple[Tensor, Any]:
        """Run `[B, T]` ids, which may be padded behind; return h `[B, T, d]`, and no output."""
        if unknown := set(inputs) - {"use_cache"}:
            raise BadInput(
                f"{', '.join(sorted(unknown))} cannot be given to llama.cpp, which reads ids alone;"
                " load the model with body='torch'"
            )
        # a few at a time: nobody asks for the memory again, and a pass has room for BATCH tokens
        few = max(1, min(_TOGETHER, BATCH // max(1, input_ids.shape[1])))
        parts = [self.run(input_ids[i : i + few])[0] for i in range(0, len(input_ids), few)]
        return torch.cat(parts), None

    def run(
        self,
        ids: Tensor,
        state: LlamaState | None = None,
        *,
        rows: Sequence[Additions] | None = None,
    ) -> tuple[Tensor, LlamaState]:
        """Read ids `[B, T]` behind what `state` remembers; return h `[B, T, d]` and the memory.

        `rows` says for each of the B rows what is added to it, `[d]` for each layer, or None. Rows
        with other vectors are run one set after the other.
        """
        h, state = self._read(ids.tolist(), state, rows)
        return h.view(*ids.shape, -1), state

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        rows: Sequence[Additions] | None = None,
        room: int = 0,
        whole: bool = False,
    ) -> tuple[Tensor, LlamaState]:
        """Read prompts of any lengths; return h `[B, d]` of their last tokens, and the memory.

        `whole`: h `[B, T, d]` of all tokens, each prompt at the end of its row.
        """
        h, state = self._read(prompts, None, rows)
        if whole:
            T = max(map(len, prompts))
            inside = torch.tensor([[t >= T - len(ids) for t in range(T)] for ids in prompts])
            every = torch.zeros(len(prompts), T, h.shape[-1])
            every[inside] = h
            return every, state
        last = np.cumsum([len(prompt) for prompt in prompts]) - 1
        return h[torch.from_numpy(last)], state

    def _read(
        self,
        ids: Sequence[Sequence[int]],
        state: LlamaState | None,
        rows: Sequence[Additions] | None,
    ) -> tuple[Tensor, LlamaState]:
        """Read on in B sequences; return h `[n, d]`, a sequence behind the other."""
        self._check(ids)
        changes = row_changes(rows, len(ids)) if rows else {}
        with self._rows.lock:
            if state is None or not state.held:
                state = LlamaState(self._rows, self._rows.new(len(ids)))
            held = state.held
            if len(held) != len(ids):
                raise BadInput(f"there are {len(ids)} rows of ids for a memory of {len(held)}")
            self._rows.grow(held, [len(row) for row in ids])
            groups = self._groups(rows, len(ids))
            if len(groups) == 1:
                h = self._pass(*groups[0], ids, held)
            else:
                starts = np.cumsum([0, *(len(row) for row in ids)])
                h = torch.empty(int(starts[-1]), self.model.width)
                for added, members in groups:
                    at = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in members])
                    h[torch.from_numpy(at)] = self._pass(added, members, ids, held)
        if HEAD in changes:
            h = _at_head(changes[HEAD], h, ids)
        return h, state

    def _pass(
        self,
        added: Floats | None,
        members: Sequence[int],
        ids: Sequence[Sequence[int]],
        held: Sequence[Row],
    ) -> Tensor:
        """Run some of the rows, all with the same vectors; return h `[n, d]`."""
        context = self._rows.context
        context.steer(added)
        # in the order of their numbers: those that follow each other are run together
        order = sorted(members, key=lambda i: held[i].id)
        flat = [token for i in order for token in ids[i]]
        places = [held[i].length + t for i in order for t in range(len(ids[i]))]
        numbers = [held[i].id for i in order for _ in ids[i]]
        h = context.read(self._given(flat), places, numbers)
        for i in order:
            held[i].length += len(ids[i])
        if order != list(members):
            ends = np.cumsum([len(ids[i]) for i in order])
            parts = dict(zip(order, np.split(h, ends[:-1]), strict=True))
            h = np.concatenate([parts[i] for i in members])
        return torch.from_numpy(h)

    def _given(self, ids: list[int]) -> Any:
        """Return what llama.cpp is given for ids: their embeddings `[n, d]`, or themselves."""
        if self._scale is None:
            return np.array(ids, np.int32)
        rows = self._embedding[ids].float()
        return (rows if self._scale == 1 else rows * self._scale).numpy()

    def _groups(
        self, rows: Sequence[Additions] | None, B: int
    ) -> list[tuple[Floats | None, list[int]]]:
        """Put rows with the same vectors at blocks together; those without any come first."""
        members: dict[int, list[int]] = {}
        vectors: dict[int, Additions] = {}
        for i, added in enumerate(rows or [None] * B):
            below = added and any(layer != HEAD for layer in added)
            key = id(added) if below else 0
            members.setdefault(key, []).append(i)
            vectors[key] = added if below else None
        order = sorted(members, key=lambda key: key != 0)
        return [(self._buffer(vectors[key]), members[key]) for key in order]

    def _buffer(self, added: Additions) -> Floats | None:
        """Return vectors as llama.cpp reads them, `[layers - 1, d]`: block 1 first."""
        if added is None:
            return None
        if (known := self._vectors.get(id(added))) is not None:
            return known[1]
        buffer = np.zeros((self.layers - 1, self.model.width), np.float32)
        for layer, vector in added.items():
            if layer == HEAD:
                continue
            self.check_layer(layer)
            buffer[int(layer) - 1] = vector.detach().float().cpu().numpy()
        if len(self._vectors) >= _KEPT:
            self._vectors.pop(next(iter(self._vectors)))
        self._vectors[id(added)] = added, buffer  # held, so that no other gets its number
        return buffer

    def check_layer(self, layer: int | str) -> None:
        """Refuse a layer that no vector can be added at."""
        if layer == HEAD:
            return
        if not 0 <= int(layer) < self.layers:
            raise BadInput(
                f"the layer is {layer}, but the model has {self.layers} blocks; expected 0 to "
                f"{self.layers - 1}, or {HEAD!r}"
            )
        if int(layer) == 0:
            raise UnsupportedModel(
                "llama.cpp adds no vector at block 0; take another layer, or load the model with "
                "body='torch'"
            )

    def _check(self, ids: Sequence[Sequence[int]]) -> None:
        """Refuse ids that are no row of the embedding."""
        V = self.vocab_size
        for row in ids:
            if not row:
                raise BadInput("a sequence has no token to read; expected at least one")
            if min(row) < 0 or max(row) >= V:
                raise BadInput(f"the ids hold {max(row):,}; expected numbers from 0 to {V - 1:,}")


def _at_head(change: Any, h: Tensor, ids: Sequence[Sequence[int]]) -> Tensor:
    """Add to h `[n, d]` what is added to its rows at the head; each row has its own length."""
    T = max(map(len, ids))
    padded = torch.zeros(len(ids), T, h.shape[-1])
    inside = torch.tensor([[t < len(row) for t in range(T)] for row in ids])
    padded[inside] = h
    changed: Tensor = change(padded)[inside]
    return changed


def _is_float32(gguf: Path) -> bool:
    """Tell whether a file holds its matrices in float32: then keys and values are kept so too."""
    return all(t.type == "F32" for t in open_gguf(gguf).tensors.values())
