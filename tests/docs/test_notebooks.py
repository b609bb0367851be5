"""The notebooks of examples/: every cell runs, and what it shows is stored with it."""

import base64
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
import notebooks

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "examples").glob("*.ipynb"))
by_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def shown(notebook: dict[str, Any]) -> list[list[str]]:
    """Return the kinds of output of each code cell."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [[output["output_type"] for output in cell["outputs"]] for cell in cells]


def test_there_are_seven() -> None:
    assert [path.stem[:2] for path in FILES] == ["01", "02", "03", "04", "05", "06", "07"]


@pytest.mark.model
@by_file
def test_it_runs(path: Path, smollm2: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    notebook = read(path)
    stored = shown(notebook)
    notebooks.run(notebook, tmp_path, path.stem)
    assert shown(notebook) == stored, f"run scripts/notebooks.py --write examples/{path.name}"


@by_file
def test_its_pictures_are_stored(path: Path) -> None:
    notebook = read(path)
    assert notebook["nbformat"] == 4
    assert notebook["cells"][0]["source"][0].startswith("# ")
    pictures = [
        output["data"]["image/png"]
        for cell in notebook["cells"]
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    assert pictures or path.stem == "02_custom_head"
    for picture in pictures:
        assert base64.b64decode(picture).startswith(b"\x89PNG")


def test_an_error_in_a_cell_is_noticed(tmp_path: Path) -> None:
    cell = {"cell_type": "code", "source": ["x = 1\n", "assert x == 2"], "outputs": []}
    with pytest.raises(AssertionError):
        notebooks.run({"cells": [cell]}, tmp_path)
