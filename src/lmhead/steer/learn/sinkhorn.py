"""Soft labels by optimal transport: classes for unlabelled texts, each class with its share."""

import torch
from torch import Tensor


def soft_labels(
    scores: Tensor, shares: Tensor, epsilon: float = 0.05, iterations: int = 3
) -> Tensor:
    """Give every row a distribution over the classes, whose mean is `shares`.

    scores `[N, C]`: the log-probability of each class; shares `[C]`, of sum 1. The plan that
    agrees most with the scores, smoothed by `epsilon`; after few iterations its rows are exact
    distributions and the shares of the classes nearly so. Returns `[N, C]`.
    """
    log_q = scores.double() / epsilon  # [N, C]
    log_shares = shares.double().log()
    for _ in range(iterations):
        log_q = log_q - torch.logsumexp(log_q, 0, keepdim=True) + log_shares
        log_q = log_q - torch.logsumexp(log_q, 1, keepdim=True)
    return log_q.exp().float()


def most_confident(q: Tensor, shares: Tensor, count: int) -> Tensor:
    """Return the `count` rows whose soft labels `[N, C]` are surest, by class in its share."""
    best, label = q.max(1)
    chosen = []
    for c, share in enumerate(shares.tolist()):
        rows = (label == c).nonzero().flatten()
        take = rows[best[rows].argsort(descending=True, stable=True)]
        chosen.append(take[: round(share * count)])
    return torch.cat(chosen).sort().values
