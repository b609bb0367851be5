"""Folds of the labelled rows: every label teaches, and every label judges what it did not teach."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

FOLDS, REPEATS = 5, 4


def folds(y: Tensor, groups: Sequence[str], seed: int, repeats: int = REPEATS) -> Tensor:
    """Return which rows are left out, `[K, N]` bool; each row is left out once in every repeat.

    No fold takes a group apart, and each has its share of both classes where groups allow it. A
    fold that would leave one class alone to learn from is left out.
    """
    members: dict[str, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    label = y.tolist()
    own = {
        name: [sum(label[i] == c for i in rows) for c in (0, 1)] for name, rows in members.items()
    }
    draw, result = random.Random(seed), []
    for _ in range(repeats):
        order = sorted(members)
        draw.shuffle(order)
        order.sort(key=lambda name: -len(members[name]))  # the large ones first; ties by chance
        count = [[0, 0] for _ in range(FOLDS)]
        place = torch.zeros(len(y), dtype=torch.long)
        for name in order:
            new = own[name]
            # where these classes are rarest so far, and of those the smallest
            cost = [1000 * (a * new[0] + b * new[1]) + a + b for a, b in count]
            fold = cost.index(min(cost))
            place[members[name]] = fold
            count[fold] = [a + b for a, b in zip(count[fold], new, strict=True)]
        for fold in range(FOLDS):
            out = place == fold
            if out.any() and {0, 1} <= set(y[~out].tolist()):
                result.append(out)
    return torch.stack(result) if result else torch.zeros(0, len(y), dtype=torch.bool)


def out_of_fold(scores: Tensor, out: Tensor) -> Tensor:
    """Average scores `[K, N]` of K fits over the folds `out [K, N]` that left each row out: `[N]`.

    A row that no fold left out has 0: nothing is known about it.
    """
    times = out.sum(0)
    return (scores * out).sum(0) / times.clamp(min=1)
