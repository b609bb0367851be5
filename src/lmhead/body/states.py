"""What a model thinks at the last token of a text, at every layer, computed once.

Symbols: N texts, B of them in a batch, T tokens, L blocks, d the width of a state. Texts are
padded on the right; attention looks back only, so the padding changes nothing.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from lmhead.body.adding import check_layer
from lmhead.body.base import HEAD
from lmhead.body.blocks import Blocks
from lmhead.body.tap import tapped
from lmhead.errors import UnsupportedModel
from lmhead.files.whole import written_whole
from lmhead.head import LMHead
from lmhead.progress import Progress, silent

BATCH = 32  # texts that run together; they are of about the same length

# The ids of a text, and how many of them are its prompt: at least 1, for token 0 is never predicted
Encoded = tuple[list[int], int]


@dataclass(frozen=True)
class States:
    """The states of N texts at their last token, and how likely the model finds the texts."""

    last: Tensor  # [N, L + 1, d]: after every block, and at the end what enters the head
    logprob: Tensor  # [N]: mean log-probability of a token, given those before it

    def __len__(self) -> int:
        return len(self.last)

    def at(self, layer: int | str) -> Tensor:
        """Return the states of one layer, `[N, d]`."""
        return self.last[:, -1 if layer == HEAD else int(layer)]

    def __getitem__(self, rows: "slice | Tensor") -> "States":
        return States(self.last[rows], self.logprob[rows])


@dataclass(frozen=True)
class Batch:
    """Texts of about the same length."""

    rows: Tensor  # [B]: which texts
    ids: Tensor  # [B, T]
    first: Tensor  # [B]: the first token that is no prompt; at least 1, for 0 is never predicted
    last: Tensor  # [B]: the last token

    def at_last(self, x: Tensor) -> Tensor:
        """Take the last token's out of `[B, T, ...]`."""
        return x[torch.arange(len(x)), self.last]

    @property
    def scored(self) -> Tensor:
        """Which tokens are predicted by those before them, `[B, T]` bool; prompts are left out."""
        position = torch.arange(self.ids.shape[1])
        return (position >= self.first[:, None]) & (position <= self.last[:, None])


def batches(encoded: Sequence[Encoded], size: int = BATCH) -> list[Batch]:
    """Put texts of about the same length together; the same texts give the same batches."""
    order = sorted(range(len(encoded)), key=lambda i: len(encoded[i][0]))
    result = []
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        T = max(len(encoded[i][0]) for i in rows)
        ids = torch.zeros(len(rows), T, dtype=torch.long)
        for b, i in enumerate(rows):
            ids[b, : len(encoded[i][0])] = torch.tensor(encoded[i][0])
        first = torch.tensor([encoded[i][1] for i in rows])
        last = torch.tensor([len(encoded[i][0]) - 1 for i in rows])
        result.append(Batch(torch.tensor(rows), ids, first, last))
    return result


@torch.no_grad()
def states_of(
    blocks: Blocks,
    head: LMHead,
    encoded: Sequence[Encoded],
    *,
    cache: Path | None = None,
    progress: Progress = silent,
) -> States:
    """Run the body once over all texts, and keep the last token's state of every layer.

    `cache` is a folder where the result is kept for the same body, head and texts.
    """
    kept = None if cache is None else cache / f"{_digest(blocks, head, encoded)}.safetensors"
    if kept is not None and kept.is_file():
        tensors = load_file(kept)
        return States(tensors["last"], tensors["logprob"])
    d = head.hidden_size
    if (width := int(blocks.body.config.hidden_size)) != d:
        raise UnsupportedModel(
            f"the blocks of this model have width {width} and its head {d}; expected one width"
        )
    last = torch.zeros(len(encoded), len(blocks) + 1, d)
    logprob = torch.zeros(len(encoded))
    with progress("reading texts", total=len(encoded)) as advance:
        for batch in batches(encoded):
            found = blocks.states(batch.ids)
            for layer, x in enumerate(found):
                last[batch.rows, layer] = batch.at_last(x).float().to(last.device)
            logprob[batch.rows] = _mean_logprob(head, batch, found[-1])
            advance(len(batch.rows))
    if kept is not None:
        with written_whole(kept, force=True) as staging:
            staging.write_bytes(save({"last": last, "logprob": logprob}))
    return States(last, logprob)


def _digest(blocks: Blocks, head: LMHead, encoded: Sequence[Encoded]) -> str:
    about = f"{blocks.body.sha256} {head.sha256} {encoded}"
    return hashlib.sha256(about.encode()).hexdigest()[:32]


def _mean_logprob(head: LMHead, batch: Batch, h: Tensor) -> Tensor:
    """Return the mean log-probability of the scored tokens of each text, `[B]`, from h."""
    scored = batch.scored[:, 1:]
    losses = torch.zeros(scored.shape)
    if scored.any():
        targets = batch.ids[:, 1:][scored].to(h.device)
        found = head.loss(h[:, :-1][scored], targets, reduction="none")
        losses[scored] = found.float().to(losses.device)
    return -losses.sum(1) / scored.sum(1).clamp(min=1)


@torch.no_grad()
def layer_states(
    blocks: Blocks,
    encoded: Sequence[Encoded],
    layer: int | str,
    *,
    size: int = BATCH,
    progress: Progress = silent,
) -> list[tuple[Batch, Tensor]]:
    """Return what block `layer` puts out at all tokens, `[B, T, d]`, batch by batch.

    It is what the blocks above start from: a vector added to it needs only them to run again.
    """
    check_layer(layer, blocks.blocks)
    result = []
    with progress(f"reading layer {layer}", total=len(encoded)) as advance:
        for batch in batches(encoded, size):
            result.append((batch, _upto(blocks, layer, batch.ids)))
            advance(len(batch.rows))
    return result


class _Caught(Exception):
    def __init__(self, x: Tensor) -> None:
        self.x = x


def _upto(blocks: Blocks, layer: int | str, ids: Tensor) -> Tensor:
    """Run the model as far as `layer`, and no further."""
    if layer == HEAD:
        h, _ = blocks.body(ids, use_cache=False)
        return h

    def stop(x: Tensor) -> Tensor:
        raise _Caught(x)

    try:
        with tapped(blocks.blocks[int(layer)], leave=stop):
            blocks.body(ids, use_cache=False)
    except _Caught as caught:
        return caught.x
    raise UnsupportedModel(f"the model did not run block {layer}; choose another layer")
