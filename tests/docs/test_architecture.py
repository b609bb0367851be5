"""docs/architecture.md: the files are there, and no one that reads them in order has to go back."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ROOT / "src" / "lmhead"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
LISTS = {
    part.splitlines()[0].strip("` "): re.findall(r"^\d+\. `([^`]+)`", part, flags=re.MULTILINE)
    for part in PAGE.split("\n## ")[1:]
}


def imports(file: str) -> set[str]:
    """Return the files that a file imports when it is imported itself."""
    found = set()
    for node in ast.parse((ROOMS / file).read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            found |= {name.removeprefix("lmhead.").replace(".", "/") + ".py" for name in names}
    return found


def test_the_four_commands() -> None:
    assert list(LISTS) == ["lmhead next", "lmhead generate", "lmhead trim", "lmhead steer train"]


@pytest.mark.parametrize("command", LISTS)
def test_every_file_is_there(command: str) -> None:
    assert len(LISTS[command]) > 12
    for file in LISTS[command]:
        assert (ROOMS / file).is_file(), file


@pytest.mark.parametrize("command", LISTS)
def test_nobody_has_to_go_back(command: str) -> None:
    files = LISTS[command]
    for i, file in enumerate(files):
        assert not imports(file) & set(files[:i]), f"{file} uses one that stands above it"


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_every_room_is_named(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    rooms = {path.name.removesuffix(".py") for path in ROOMS.iterdir() if path.name[0].isalpha()}
    for room in rooms - {"py.typed"}:
        assert re.search(rf"`(src/lmhead/)?{room}(/|\.py)?`", text), f"{page} leaves {room} out"
