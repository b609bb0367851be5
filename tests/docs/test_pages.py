"""README and docs: every code block runs, and prints what it is said to print.

- A ```python block is executed; all blocks of a page share one namespace and one folder.
- In a ```console block a line that begins with `$ ` is a command, and what follows, up to the
  next one, is its stdout. Stated output is compared; `...` stands for anything.
- Comments say what a reader need not see. `<!-- python` opens code that prepares or checks
  something. Right above a block, `<!-- not run: REASON -->` leaves it alone, and
  `<!-- smaller: trim --positions 200; verify --count 3 -->` adds options to the commands of these
  names, where the full size takes minutes. `<!-- server: --no-browser -->` starts its command with
  these options on a free port, asks the address that it prints, and ends it.
"""

import doctest
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from lmhead.cli.app import command as whole_command

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)

_PART = re.compile(
    r"^<!-- (?P<hidden>python)\n(?P<secret>.*?)^-->$"
    r"|^<!-- (?P<word>not run|smaller|server): (?P<what>.*?) -->$"
    r"|^(?P<indent> *)```(?P<language>[^\n]*)\n(?P<code>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A piece of code: its language, its text, where it stands, and whether it is run."""

    language: str
    text: str
    line: int
    not_run: str = ""  # the reason
    smaller: tuple[str, ...] = ()  # "name --option ..."
    server: str = ""  # options for a server that is started and ended


@dataclass(frozen=True)
class Command:
    """A command of a console block, and the lines that it is said to print."""

    text: str
    output: str


def blocks(markdown: str) -> Iterator[Block]:
    """Yield the blocks of a page in their order."""
    above: tuple[int, str, str] | None = None
    for found in _PART.finditer(markdown):
        line = markdown.count("\n", 0, found.start()) + 1
        if found["word"]:
            above = (markdown.count("\n", 0, found.end()) + 1, found["word"], found["what"])
            continue
        notes = {}
        if above is not None and above[0] == line - 1:
            value = tuple(above[2].split("; ")) if above[1] == "smaller" else above[2]
            notes = {above[1].replace(" ", "_"): value}
        above = None
        language = found["hidden"] or found["language"].strip()
        yield Block(language, found["secret"] or found["code"] or "", line, **notes)  # type: ignore[arg-type]


def commands(block: Block) -> list[Command]:
    """Return the commands of a console block."""
    text = re.sub(r"\\\n\s*", "", block.text)  # a line that goes on
    result = []
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        first, _, rest = part.partition("\n")
        result.append(Command(re.sub(r"\s+# .*$", "", first), rest))
    return result


def run_page(page: Path, folder: Path) -> None:
    """Run every block of a page in a folder, and compare what is stated."""
    names: dict[str, Any] = {"__name__": page.stem}
    before, variables = Path.cwd(), dict(os.environ)
    os.chdir(folder)
    try:
        for block in blocks(page.read_text(encoding="utf-8")):
            if block.not_run:
                continue
            if block.language == "python":
                code = "\n" * block.line + block.text  # errors name the line of the page
                exec(compile(code, str(page), "exec"), names)
            elif block.language == "console":
                for command in commands(block):
                    if block.server:
                        _serve(command, block.server)
                        continue
                    _run(command, f"{page.name}:{block.line}", block.smaller)
    finally:
        os.chdir(before)
        os.environ.clear()
        os.environ.update(variables)


def _run(command: Command, where: str, smaller: tuple[str, ...]) -> None:
    words = shlex.split(command.text)
    assert words[0] == "lmhead", f"{where}: {command.text}: mark what is no lmhead as not run"
    for more in smaller:
        name, *options = shlex.split(more)
        if " ".join(words[1:]).startswith(name.replace("+", " ")):
            words += options
    done = subprocess.run(
        [sys.executable, "-m", "lmhead", *words[1:]], capture_output=True, text=True
    )
    assert done.returncode == 0, f"{where}: {command.text}\n{done.stderr}"
    wanted = _plain(command.output)
    if not wanted:
        return
    checker = doctest.OutputChecker()
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    got = _plain(done.stdout)
    assert checker.check_output(wanted, got, options), (
        f"{where}: {command.text}\nexpected:\n{wanted}\ngot:\n{got}"
    )


def _serve(command: Command, options: str) -> None:
    """Start a server as the page says, on a port of its own; it answers, and ends when asked to."""
    words = [*shlex.split(command.text)[1:], "--port", "0", "--json", *shlex.split(options)]
    command_line = [sys.executable, "-m", "lmhead", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command_line, text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            said = ""
            for line in process.stdout:
                said += line
                if line.rstrip().endswith("}"):
                    break
            url = json.loads(said)["url"]
            with urlopen(url if url.endswith("/") else f"{url}/healthz", timeout=120) as answer:
                assert answer.status == 200
        finally:
            process.terminate()


def _plain(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@by_page
def test_every_block_is_code_that_can_be_run(page: Path) -> None:
    for block in blocks(text_of(page)):
        where = f"{page.name}:{block.line}"
        assert block.language in ("python", "console", "text", "json"), f"{where} has no language"
        if block.language == "text":
            assert "lmhead" not in block.text.split()[:1], f"{where} is a command: console"
        if block.language == "console":
            assert block.text.startswith("$ "), f"{where} begins with no command"


@pytest.mark.model
@pytest.mark.timeout(1800)
@by_page
def test_its_code_runs(page: Path, smollm2: Path, tmp_path: Path) -> None:
    if page.name == "max.md":
        pytest.importorskip("max", reason="needs the extra `max`")
    if page.name == "llama_cpp.md":
        pytest.importorskip("llama_cpp", reason="needs the extra `llamacpp`")
    (tmp_path / "docs").mkdir()
    for other in PAGES:
        (tmp_path / "docs" / other.name).write_text(text_of(other), encoding="utf-8")
    run_page(page, tmp_path)


@by_page
def test_commands_in_a_sentence_exist(page: Path) -> None:
    """`lmhead next --trace` in a sentence or a table: that command, with that option."""
    for found in re.finditer(r"`lmhead ([^`\n]*)`", text_of(page)):
        part: Any = whole_command()
        words = shlex.split(found[1])
        while words and words[0] in getattr(part, "commands", {}):
            part = part.commands[words.pop(0)]
        named = {option for param in part.params for option in (*param.opts, *param.secondary_opts)}
        assert (
            not hasattr(part, "commands")
            or not words
            or words[0].startswith("-")
            or (words[0].isupper())
        ), f"{page.name}: no command {found[0]}"
        for word in words:
            if word.startswith("-") and word != "-" and not word[1:2].isdigit():
                assert word.partition("=")[0] in {*named, "-h", "--help"}, (
                    f"{page.name}: {found[0]}"
                )


def test_a_false_statement_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```console\n$ lmhead -V\nlmhead 99.0\n```\n")
    with pytest.raises(AssertionError, match=r"page\.md:1"):
        run_page(page, tmp_path)
    page.write_text("<!-- python\nx = 1\n-->\n\n```python\nassert x == 2\n```\n")
    with pytest.raises(AssertionError):
        run_page(page, tmp_path)
