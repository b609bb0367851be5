"""Byte-pair merges, and the one tree by which a token comes to be.

BPE starts from symbols (characters, or bytes) and applies, again and again, the applicable merge of
lowest rank, leftmost first. Two facts make an exact trim possible:

1. Take away merges that do not fire on a text, leave the others in their order: the text encodes as
   before, for at every step the merge that fires is still the lowest that applies.
2. Where a text ends up as tokens t1 ... tn, no merge ever crossed their borders, so the merges that
   fired inside ti are those that fire when ti is encoded alone: its canonical tree.

So a keep-set that holds, with every token, all tokens of its canonical tree encodes every text
whose tokens it holds exactly as the whole vocabulary does. A token may be the result of several
rules; only the one that fires counts.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any

Pair = tuple[int, int]
# What merging an adjacent pair gives: (rank, id), lowest rank first; None where nothing applies.
Rule = Callable[[int, int], tuple[float, int] | None]

_FEW = 24  # symbols up to which a heap is not worth its while


def merge_all(symbols: Sequence[int], rule: Rule) -> tuple[list[int], list[int]]:
    """Encode `symbols`; return the tokens that are left, and every token made on the way."""
    return _merge_few(symbols, rule) if len(symbols) <= _FEW else _merge_many(symbols, rule)


def _merge_few(symbols: Sequence[int], rule: Rule) -> tuple[list[int], list[int]]:
    """Look for the lowest rank again before every merge: the quickest for a word."""
    tokens: list[int] = list(symbols)
    made: list[int] = []
    found = [rule(left, right) for left, right in pairwise(tokens)]
    while True:
        best: tuple[float, int] | None = None
        at = -1
        for place, one in enumerate(found):
            if one is not None and (best is None or one[0] < best[0]):
                best, at = one, place
        if best is None:
            return tokens, made
        tokens[at : at + 2] = [best[1]]
        del found[at]
        made.append(best[1])
        if at > 0:
            found[at - 1] = rule(tokens[at - 1], tokens[at])
        if at < len(found):
            found[at] = rule(tokens[at], tokens[at + 1])


def _merge_many(symbols: Sequence[int], rule: Rule) -> tuple[list[int], list[int]]:
    """Keep all that can be merged in a heap: for long texts."""
    tokens = list(symbols)  # -1: merged into the one before
    last = len(tokens) - 1
    before, after = list(range(-1, last)), list(range(1, last + 2))
    heap: list[tuple[float, int, int, int, int]] = []  # rank, place, left, right, result

    def propose(at: int) -> None:
        if at >= 0 and after[at] <= last:
            left, right = tokens[at], tokens[after[at]]
            if (found := rule(left, right)) is not None:
                heappush(heap, (found[0], at, left, right, found[1]))

    for at in range(last):
        propose(at)
    made: list[int] = []
    while heap:
        _, at, left, right, new = heappop(heap)
        gone = after[at]
        if tokens[at] != left or gone > last or tokens[gone] != right:
            continue  # another merge came first
        tokens[at], tokens[gone] = new, -1
        after[at] = after[gone]
        if after[at] <= last:
            before[after[at]] = at
        made.append(new)
        propose(before[at])
        propose(at)
    return [token for token in tokens if token >= 0], made


@dataclass(frozen=True)
class Merges:
    """The BPE model of a tokenizer.json: vocabulary, ranks, and how a token falls into symbols."""

    vocab: Mapping[str, int]
    ranks: Mapping[Pair, tuple[int, int]]  # (left, right) -> (rank, result)
    prefix: str  # of a symbol that continues a word
    suffix: str  # of the symbol that ends a word
    byte_fallback: bool
    # Whether a token comes out of its own merges, where a library knows; None: find out.
    comes_out: Callable[[str, int], bool] | None = field(default=None, repr=False, compare=False)
    _parts: dict[int, Pair | None] = field(default_factory=dict, repr=False, compare=False)
    _trees: dict[int, frozenset[int]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(
        cls, model: Mapping[str, Any], comes_out: Callable[[str, int], bool] | None = None
    ) -> "Merges":
        """Read the `model` object of a tokenizer.json."""
        vocab, prefix = model["vocab"], model.get("continuing_subword_prefix") or ""
        ranks: dict[Pair, tuple[int, int]] = {}
        inner = len(prefix)  # which goes away from the right side: see `result_of`
        for rank, merge in enumerate(model["merges"]):
            left, right = merge.split(" ") if isinstance(merge, str) else merge
            # A rule that stands there twice has its last rank, as in the tokenizers library.
            ranks[vocab[left], vocab[right]] = (rank, vocab[left + right[inner:]])
        suffix = model.get("end_of_word_suffix") or ""
        return cls(vocab, ranks, prefix, suffix, bool(model.get("byte_fallback")), comes_out)

    @cached_property
    def _only_rules(self) -> dict[int, Pair]:
        """By result: its parts, where a single rule makes it."""
        found: dict[int, Pair] = {}
        several: set[int] = set()
        for pair, (_, result) in self.ranks.items():
            if result in found:
                several.add(result)
            found[result] = pair
        return {result: pair for result, pair in found.items() if result not in several}

    def symbols(self, token: str) -> list[int] | None:
        """Return the symbols that a token is made from, None where the vocabulary lacks one."""
        continues = bool(self.prefix) and token.startswith(self.prefix)
        ends = bool(self.suffix) and token.endswith(self.suffix)
        text = token[len(self.prefix) if continues else 0 :]
        text = text[: len(text) - len(self.suffix)] if ends else text
        ids: list[int] = []
        for at, char in enumerate(text):
            symbol = (self.prefix if continues or at else "") + char
            symbol += self.suffix if ends and at == len(text) - 1 else ""
            if symbol in self.vocab:
                ids.append(self.vocab[symbol])
            elif self.byte_fallback and all(byte_token(b) in self.vocab for b in char.encode()):
                ids.extend(self.vocab[byte_token(b)] for b in char.encode())
            else:
                return None
        return ids

    def closure(self, ids: Iterable[int], names: Mapping[int, str]) -> set[int]:
        """Return `ids` with the canonical trees of all of them."""
        closed: set[int] = set()
        left = list(ids)
        while left:
            token_id = left.pop()
            if token_id in closed:  # what is in a tree has its own tree there
                continue
            closed.add(token_id)
            if (parts := self._parts_of(token_id, names)) is not None:
                left += parts
            else:
                closed |= self._tree(token_id, names.get(token_id))
        return closed

    def _parts_of(self, token_id: int, names: Mapping[int, str]) -> Pair | None:
        """Return the two tokens that a token is merged from, None where that takes finding out.

        Where one rule makes a token and it comes out of its merges, that rule was the last to fire,
        and before it nothing crossed the border of both parts: its tree is theirs.
        """
        if token_id not in self._parts:
            parts, token = self._only_rules.get(token_id), names.get(token_id)
            if self.comes_out is None or token is None or not self.comes_out(token, token_id):
                parts = None
            self._parts[token_id] = parts
        return self._parts[token_id]

    def _tree(self, token_id: int, token: str | None) -> frozenset[int]:
        if token_id not in self._trees:
            self._trees[token_id] = self._simulated(token_id, token)
        return self._trees[token_id]

    def _simulated(self, token_id: int, token: str | None) -> frozenset[int]:
        symbols = self.symbols(token) if token is not None else None
        if symbols:
            tokens, made = merge_all(symbols, lambda left, right: self.ranks.get((left, right)))
            # A token that its own merges do not lead to never comes out of them: no tree.
            if tokens == [token_id]:
                return frozenset((token_id, *symbols, *made))
        return frozenset((token_id,))


def split_rule(merge: str | Sequence[str]) -> tuple[str, str]:
    """Return both sides of a merge, which is written `"a b"` or `["a", "b"]`."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def result_of(left: str, right: str, prefix: str) -> str:
    """Return the token that a merge makes: the inner prefix of the right side goes away."""
    return left + (right[len(prefix) :] if prefix else right)


def byte_token(byte: int) -> str:
    """Return the token of one byte, as SentencePiece spells it."""
    return f"<0x{byte:02X}>"
