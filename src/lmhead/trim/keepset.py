"""Which ids to keep: what was asked for, what every trim needs, and what those are made of."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lmhead.errors import BadInput
from lmhead.files import limits
from lmhead.files.jsons import read_bytes
from lmhead.trim.scripts import is_written_in, scripts_of
from lmhead.trim.tokenizer import TokenizerJson

BLOCK = 64  # rows; no matrix product that was tried looks further


@dataclass(frozen=True)
class Keep:
    """What to keep beside what every trim keeps; the parts add up, `size` limits their sum."""

    min_count: int = 1  # how often the corpus must hold a token
    scripts: tuple[str, ...] = ()
    languages: tuple[str, ...] = ()
    ascii: bool = False
    ids: Path | None = None
    tokens: Path | None = None
    size: int | None = None

    def __post_init__(self) -> None:
        if self.min_count < 1:
            raise BadInput(f"min_count is {self.min_count}; expected at least 1")
        if self.size is not None and self.size < 2:
            raise BadInput(f"the size is {self.size}; expected at least 2 rows")
        scripts_of(self.scripts, self.languages)

    @property
    def names_something(self) -> bool:
        """Whether anything is asked for beside a corpus."""
        return bool(self.scripts or self.languages or self.ascii or self.ids or self.tokens)


@dataclass(frozen=True)
class KeepSet:
    """The ids to keep, closed under what they are made of, and what each reason brought."""

    ids: frozenset[int]
    reasons: Mapping[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {"ids": len(self.ids), "reasons": dict(self.reasons)}


def token_texts(tokenizer: TokenizerJson) -> dict[int, str | None]:
    """Return the text of each token, None for a piece of a character or a special token."""
    built = tokenizer.built
    special = {
        tokenizer.vocab[t["content"]]
        for t in tokenizer.data.get("added_tokens") or ()
        if t["special"]
    }
    ids = sorted(i for i in tokenizer.names if i not in special)
    texts = built.decode_batch([[i] for i in ids])
    known = {
        i: t if "�" not in t or "�" in tokenizer.names[i] else None
        for i, t in zip(ids, texts, strict=True)
    }
    return {**known, **dict.fromkeys(special)}


def wanted(
    tokenizer: TokenizerJson, keep: Keep, counts: npt.NDArray[np.int64] | None
) -> dict[str, set[int]]:
    """Return the ids that each part of `keep`, and the corpus, asks for."""
    found: dict[str, set[int]] = {}
    if counts is not None:
        found["corpus"] = set(np.flatnonzero(counts >= keep.min_count).tolist())
    if keep.scripts or keep.languages or keep.ascii:
        texts = {i: t for i, t in token_texts(tokenizer).items() if t}
        if keep.ascii:
            found["ascii"] = {i for i, text in texts.items() if text.isascii()}
        if scripts := scripts_of(keep.scripts, keep.languages):
            found["scripts"] = {i for i, text in texts.items() if is_written_in(text, scripts)}
    if keep.ids:
        found["ids"] = read_ids(keep.ids)
    if keep.tokens:
        found["tokens"] = _read_tokens(keep.tokens, tokenizer)
    return found


def choose(
    tokenizer: TokenizerJson,
    required: Iterable[int],
    parts: Mapping[str, set[int]],
    *,
    size: int | None = None,
    usefulness: npt.NDArray[np.float64] | None = None,
) -> KeepSet:
    """Close the union of `parts` around `required`.

    With `size`, take them (or without any parts the whole vocabulary) in the order of
    `usefulness`, `[ids]`, then of ids, each with all that it is made of, while they fit.
    """
    base = set(tokenizer.closure(required))
    reasons = {"always": len(base)}
    if size is None:
        ids = set(base)
        for name, part in parts.items():
            before = len(ids)
            ids |= tokenizer.closure(part)
            reasons[name] = len(ids) - before
        return KeepSet(frozenset(ids), reasons)

    ids = set(base)
    candidates = set().union(*parts.values()) if parts else set(tokenizer.names)
    score = usefulness if usefulness is not None else np.zeros(max(tokenizer.names) + 1)
    for token_id in _by_use(candidates, score):
        if token_id in ids:
            continue
        tree = tokenizer.tree(token_id)
        if len(ids | tree) <= size:
            ids |= tree
        if len(ids) == size:
            break
    reasons["size"] = len(ids) - len(base)
    return KeepSet(frozenset(ids), reasons)


def _by_use(ids: Iterable[int], score: npt.NDArray[np.float64]) -> list[int]:
    """Sort ids by their score, the highest first, equal ones by themselves."""
    array = np.array(sorted(ids), np.int64)
    order: list[int] = array[np.argsort(-score[array], kind="stable")].tolist()
    return order


def minimum(tokenizer: TokenizerJson, required: Iterable[int], rest: int, size: int) -> int:
    """Return the fewest rows that a trim can have, or refuse a `size` below that."""
    always = len(tokenizer.closure(required))
    fewest = always + (rest - always) % BLOCK
    if size < fewest:
        raise BadInput(
            f"the size is {size:,}, but what every trim keeps (bytes, special and added tokens, "
            f"the chat template) takes {always:,} rows, in whole blocks of {BLOCK} rows "
            f"{fewest:,}; give at least that"
        )
    return fewest


def tail(tokenizer: TokenizerJson, rows: int) -> tuple[set[int], int]:
    """Return the ids of the last rows that make no whole block, and how many rows these are.

    A matrix product works on blocks of rows, and adds up in another order in what is left at the
    end. So that every kept logit comes out with the same bits, rows that lie in whole blocks must
    do so after the trim, and the others must be the rest again. Where a row of the rest has no
    token it cannot be kept, and the best that can be done is whole blocks.
    """
    ids = set(range(rows - rows % BLOCK, rows))
    return (ids, len(ids)) if ids <= tokenizer.names.keys() else (set(), 0)


def rounded(
    tokenizer: TokenizerJson,
    kept: KeepSet,
    rows: int,
    usefulness: npt.NDArray[np.float64] | None = None,
) -> KeepSet:
    """Add the most useful ids until the rows are whole blocks and the rest of `rows`."""
    last, rest = tail(tokenizer, rows)
    ids = set(kept.ids) | (tokenizer.closure(last) if last else set())
    lacking = (rest - sum(i < rows for i in ids)) % BLOCK
    score = usefulness if usefulness is not None else np.zeros(max(tokenizer.names) + 1)
    left = [i for i in tokenizer.names if i not in ids and i < rows] if lacking else []
    for token_id in _by_use(left, score):
        if lacking == 0:
            break
        new = {i for i in tokenizer.tree(token_id) if i not in ids}
        if len(new) <= lacking:
            ids |= new
            lacking -= len(new)
    return KeepSet(frozenset(ids), {**kept.reasons, "whole blocks": len(ids) - len(kept.ids)})


def read_ids(path: Path) -> set[int]:
    """Read ids: a JSON list, one id per line, or a keep-set file of `lmhead trim --form head`."""
    if path.suffix == ".safetensors":
        from lmhead.trim.keepfile import KeepFile

        return set(KeepFile.load(path).ids.kept)
    text = _read(path)
    try:
        values = json.loads(text) if text.lstrip().startswith("[") else text.split()
        ids = {_id(value) for value in values}
    except (ValueError, TypeError, RecursionError) as error:
        raise BadInput(
            f"{path} holds something that is not an id ({error}); expected one id per line, or a "
            "JSON "
            "list of ids"
        ) from error
    if negative := [i for i in ids if i < 0]:
        raise BadInput(f"{path} holds the id {min(negative)}; expected ids from 0")
    return ids


def _id(value: Any) -> int:
    if isinstance(value, str) or type(value) is int:
        return int(value)
    raise TypeError(f"a {type(value).__name__}")


def _read_tokens(path: Path, tokenizer: TokenizerJson) -> set[int]:
    """Read tokens, one per line, as the vocabulary spells them or as JSON strings."""
    ids: set[int] = set()
    for number, line in enumerate(_read(path).splitlines(), 1):
        if not line:
            continue
        token = line
        if line not in tokenizer.vocab and line.startswith('"'):
            try:
                token = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise BadInput(f"{path}:{number} is not a JSON string ({error})") from error
        if token not in tokenizer.vocab:
            raise BadInput(
                f"{path}:{number}: {token!r} is not a token of {tokenizer.where}; expected tokens "
                "as "
                "its vocabulary spells them"
            )
        ids.add(tokenizer.vocab[token])
    return ids


def _read(path: Path) -> str:
    try:
        return read_bytes(path, limits.ID_LIST).decode("utf-8")
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot read {path}: {error}") from error
