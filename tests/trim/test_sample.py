"""Samples: drawn in one pass, the same in parts, without favour."""

import numpy as np

from lmhead.trim.sample import WINDOW, Sampler, rank_of


def drawn(places: range, most: int, lot: int = 97) -> Sampler:
    sampler = Sampler(most)
    for at in range(places.start, places.stop, lot):
        some = np.arange(at, min(at + lot, places.stop))
        sampler.offer(some, [[i, i + 1] for i in some.tolist()])
    return sampler


def firsts(sampler: Sampler) -> list[int]:
    return [int(text[0]) for text in sampler.sampled().texts]


def test_the_sample_of_the_whole_is_made_of_those_of_its_parts() -> None:
    whole = drawn(range(5000), 300).sampled()
    parts = drawn(range(1700), 300).sampled() + drawn(range(1700, 5000), 300, 41).sampled()
    assert len(whole.texts) == 300
    assert parts.ranks == whole.ranks
    assert all(np.array_equal(a, b) for a, b in zip(parts.texts, whole.texts, strict=True))


def test_every_text_is_as_likely_as_any_other() -> None:
    found = firsts(drawn(range(100_000), 4000))
    assert len(set(found)) == 4000
    tenths = np.bincount(np.array(found) // 10_000, minlength=10)
    assert (abs(tenths - 400) < 5 * 20).all()  # five standard deviations
    half = sum(i < 50_000 for i in found[:1000])  # the order is random too
    assert abs(half - 500) < 80
    assert len(np.unique(rank_of(np.arange(100_000)))) == 100_000


def test_few_texts_are_all_taken_and_long_ones_cut() -> None:
    sampler = Sampler(10)
    sampler.offer(np.arange(3), [[1], [], list(range(5000))])
    texts = sampler.sampled().texts
    assert sorted(map(len, texts)) == [1, WINDOW]
