"""How often each token occurs in a corpus, counted on all cores, and the file that holds it.

A counts file is JSON lines: the first line says what was counted and with which tokenizer, then
`[id, count]` per line, ascending. The counts of parts add up to the counts of the whole, so that
any batch system can count in pieces.
"""

import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lmhead.errors import BadCheckpoint, BadInput, LMHeadError
from lmhead.files.jsons import open_file
from lmhead.models.reading import refusing
from lmhead.progress import Progress, silent
from lmhead.trim.corpus import Corpus, Text, batches
from lmhead.trim.sample import Sampled, Sampler
from lmhead.trim.tokenizer import TokenizerJson
from lmhead.trim.workers import joined, spread

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_KIND = "lmhead token counts"
_IDS, _LINE = 2**24, 2**16  # ids and characters of a line: more than any vocabulary has
_LOT = 2**24  # bytes of files that one job of a cluster counts
SAMPLE = 4096  # texts that the model may be run on, and as many of those held back
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
        if len(self.counts) != len(other.counts):
            raise BadInput(
                f"these counts are of {len(self.counts):,} and {len(other.counts):,} ids; expected "
                "those of one tokenizer: count again"
            )
        if self.tokens + other.tokens >= 2**63:
            raise BadInput("these counts add up to more than 64 bits hold; count again")
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
            with io.TextIOWrapper(open_file(path), encoding="utf-8") as stream:
                head = json.loads(stream.readline(_LINE))
                if not isinstance(head, dict) or head.get("kind") != _KIND:
                    raise ValueError("its first line does not say so")
                numbers = {key: _number(head[key]) for key in ("ids", "texts", "tokens", "skipped")}
                if numbers["ids"] > _IDS:
                    raise ValueError(f"it says {numbers['ids']:,} ids; at most {_IDS:,} are read")
                counts = np.zeros(numbers["ids"], np.int64)
                total, last = 0, -1
                while line := stream.readline(_LINE):
                    i, number = (_number(value) for value in json.loads(line))
                    if i <= last:
                        raise ValueError(f"the id {i} does not come after {last}")
                    counts[i], last = number, i
                    total += number
            if total >= 2**63:
                raise ValueError("its counts add up to more than 64 bits hold")
            result = cls(str(head["tokenizer"]), counts, numbers["texts"], numbers["skipped"])
        except (OSError, KeyError, ValueError, IndexError, TypeError, RecursionError) as error:
            raise BadInput(
                f"{path} is not a counts file ({error}); expected what `lmhead count` writes"
            ) from error
        if result.tokens != head["tokens"]:
            raise BadInput(
                f"{path} is cut short: {result.tokens:,} tokens of {head['tokens']:,}; count again"
            )
        return result


def _number(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise ValueError(f"{str(value)[:40]} is not a count")
    return value


def fingerprint(tokenizer: TokenizerJson) -> str:
    """Return the SHA-256 of what decides over ids: two tokenizers with the same one count alike."""
    text = json.dumps(tokenizer.data, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Survey:
    """What one reading of a corpus gives: counts and samples, of texts held back and of others."""

    counts: Counts
    held: Counts
    sample: Sampled
    held_sample: Sampled

    def __add__(self, other: "Survey") -> "Survey":
        return Survey(
            self.counts + other.counts,
            self.held + other.held,
            self.sample + other.sample,
            self.held_sample + other.held_sample,
        )


def encode(tokenizers: "Sequence[Tokenizer]", batch: list[Text]) -> list[list[list[int]]]:
    """Encode a batch of texts on all cores, special tokens included: a list for each tokenizer."""
    texts = [text.text for text in batch]
    with refusing(_cannot_encode):
        return [[e.ids for e in tokenizer.encode_batch_fast(texts)] for tokenizer in tokenizers]


def _cannot_encode(reason: str) -> LMHeadError:
    return BadCheckpoint(
        f"the tokenizer cannot read the corpus ({reason}); expected the tokenizer.json that "
        "belongs to the model"
    )


def encoded(
    tokenizers: "Sequence[Tokenizer]", texts: Iterable[Text]
) -> Iterator[tuple[list[Text], list[list[list[int]]]]]:
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


def survey(
    tokenizer: TokenizerJson,
    corpus: Corpus,
    *,
    readings: "Sequence[Tokenizer] | None" = None,
    before: int = 0,
    progress: Progress = silent,
) -> Survey:
    """Read a corpus once: count its tokens and draw a sample; every tenth text is held back.

    With several readings of one vocabulary, a token counts for each of them; the sample is of the
    first. `before` tells how many texts stand before these, where they are a part of a corpus.
    """
    tokenizers = readings or (tokenizer.built,)
    size = max(tokenizer.names) + 1
    whole, held = np.zeros(size, np.int64), np.zeros(size, np.int64)
    sample, held_sample = Sampler(SAMPLE), Sampler(SAMPLE)
    texts = held_texts = 0
    with progress("counting tokens", total=corpus.characters) as advance:
        for batch, rows_of in encoded(tokenizers, corpus):
            places = before + texts + np.arange(len(batch))
            is_held = places % HELD_BACK == HELD_BACK - 1
            first = (HELD_BACK - 1 - before - texts) % HELD_BACK
            for rows in rows_of:
                whole += _bincount(rows, size)
                held += _bincount(rows[first::HELD_BACK], size)
            rows = rows_of[0]
            held_sample.offer(places[is_held], rows[first::HELD_BACK])
            free = [row for row, away in zip(rows, is_held.tolist(), strict=True) if not away]
            sample.offer(places[~is_held], free)
            texts += len(rows)
            held_texts += int(is_held.sum())
            advance(sum(len(text.text) for text in batch))
    mark = fingerprint(tokenizer)
    return Survey(
        Counts(mark, whole - held, texts - held_texts, len(corpus.skipped)),
        Counts(mark, held, held_texts),
        sample.sampled(),
        held_sample.sampled(),
    )


def count(
    tokenizer: TokenizerJson,
    corpus: Corpus,
    *,
    readings: "Sequence[Tokenizer] | None" = None,
    before: int = 0,
    progress: Progress = silent,
) -> tuple[Counts, Counts]:
    """Count a corpus; return the counts of nine texts in ten and of the tenth ones, held back."""
    found = survey(tokenizer, corpus, readings=readings, before=before, progress=progress)
    return found.counts, found.held


def _bincount(rows: list[list[int]], size: int) -> npt.NDArray[np.int64]:
    flat = np.array(list(chain.from_iterable(rows)), np.int64)
    return np.bincount(flat, minlength=size)


def count_on_ray(
    tokenizer: TokenizerJson,
    corpus: Corpus,
    address: str,
    readings: "Sequence[Tokenizer] | None" = None,
) -> tuple[Counts, Counts]:
    """Count as `count` does, on a Ray cluster."""
    found = survey_on_ray(tokenizer, corpus, address, readings)
    return found.counts, found.held


def survey_on_ray(
    tokenizer: TokenizerJson,
    corpus: Corpus,
    address: str,
    readings: "Sequence[Tokenizer] | None" = None,
) -> Survey:
    """Read as `survey` does, on a Ray cluster; all its machines must see the same paths.

    The work is shared out by files. The address `local` starts a cluster on this machine.
    """
    spelled = [reading.to_str() for reading in readings or (tokenizer.built,)]
    plain = TokenizerJson(tokenizer.data, tokenizer.where)  # what is built cannot travel

    def texts(files: tuple[Path, ...]) -> Corpus:
        return Corpus(files, corpus.field, corpus.errors)

    def length(files: tuple[Path, ...]) -> int:
        return sum(1 for _ in texts(files))

    def part(lot: tuple[tuple[Path, ...], int]) -> Survey:
        from tokenizers import Tokenizer

        files, before = lot
        built = [Tokenizer.from_str(text) for text in spelled]
        return survey(plain, texts(files), readings=built, before=before)

    lots = list(_lots([file.absolute() for file in corpus.text_files()]))
    if not lots:
        raise BadInput("the corpus holds no file; check the path")
    with joined(address):
        # Which texts are held back depends on where in the whole corpus they stand.
        starts = accumulate(spread(length, lots[:-1]), initial=0)
        results = list(spread(part, zip(lots, starts, strict=True)))
    return sum(results[1:], results[0])


def _lots(files: Sequence[Path]) -> Iterator[tuple[Path, ...]]:
    """Group files, so that building a tokenizer is little beside counting with it."""
    lot: list[Path] = []
    held = 0
    for file in files:
        lot.append(file)
        held += file.stat().st_size
        if held >= _LOT:
            yield tuple(lot)
            lot, held = [], 0
    if lot:
        yield tuple(lot)
