"""`lmhead doctor` and `lmhead --version --verbose`: what a bug report needs."""

import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import manual_seed
from transformers import LlamaConfig, LlamaForCausalLM

import lmhead
from lmhead import cli
from lmhead.head import LMHead
from lmhead.head.screened import ScreenedHead

Call = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LMHEAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_it_says_what_would_make_answers_faster(call: Call, folder: Path) -> None:
    done = call("doctor", "-m", str(folder), "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["engine"]["auto"] == "dense"
    assert f"lmhead screen {folder}" in " ".join(report["advice"])
    ScreenedHead.from_head(LMHead.from_pretrained(folder), folder, save=True)
    report = json.loads(call("doctor", "-m", str(folder), "--json").stdout)
    assert report["engine"]["auto"] == "screened"
    assert not any("lmhead screen" in line for line in report["advice"])


def test_it_names_a_model_that_is_not_here(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMHEAD_CACHE", str(tmp_path))
    report = json.loads(call("doctor", "--json").stdout)
    assert "lmhead pull smollm2-135m" in report["engine"]["why"]
    assert report["cache"] == {"folder": str(tmp_path), "bytes": 0, "entries": []}


def test_threads_that_are_held_back(
    call: Call, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("lmhead.cli.doctor._cpus", lambda: 4)
    assert "it limits torch to 1 of 4 CPUs" in call("doctor", "-m", str(folder)).stdout


def test_a_missing_extra_has_its_install_line(
    call: Call, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmhead.cli import doctor

    found = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "ray" else found(name))
    out = call("doctor", "-m", str(folder)).stdout
    assert "not installed (counts and trims on a Ray cluster)" in out
    assert "[ray]" in out


@pytest.mark.parametrize("words", [["--version", "--verbose"], ["--verbose", "-V"]])
def test_a_verbose_version(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(words) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"lmhead {lmhead.__version__}\n")
    assert "torch 2." in out
    assert "transformers" in out
    assert f"Python: {platform.python_version()} (" in out
