"""Directions that are found, not trained by steps: mean difference, principal component, probe.

Each looks at the states of one layer at the last token, x `[N, d]`, with labels y `[N]` of 0 and
1, and gives a direction that points from false to true.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_NEWTON_STEPS = 50
L2 = 0.1  # on standardised states, per row: with few labels a probe needs much restraint


class Linear(NamedTuple):
    """score = x @ direction + bias; its sigmoid is the probability of being true."""

    direction: Tensor  # [d]
    bias: float

    def __call__(self, x: Tensor) -> Tensor:
        """Score states `[..., d]`."""
        return x @ self.direction + self.bias


def logistic(x: Tensor, y: Tensor, l2: float) -> Linear:
    """Fit a logistic regression: mean loss + l2/2 |w|^2, the bias left free. Unseeded.

    Newton's method in the space that the rows span, which is small where labels are few.
    """
    x, y = x.double(), y.double()
    mean = x.mean(0)
    rows, sizes, axes = torch.linalg.svd(x - mean, full_matrices=False)  # the minimum lies in axes
    z = torch.cat([rows * sizes, torch.ones(len(x), 1, dtype=torch.float64)], 1)  # [N, r + 1]
    ridge = torch.full((z.shape[1],), l2, dtype=torch.float64)
    ridge[-1] = 0.0

    def loss(w: Tensor) -> float:
        fitted = F.binary_cross_entropy_with_logits(z @ w, y)
        return float(fitted + 0.5 * (ridge * w * w).sum())

    w = torch.zeros(z.shape[1], dtype=torch.float64)
    for _ in range(_NEWTON_STEPS):
        p = (z @ w).sigmoid()
        gradient = z.T @ (p - y) / len(y) + ridge * w
        if float(gradient.abs().max()) < 1e-9:
            break
        curvature = (z.T * (p * (1 - p)).clamp(min=1e-12)) @ z / len(y) + torch.diag(ridge)
        curvature = curvature + 1e-12 * torch.eye(len(w), dtype=torch.float64)
        step = torch.linalg.solve(curvature, gradient)
        size, before = 1.0, loss(w)
        while loss(w - size * step) > before and size > 1e-6:
            size /= 2
        w = w - size * step
    direction = axes.T @ w[:-1]
    return Linear(direction.float(), float(w[-1] - mean @ direction))


def probe(x: Tensor, y: Tensor, every: Tensor | None = None, l2: float = L2) -> Linear:
    """Fit a logistic probe on standardised states.

    `every [M, d]`: states with and without labels, whose mean and spread standardise; by default x.
    """
    every = x if every is None else every
    mean, std = every.mean(0), every.std(0, correction=0).clamp(min=1e-6)
    found = logistic((x - mean) / std, y, l2)
    direction = found.direction / std
    return Linear(direction, found.bias - float(mean @ direction))


def mean_diff(x: Tensor, y: Tensor) -> Linear:
    """Take the mean of the true states minus the mean of the false ones."""
    return _scaled(x[y == 1].mean(0) - x[y == 0].mean(0), x, y)


def pca(x: Tensor, y: Tensor, every: Tensor | None = None) -> Linear:
    """Take the first principal component of the states, turned to the side of the true ones.

    `every [M, d]`: states with and without labels, whose component it is; by default x.
    """
    every = x if every is None else every
    _, _, right = torch.linalg.svd((every - every.mean(0)).double(), full_matrices=False)
    direction = right[0].float()
    gap = x[y == 1].mean(0) - x[y == 0].mean(0)
    return _scaled(direction if direction @ gap >= 0 else -direction, x, y)


def _scaled(direction: Tensor, x: Tensor, y: Tensor) -> Linear:
    """Put the middle of the classes at 0, and their spread along the direction at 1."""
    along = x @ direction
    true, false = along[y == 1], along[y == 0]
    middle = 0.5 * (true.mean() + false.mean())
    spread = torch.cat([true - true.mean(), false - false.mean()]).square().mean().sqrt()
    scale = 1 / max(float(spread), 1e-6)
    return Linear(direction * scale, -float(middle) * scale)
