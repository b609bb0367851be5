"""Statements that are true or false: reading them, naming them, and splitting them by seed.

A row is one text with a label (1 true, 0 false, None unlabelled). A pair is a prompt with a true
and a false ending. Rows that belong together (the endings of one prompt, the answers to one
question, a text that is there twice) share a group, and no split takes a group apart.
"""

import csv
import hashlib
import io
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lmhead.errors import BadInput

BUILT_IN = "builtin"
_LABELS = {"1": 1, "true": 1, "yes": 1, "0": 0, "false": 0, "no": 0, "": None}
_MARKS = tuple(".!?…。！？\"'”’)]")
_SHAPES = (
    "statement and label; question, answer and label; prompt, true and false; or TruthfulQA's own"
)


@dataclass(frozen=True)
class Row:
    """One text; `label` is 1 (true), 0 (false) or None (unlabelled).

    `prompt` is how the text begins where that is given (a question, the prompt of a pair): it is
    no part of what may be true or false. `about` is what rows that belong together share, where
    the file says so.
    """

    text: str
    label: int | None = None
    prompt: str = ""
    about: str = ""

    @property
    def group(self) -> str:
        """What the rows that belong together share: a split never takes them apart."""
        return self.about or self.prompt or self.text

    @property
    def sha256(self) -> str:
        """What a card remembers the row by: the hash of its text."""
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True)
class Pair:
    """A prompt, and a true and a false ending of it; an ending begins with its own space."""

    prompt: str
    true: str
    false: str

    @property
    def rows(self) -> tuple[Row, Row]:
        """The two texts as statements, the true one first."""
        return (
            Row(closed(self.prompt + self.true), 1, self.prompt),
            Row(closed(self.prompt + self.false), 0, self.prompt),
        )

    @property
    def sha256(self) -> str:
        """The hash of both texts."""
        return hashlib.sha256(f"{self.prompt}\0{self.true}\0{self.false}".encode()).hexdigest()


@dataclass(frozen=True)
class Data:
    """Rows, and the pairs that they were made of, where they were."""

    name: str
    rows: tuple[Row, ...]
    pairs: tuple[Pair, ...] = ()

    @cached_property
    def labelled(self) -> tuple[Row, ...]:
        """The rows that have a label."""
        return tuple(row for row in self.rows if row.label is not None)


@dataclass(frozen=True)
class Split:
    """Rows for training (with and without labels), for choosing, and for the final figure.

    The rows of `unlabelled` may know their label; training never looks at it.
    """

    labelled: tuple[Row, ...]
    unlabelled: tuple[Row, ...]
    validation: tuple[Row, ...]
    test: tuple[Row, ...]
    seed: int

    def to_dict(self) -> dict[str, int]:
        """Return the sizes and the seed."""
        parts = ("labelled", "unlabelled", "validation", "test")
        return {**{name: len(getattr(self, name)) for name in parts}, "seed": self.seed}


def closed(text: str) -> str:
    """End a statement with a full stop, unless some mark ends it already.

    What a text says as a whole is summed up in the state at its last mark; and a class whose
    texts happen to lack the mark would be told by that alone.
    """
    text = text.rstrip()
    return text if text[-1:] in _MARKS else text + "."


def read(source: str | Path) -> Data:
    """Read `builtin`, a `.csv` or a `.jsonl` file: statements, answers to questions, or pairs."""
    if str(source) == BUILT_IN:
        from lmhead.steer.learn.builtin import builtin_data

        return builtin_data()
    path = Path(source)
    if not path.is_file():
        raise BadInput(f"there is no data file {path}; expected a .csv or .jsonl file, or builtin")
    if path.suffix.lower() not in (".csv", ".jsonl", ".ndjson"):
        raise BadInput(f"the data file is {path.name}; expected a name in .csv or .jsonl")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 (byte {error.start}); convert it first") from error
    records = _csv(text) if path.suffix.lower() == ".csv" else _jsonl(text, path)
    return from_records(records, path.stem)


def _csv(text: str) -> list[tuple[int, dict[str, Any]]]:
    reader = csv.DictReader(io.StringIO(text, newline=""))
    return [(reader.line_num, record) for record in reader]


def _jsonl(text: str, path: Path) -> list[tuple[int, dict[str, Any]]]:
    records = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise BadInput(f"{path}:{number} is not JSON: {error}; expected an object") from error
        if not isinstance(record, dict):
            raise BadInput(f"{path}:{number} is no JSON object; expected {_SHAPES}")
        records.append((number, record))
    return records


def from_records(records: Iterable[tuple[int, Mapping[str, Any]]], name: str) -> Data:
    """Make data of records with their line numbers; the names of their fields tell the shape."""
    rows: list[Row] = []
    pairs: list[Pair] = []
    for number, raw in records:
        where = f"{name}, line {number}"
        record = {str(k).strip().lower(): v for k, v in raw.items() if k is not None}
        if (pair := _pair(record, where)) is not None:
            pairs.append(pair)
            rows += pair.rows
        else:
            rows.append(_row(record, where))
    if not rows:
        raise BadInput(f"{name} holds no rows; expected {_SHAPES}")
    return Data(name, tuple(rows), tuple(pairs))


def _pair(record: Mapping[str, Any], where: str) -> Pair | None:
    if {"prompt", "true", "false"} <= record.keys():
        prompt = _text(record, "prompt", where)
        endings = [_text(record, key, where) for key in ("true", "false")]
    elif {"question", "best answer", "best incorrect answer"} <= record.keys():
        prompt = _question(_text(record, "question", where))
        endings = [_text(record, key, where) for key in ("best answer", "best incorrect answer")]
    else:
        return None
    true, false = (e if e[0].isspace() or prompt[-1].isspace() else " " + e for e in endings)
    if true == false:
        raise BadInput(f"{where}: the true and the false ending are the same; expected two")
    return Pair(prompt, true, false)


def _row(record: Mapping[str, Any], where: str) -> Row:
    label = _label(record.get("label"), where)
    about = str(record.get("group") or "").strip()
    if {"question", "answer"} <= record.keys():
        question = _question(_text(record, "question", where))
        text = f"{question} {_text(record, 'answer', where)}"
        return Row(closed(text), label, question, about)
    for key in ("statement", "text"):
        if key in record:
            return Row(closed(_text(record, key, where)), label, about=about)
    raise BadInput(f"{where} has the fields {', '.join(record) or 'none'}; expected {_SHAPES}")


def _question(question: str) -> str:
    return f"Q: {question}\nA:"


def _text(record: Mapping[str, Any], key: str, where: str) -> str:
    value = record[key]
    if not isinstance(value, str) or not value.strip():
        raise BadInput(f"{where}: the {key} is empty; expected some text")
    return value.rstrip() if key != "prompt" else value


def _label(value: object, where: str) -> int | None:
    if value is None:
        return None
    key = str(value).strip().lower().removesuffix(".0")
    if key not in _LABELS:
        raise BadInput(f"{where}: the label is {value!r}; expected 1 or 0, or nothing")
    return _LABELS[key]


def split(
    data: Data,
    seed: int,
    *,
    labels: int = 32,
    unlabelled: int = 500,
    validation: int = 100,
    test: float = 0.25,
) -> Split:
    """Split by seed: the share `test` of the labelled rows, then the others, groups kept whole.

    The labelled rows to train on are as even between the classes as the data allows. Rows that
    have no label at all join the unlabelled ones. Counts are reached to within one group.
    """
    if labels < 2:
        raise BadInput(f"labels is {labels}; expected at least 2, one of each class")
    if not 0 <= test < 1:
        raise BadInput(f"test is {test}; expected a share from 0 to below 1")
    require_both(data.labelled, data.name)
    groups: dict[str, list[Row]] = {}
    for row in data.rows:
        groups.setdefault(row.group, []).append(row)
    order = sorted(groups)  # by name, so that the order of the file does not matter
    random.Random(seed).shuffle(order)
    left = [groups[name] for name in order]

    parts: dict[str, list[Row]] = {"test": [], "validation": []}
    sizes = {"test": round(test * len(data.labelled)), "validation": validation}
    for name, size in sizes.items():
        while left and len(parts[name]) < size:
            parts[name] += [row for row in left.pop() if row.label is not None]
    if len(rows := [row for group in left for row in group if row.label is not None]) < labels:
        raise BadInput(
            f"{data.name} has {len(data.labelled):,} labelled rows, {len(rows):,} of them left "
            f"beside test and validation; expected {labels} to train on: ask for fewer labels or "
            "a smaller validation set"
        )
    chosen = _balanced(left, labels)
    taken = {id(row) for group in chosen for row in group}
    rest = [row for group in left for row in group if id(row) not in taken]
    return Split(
        tuple(row for group in chosen for row in group if row.label is not None),
        tuple(rest[:unlabelled]),
        tuple(parts["validation"]),
        tuple(parts["test"]),
        seed,
    )


def _balanced(groups: Sequence[list[Row]], labels: int) -> list[list[Row]]:
    """Take groups in order, leaving out what would put one class above half, until enough."""
    chosen: list[list[Row]] = []
    spare: list[list[Row]] = []
    counts = [0, 0]
    half = (labels + 1) // 2
    for group in groups:
        known = [row.label for row in group if row.label is not None]
        if not known:
            continue
        if sum(counts) >= labels:
            break
        if all(counts[c] + known.count(c) <= half for c in (0, 1)):
            chosen.append(group)
            counts = [counts[c] + known.count(c) for c in (0, 1)]
        else:
            spare.append(group)
    for group in spare:  # one class is short: the other fills up
        if sum(counts) >= labels:
            break
        chosen.append(group)
        known = [row.label for row in group if row.label is not None]
        counts = [counts[c] + known.count(c) for c in (0, 1)]
    return chosen


def require_both(rows: Sequence[Row], name: str) -> None:
    """Refuse rows that are all of one class."""
    found = {row.label for row in rows}
    if not {0, 1} <= found:
        only = ", ".join(str(label) for label in sorted(found - {None}, key=str)) or "none"
        raise BadInput(
            f"the labelled rows of {name} have the labels {only}; expected both true (1) and "
            "false (0) ones"
        )


def split_pairs(
    pairs: Sequence[Pair], seed: int, test: float = 0.25
) -> tuple[list[Pair], list[Pair]]:
    """Split pairs by seed into those to train on and those held out; equal prompts stay together.

    The same seed and share hold out the same prompts whatever the order of the file.
    """
    prompts = sorted({pair.prompt for pair in pairs})
    random.Random(seed).shuffle(prompts)
    held = set(prompts[: round(test * len(prompts))])
    if not held or len(held) == len(prompts):
        raise BadInput(
            f"{len(prompts)} pairs cannot be split with a test share of {test}; expected more pairs"
        )
    return (
        [pair for pair in pairs if pair.prompt not in held],
        [pair for pair in pairs if pair.prompt in held],
    )


def hashes(rows: Iterable[Row | Pair]) -> list[str]:
    """Return the sorted SHA-256 of all of them, for a card."""
    return sorted({row.sha256 for row in rows})
