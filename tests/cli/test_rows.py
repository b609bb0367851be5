"""Rows of files and of stdin: nothing is guessed, nothing of a row is lost."""

import io
import sys
from pathlib import Path

import pytest

from lmhead.cli.options import read_prompts
from lmhead.cli.rows import Row, rows_of
from lmhead.errors import BadInput


def rows(path: Path, *fields: str) -> list[dict[str, object]]:
    return [row.fields for row in rows_of(path, *fields)]


def test_lines_are_texts(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(b'one\r\n{"prompt": "two"}\n  three \nfour')
    expected = ["one", '{"prompt": "two"}', "  three ", "four"]
    assert rows(file, "prompt") == [{"prompt": text} for text in expected]
    assert read_prompts(file) == expected


def test_json_lines_keep_every_field(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a", "n": 1}\n{"prompt": "b", "tags": [2]}\n')
    assert rows(file, "prompt") == [{"prompt": "a", "n": 1}, {"prompt": "b", "tags": [2]}]
    row = next(rows_of(file, "prompt"))
    reported = row.with_result({"prompt": "a", "text": "c"}, given=["prompt"])
    assert reported == {"prompt": "a", "n": 1, "text": "c"}
    with pytest.raises(BadInput, match='has a field "n", which the result has too'):
        row.with_result({"n": 2})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"prompt": "a"}\n{"prompt": "b"}\n', ["a", "b"]),
        ('{"name": "a"}\nplain\n', ['{"name": "a"}', "plain"]),  # no row of ours: a text
        ("a\n", ["a"]),
    ],
)
def test_stdin_tells_by_its_first_line(
    text: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert [row.text("prompt") for row in rows_of(Path("-"), "prompt")] == expected


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"one\n\ntwo\n", "line 2 of .* is empty; expected one prompt per line"),
        ("a.txt", b"", "holds no prompt"),
        ("a.txt", b"one\n\xff\n", "is not UTF-8"),
        ("a.jsonl", b'{"prompt": "a"}\nplain\n', "line 2 of .* is not a JSON object: 'plain'"),
        ("a.jsonl", b'["a"]\n', "line 1 of .* is not a JSON object"),
        ("a.jsonl", b'{"text": "a"}\n', 'line 1 of .* has no "prompt"'),
        ("a.jsonl", b'{"prompt": 3}\n', 'line 1 of .* has the "prompt" 3; expected a text'),
        ("a.jsonl", b'{"prompt": ""}\n', "that is not empty"),
        ("missing.txt", None, "cannot read .*missing.txt: No such file"),
    ],
)
def test_what_is_wrong_names_the_line(
    name: str, content: bytes | None, message: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=message):
        read_prompts(tmp_path / name)


def test_the_first_field_that_is_there_is_the_text() -> None:
    row = Row("line 1", {"completion": "a", "text": "b"}, from_json=True)
    assert row.text("completion", "text") == "a"
    assert row.text("missing", "text") == "b"
