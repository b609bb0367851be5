"""Reading statements that are true or false: CSV, JSON lines, or those that are built in."""

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lmhead.errors import BadInput
from lmhead.files.jsons import is_unicode
from lmhead.steer.learn.builtin import BUILT_IN, builtin_data
from lmhead.steer.learn.data import Data, Pair, Row, closed

_LABELS = {"1": 1, "true": 1, "yes": 1, "0": 0, "false": 0, "no": 0, "": None}
_OWN = {"statement", "text", "label", "group", "question", "answer"}
_MANY = 10  # values of a column, below which it names classes rather than subjects
_SHAPES = (
    "statement and label; question, answer and label; prompt, true and false; or TruthfulQA's own"
)


def read_data(source: str | Path) -> Data:
    """Read `builtin`, a `.csv` or a `.jsonl` file: statements, answers to questions, or pairs."""
    if str(source) == BUILT_IN:
        return builtin_data()
    path = Path(source)
    if not path.is_file():
        raise BadInput(f"there is no data file {path}; expected a .csv or .jsonl file, or builtin")
    if path.suffix.lower() not in (".csv", ".jsonl", ".ndjson"):
        raise BadInput(f"the data file is {path.name}; expected a name that ends in .csv or .jsonl")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 (byte {error.start}); convert it first") from error
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from error
    records = _csv(text) if path.suffix.lower() == ".csv" else _jsonl(text, path)
    return from_records(records, path.stem)


def _csv(text: str) -> list[tuple[int, dict[str, Any]]]:
    reader = csv.DictReader(io.StringIO(text, newline=""))
    try:
        return [(reader.line_num, record) for record in reader]
    except csv.Error as error:  # a field of more than 128 KB, a quote that is never closed
        raise BadInput(
            f"line {reader.line_num} is not CSV ({error}); expected {_SHAPES}"
        ) from error


def _jsonl(text: str, path: Path) -> list[tuple[int, dict[str, Any]]]:
    records = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadInput(f"{path}:{number} is not JSON: {error}; expected an object") from error
        if not isinstance(record, dict):
            raise BadInput(f"{path}:{number} is not a JSON object; expected {_SHAPES}")
        records.append((number, record))
    return records


def from_records(records: Iterable[tuple[int, Mapping[str, Any]]], name: str) -> Data:
    """Make data of records with their line numbers; the names of their fields tell the shape."""
    rows: list[Row] = []
    pairs: list[Pair] = []
    alone: list[Mapping[str, Any]] = []  # the records of statements by themselves
    for number, raw in records:
        where = f"{name}, line {number}"
        record = {str(k).strip().lower(): v for k, v in raw.items() if k is not None}
        if (pair := _pair(record, where)) is not None:
            pairs.append(pair)
            rows += pair.rows
        else:
            rows.append(_row(record, where))
            alone.append(record)
    if not rows:
        raise BadInput(f"{name} holds no rows; expected {_SHAPES}")
    if len(alone) < len(rows):
        return Data(name, tuple(rows), tuple(pairs))
    if any(row.about for row in rows):
        return Data(name, tuple(rows), group="group")
    used, offered = _columns(alone, [row.label for row in rows])
    if used is not None and not any(row.prompt for row in rows):
        about = (str(record.get(used) or "").strip() for record in alone)
        rows = [replace(row, about=value) for row, value in zip(rows, about, strict=True)]
    else:
        used, offered = None, offered if used is None else (used, *offered)
    return Data(name, tuple(rows), group=used, offered=offered)


def _columns(
    records: Sequence[Mapping[str, Any]], labels: Sequence[int | None]
) -> tuple[str | None, tuple[str, ...]]:
    """Return the column that tells which rows belong together, and others that might.

    A column can tell if its values repeat, and are many. It is used if most of those that repeat
    stand beside true and false rows alike: if of such rows one is learned and the other asked for,
    what was learned about the value misleads.
    """
    shared: dict[str, float] = {}
    for name in dict.fromkeys(key for record in records for key in record):
        if name in _OWN:
            continue
        beside: dict[str, list[int | None]] = {}
        for record, label in zip(records, labels, strict=True):
            if value := str(record.get(name) or "").strip():
                beside.setdefault(value, []).append(label)
        again = [found for found in beside.values() if len(found) > 1]
        if len(beside) >= _MANY and sum(map(len, again)) >= len(records) / 2:
            shared[name] = sum({0, 1} <= set(found) for found in again) / len(again)
    best = max(shared, key=shared.__getitem__, default=None)
    used = best if best is not None and shared[best] > 0.5 else None
    return used, tuple(name for name in shared if name != used)


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
    return Pair(prompt, true, false, str(record.get("group") or "").strip())


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
    if not is_unicode(value):
        raise BadInput(
            f"{where}: the {key} holds half of a surrogate pair, which is not a character"
        )
    return value.rstrip() if key != "prompt" else value


def _label(value: object, where: str) -> int | None:
    if value is None:
        return None
    key = str(value).strip().lower().removesuffix(".0")
    if key not in _LABELS:
        raise BadInput(f"{where}: the label is {value!r}; expected 1 or 0, or nothing")
    return _LABELS[key]
