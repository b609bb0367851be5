"""Imports point down, never up or sideways or in a circle. And nothing imports torch early."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import lmhead

ROOT = Path(lmhead.__file__).parent
# From the bottom up. A room imports itself and the rows before its own; nothing sideways.
ROWS = (
    {"errors", "markup", "progress"},
    {"files"},
    {"models"},
    {"loss"},
    {"head", "sampling"},
    {"body"},
    {"loading"},
    {"generation"},
    {"inspect", "patch", "steer", "trim"},
    {"serve"},
    {"cli"},
    {"__main__"},
)
LONGEST = 400  # lines; a longer file is two ideas
LONG = {"head/screening/kernels.py"}  # loops that are compiled together


def name_of(path: Path) -> str:
    """Return a file as a module: `head.dense`; a room's `__init__` is the room."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py"}


def imports(path: Path) -> set[str]:
    """Return the modules of lmhead that a file imports: at its top, in functions, for types."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {n if n.removeprefix("lmhead.") in MODULES else node.module for n in inner}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name.removeprefix("lmhead.") for name in found if name.startswith("lmhead.")}


def row_of(module: str) -> int:
    room = module.split(".")[0]
    for i, rooms in enumerate(ROWS):
        if room in rooms:
            return i
    raise AssertionError(f"{room} has no row: add it to ROWS, and to the plan")


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_down(module: str) -> None:
    for other in imports(MODULES[module]):
        same_room = other.split(".")[0] == module.split(".")[0]
        assert same_room or row_of(other) < row_of(module), f"{module} imports {other}"


def cycles(graph: dict[str, set[str]]) -> set[tuple[str, ...]]:
    """Return the groups of modules that reach each other."""
    reach = {name: set(others) for name, others in graph.items()}
    for middle in graph:
        for name in graph:
            if middle in reach[name]:
                reach[name] |= reach[middle]
    return {
        tuple(sorted(o for o in reach[name] if name in reach.get(o, ())))
        for name in graph
        if name in reach[name]
    }


def test_modules_form_no_cycle() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == {("a", "b", "c")}
    graph = {name: imports(path) & MODULES.keys() - {name} for name, path in MODULES.items()}
    assert not cycles(graph)


def test_no_file_is_too_long() -> None:
    long = {
        path.relative_to(ROOT).as_posix()
        for path in MODULES.values()
        if len(path.read_text().splitlines()) > LONGEST
    }
    assert long == LONG


def test_tests_mirror_the_rooms() -> None:
    tests = Path(__file__).parent
    folders = {path.parent.relative_to(tests) for path in tests.rglob("test_*.py")}
    whole = {Path("e2e"), Path("docs"), Path("fuzz"), Path()}  # about all rooms at once
    for folder in folders - whole:
        assert (ROOT / folder).is_dir(), f"tests/{folder} has no room"
    for room in ROOT.iterdir():
        if room.is_dir() and any(room.glob("*.py")):
            assert Path(room.name) in folders, f"{room.name} has no tests of its own"
    for path in tests.glob("test_*.py"):
        about = path.stem.removeprefix("test_")
        assert (ROOT / f"{about}.py").is_file() or about in ("layers", "scripts"), path.name


def test_only_declared_packages_are_imported() -> None:
    """A package that is here by chance, with the test tools, may be missing where a user is."""
    project = tomllib.loads((ROOT.parents[1] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = [
        *project["dependencies"],
        *(d for e in ("guided", "max", "plot", "ray", "serve") for d in extras[e]),
    ]
    names = {re.split(r"[^A-Za-z0-9_-]", wanted)[0] for wanted in declared}
    # click comes with typer, llvmlite with numba, huggingface_hub and jinja2 with transformers,
    # pydantic and starlette with fastapi
    names |= {"click", "huggingface_hub", "jinja2", "llvmlite", "zstandard", "compression"}
    names |= {"prometheus_client", "pydantic", "starlette"}
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


def test_every_public_name_is_there_and_has_an_example() -> None:
    page = (ROOT.parents[1] / "docs" / "python.md").read_text(encoding="utf-8")
    for name in lmhead.__all__:
        found = getattr(lmhead, name)
        assert found is not None
        assert not isinstance(found, ModuleType), f"lmhead.{name} is a room, not what it names"
        assert re.search(rf"lmhead\.{name}\b|`{name}`", page), f"docs/python.md leaves {name} out"
    assert set(lmhead.__all__) <= set(dir(lmhead))


def test_no_public_name_is_hidden_by_a_room() -> None:
    """`import lmhead.steer` would put the room in the place of a function of that name."""
    assert not set(lmhead.__all__) & {name.split(".")[0] for name in MODULES}
