"""Checks the words: spelling (codespell), prose (proselint), and phrases that we do not write.

    python scripts/words.py

Read are the pages, the notebooks' text, what `--help` prints (docs/cli.md) and every docstring of
src/lmhead. Code is left out: blocks, comments, and whatever stands in backticks.
"""

import ast
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Checks of proselint that code, tables and terminals set off.
LEFT_OUT = ("annotations", "dates_times", "lexical_illusions", "typography")
# What made readers stumble, and what to write instead.
PHRASES = {
    r"not nearly the right one": "exact, not approximate",
    r"for every time\b": "say what for",
    r"\bhow it moves\b": "say what changes",
    r"\bin logits, of both\b": "name the two",
    r"\b(go|goes|going) on alike\b": "continue identically",
    r"\bprograms? prints? (them|it) again\b": "reproduces",
    r"\b(in|takes?|and) some minutes\b": "a few minutes",
    r"\bno place to write\b": "no writable folder",
    r"\bunasked\b": "by default",
    r"\btells? of (each|every)\b": "gives for each",
    r"\btakes? it back\b": "undoes it",
    r"\bunless (it is )?told otherwise\b": "by default",
    r"\blikewise, and\b": "and so does",
    r"\bnobody has heard of\b": "unknown",
    r"\bthere is no place\b": "no ... exists",
}


def prose(markdown: str) -> str:
    """Return the text of a page; code becomes blank, so that lines keep their numbers."""
    blank = re.compile(
        r"<!--.*?-->|^ *```.*?^ *```$|`[^`\n]+`|^::: .*(?:\n    .*)*|\]\([^)]*\)",
        re.MULTILINE | re.DOTALL,
    )
    return blank.sub(lambda found: re.sub(r"[^\n]+", "x", found[0]), markdown)


def texts() -> Iterator[tuple[str, str]]:
    """Yield everything that people read, with the name of its place."""
    folders = (ROOT, ROOT / "docs", ROOT / "examples")
    pages = [path for folder in folders for path in sorted(folder.glob("*.md"))]
    for path in pages:
        text = path.read_text(encoding="utf-8")
        name = str(path.relative_to(ROOT))
        yield name, text.replace("```", "") if path.name == "cli.md" else prose(text)
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        words = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
        yield str(path.relative_to(ROOT)), prose("\n\n".join(words))
    for path in sorted((ROOT / "src" / "lmhead").rglob("*.py")):
        yield str(path.relative_to(ROOT)), prose("\n\n".join(docstrings(path)))


def docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings of a module, without doctests and indented code."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield re.sub(r"^(>>> | {4,}).*(\n\S.*)?$", "", text, flags=re.MULTILINE)


def phrases(name: str, text: str) -> list[str]:
    """Return the phrases of a text that we do not write, also those that cross a line."""
    found = []
    for pattern, instead in PHRASES.items():
        crossing = re.compile(pattern.replace(" ", r"\s+"), re.IGNORECASE)
        for match in crossing.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            said = " ".join(match[0].split())
            found.append(f"{name}:{line}: “{said}”; write: {instead}")
    return found


def misspelled() -> list[str]:
    """Return what codespell finds; its settings are in pyproject.toml."""
    done = subprocess.run(
        [sys.executable, "-m", "codespell_lib"], cwd=ROOT, capture_output=True, text=True
    )
    return (done.stdout + done.stderr).splitlines() if done.returncode else []


def ill_written(everything: list[tuple[str, str]]) -> list[str]:
    """Return what proselint finds in all texts."""
    with tempfile.TemporaryDirectory() as folder:
        files = {}
        for name, text in everything:
            path = Path(folder, name.replace("/", "__"))
            path.write_text(text, encoding="utf-8")
            files[path.name] = name
        done = subprocess.run(
            [sys.executable, "-m", "proselint", "check", *(str(Path(folder, f)) for f in files)],
            capture_output=True,
            text=True,
        )
        if done.returncode not in (0, 1):
            raise SystemExit(done.stderr)
        found = re.findall(r"^\S*?([^/\s:]+):(\d+):\d+: ([\w.]+): (.*)", done.stdout, re.MULTILINE)
    return [
        f"{files[file]}:{line}: {check}: {advice}"
        for file, line, check, advice in found
        if not check.startswith(LEFT_OUT)
    ]


def problems() -> list[str]:
    """Return everything that is found, a line each."""
    everything = list(texts())
    ours = [line for name, text in everything for line in phrases(name, text)]
    return [*ours, *misspelled(), *ill_written(everything)]


if __name__ == "__main__":
    found = problems()
    print("\n".join(found))
    sys.exit(bool(found))
