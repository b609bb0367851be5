"""What can be read off many distributions at once, one stretch of the vocabulary after another.

The logits of hundreds of states over a whole vocabulary are hundreds of megabytes. Read by
stretches, they stay in the processor's cache, and are never held all together.

Symbols: N distributions, V tokens, z logits `[N, n]` of the n tokens of a stretch.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_LOWEST = -1e30  # below any logit, and finite, so that differences are numbers


class Distributions:
    """Sums over the vocabulary for N distributions, and the k best tokens of each.

    All logits are taken less the largest so far, `peak`, so that nothing large is taken from
    something large; when a larger one comes, the sums are moved to it.
    """

    def __init__(self, N: int, k: int, device: torch.device | None = None) -> None:
        self.peak = torch.full((N,), _LOWEST, device=device)
        self.total = torch.zeros(N, dtype=torch.float64, device=device)  # of exp(z - peak)
        self.moment = torch.zeros_like(self.total)  # of exp(z - peak) (z - peak)
        self.best = torch.full((N, k), -math.inf, device=device)
        self.ids = torch.zeros(N, k, dtype=torch.long, device=device)

    def add(self, z: Tensor, first: int, space: "Space") -> tuple[Tensor, Tensor]:
        """Add the logits of the tokens from `first` on; z is written over.

        Return z less the peak, and by how much the peak moved, `[N]` float64.
        """
        largest = z.amax(-1)
        self._keep_best(z, largest, first)
        peak = torch.maximum(self.peak, largest)
        moved = (self.peak - peak).double()
        off = z.sub_(peak[:, None])
        w, product = space.of(z)
        torch.exp(off, out=w)
        shrunk = moved.exp()
        self.moment = shrunk * (self.moment + moved * self.total) + weighed(w, off, product)
        self.total = shrunk * self.total + w.sum(-1).double()
        self.peak = peak
        return off, moved

    def _keep_best(self, z: Tensor, largest: Tensor, first: int) -> None:
        # after the first few stretches, most rows of a stretch hold none of the best
        rows = (largest > self.best[:, -1]).nonzero()[:, 0]
        if not len(rows):
            return
        found = torch.topk(z[rows], min(self.best.shape[1], z.shape[1]))
        values = torch.cat([self.best[rows], found.values], 1)
        ids = torch.cat([self.ids[rows], found.indices + first], 1)
        best = torch.topk(values, self.best.shape[1])
        self.best[rows], self.ids[rows] = best.values, ids.gather(1, best.indices)

    @property
    def log_total(self) -> Tensor:
        """The logarithm of the sum of exp(z - peak), `[N]` float64."""
        return self.total.log()

    @property
    def entropy(self) -> Tensor:
        """The entropy of each, in nats, `[N]` float64."""
        return (self.log_total - self.moment / self.total).clamp(min=0.0)

    def probability(self, z: Tensor) -> Tensor:
        """Return the probability of a logit of each, `[N]`."""
        return (z.double() - self.peak).exp() / self.total


def weighed(p: Tensor, off: Tensor, product: Tensor) -> Tensor:
    """Return the sum of p `off` over the last dimension, in float64; -inf counts where p is not 0.

    `product` is memory to write to.
    """
    # added up in pairs; a dot product would round far more
    found = torch.mul(p, off, out=product).sum(-1)
    if bool(found.isnan().any()):  # -inf times 0
        found = (p * off.clamp(min=_LOWEST)).sum(-1)
    return found.double()


@dataclass(frozen=True)
class Space:
    """Memory for one stretch after another: to ask for it anew costs more than what is done in it.

    `w` and `product`: one number for each logit of a stretch.
    """

    w: Tensor
    product: Tensor

    @classmethod
    def to_hold(cls, numbers: int, device: torch.device | None = None) -> "Space":
        """Make room for this many logits."""
        return cls(*torch.empty(2, numbers, device=device))

    def of(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return both as tensors of the shape of z."""
        n = z.numel()
        return self.w[:n].view(z.shape), self.product[:n].view(z.shape)
