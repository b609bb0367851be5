"""Which texts are read together, and what is read once for several of them."""

import itertools
import random

import pytest

from lmhead.body.sharing import TOKENS, _runs


@pytest.mark.parametrize("seed", range(6))
def test_texts_of_one_beginning_are_parted_where_padding_costs_more(seed: int) -> None:
    """Compared with every way to cut a few texts, sorted by length, into runs."""
    draw = random.Random(seed)
    lefts = sorted(draw.choice([1, 2, 3, 9, 40, 300]) for _ in range(8))
    P = draw.choice([1, 5, 20])

    def cost(runs: list[slice]) -> int:
        return sum(2 * P + len(lefts[run]) * max(lefts[run]) for run in runs)

    ways = []
    for cuts in itertools.product([False, True], repeat=7):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), 8]
        runs = [slice(a, b) for a, b in itertools.pairwise(edges)]
        if all(len(lefts[r]) == 1 or len(lefts[r]) * max(lefts[r]) <= TOKENS for r in runs):
            ways.append(cost(runs))
    found = _runs(lefts, P)
    assert sorted(i for run in found for i in range(8)[run]) == list(range(8))
    assert cost(found) == min(ways)
