"""The words: spelling, prose, and phrases that we do not write (scripts/words.py)."""

import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
import words


def test_nothing_is_found() -> None:
    pytest.importorskip("codespell_lib", reason="needs codespell")
    pytest.importorskip("proselint", reason="needs proselint")
    assert words.problems() == []


def test_a_phrase_is_found_across_lines_and_not_in_code() -> None:
    text = words.prose("It will go on\nalike.\n\n```text\ngo on alike\n```\n\n`go on alike`\n")
    assert words.phrases("page", text) == ["page:1: “go on alike”; write: continue identically"]


def test_the_linters_are_at_work() -> None:
    pytest.importorskip("proselint", reason="needs proselint")
    (found,) = words.ill_written([("docs/page.md", "It is a very good one.\n")])
    assert found.startswith("docs/page.md:1: weasel_words.very")


def test_every_kind_of_text_is_read() -> None:
    names = {name for name, _ in words.texts()}
    for name in ("README.md", "docs/cli.md", "src/lmhead/errors.py", "examples/07_lens.ipynb"):
        assert name in names


def test_every_script_that_is_named_exists() -> None:
    root = Path(__file__).parents[2]
    pages = [root / "README.md", root / "CHANGELOG.md", *sorted((root / "docs").glob("*.md"))]
    path = re.compile(r"\b(?:tests|benchmarks|examples|scripts)/[a-z0-9_/]+\.(?:py|ipynb|mjs)")
    named = {(page.name, name) for page in pages for name in path.findall(page.read_text("utf-8"))}
    assert len(named) > 50
    assert [pair for pair in sorted(named) if not (root / pair[1]).is_file()] == []
