"""Which rows of the head the tokenizer has a token for, and which tokens have no row.

A head is often padded to a round number of rows; nothing that the tokenizer can read or write uses
those. The other way round, a tokenizer with more ids than rows makes the model fail on some text.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from lmhead.errors import BadCheckpoint
from lmhead.files import limits
from lmhead.files.jsons import read_bytes, read_json

_RANGES_SHOWN = 5
_GGUF_UNUSED = 5  # the token type of rows that a converter had to invent a token for

# A key "vocab" with an object or a list can only be the model's own: inside it, values are numbers.
_VOCAB = re.compile(rb'"vocab"\s*:\s*(?=[{\[])')
_MERGES = re.compile(rb'"merges"\s*:\s*\[')
_ADDED = re.compile(rb'"added_tokens"\s*:\s*(?=\[)')
_PLACEHOLDER = re.compile(
    r"<\|?(unused|reserved|extra|dummy|placeholder|SPECIAL)\D{0,20}\d+\|?>"
    r"|\[(unused|control_|PAD)\d+\]"
)


@dataclass(frozen=True)
class TokenizerReach:
    """The tokenizer's ids against the head's V rows."""

    ids: int  # how many the tokenizer has
    largest_id: int
    rows_without_token: int
    ranges_without_token: tuple[tuple[int, int], ...]  # the first few, each from first to last
    tokens_without_row: int
    placeholder_rows: int  # rows whose token only keeps a place free, such as <unused7>


def folder_reach(folder: Path, vocab_size: int) -> TokenizerReach | None:
    """Compare a folder's tokenizer with V rows; None if its tokenizer is of no kind we read."""
    tokens = _folder_tokens(folder)
    return None if not tokens else _reach(tokens, vocab_size)


def gguf_reach(metadata: Mapping[str, Any], vocab_size: int) -> TokenizerReach | None:
    """Compare a GGUF file's own token list with V rows; None if it has none."""
    texts: Any = metadata.get("tokenizer.ggml.tokens")
    if not _is_array(texts) or not texts or not isinstance(texts[0], str):
        return None
    types: Any = metadata.get("tokenizer.ggml.token_type")
    tokens = dict(enumerate(texts[:]))
    for i, kind in enumerate(types[:] if _is_array(types) else ()):
        if kind == _GGUF_UNUSED:
            tokens.pop(i, None)
    return _reach(tokens, vocab_size)


def _is_array(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _reach(tokens: Mapping[int, str], vocab_size: int) -> TokenizerReach:
    """Compare id -> token with V rows; V may be anything that a file claims."""
    ids = sorted(tokens)
    used = ids[bisect_left(ids, 0) : bisect_left(ids, vocab_size)]
    marked = [(i, text) for i, text in tokens.items() if text.startswith(("<", "["))]
    return TokenizerReach(
        ids=len(tokens),
        largest_id=max(tokens, default=-1),
        rows_without_token=vocab_size - len(used),
        ranges_without_token=tuple(islice(_gaps(used, vocab_size), _RANGES_SHOWN)),
        tokens_without_row=len(tokens) - len(used),
        placeholder_rows=sum(
            1 for i, text in marked if i < vocab_size and _PLACEHOLDER.fullmatch(text)
        ),
    )


def _gaps(used: Sequence[int], vocab_size: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of ids below V that are not in `used`, which ascends, as (first, last)."""
    expected = 0
    if used and used[-1] == len(used) - 1:  # all of them from 0 on, as nearly always
        expected, used = len(used), ()
    for i in used:
        if i > expected:
            yield expected, i - 1
        expected = i + 1
    if expected < vocab_size:
        yield expected, vocab_size - 1


def _folder_tokens(folder: Path) -> dict[int, str]:
    """Return id -> token of a folder's tokenizer, empty if it has none that we read."""
    tokens: dict[int, str] = {}
    fast, slow = folder / "tokenizer.json", folder / "vocab.json"
    if fast.is_file():
        tokens = _fast_tokens(fast)
    elif slow.is_file():
        vocab = read_json(slow)
        tokens = _by_id(slow, vocab.keys(), vocab.values())
    if not tokens:
        return {}
    added = folder / "added_tokens.json"
    if added.is_file():
        more = read_json(added)
        tokens |= _by_id(added, more.keys(), more.values())
    settings = folder / "tokenizer_config.json"
    if settings.is_file():
        decoder = read_json(settings).get("added_tokens_decoder")
        if isinstance(decoder, dict):
            tokens |= _added(settings, decoder)
    return tokens


def _added(path: Path, decoder: Mapping[str, Any]) -> dict[int, str]:
    """Return id -> token of tokenizer_config.json, which writes the ids as texts."""
    tokens = {}
    for i, token in decoder.items():
        if not re.fullmatch(r"[0-9]{1,18}", i) or not isinstance(token, dict):
            raise BadCheckpoint(f"{path} adds a token with the id {i[:40]!r}; fetch it again")
        content = token.get("content", "")
        tokens[int(i)] = content if isinstance(content, str) else ""
    return tokens


def _fast_tokens(path: Path) -> dict[int, str]:
    """Read only vocabulary and added tokens: the merges are four fifths of a large file."""
    try:
        data = read_bytes(path, limits.TOKENIZER_JSON)
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"cannot read {path}: {error}; fetch it again") from error
    vocab_at = _VOCAB.search(data)
    if vocab_at is None:
        raise BadCheckpoint(f"{path} has no vocabulary; expected a tokenizer.json; fetch it again")
    merges_at = _MERGES.search(data, vocab_at.end())
    vocab = _value_at(path, data[vocab_at.end() : merges_at.start() if merges_at else None])
    if isinstance(vocab, list):  # Unigram: the place in the list is the id
        texts = [entry[0] if isinstance(entry, list) and entry else None for entry in vocab]
        tokens = _by_id(path, texts, range(len(texts)))
    else:
        tokens = _by_id(path, vocab.keys(), vocab.values())
    # The tokenizers library writes them before the vocabulary, but JSON has no order.
    if added_at := _ADDED.search(data):
        before = added_at.start() < vocab_at.start()
        added = _value_at(path, data[added_at.end() : vocab_at.start() if before else None])
        found = [token for token in added if isinstance(token, dict)]
        contents = [token.get("content") for token in found]
        tokens |= _by_id(path, contents, [token.get("id") for token in found])
    return tokens


def _value_at(path: Path, data: bytes) -> Any:
    """Parse the JSON value that `data` opens with."""
    try:
        return json.JSONDecoder().raw_decode(data.decode("utf-8"))[0]
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{path} is damaged ({error}); fetch it again") from error


def _by_id(path: Path, texts: Collection[Any], ids: Collection[Any]) -> dict[int, str]:
    """Return id -> token, and check that they are that."""
    if not (set(map(type, ids)) <= {int} and set(map(type, texts)) <= {str}):
        raise BadCheckpoint(f"{path} gives tokens ids that are not integers; fetch it again")
    if ids and not -limits.ELEMENTS < min(ids) <= max(ids) < limits.ELEMENTS:
        raise BadCheckpoint(f"{path} gives a token an id beyond all bounds; fetch it again")
    return dict(zip(ids, texts, strict=True))
