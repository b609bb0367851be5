"""DRY's sequence breakers as token ids.

A breaker is a text such as a line break. It can stand inside one token, or begin in one token and
go on in the next ones: both are found here, for every token of the vocabulary.
"""

import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from lmhead.errors import BadInput
from lmhead.sampling.penalties import Breakers

LONGEST_TAIL = 20

_TEXTS: "weakref.WeakKeyDictionary[Any, list[str]]" = weakref.WeakKeyDictionary()


def breakers_of(tokenizer: Any, texts: Sequence[str]) -> Breakers:
    """Give, for each token that begins one of the texts, what must follow it (`()`: nothing).

    tokenizer: a fast tokenizer of transformers, or a `tokenizers.Tokenizer`.
    """
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(backend, "decode_batch"):
        raise BadInput(
            f"{type(tokenizer).__name__} is not a fast tokenizer; DRY's breakers need one"
        )
    found: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    for token, piece in enumerate(_pieces(backend)):
        for text in texts:
            if text in piece:
                found[token].add(())
            elif len(text) > 1:
                # the longest head of the text that ends this token, and all shorter ones
                for n in range(1, min(len(text), len(piece) + 1)):
                    if piece.endswith(text[:n]):
                        tail = backend.encode(text[n:], add_special_tokens=False).ids
                        found[token].add(tuple(tail[:LONGEST_TAIL]))
    return {token: tuple(sorted(tails)) for token, tails in found.items()}


def _pieces(backend: Any) -> list[str]:
    if backend not in _TEXTS:
        size = backend.get_vocab_size(with_added_tokens=True)
        _TEXTS[backend] = backend.decode_batch(
            [[token] for token in range(size)], skip_special_tokens=False
        )
    return _TEXTS[backend]
