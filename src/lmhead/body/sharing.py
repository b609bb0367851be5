"""Texts that begin alike: what several of them begin with is read once, and each reads on from it.

Symbols: N texts, G beginnings of P tokens, B texts that read on from them, T tokens of the rest. A
text has at most one beginning, of as many tokens as save the most work over all texts. Beginnings
of one length are read together, so that they have no padding; the rests are padded on the right,
where attention does not look.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

TOKENS = 512  # that run together: enough that a product of matrices is at its fastest
_WORTH = 4  # tokens that a beginning has to save


@dataclass(frozen=True)
class Shared:
    """Texts that are read together: `texts[b]` begins with `beginnings[of[b]]`."""

    texts: list[int]  # which
    beginnings: list[tuple[int, ...]]  # all of one length, 0 where texts are read whole
    of: list[int]

    @property
    def length(self) -> int:
        """P, the tokens of a beginning."""
        return len(self.beginnings[0]) if self.beginnings else 0


def lengths_shared(texts: Sequence[Sequence[int]]) -> list[int]:
    """Return how many tokens of each text to read with others; every text keeps one of its own."""
    order = sorted(range(len(texts)), key=lambda i: tuple(texts[i]))
    common = [0]  # tokens that a text shares with the one before it
    for i, j in pairwise(order):
        both = zip(texts[i][:-1], texts[j][:-1], strict=False)
        common.append(next((k for k, (a, b) in enumerate(both) if a != b), _shorter(texts, i, j)))
    result = [0] * len(texts)
    # Spans of neighbours that share something, the innermost first: a stack of those still open,
    # each with where it began, its depth, what is saved within it, and by which spans.
    spans: list[tuple[int, int, int, list[tuple[int, int, int]]]] = [(0, 0, 0, [])]
    for place in range(1, len(order) + 1):
        depth = common[place] if place < len(order) else 0
        begin = place - 1
        while spans and spans[-1][1] > depth:
            begin, inner, saved, by = spans.pop()
            own = (place - begin - 1) * inner
            if own >= max(saved, _WORTH):
                saved, by = own, [(begin, place, inner)]
            if not spans or spans[-1][1] < depth:
                spans.append((begin, depth, saved, by))
                break
            outer = spans.pop()
            spans.append((outer[0], outer[1], outer[2] + saved, outer[3] + by))
        else:
            if not spans or spans[-1][1] < depth:
                spans.append((begin, depth, 0, []))
    for begin, end, depth in spans[0][3]:
        for place in range(begin, end):
            result[order[place]] = depth
    return result


def _shorter(texts: Sequence[Sequence[int]], i: int, j: int) -> int:
    return min(len(texts[i]), len(texts[j])) - 1


def shared_batches(texts: Sequence[Sequence[int]], share: bool = True) -> Iterator[Shared]:
    """Put texts together that have beginnings of one length and about as many tokens left.

    Texts of one beginning are parted where to read it once more costs less than padding, and where
    they are many. The order of the texts does not matter: which of them run together decides the
    last bits of their states.
    """
    lengths = lengths_shared(texts) if share else [0] * len(texts)
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, (ids, P) in enumerate(zip(texts, lengths, strict=True)):
        groups.setdefault(tuple(ids[:P]), []).append(i)
    parts: list[tuple[tuple[int, ...], list[int], int]] = []  # and tokens left of the longest
    for beginning, members in groups.items():
        P = len(beginning)
        members.sort(key=lambda i: (len(texts[i]), tuple(texts[i])))
        if P:
            runs = _runs([len(texts[i]) - P for i in members], P)
        else:  # texts that share nothing go anywhere
            runs = [slice(k, k + 1) for k in range(len(members))]
        for run in runs:
            parts.append((beginning, members[run], len(texts[members[run][-1]]) - P))
    parts.sort(key=lambda part: (len(part[0]), part[2], part[0], tuple(texts[part[1][0]])))
    waiting: list[tuple[tuple[int, ...], list[int], int]] = []
    count = 0
    for part in parts:
        beginning, members, left = part
        grown = (count + len(members)) * left
        if waiting and (len(waiting[0][0]) != len(beginning) or grown > TOKENS):
            yield _together(waiting)
            waiting, count = [], 0
        waiting.append(part)
        count += len(members)
    if waiting:
        yield _together(waiting)


def _runs(lefts: Sequence[int], P: int) -> list[slice]:
    """Part texts of one beginning, the shortest first, so that the fewest positions are run.

    Each part reads the P tokens of the beginning, and pads its texts to the longest of them. A
    token of a beginning counts twice: products of so few rows are half as fast.
    """
    least = [0]  # positions that the first n texts need
    cut = [0]  # where the last part of the first n texts begins
    for n, left in enumerate(lefts, 1):
        most = max(1, TOKENS // left)
        needed, begin = min(
            (least[j] + 2 * P + (n - j) * left, j) for j in range(max(0, n - most), n)
        )
        least.append(needed)
        cut.append(begin)
    runs, n = [], len(lefts)
    while n:
        runs.append(slice(cut[n], n))
        n = cut[n]
    return runs


def _together(parts: Sequence[tuple[tuple[int, ...], list[int], int]]) -> Shared:
    texts = [i for _, members, _ in parts for i in members]
    if not parts[0][0]:
        return Shared(texts, [], [])
    of = [g for g, (_, members, _) in enumerate(parts) for _ in members]
    return Shared(texts, [beginning for beginning, _, _ in parts], of)
