"""Who has which rows of the head.

Symbols: V vocabulary rows, R ranks, V_r rows of rank r.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from lmhead.errors import BadInput
from lmhead.head.projection import Projection
from lmhead.ranks import Ranks

BLOCK = 64
"""Rows that a rank gets together: what a product in float32 works on (see `block_rows`)."""

_CHUNK = 2**22  # numbers that are hashed together


def even_split(V: int, R: int) -> tuple[int, ...]:
    """Split V rows over R ranks, as evenly as whole blocks allow; the last rank has the rest."""
    if V < R:
        raise BadInput(f"a head of {V:,} rows cannot be split over {R} ranks; take fewer ranks")
    step = BLOCK if V >= BLOCK * R else 1
    blocks = V // step
    ends = [blocks * (r + 1) // R * step for r in range(R - 1)] + [V]
    return tuple(end - start for start, end in zip([0, *ends], ends, strict=False))


def chosen(total: int, counts: Sequence[int] | None, ranks: Ranks) -> slice:
    """Choose this rank's rows: as `counts` says, or evenly."""
    split = even_split(total, ranks.size) if counts is None else tuple(counts)
    if len(split) != ranks.size or sum(split) != total or min(split) < 1:
        raise BadInput(
            f"counts is {list(split)}; expected {ranks.size} numbers of rows above 0, "
            f"{total:,} together"
        )
    first = sum(split[: ranks.rank])
    return slice(first, first + split[ranks.rank])


@dataclass(frozen=True)
class Rows:
    """The rows of the whole head over the ranks, in their order. `V` of them are tokens."""

    counts: tuple[int, ...]  # [R]
    rank: int
    V: int

    @property
    def start(self) -> int:
        """The id of this rank's first row."""
        return sum(self.counts[: self.rank])

    @property
    def total(self) -> int:
        """All rows, padding included."""
        return sum(self.counts)

    def below(self, limit: int) -> tuple[int, ...]:
        """Give how many of its rows each rank has below a limit, `[R]`."""
        starts = accumulate(self.counts, initial=0)
        return tuple(min(max(limit - at, 0), n) for at, n in zip(starts, self.counts, strict=False))

    def here(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Give ids as rows of this rank, and which of them are its own; others become row 0."""
        place = ids - self.start
        own = (place >= 0) & (place < self.counts[self.rank])
        return place.masked_fill(~own, 0), own


def rows_of(ranks: Ranks, rows: int, width: int, vocab_size: int | None) -> Rows:
    """Learn from all ranks how many rows they have; refuse ranks that do not fit together."""
    sizes = torch.tensor([rows, width, -1 if vocab_size is None else vocab_size])
    (every,) = ranks.gather(sizes, what="making a sharded head")  # [R, 3]
    counts = tuple(every[:, 0].tolist())
    for name, column in (("width", every[:, 1]), ("vocab_size", every[:, 2])):
        if len(set(column.tolist())) > 1:
            raise BadInput(
                f"the ranks have {name} {', '.join(map(str, column.tolist()))}; expected rows of "
                "one head on all of them"
            )
    total = sum(counts)
    if vocab_size is not None and not 1 <= vocab_size <= total:
        raise BadInput(f"vocab_size is {vocab_size:,}; expected 1 to {total:,}, the number of rows")
    return Rows(counts, ranks.rank, vocab_size or total)


def hashed(head: Projection, own: Sequence[Tensor], rows: Rows, ranks: Ranks) -> str:
    """Hash the tensors of all ranks as one head does; they pass by in pieces."""
    about = {
        "shape": [rows.total, head.hidden_size],
        "dtype": [str(t.dtype).removeprefix("torch.") for t in own],
        "scale": head.scale and [head.scale.by, head.scale.divide],
        "softcap": head.softcap,
        "logits": rows.V,
    }
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for tensor in own:
        mine = tensor.detach().cpu()
        step = max(1, _CHUNK // max(1, tensor[:1].numel()))
        for rank, count in enumerate(rows.counts):
            for first in range(0, count, step):
                room = mine.new_empty(min(step, count - first), *mine.shape[1:])
                if rank == ranks.rank:
                    room.copy_(mine[first : first + step])
                ranks.from_rank(rank, room, "hashing a head")
                digest.update(room.view(torch.uint8).numpy().data)
    return digest.hexdigest()
