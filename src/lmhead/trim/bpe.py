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
from typing import Any, NamedTuple, cast

Pair = tuple[int, int]
# What merging an adjacent pair gives: (rank, id), lowest rank first; None where nothing applies.
Rule = Callable[[Pair], tuple[float, int] | None]


class Merged(NamedTuple):
    """A merge that fired: the token that it made, and of which two."""

    token: int
    of: Pair


_NEVER = float("inf")
_NOTHING = (_NEVER, -1)
_FEW = 24  # symbols up to which a heap is not worth its while


def merge_all(symbols: Sequence[int], rule: Rule) -> tuple[list[int], list[Merged]]:
    """Encode `symbols`; return the tokens that are left, and every merge on the way."""
    return _merge_few(symbols, rule) if len(symbols) <= _FEW else _merge_many(symbols, rule)


def _merge_few(symbols: Sequence[int], rule: Rule) -> tuple[list[int], list[Merged]]:
    """Look for the lowest rank again before every merge: the quickest for a word."""
    tokens: list[int] = list(symbols)
    made: list[Merged] = []
    found = [rule(pair) or _NOTHING for pair in pairwise(tokens)]
    ranks = [rank for rank, _ in found]
    while ranks and (lowest := min(ranks)) < _NEVER:
        at = ranks.index(lowest)  # the leftmost
        new = found[at][1]
        made.append(Merged(new, (tokens[at], tokens[at + 1])))
        tokens[at : at + 2] = [new]
        del found[at], ranks[at]
        for place in (at - 1, at):
            if 0 <= place < len(found):
                found[place] = rule((tokens[place], tokens[place + 1])) or _NOTHING
                ranks[place] = found[place][0]
    return tokens, made


def _merge_many(symbols: Sequence[int], rule: Rule) -> tuple[list[int], list[Merged]]:
    """Keep all that can be merged in a heap: for long texts."""
    tokens = list(symbols)  # -1: merged into the one before
    last = len(tokens) - 1
    before, after = list(range(-1, last)), list(range(1, last + 2))
    heap: list[tuple[float, int, int, int, int]] = []  # rank, place, left, right, result

    def propose(at: int) -> None:
        if at >= 0 and after[at] <= last:
            left, right = tokens[at], tokens[after[at]]
            if (found := rule((left, right))) is not None:
                heappush(heap, (found[0], at, left, right, found[1]))

    for at in range(last):
        propose(at)
    made: list[Merged] = []
    while heap:
        _, at, left, right, new = heappop(heap)
        gone = after[at]
        if tokens[at] != left or gone > last or tokens[gone] != right:
            continue  # another merge came first
        tokens[at], tokens[gone] = new, -1
        after[at] = after[gone]
        if after[at] <= last:
            before[after[at]] = at
        made.append(Merged(new, (left, right)))
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
    _parts: dict[int, tuple[int, ...]] = field(default_factory=dict, repr=False, compare=False)

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
        if not self.prefix and not self.suffix:
            plain = [self.vocab.get(char) for char in token]
            if None not in plain:
                return cast("list[int]", plain)
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
        known, left = self._parts, list(ids)
        while left:
            token_id = left.pop()
            if token_id in closed:
                continue
            closed.add(token_id)
            if token_id not in known:
                known[token_id] = self._parts_of(token_id, names.get(token_id))
            left += known[token_id]
        return closed

    def _parts_of(self, token_id: int, token: str | None) -> tuple[int, ...]:
        """Return the two tokens that a token is merged from, or () where it is not.

        Before the last merge nothing crossed the border of both parts, so that the tree of a token
        is those of its parts. Where one rule alone makes a token, and the token comes out of its
        merges, that rule was the last; else they are gone through.
        """
        only = self._only_rules.get(token_id)
        if token is None:
            return ()
        if only is not None and self.comes_out is not None and self.comes_out(token, token_id):
            return only
        if not (symbols := self.symbols(token)):
            return ()
        tokens, made = merge_all(symbols, self.ranks.get)
        # A token that its own merges do not lead to never comes out of them: no tree.
        return made[-1].of if tokens == [token_id] and made else ()


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
