"""The three rooms: imports between them point one way, and no name hides a module."""

import ast
import importlib
import pkgutil
from pathlib import Path
from types import ModuleType

import pytest

import lmhead.steer

ROOT = Path(lmhead.steer.__file__).parent
ROOMS = ("bound", "learn", "judge")  # each may import those before it


def modules() -> list[ModuleType]:
    names = [m.name for m in pkgutil.walk_packages([str(ROOT)], "lmhead.steer.")]
    return [importlib.import_module(name) for name in names]


def test_no_function_has_the_name_of_its_module() -> None:
    for module in [lmhead.steer, *modules()]:
        own = module.__name__.rpartition(".")[2]
        if not hasattr(module, "__path__"):
            assert not hasattr(module, own), f"{module.__name__} holds something of its own name"
            continue
        for inner in pkgutil.iter_modules(module.__path__):
            found = getattr(module, inner.name)
            assert isinstance(found, ModuleType), f"{module.__name__}.{inner.name} is hidden"


@pytest.mark.parametrize("room", ROOMS)
def test_imports_between_the_rooms_point_one_way(room: str) -> None:
    later = ROOMS[ROOMS.index(room) + 1 :]
    for path in (ROOT / room).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                for other in later:
                    assert not node.module.startswith(f"lmhead.steer.{other}"), path
