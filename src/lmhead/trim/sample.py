"""A sample of the texts of a corpus, drawn while they are counted.

Every text has a number that looks random and depends on its place alone; those with the lowest
numbers are the sample. So it is drawn in one pass, without knowing how many texts will come, and
the samples of parts of a corpus make up the sample of the whole.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappush, heappushpop

import numpy as np
import numpy.typing as npt

WINDOW = 256  # tokens of a text that the model reads at once
PROMPTS = (32, 16, 8, 4, 2, 1)  # lengths that prompts are cut to: equal ones need no padding

Row = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Sampled:
    """Some texts as ids, in a random order; a long one is cut off at `WINDOW` tokens."""

    texts: tuple[Row, ...]
    ranks: tuple[int, ...]  # lowest first
    most: int

    def __add__(self, other: "Sampled") -> "Sampled":
        pairs = sorted(
            zip((*self.ranks, *other.ranks), (*self.texts, *other.texts), strict=True),
            key=lambda pair: pair[0],
        )[: self.most]
        return Sampled(
            tuple(text for _, text in pairs), tuple(rank for rank, _ in pairs), self.most
        )


class Sampler:
    """Takes texts by their places in the corpus and keeps a random `most` of them."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._heap: list[tuple[int, Row]] = []  # the highest rank first: (-rank, text)

    def offer(self, places: "npt.NDArray[np.int64]", texts: Sequence[Sequence[int]]) -> None:
        """Offer some texts, given as ids."""
        ranks = rank_of(places)
        if len(self._heap) == self.most:
            some: Iterable[int] = np.flatnonzero(ranks < np.uint64(-self._heap[0][0])).tolist()
        else:
            some = range(len(texts))
        for at in some:
            if not len(texts[at]):
                continue
            entry = -int(ranks[at]), np.array(texts[at][:WINDOW], np.int32)
            if len(self._heap) < self.most:
                heappush(self._heap, entry)
            elif entry[0] > self._heap[0][0]:
                heappushpop(self._heap, entry)

    def sampled(self) -> Sampled:
        """Return what was kept."""
        found = sorted(self._heap, key=lambda entry: -entry[0])
        return Sampled(
            tuple(text for _, text in found), tuple(-rank for rank, _ in found), self.most
        )


def rank_of(places: "npt.NDArray[np.int64]") -> "npt.NDArray[np.uint64]":
    """Mix the bits of numbers (SplitMix64): each gives another number, in no visible order."""
    z = places.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def cut_prompts(texts: Iterable[Sequence[int]]) -> list[list[int]]:
    """Cut the beginning off each text, to one of few lengths."""
    prompts = []
    for ids in texts:
        # Something must be left to continue; a text of one token is its own prompt.
        length = next((n for n in PROMPTS if n < max(2, len(ids))), 0)
        if len(ids) and length:
            prompts.append([int(i) for i in ids[:length]])
    return prompts
