"""Imports point one way: cli and serve above, errors below. And nothing imports torch early."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import lmhead

ROOT = Path(lmhead.__file__).parent
# From the bottom up; a room may import its own row and the rows before it.
ROWS = (
    {"errors", "progress"},
    {"files"},
    {"models"},
    {"head", "loss", "sampling"},
    {"patch"},
    {"body"},
    {"loading"},
    {"generation", "inspect", "steer", "trim"},
    {"cli", "serve", "__main__"},
)


def row_of(room: str) -> int:
    for i, rooms in enumerate(ROWS):
        if room in rooms:
            return i
    raise AssertionError(f"{room} has no row: add it to ROWS, and to the plan")


def imports(path: Path) -> set[str]:
    """Return the rooms of lmhead that a file imports, at its top or inside a function."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "lmhead":
                names = [f"lmhead.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("lmhead.")}
    return rooms - {"__version__"}


@pytest.mark.parametrize(
    "path",
    [p for p in ROOT.rglob("*.py") if p != ROOT / "__init__.py"],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_imports_never_point_up(path: Path) -> None:
    here = path.relative_to(ROOT).parts[0].removesuffix(".py")
    for room in imports(path):
        assert row_of(room) <= row_of(here), f"{here} imports {room}"


def test_only_declared_packages_are_imported() -> None:
    """A package that is here by chance, with the test tools, may be missing where a user is."""
    project = tomllib.loads((ROOT.parents[1] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = [
        *project["dependencies"],
        *(d for e in ("guided", "max", "plot", "ray") for d in extras[e]),
    ]
    names = {re.split(r"[^A-Za-z0-9_-]", wanted)[0] for wanted in declared}
    # click comes with typer, llvmlite with numba, huggingface_hub and jinja2 with transformers
    names |= {"click", "huggingface_hub", "jinja2", "llvmlite", "zstandard", "compression"}
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            found: list[str] = []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found = [node.module]
            elif isinstance(node, ast.Import):
                found = [alias.name for alias in node.names]
            packages = {name.split(".")[0] for name in found} - {"lmhead"}
            unknown = packages - set(sys.stdlib_module_names) - names
            assert not unknown, f"{path.relative_to(ROOT)} imports {sorted(unknown)}"


@pytest.mark.parametrize(
    "code",
    [
        "import lmhead",
        "from lmhead.cli import run; run(['--help'])",
        "from lmhead.cli import run; run(['inspect', '--help'])",
        "from lmhead.cli import run; run(['inspect', 'gemma-7b'])",
        "from lmhead.cli import run; run(['models'])",
    ],
)
def test_no_torch_before_it_is_needed(code: str) -> None:
    check = "; import sys; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    done = subprocess.run([sys.executable, "-c", code + check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_there() -> None:
    for name in lmhead.__all__:
        assert getattr(lmhead, name) is not None
    assert set(lmhead.__all__) <= set(dir(lmhead))
