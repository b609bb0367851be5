"""lmhead without its extras: what is missing is said in one line, and everything else works.

`make test-bare` runs this in a venv that holds no extra; there none of it may be skipped.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [pytest.mark.bare, pytest.mark.model]

LMHEAD = [sys.executable, "-m", "lmhead"]
ROOT = Path(__file__).parents[2]
MODULES = {
    "guided": "llguidance",
    "llamacpp": "llama_cpp",
    "max": "max",
    "plot": "matplotlib",
    "ray": "ray",
    "serve": "fastapi",
}
MISSING = {
    "guided-regex": ("generate", "x", "--regex", "a+"),
    "guided-schema": ("generate", "x", "--json-schema", "{}"),
    "llamacpp": ("generate", "x", "--body", "llama.cpp"),
    "max": ("generate", "x", "--engine", "max"),
    "plot": ("steer", "check", "v.safetensors", "--plot", "v.png"),
    "serve-explore": ("explore", "--no-browser"),
    "ray": ("count", "text.txt", "-o", "text.counts", "--ray", "local"),
    "serve": ("serve", "--port", "0"),
    "ray-trim": ("trim", "smollm2-135m", "--corpus", "text.txt", "--out", "o", "--ray", "local"),
}


def call(*command: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*command], capture_output=True, text=True, **options)  # type: ignore[call-overload,no-any-return]


def needs_absent(extra: str) -> None:
    if find_spec(MODULES[extra]) is None:
        return
    if os.environ.get("LMHEAD_BARE"):
        pytest.fail(f"{MODULES[extra]} is installed in the bare venv")
    pytest.skip(f"{MODULES[extra]} is installed; `make test-bare` runs this without it")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    import torch

    from lmhead import SteeringVector

    (tmp_path / "text.txt").write_text("The capital of France is Paris.\n" * 40)
    SteeringVector(torch.ones(576) / 24, "head", 1.0).save(tmp_path / "v.safetensors")
    return tmp_path


@pytest.mark.parametrize("case", MISSING)
def test_a_missing_extra_is_one_line(case: str, folder: Path) -> None:
    extra = case.partition("-")[0]
    needs_absent(extra)
    done = call(*LMHEAD, *MISSING[case], cwd=folder)
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    said = [line for line in done.stderr.splitlines() if "done in" not in line]
    assert len(said) == 1, done.stderr
    assert said[0].startswith("error: ")
    assert f"[{extra}]'" in said[0]
    assert sorted(p.name for p in folder.iterdir()) == ["text.txt", "v.safetensors"]


def test_the_hint_is_the_way_lmhead_was_installed() -> None:
    from importlib.metadata import distribution

    from lmhead.errors import how_to_install

    origin = distribution("lmhead").read_text("direct_url.json") or ""
    hint = how_to_install("ray")
    if '"editable": true' in origin:
        assert hint == "pip install -e '.[ray]' in lmhead's checkout"
    elif '"dir_info"' in origin:
        assert hint == "pip install '.[ray]' in lmhead's checkout"
    else:
        assert hint == "pip install 'lmhead[ray]'"


def test_next_answers(smollm2: Path) -> None:
    done = call(*LMHEAD, "next", "The capital of France is", "-m", str(smollm2))
    assert done.returncode == 0, done.stderr
    assert '" Paris"' in done.stdout.splitlines()[2]


def test_the_screened_head_is_compiled(smollm2: Path, tmp_path: Path) -> None:
    done = call(
        *LMHEAD, "generate", "The capital of France is", "-n", "3", "--engine", "screened",
        "-m", str(smollm2), "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert find_spec("numba"), "numba is an ordinary dependency"


def test_the_picture_of_the_example_is_asked_for_before_the_training() -> None:
    needs_absent("plot")
    done = call(sys.executable, str(ROOT / "examples" / "explosion.py"), timeout=100)
    assert done.returncode == 1
    assert done.stderr.startswith("error: the picture needs matplotlib: pip install")
    assert done.stderr.count("\n") == 1
