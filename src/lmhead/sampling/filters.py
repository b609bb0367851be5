"""The truncations: each takes logits and says which tokens stay.

Every function takes logits z `[B, N]` float32 (-inf: already out) whose columns are in ascending
id order, and returns a mask `[B, N]`, true for the tokens that stay; `z.masked_fill(~mask, -inf)`
applies it. The best token always stays. The whole vocabulary is never sorted. Logits are on the
CPU, where comparing and finding columns is numpy's work: torch takes ten times as long for it.

Sources: top-k (Fan et al. 2018), top-p (Holtzman et al. 2020), typical (Meister et al. 2023),
epsilon and eta (Hewitt et al. 2022), min-p (Nguyen et al. 2024), top-n-sigma (Tang et al. 2024),
mirostat (Basu et al. 2021), XTC (its author's proposal in text-generation-webui, 2024).
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BINS = 2048
SORT_AT_MOST = 2048
BLOCK = 64

Floats = NDArray[np.float32]


class Weights(NamedTuple):
    """Unnormalised probabilities: `w = exp(z - best)`, `[B, N]`; the rest `[B, 1]`."""

    w: Tensor
    best: Tensor
    total: Tensor

    @property
    def logsumexp(self) -> Tensor:
        """The log of the sum of exp(z), `[B, 1]` float64."""
        return self.best + self.total.log()


def weights(z: Tensor) -> Weights:
    """Exponentiate logits safely; the sum over N is taken in float64."""
    best = z.amax(-1, keepdim=True)
    w = (z - best).exp_()
    return Weights(w, best, w.sum(-1, keepdim=True, dtype=torch.float64))


def entropy(z: Tensor) -> Tensor:
    """Entropy in nats of softmax(z), `[B, 1]` float64."""
    w, best, total = weights(z)
    # 0 * -inf is no contribution, not NaN
    energy = (w * (z - best)).nan_to_num_(nan=0.0).sum(-1, keepdim=True, dtype=torch.float64)
    return total.log() - energy / total


def top_k(z: Tensor, k: int, keep_ties: bool = False) -> Tensor:
    """Keep the k highest logits: exactly k, lowest ids first among equals, or with all ties.

    k = 0, or k of at least N, keeps everything.
    """
    B, N = z.shape
    if k == 0 or k >= N:
        return alive(z)
    keep = torch.zeros(z.shape, dtype=torch.bool)
    for row in range(B):
        columns = _not_below_kth(z[row], k)
        values = z[row, columns]
        last = values.topk(k, sorted=False).values.amin()
        stay = values >= last
        spare = 0 if keep_ties else int(stay.count_nonzero()) - k
        if spare:
            stay[(values == last).nonzero().squeeze(-1)[-spare:]] = False
        keep[row, columns[stay]] = True
    return keep & alive(z) if keep_ties else keep


def _not_below_kth(z: Tensor, k: int) -> Tensor:
    """Give columns of one row `[N]` that hold its k highest logits, with few others."""
    blocks = z.numel() // BLOCK
    if k > blocks // 4:
        return torch.arange(z.numel())
    # the k blocks of highest maximum hold k logits that reach the k-th of these maxima
    maxima = z[: blocks * BLOCK].view(blocks, BLOCK).amax(-1)
    level = maxima.topk(k, sorted=False).values.amin()
    return torch.from_numpy(np.flatnonzero(z.numpy() >= level.numpy()))


def top_p(z: Tensor, p: float, keep_ties: bool = False) -> Tensor:
    """Keep the fewest tokens, best first, whose probabilities sum to p or more.

    The token that crosses p stays. p = 0 keeps the best token, p = 1 everything.
    """
    if p >= 1:
        return alive(z)
    w, best, total = weights(z)
    # tokens of probability below (1 - p) / N together weigh less than 1 - p: none of them stays
    floor = best + (total * (1 - p) / z.shape[-1]).log() - 0.01
    return _prefixes(z, w, total * p, floor.float(), keep_ties)


def typical_p(z: Tensor, p: float, keep_ties: bool = False) -> Tensor:
    """Keep the tokens whose surprise is nearest to the entropy, until they sum to p or more."""
    if p >= 1:
        return alive(z)
    found = weights(z)
    H = entropy(z)
    # the score is minus the distance of the surprise from the entropy
    score = (z - found.logsumexp.float()).add_(H.float()).abs_().neg_()
    # as in top_p: a token this far off is on the improbable side, and of too little weight
    rare = -math.log((1 - p) / z.shape[-1])
    floor = -torch.maximum(H, rare - H) - 0.01
    return _prefixes(score, found.w, found.total * p, floor.float(), keep_ties)


def min_p(z: Tensor, p: float) -> Tensor:
    """Keep the tokens at least p times as probable as the best one."""
    if p <= 0:
        return alive(z)
    return _at_least(z, z.amax(-1, keepdim=True) + math.log(p))


def epsilon(z: Tensor, cutoff: float) -> Tensor:
    """Keep the tokens of probability cutoff or more, or the best one and its equals."""
    if cutoff <= 0:
        return alive(z)
    found = weights(z)
    return _at_least(z, torch.minimum(found.best, (found.logsumexp + math.log(cutoff)).float()))


def eta(z: Tensor, cutoff: float) -> Tensor:
    """Like epsilon, with the cutoff lowered to sqrt(cutoff) * exp(-entropy) where that is less."""
    if cutoff <= 0:
        return alive(z)
    found = weights(z)
    lowered = torch.clamp(0.5 * math.log(cutoff) - entropy(z), max=math.log(cutoff))
    return _at_least(z, torch.minimum(found.best, (found.logsumexp + lowered).float()))


def top_n_sigma(z: Tensor, n: float) -> Tensor:
    """Keep the logits within n standard deviations (of all finite logits) of the best."""
    if n <= 0:
        return alive(z)
    finite = alive(z)
    count = finite.sum(-1, keepdim=True)
    mean = z.masked_fill(~finite, 0).sum(-1, keepdim=True, dtype=torch.float64) / count
    off = (z - mean.float()).masked_fill_(~finite, 0).square_()
    sigma = (off.sum(-1, keepdim=True, dtype=torch.float64) / count).sqrt()
    return _at_least(z, z.amax(-1, keepdim=True) - (n * sigma).float())


def xtc(z: Tensor, threshold: float, chosen: Tensor) -> Tensor:
    """In the chosen rows `[B]`, drop the tokens of probability threshold or more but the last one.

    The last one is the least probable of them, the highest id among equals: with fewer than two
    such tokens nothing is dropped.
    """
    finite = alive(z)
    level = weights(z).logsumexp + (math.log(threshold) if threshold > 0 else -math.inf)
    high = _at_least(z, level.float()) & finite
    lowest = z.masked_fill(~high, torch.inf)
    # flipped, so that the highest id wins a tie
    last = z.shape[-1] - 1 - lowest.flip(-1).argmin(-1, keepdim=True)
    dropped = high.scatter(-1, last, False)
    return finite & ~(dropped & chosen.unsqueeze(-1))


def mirostat(z: Tensor, mu: Tensor) -> Tensor:
    """Keep the tokens of at most mu `[B]` bits of surprise, or the best one and its equals."""
    found = weights(z)
    level = found.logsumexp - mu.unsqueeze(-1) * math.log(2)
    return _at_least(z, torch.minimum(found.best, level.float()))


def alive(z: Tensor) -> Tensor:
    """Tell which tokens can still be drawn, `[B, N]`."""
    return torch.from_numpy(z.numpy() > -np.inf)


def _at_least(z: Tensor, level: Tensor) -> Tensor:
    """Compare logits `[B, N]` with a level `[B, 1]`: in numpy, ten times as fast as in torch."""
    return torch.from_numpy(z.numpy() >= level.numpy())


def _prefixes(score: Tensor, w: Tensor, target: Tensor, floor: Tensor, keep_ties: bool) -> Tensor:
    """Keep the shortest run of columns, highest score first, whose weights w sum to target.

    score, w `[B, N]`; target, floor `[B, 1]`. The caller knows that no column that scores below
    floor is needed.
    """
    keep = np.empty(score.shape, dtype=bool)
    rows = zip(score.numpy(), w.numpy(), target[:, 0].tolist(), floor[:, 0].tolist(), strict=True)
    for row, (row_score, row_w, row_target, row_floor) in enumerate(rows):
        level, ties = _last_kept(row_score, row_w, row_target, row_floor)
        if keep_ties:
            np.greater_equal(row_score, level, out=keep[row])
        else:
            np.greater(row_score, level, out=keep[row])
            keep[row, ties] = True
    return torch.from_numpy(keep)


def _last_kept(
    score: Floats, w: Floats, target: float, floor: float
) -> tuple[float, NDArray[np.int64]]:
    """Give the score of the last column that `_prefixes` keeps in a row, and which equals it keeps.

    Put the columns into equal bins of the score and add up each bin's weight; the sum crosses the
    target in one bin. Go on with that bin alone, until it is small enough to sort.
    """
    columns = np.flatnonzero(score >= floor)
    while columns.size > SORT_AT_MOST:
        depth = score[columns]
        low, high = depth.min(), depth.max()
        if high - low < 1e-30:  # all but equal: no bins between them
            break
        np.subtract(high, depth, out=depth)  # in place: fresh memory costs more than the sums
        depth *= (BINS - 1) / (high - low)
        bins = depth.astype(np.int64)
        sums = np.bincount(bins, w[columns], minlength=BINS).cumsum()
        edge = int(np.searchsorted(sums, target))
        if edge == BINS:  # by rounding the weights do not quite reach the target
            edge = int(bins.max())
        target -= sums[edge - 1] if edge else 0.0
        columns = columns[np.flatnonzero(bins == edge)]
    few = score[columns]
    order = np.argsort(-few, kind="stable")  # the lowest ids come first among equals
    sums = w[columns[order]].cumsum(dtype=np.float64)
    kept = order[: int(np.searchsorted(sums, target)) + 1]
    level = few[kept[-1]]
    return float(level), columns[kept[few[kept] == level]]
