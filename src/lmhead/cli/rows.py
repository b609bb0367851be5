"""Rows of a file or of stdin: one text per line, or JSON lines whose other fields are kept."""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmhead.errors import BadInput

if TYPE_CHECKING:
    from lmhead.models.conversation import Conversation


@dataclass(frozen=True)
class Row:
    """One line: the field that was asked for, and the whole object it stands in."""

    where: str  # for messages: "line 3 of prompts.jsonl"
    fields: dict[str, Any]
    from_json: bool

    def text(self, *names: str) -> str:
        """Return the first of these fields that is there; it must be a text and not empty."""
        for name in names:
            if name in self.fields:
                value = self.fields[name]
                if not isinstance(value, str) or not value:
                    raise BadInput(
                        f'{self.where} has the "{name}" {value!r}; expected a text that is not '
                        "empty"
                    )
                return value
        wanted = " or ".join(f'"{name}"' for name in names)
        raise BadInput(f"{self.where} has no {wanted}; expected a JSON object with one")

    def with_result(self, result: dict[str, Any], given: Sequence[str] = ()) -> dict[str, Any]:
        """Return the result behind all fields of the row; refuse to lose one of them.

        given: what the row was asked for; it stays as it is there.
        """
        self.check_fields(name for name in result if name not in given)
        return {**self.fields, **{n: v for n, v in result.items() if n not in self.fields}}

    def check_fields(self, names: Iterable[str]) -> None:
        """Refuse a row that has one of these fields, which its result will have."""
        for name in names:
            if name in self.fields:
                raise BadInput(
                    f'{self.where} has a field "{name}", which the result has too; rename it'
                )

    def prompt(self) -> "str | Conversation":
        """Return the "prompt", a text or a conversation, or the conversation in "messages"."""
        from lmhead.models.conversation import check_conversation, is_conversation

        for name in ("prompt", "messages"):
            value = self.fields.get(name)
            if is_conversation(value):
                try:
                    check_conversation(value)
                except BadInput as error:
                    raise BadInput(f"{self.where}: {error}") from error
                return [dict(message) for message in value]
        return self.text("prompt")


def is_json_lines(path: Path) -> bool:
    """Tell whether a file holds JSON lines by its name; stdin tells by its first line."""
    return path.suffix in (".jsonl", ".ndjson")


def rows_of(path: Path, *fields: str) -> Iterator[Row]:
    """Read rows one by one: JSON objects of a `.jsonl`, otherwise lines, as the first of `fields`.

    stdin (`-`) holds JSON lines if its first line is a JSON object with one of the fields.
    """
    as_json = is_json_lines(path)
    name = "stdin" if str(path) == "-" else str(path)
    for number, line in enumerate(_lines(path), 1):
        where = f"line {number} of {name}"
        if number == 1 and name == "stdin":
            found = _object(line)
            as_json = found is not None and any(field in found for field in fields)
        if not as_json:
            if not line:
                raise BadInput(f"{where} is empty; expected one {fields[0]} per line")
            yield Row(where, {fields[0]: line}, from_json=False)
            continue
        values = _object(line)
        if values is None:
            raise BadInput(f"{where} is not a JSON object: {line[:60]!r}")
        yield Row(where, values, from_json=True)


def _object(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines as they come, without their ends; a last empty one is none."""
    try:
        if str(path) == "-":
            if sys.stdin.isatty():
                print("reading lines from the terminal; press Ctrl-D to finish", file=sys.stderr)  # noqa: T201
            yield from (_decoded(line) for line in sys.stdin.buffer)
            return
        with path.open("rb") as file:
            yield from (_decoded(line) for line in file)
    except UnicodeDecodeError as error:
        name = "stdin" if str(path) == "-" else path
        raise BadInput(f"{name} is not UTF-8; convert it first, e.g. with iconv") from error
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}") from error


def _decoded(line: bytes) -> str:
    return line.decode("utf-8").removesuffix("\n").removesuffix("\r")
