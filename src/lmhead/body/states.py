"""What a model thinks at the last token of a text, at every layer, computed once.

Symbols: N texts, B of them in a batch, T tokens, L blocks, d the width of a state. Texts are
padded on the right; attention looks back only, so the padding changes nothing.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmhead.body.adding import check_layer
from lmhead.body.base import HEAD
from lmhead.body.blocks import Blocks
from lmhead.body.likelihood import FIGURES, MEAN
from lmhead.body.reading import Encoded, read_once
from lmhead.body.state_cache import StateCache, key_of, limit
from lmhead.body.tap import tapped
from lmhead.errors import UnsupportedModel
from lmhead.head import LMHead
from lmhead.progress import Progress, silent

BATCH = 32  # texts that run together as far as a layer; they are of about the same length
_KEPT_AT_ONCE = 512  # texts; a reading that is killed goes on from there


@dataclass(frozen=True)
class States:
    """The states of N texts at their last token, and how likely the model finds the texts."""

    last: Tensor  # [N, L + 1, d]: after every block, and at the end what enters the head
    likelihood: Tensor  # [N, F]: the figures that `lmhead.body.likelihood` names

    def __len__(self) -> int:
        return len(self.last)

    @property
    def logprob(self) -> Tensor:
        """The mean log-probability of a token, given those before it, `[N]`."""
        return self.likelihood[:, MEAN]

    def at(self, layer: int | str) -> Tensor:
        """Return the states of one layer, `[N, d]`."""
        return self.last[:, -1 if layer == HEAD else int(layer)]

    def __getitem__(self, rows: "slice | Tensor") -> "States":
        return States(self.last[rows], self.likelihood[rows])


@dataclass(frozen=True)
class Batch:
    """Texts of about the same length."""

    rows: Tensor  # [B]: which texts
    ids: Tensor  # [B, T]
    last: Tensor  # [B]: the last token

    def at_last(self, x: Tensor) -> Tensor:
        """Take the last token's out of `[B, T, ...]`."""
        return x[torch.arange(len(x)), self.last]


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
        last = torch.tensor([len(encoded[i][0]) - 1 for i in rows])
        result.append(Batch(torch.tensor(rows), ids, last))
    return result


@torch.no_grad()
def states_of(
    blocks: Blocks,
    head: LMHead,
    encoded: Sequence[Encoded],
    *,
    keep: bool = False,
    progress: Progress = silent,
) -> States:
    """Return the last token's state of every layer, and the figures of each text.

    The body reads every text once, and what several begin with once for all of them. With `keep`
    that is once for all time: what the cache knows of the same body, head and text is read, and
    the rest is kept there.
    """
    d = head.hidden_size
    if (width := int(blocks.body.config.hidden_size)) != d:
        raise UnsupportedModel(
            f"the blocks of this model have width {width} and its head {d}; expected one width"
        )
    keep = keep and limit() > 0
    last = torch.zeros(len(encoded), len(blocks) + 1, d)
    likelihood = torch.zeros(len(encoded), len(FIGURES))
    keys = [key_of(*text) for text in encoded]
    new = list(range(len(encoded)))
    if keep:
        kept = StateCache(_digest(blocks, head), (len(blocks) + 1, d), len(FIGURES))
        known = kept.find(keys)
        for i, (states, figured) in known.items():
            last[i], likelihood[i] = states, figured
        new = [i for i in new if i not in known]
    places = dict(zip((keys[i] for i in reversed(new)), reversed(new), strict=True))
    first = sorted(places.values())  # of equal texts, one
    done: list[int] = []
    left = len(first)
    if first:
        with progress("reading texts", total=len(first)) as advance:
            for read, states, figured in read_once(blocks, head, [encoded[i] for i in first]):
                rows = [first[k] for k in read]
                last[rows], likelihood[rows] = states, figured
                advance(len(rows))
                done += rows
                if keep and (len(done) >= _KEPT_AT_ONCE or len(done) == left):
                    kept.add([keys[i] for i in done], last[done], likelihood[done])
                    left, done = left - len(done), []
        others = [i for i in new if places[keys[i]] != i]
        same = [places[keys[i]] for i in others]
        last[others], likelihood[others] = last[same], likelihood[same]
    return States(last, likelihood)


def _digest(blocks: Blocks, head: LMHead) -> str:
    about = f"{blocks.body.sha256} {head.sha256} {head.vocab_size}"
    return hashlib.sha256(about.encode()).hexdigest()[:32]


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
