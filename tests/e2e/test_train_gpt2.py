"""Training a small GPT-2 on a text file: it learns, survives kill -9, and its model loads."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from lmhead.models.gpt2 import GPT2LMHeadModel

SCRIPT = Path(__file__).parents[2] / "examples" / "train_gpt2.py"
OPTIONS = {
    "--steps": 60,
    "--save-every": 7,
    "--vocab": 300,
    "--context": 24,
    "--batch": 4,
    "--width": 32,
    "--layers": 2,
    "--learning-rate": 0.01,
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "rhyme.txt"
    lines = (f"{n} green bottles hanging on the wall, née Ünïcode.\n" for n in range(400))
    path.write_text("".join(lines), encoding="utf-8")
    return path


def start(text: Path, out: Path, *extra: str) -> subprocess.Popen[str]:
    options = [word for option in OPTIONS.items() for word in option]
    command = [sys.executable, SCRIPT, text, "--out", out, "--json", *options, *extra]
    return subprocess.Popen(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    result: dict[str, Any] = json.loads(out)
    return result


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of a run that nothing disturbs."""
    return finish(start(text, tmp_path_factory.mktemp("whole")))


def test_it_learns(whole: dict[str, Any]) -> None:
    assert len(whole["losses"]) == 60
    assert whole["losses"][-1] < 0.6 * whole["losses"][0]
    assert whole["valid_loss"] < whole["losses"][0]
    assert len(whole["sample"]) > 20
    if find_spec("matplotlib"):
        assert Path(whole["picture"]).read_bytes().startswith(b"\x89PNG")
    else:
        assert whole["picture"] is None


def test_killed_and_resumed_it_has_the_same_losses(
    text: Path, tmp_path: Path, whole: dict[str, Any]
) -> None:
    process = start(text, tmp_path)
    deadline = time.monotonic() + 200
    while not (tmp_path / "state.safetensors").exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    (tmp_path / "state.part").write_bytes(b"half a checkpoint")  # killed while writing, too
    resumed = finish(start(text, tmp_path))
    assert 0 < resumed["resumed_after"] < 60
    assert resumed["losses"] == whole["losses"]
    assert resumed["sample"] == whole["sample"]
    assert resumed["valid_loss"] == whole["valid_loss"]


def test_other_settings_do_not_overwrite_a_run(text: Path, whole: dict[str, Any]) -> None:
    folder = Path(whole["model"]).parent
    before = (folder / "state.safetensors").read_bytes()
    process = start(text, folder, "--seed", "5")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "seed = 0, not 5" in " ".join(err.split())
    assert (folder / "state.safetensors").read_bytes() == before


def test_transformers_loads_the_model(whole: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(whole["model"])
    theirs = AutoModelForCausalLM.from_pretrained(whole["model"]).eval()
    ours = GPT2LMHeadModel.from_pretrained(whole["model"])
    line = "7 green bottles hanging"
    ids = tokenizer(line, return_tensors="pt")["input_ids"]
    assert tokenizer.decode(ids[0]) == line
    with torch.inference_mode():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-4)
    assert tokenizer.decode(ours(ids).logits[0, -1].argmax()) == " on"


def test_on_two_ranks_it_has_the_losses_of_one(
    text: Path, tmp_path: Path, whole: dict[str, Any]
) -> None:
    """Rounding grows with the steps: the first five agree to 1e-5, all sixty to 2e-3."""
    options = [str(word) for option in OPTIONS.items() for word in option]
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [sys.executable, *launch, str(SCRIPT), str(text), "--out", str(tmp_path), "--json"]
    done = subprocess.run(
        [*command, *options],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    reported = json.loads(done.stdout)
    assert reported["losses"] == pytest.approx(whole["losses"], abs=2e-3)
    assert reported["losses"][:5] == pytest.approx(whole["losses"][:5], abs=1e-5)
