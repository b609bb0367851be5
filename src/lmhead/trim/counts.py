"""How often each token occurs in a corpus, counted on all cores, and the file that holds it.

A counts file is JSON lines: the first line says what was counted and with which tokenizer, then
`[id, count]` per line, ascending. The counts of parts add up to the counts of the whole, so that
any batch system can count in pieces.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lmhead.errors import BadInput, MissingExtra
from lmhead.progress import Progress, silent
from lmhead.trim.corpus import Corpus, Text, batches
from lmhead.trim.tokenizer import TokenizerJson

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_KIND = "lmhead token counts"
HELD_BACK = 10  # one text in ten is held back, where something is to be estimated


@dataclass(frozen=True)
class Counts:
    """How often each id occurs, `[ids]`, in how many texts."""

    tokenizer: str  # fingerprint
    counts: npt.NDArray[np.int64]
    texts: int
    skipped: int = 0

    @property
    def tokens(self) -> int:
        """All tokens counted."""
        return int(self.counts.sum())

    def __add__(self, other: "Counts") -> "Counts":
        if self.tokenizer != other.tokenizer:
            raise BadInput(
                f"these counts are of different tokenizers ({self.tokenizer[:12]} and "
                f"{other.tokenizer[:12]}); count again with one"
            )
        return Counts(
            self.tokenizer,
            self.counts + other.counts,
            self.texts + other.texts,
            self.skipped + other.skipped,
        )

    def save(self, path: Path) -> None:
        """Write a counts file; the same counts give the same bytes."""
        ids = np.flatnonzero(self.counts)
        head = {
            "kind": _KIND,
            "version": 1,
            "tokenizer": self.tokenizer,
            "ids": len(self.counts),
            "texts": self.texts,
            "tokens": self.tokens,
            "skipped": self.skipped,
        }
        lines = [json.dumps(head), *(f"[{i}, {self.counts[i]}]" for i in ids.tolist())]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Counts":
        """Read a counts file."""
        try:
            with path.open(encoding="utf-8") as stream:
                head = json.loads(next(stream))
                if head.get("kind") != _KIND:
                    raise ValueError("its first line does not say so")
                counts = np.zeros(head["ids"], np.int64)
                for line in stream:
                    i, count = json.loads(line)
                    counts[i] = count
            result = cls(head["tokenizer"], counts, head["texts"], head["skipped"])
        except (OSError, StopIteration, KeyError, ValueError, IndexError, TypeError) as error:
            raise BadInput(
                f"{path} is no counts file ({error}); expected what `lmhead count` writes"
            ) from error
        if result.tokens != head["tokens"]:
            raise BadInput(
                f"{path} is cut short: {result.tokens:,} tokens of {head['tokens']:,}; count again"
            )
        return result


def fingerprint(tokenizer: TokenizerJson) -> str:
    """Return the SHA-256 of what decides over ids: two tokenizers with the same one count alike."""
    text = json.dumps(tokenizer.data, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def encode(tokenizers: "Sequence[Tokenizer]", batch: list[Text]) -> list[list[int]]:
    """Encode a batch of texts on all cores, special tokens included.

    With several tokenizers (readings of one vocabulary), each text's ids are those of all readings.
    """
    texts = [text.text for text in batch]
    ids = [encoding.ids for encoding in tokenizers[0].encode_batch_fast(texts)]
    for other in tokenizers[1:]:
        for row, encoding in zip(ids, other.encode_batch_fast(texts), strict=True):
            row += encoding.ids
    return ids


def encoded(
    tokenizers: "Sequence[Tokenizer]", texts: Iterable[Text]
) -> Iterator[tuple[list[Text], list[list[int]]]]:
    """Encode a stream of texts batch by batch, the next batch while the last one is used."""
    # encode_batch lets go of the interpreter, so one thread is enough to keep all cores busy.
    with ThreadPoolExecutor(1) as pool:
        pending = None
        for batch in batches(texts):
            job = batch, pool.submit(encode, tokenizers, batch)
            if pending is not None:
                yield pending[0], pending[1].result()
            pending = job
        if pending is not None:
            yield pending[0], pending[1].result()


def count(
    tokenizer: TokenizerJson,
    corpus: Corpus,
    *,
    readings: "Sequence[Tokenizer] | None" = None,
    progress: Progress = silent,
) -> tuple[Counts, Counts]:
    """Count a corpus; return the counts of nine texts in ten and of the tenth ones, held back."""
    tokenizers = readings or (tokenizer.built,)
    size = max(tokenizer.names) + 1
    whole, held = np.zeros(size, np.int64), np.zeros(size, np.int64)
    texts = held_texts = 0
    with progress("counting tokens", total=corpus.characters) as advance:
        for batch, rows in encoded(tokenizers, corpus):
            first = (HELD_BACK - 1 - texts) % HELD_BACK
            whole += _bincount(rows, size)
            held += _bincount(rows[first::HELD_BACK], size)
            texts += len(rows)
            held_texts += len(rows[first::HELD_BACK])
            advance(sum(len(text.text) for text in batch))
    mark = fingerprint(tokenizer)
    return (
        Counts(mark, whole - held, texts - held_texts, len(corpus.skipped)),
        Counts(mark, held, held_texts),
    )


def _bincount(rows: list[list[int]], size: int) -> npt.NDArray[np.int64]:
    flat = np.array(list(chain.from_iterable(rows)), np.int64)
    return np.bincount(flat, minlength=size)


def count_on_ray(
    tokenizer: TokenizerJson,
    corpus: Corpus,
    address: str,
    readings: "Sequence[Tokenizer] | None" = None,
) -> Counts:
    """Count on an existing Ray cluster, file by file; all machines must see the same paths."""
    try:
        import ray  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise MissingExtra("--ray needs Ray: `pip install lmhead[ray]`") from None

    spelled = [reading.to_str() for reading in readings or (tokenizer.built,)]
    plain = TokenizerJson(tokenizer.data, tokenizer.where)  # what is built cannot travel

    def part(file: Path) -> Counts:
        from tokenizers import Tokenizer

        built = [Tokenizer.from_str(text) for text in spelled]
        texts = Corpus((file,), corpus.field, corpus.errors)
        first, held = count(plain, texts, readings=built)
        return first + held

    ray.init(address=address, ignore_reinit_error=True)
    try:
        remote: Any = ray.remote(part)
        results: list[Counts] = ray.get([remote.remote(file) for file in corpus.files])
    finally:
        ray.shutdown()
    if not results:
        raise BadInput("the corpus holds no file")
    return sum(results[1:], results[0])
