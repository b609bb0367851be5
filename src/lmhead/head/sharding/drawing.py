"""One draw over the rows of all ranks, for the same token that one rank would draw.

Symbols: n states, R ranks, z logits of the columns that are here, `[n, columns]`.
"""

import torch
from torch import Tensor

from lmhead.errors import BadInput
from lmhead.head.answers import Generators, TopK, each, ranked
from lmhead.head.sharding.joining import best_of_all
from lmhead.ranks import Ranks

_FIRST = 256  # candidates of each rank that top_p looks at first


def largest(z: Tensor, ranks: Ranks) -> Tensor:
    """Give the largest logit `[n, 1]` of all ranks' `[n, columns]`; NaN where there is one."""
    mine = z.amax(-1) if z.shape[-1] else z.new_full(z.shape[:1], -torch.inf)
    (every,) = ranks.gather(mine, what="a draw")  # [R, n]
    best = every.amax(0).unsqueeze(-1)
    if not best.isfinite().all():
        raise BadInput(
            "the largest logit is not finite, so there is nothing to sample from; "
            "check h for NaN and infinity, and what was banned"
        )
    return best


def sigma_floor(z: Tensor, best: Tensor, n: float, ranks: Ranks) -> Tensor:
    """Give the logit `[n, 1]` that is n standard deviations of all ranks' logits below the best."""
    wide = z.double()
    finite = wide.isfinite()
    held = wide.masked_fill(~finite, 0)
    sums = torch.stack([finite.double().sum(-1), held.sum(-1)])  # [2, n]
    count, total = ranks.sum_(sums, "a draw").unsqueeze(-1)  # [n, 1] each
    off = (wide - total / count).masked_fill(~finite, 0).square().sum(-1, keepdim=True)
    floor: Tensor = best.double() - n * (ranks.sum_(off, "a draw") / count).sqrt()
    return floor


def drawn_from_all(
    z: Tensor, best: Tensor, temperature: float, u: Tensor, start: int, ranks: Ranks
) -> Tensor:
    """Draw one id `[n]` from softmax(z / temperature) over the columns of all ranks.

    The law of `answers.drawn`, with its weights: the running sum in float64 goes from rank to rank,
    and the rank in whose part it passes u `[n, 1]` times the total says which id that is.
    """
    y = z if temperature == 1 else z / temperature
    top = best if temperature == 1 else best / temperature
    if not top.isfinite().all():  # divided by next to nothing
        y, top = (z - best) / temperature, torch.zeros_like(best)
    sums = (y - top).exp_().cumsum(-1, dtype=torch.float64)  # [n, columns]
    mine = sums[:, -1] if sums.shape[1] else sums.new_zeros(len(sums))
    (totals,) = ranks.gather(mine, what="a draw")  # [R, n]
    ends = totals.cumsum(0)  # [R, n]
    passed = u.squeeze(-1) * ends[-1]  # [n]
    owner = (ends <= passed).sum(0)
    # were u * total to round up to total: the last rank, and column, of positive weight
    owner = torch.minimum(owner, (ends < ends[-1]).sum(0))
    before = ends[ranks.rank] - totals[ranks.rank]
    ids = torch.zeros(len(z), dtype=torch.int64)
    at = (owner == ranks.rank).nonzero().squeeze(1)
    if len(at):
        own, wanted = sums[at], (passed - before)[at].unsqueeze(-1)
        picked = torch.searchsorted(own, wanted, right=True)
        last = torch.searchsorted(own, own[:, -1:].contiguous())
        ids[at] = start + torch.minimum(picked, last).squeeze(-1).cpu()
    (every,) = ranks.gather(ids, what="a draw")  # [R, n]
    return every.gather(0, owner.cpu().unsqueeze(0)).squeeze(0)


def generators_of_all(generator: Generators, n: int, ranks: Ranks) -> list[torch.Generator]:
    """Give one generator for each of n states; where none was given, ranks agree on a seed.

    Generators that are given are the caller's: all ranks bring them in the same state.
    """
    given = each(generator, n, "generators")
    if all(one is not None for one in given):
        return list(given)  # type: ignore[arg-type]
    seed = ranks.agree(int(torch.randint(2**62, ())), "a draw")
    common = torch.Generator().manual_seed(seed)
    return [one or common for one in given]


def nucleus_of_all(
    z: Tensor, best: Tensor, temperature: float, top_p: float, start: int, ranks: Ranks
) -> TopK:
    """Give the tokens that hold the share top_p, best first; what is cut has -inf.

    Ranks send more and more of their best, until these hold the share for every state.
    """
    top, columns = best.double(), z.shape[1]

    def weights(logits: Tensor) -> Tensor:
        return ((logits.double() - top) / temperature).exp()

    here = torch.full((len(z),), columns, dtype=torch.float64)
    parts, every = ranks.gather(weights(z).sum(-1), here, what="a draw")  # [R, n]
    wanted = top_p * parts.sum(0).unsqueeze(-1)  # [n, 1]
    there = [int(n) for n in every[:, 0]] if len(z) else [columns]
    k = _FIRST
    while True:
        width = min(k, columns)
        mine = ranked(z, width) if width else TopK(z[:, :0].long(), z)
        counts = [min(k, n) for n in there]
        all_there = k >= max(there)
        # only the k best of so many are sure to be the best of all
        most = sum(counts) if all_there else min(k, sum(counts))
        found = best_of_all(TopK(mine.ids + start, mine.logits), counts, most, ranks)
        p = weights(found.logits)
        held = p.cumsum(-1)
        if all_there or bool((held[:, -1:] >= wanted).all()):
            break
        k *= 8
    stays = held - p < wanted
    stays[:, :1] = True
    return TopK(found.ids, found.logits.masked_fill(~stays, -torch.inf))
