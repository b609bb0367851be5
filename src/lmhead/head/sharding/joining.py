"""Answers of all ranks put together: the best of each to the best of all.

Ranks have their rows in the order of the ids, so that what stands in the order of ranks, and within
a rank in the order of ids, is in the order of ids.

Symbols: n states, R ranks, k best tokens, z logits.
"""

from collections.abc import Sequence

import torch

from lmhead.head.answers import TopK
from lmhead.ranks import Ranks

NOBODY = 2**31 - 1  # the id of a place that is not taken


def best_of_all(mine: TopK, counts: Sequence[int], k: int, ranks: Ranks) -> TopK:
    """Give the k best `[n, k]` of what all ranks hold; rank r gives `counts[r]` columns of its own.

    Ids are those of the whole head, best first in each rank; equal logits in the order of ids.
    """
    if ranks.size == 1:
        return TopK(mine.ids[:, :k], mine.logits[:, :k])
    widest = max(counts)
    room = widest - mine.ids.shape[1]
    ids = torch.nn.functional.pad(mine.ids.to(torch.int32), (0, room), value=NOBODY)
    z = torch.nn.functional.pad(mine.logits, (0, room), value=-torch.inf)
    all_ids, all_z = ranks.gather(ids, z, what="finding the best tokens")  # [R, n, widest]
    ids = torch.cat([one[:, :c] for one, c in zip(all_ids, counts, strict=True)], 1)
    z = torch.cat([one[:, :c] for one, c in zip(all_z, counts, strict=True)], 1)
    z, order = z.sort(dim=-1, descending=True, stable=True)
    return TopK(ids.gather(-1, order)[:, :k].long(), z[:, :k])
