"""Texts in rows: pieces of the tree of all texts, each node of which is read once."""

import random

import pytest
import torch

from lmhead.body.sharing import ROW, TOKENS, Row, batches_of, inputs_of, rows_of

Ids = tuple[int, ...]


def drawn(seed: int, most: int = 3000) -> list[Ids]:
    """Different texts of few tokens, which often begin alike, and some long ones."""
    draw = random.Random(seed)
    kinds = draw.choice([2, 3, 5])
    made = {
        tuple(draw.randrange(kinds) for _ in range(draw.randint(1, 9)))
        for _ in range(draw.randint(1, most))
    }
    long = tuple(draw.randrange(kinds) for _ in range(2 * ROW))
    made |= {(*long, draw.randrange(kinds)), (*long[:-9], *range(4)), long[: ROW + 1]}
    return sorted(made)


@pytest.mark.parametrize("seed", range(20))
def test_every_text_is_a_path_of_one_row(seed: int) -> None:
    texts = drawn(seed)
    rows = [row for batch in batches_of(rows_of(texts, range(len(texts)))) for row in batch]
    for row in rows:
        for i, path in zip(row.texts, row.paths, strict=True):
            assert tuple(row.ids[node] for node in path) == texts[i]
            assert [row.parents[node] for node in path] == [-1, *path[:-1]]
            assert [row.depths[node] for node in path] == list(range(len(path)))
            assert row.seen[path[-1]].nonzero()[:, 0].tolist() == path
    assert sorted(i for row in rows for i in row.texts) == list(range(len(texts)))


@pytest.mark.parametrize("seed", range(20))
def test_no_row_reads_a_beginning_twice(seed: int) -> None:
    texts = drawn(seed)
    for row in rows_of(texts, range(len(texts))):
        beginnings = {texts[i][: n + 1] for i in row.texts for n in range(len(texts[i]))}
        assert len(row.ids) == len(beginnings)


def test_rows_are_full_and_long_texts_are_joined_by_those_that_share_half() -> None:
    long = list(range(10, 10 + 3 * ROW))
    texts = [[*long, k, k] for k in range(5)] + [[k] * 10 for k in range(1000, 1100)]
    rows = rows_of(texts, range(len(texts)))
    assert [len(row.ids) for row in rows if row.texts[0] < 5] == [len(long) + 10]
    short = [len(row.ids) for row in rows if row.texts[0] >= 5]
    assert max(short) <= ROW
    assert all(n > ROW - 10 for n in short[:-1])


@pytest.mark.parametrize("seed", range(20))
def test_the_order_of_texts_does_not_decide_what_runs_together(seed: int) -> None:
    """Else a state had other last bits where another call had read it, and a vector with it."""
    texts = drawn(seed)
    mixed = random.Random(seed).sample(texts, len(texts))
    one, other = (
        [
            [(row.ids, row.parents, [some[i] for i in row.texts]) for row in batch]
            for batch in batches_of(rows_of(some, range(len(some))))
        ]
        for some in (texts, mixed)
    )
    assert one == other


@pytest.mark.parametrize("seed", range(5))
def test_a_batch_holds_rows_of_about_one_length(seed: int) -> None:
    texts = drawn(seed)
    for batch in batches_of(rows_of(texts, range(len(texts)))):
        assert len(batch) == 1 or len(batch) * max(len(row.ids) for row in batch) <= TOKENS


def test_plain_texts_need_no_mask_and_padding_sees_itself() -> None:
    texts = [[5, 6, 7], [5, 6, 8], [9, 9]]
    alone = [row for i in range(3) for row in rows_of(texts, [i])]
    ids, others = inputs_of(alone, torch.float32)
    assert ids.tolist() == [[5, 6, 7], [5, 6, 8], [9, 9, 0]]
    assert not others
    rows: list[Row] = [*rows_of(texts, [0, 1, 2]), *rows_of(texts, [2])]
    ids, others = inputs_of(rows, torch.float32)
    assert ids.tolist() == [[5, 6, 7, 8, 9, 9], [9, 9, 0, 0, 0, 0]]
    assert others["position_ids"].tolist() == [[0, 1, 2, 2, 0, 1], [0, 1, 0, 0, 0, 0]]
    seen = others["attention_mask"][:, 0] == 0
    assert seen[0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1, 1],
    ]
    assert seen[1, 2:].nonzero().tolist() == [[0, 2], [1, 3], [2, 4], [3, 5]]
