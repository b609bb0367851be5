"""Docstrings: every public name has one, and the examples in them run and print what they say."""

import doctest
import inspect
from importlib import import_module
from pathlib import Path

import pytest

import lmhead

ROOT = Path(lmhead.__file__).parent
WITH_EXAMPLES = sorted(
    ".".join(("lmhead", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.model
@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples(name: str, smollm2: Path) -> None:
    module = import_module(name)
    done = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert done.attempted > 0
    assert done.failed == 0


def test_there_are_examples() -> None:
    assert len(WITH_EXAMPLES) >= 5


@pytest.mark.parametrize("name", lmhead.__all__)
def test_every_public_name_says_what_it_is(name: str) -> None:
    assert len(inspect.getdoc(getattr(lmhead, name)) or "") > 30
