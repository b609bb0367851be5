"""Many small logistic regressions at once: for every layer, every fold, and all rows together.

Symbols: K regressions, N rows, r features. Each minimises the mean loss of its own rows plus
l2 / 2 |w - prior|^2; the bias is free.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_STEPS = 30
_HALVINGS = 12
_ENOUGH = 1e-7  # of the gradient


class Fits(NamedTuple):
    """K linear scores: x @ weights + bias."""

    weights: Tensor  # [K, r]
    bias: Tensor  # [K]

    def __call__(self, x: Tensor) -> Tensor:
        """Score x `[K, M, r]`: `[K, M]`."""
        return torch.einsum("kmr,kr->km", x, self.weights) + self.bias[:, None]


def ridge_logistic(
    x: Tensor, y: Tensor, rows: Tensor, l2: float, prior: Tensor | None = None
) -> Fits:
    """Fit K regressions on x `[K, N, r]` and y `[N]`, each on its own `rows [K, N]` (bool).

    Newton's method, all of them side by side; a step that would raise a loss is halved.
    """
    K, _, r = x.shape
    z = torch.cat([x.double(), torch.ones(*x.shape[:2], 1, dtype=torch.float64)], -1)
    share = rows.double() / rows.sum(-1, keepdim=True)  # [K, N]
    target = y.double().expand(share.shape)
    ridge = torch.full((r + 1,), l2, dtype=torch.float64)
    ridge[-1] = 1e-9
    centre = torch.zeros(K, r + 1, dtype=torch.float64)
    if prior is not None:
        centre[:, :-1] = prior.double()

    def loss(w: Tensor) -> Tensor:
        score = torch.einsum("knr,kr->kn", z, w)
        each = F.binary_cross_entropy_with_logits(score, target, reduction="none")
        return (share * each).sum(-1) + 0.5 * (ridge * (w - centre).square()).sum(-1)

    w = centre.clone()
    for _ in range(_STEPS):
        p = torch.einsum("knr,kr->kn", z, w).sigmoid()
        gradient = torch.einsum("knr,kn->kr", z, share * (p - target)) + ridge * (w - centre)
        if float(gradient.abs().max()) < _ENOUGH:
            break
        bent = (share * p * (1 - p)).clamp(min=1e-12)
        curvature = torch.einsum("knr,kn,kns->krs", z, bent, z) + torch.diag(ridge)
        step = torch.linalg.solve(curvature, gradient)
        size, before = torch.ones(K, 1, dtype=torch.float64), loss(w)
        for _ in range(_HALVINGS):
            worse = loss(w - size * step) > before + 1e-12
            if not worse.any():
                break
            size[worse] /= 2
        w = w - size * step
    return Fits(w[:, :-1].float(), w[:, -1].float())
