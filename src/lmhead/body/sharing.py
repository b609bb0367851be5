"""Texts that begin alike, as a tree: what several of them begin with is read once.

Symbols: W nodes of a row. A row is a piece of the tree of all texts: each node is one token, seen
by those that come behind it in a text. Texts that share nothing may stand in one row as well, so
that hardly anything is padded. `ROW` and `TOKENS` are by measurement: attention looks at whole
rows, so that wide ones are slow, and narrow ones read more beginnings again.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROW = 128  # nodes of a row
TOKENS = 1024  # that run together: enough that a product of matrices is at its fastest


@dataclass(frozen=True)
class Row:
    """Texts that are read as one row of tokens: text `texts[k]` is the nodes `paths[k]`."""

    texts: list[int]  # which
    paths: list[list[int]]
    ids: list[int]  # of each node
    parents: list[int]  # of each node, -1 where a text begins

    @property
    def depths(self) -> list[int]:
        """How many tokens stand before each node."""
        depths: list[int] = []
        for parent in self.parents:  # which comes before the node
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return depths

    @property
    def seen(self) -> Tensor:
        """What each node sees: itself and what stands before it, `[W, W]`."""
        seen = torch.eye(len(self.ids), dtype=torch.bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                seen[node] |= seen[parent]
        return seen


def rows_of(texts: Sequence[Sequence[int]], which: Iterable[int]) -> list[Row]:
    """Put some of the texts into rows; their order, which would decide last bits, does not matter.

    A row has up to `ROW` nodes. A text that is longer has one of its own, where others join it
    that share half of their tokens with it or more.
    """
    rows: list[Row] = []
    for i in sorted(which, key=lambda i: tuple(texts[i])):
        ids = texts[i]
        row = rows[-1] if rows else Row([], [], [], [])
        shared = _alike(texts[row.texts[-1]], ids) if row.texts else 0
        most = max(ROW, 2 * len(ids)) if 2 * shared >= len(ids) else ROW
        if not row.texts or len(row.ids) + len(ids) - shared > most:
            row, shared = Row([], [], [], []), 0
            rows.append(row)
        path = row.paths[-1][:shared] if shared else []
        for token in ids[shared:]:
            row.parents.append(path[-1] if path else -1)
            path.append(len(row.ids))
            row.ids.append(token)
        row.texts.append(i)
        row.paths.append(path)
    return rows


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two texts begin with alike."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


def batches_of(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Put rows of about the same length together."""
    waiting: list[Row] = []
    for row in sorted(rows, key=lambda row: len(row.ids)):  # stable
        if waiting and (len(waiting) + 1) * len(row.ids) > TOKENS:
            yield waiting
            waiting = []
        waiting.append(row)
    if waiting:
        yield waiting


def inputs_of(rows: Sequence[Row], dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the ids of rows, and what else a model is told to read them.

    Nothing where each is a plain text; else positions, and what is added to the scores of
    attention.
    """
    W = max(len(row.ids) for row in rows)
    ids = torch.zeros(len(rows), W, dtype=torch.long)
    for b, row in enumerate(rows):
        ids[b, : len(row.ids)] = torch.tensor(row.ids)
    if all(row.parents == list(range(-1, len(row.ids) - 1)) for row in rows):
        return ids, {}  # padding stands behind, where no text looks
    positions = torch.zeros_like(ids)
    seen = torch.eye(W, dtype=torch.bool).repeat(len(rows), 1, 1)
    for b, row in enumerate(rows):
        positions[b, : len(row.ids)] = torch.tensor(row.depths)
        seen[b, : len(row.ids), : len(row.ids)] = row.seen
    unseen = torch.zeros(len(rows), 1, W, W, dtype=dtype)
    unseen.masked_fill_(~seen[:, None], torch.finfo(dtype).min)
    return ids, {"position_ids": positions, "attention_mask": unseen}
