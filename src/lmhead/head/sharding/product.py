"""The logits of a part of a head's rows, with the bits that the whole head gives.

A matrix product works on blocks of rows, and adds up in another order where a block is not full.
So rows are put where they stand in the whole head: the few before its first whole block here, and
the few after the last, are multiplied in blocks of their own that are filled up with zeros.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lmhead.head.projection import Projection, block_rows
from lmhead.head.sharding.rows import Rows


def scored(head: Projection, h: Tensor, rows: Rows) -> Tensor:
    """Give the logits `[..., V_r]` of this rank's rows, of what enters the projection."""
    h = h.to(head.weight.dtype)
    return head._finish(product(h, head.weight, head.bias, rows.start, rows.total))


def product(h: Tensor, weight: Tensor, bias: Tensor | None, start: int, total: int) -> Tensor:
    """Multiply h with `weight`, which are the rows from `start` on of a weight with `total`."""
    n, block = len(weight), block_rows(weight.dtype)
    before = min(-start % block, n)  # rows of a block that began elsewhere
    end = start + n
    after = 0 if end == total else min(end % block, n - before)  # of one that ends elsewhere
    if before == after == 0:
        return F.linear(h, weight, bias)
    parts = []
    for first, last in ((0, before), (before, n - after), (n - after, n)):
        if first == last:
            continue
        rows, own = weight[first:last], None if bias is None else bias[first:last]
        front = (start + first) % block
        # The last block of the whole head is as short there.
        back = 0 if end == total and last == n else -(front + last - first) % block
        if front or back:
            rows = F.pad(rows, (0, 0, front, back))
            own = None if own is None else F.pad(own, (front, back))
        z = F.linear(h, rows, own)
        parts.append(z[..., front : front + last - first])
    return torch.cat(parts, -1)
