"""A trim that was stopped goes on where it stopped, to the same bytes."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from lmhead.files.contents import entries
from lmhead.trim import observations, resume
from lmhead.trim.corpus import Corpus
from lmhead.trim.report import TrimRequest
from lmhead.trim.resume import Memory
from lmhead.trim.run import trim_model

FEW = {"positions": 600, "continuations": 6, "max_tokens": 6, "proof_prompts": 4}
KILLED = """
import os, signal, sys
from contextlib import contextmanager
from pathlib import Path
from lmhead.trim.corpus import Corpus
from lmhead.trim.observing import READING
from lmhead.trim.report import TrimRequest
from lmhead.trim.run import trim_model

@contextmanager
def progress(title, total=None):
    if title == READING:
        os.kill(os.getpid(), signal.SIGKILL)
    yield lambda n: None

model, corpus, out, few = sys.argv[1:]
request = TrimRequest(model, corpus=Corpus((Path(corpus),)), coverage=0.9, **eval(few))
trim_model(request, Path(out), form="head", progress=progress)
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LMHEAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def trim(model: Path, corpus: Path, out: Path, **more: object) -> bytes:
    asked = {**FEW, **more}
    request = TrimRequest(str(model), corpus=Corpus((corpus,)), coverage=0.9, **asked)  # type: ignore[arg-type]
    trim_model(request, out, form="head")
    return out.read_bytes()


@contextmanager
def nothing_is_asked_again(monkeypatch: pytest.MonkeyPatch, *names: str) -> Iterator[None]:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("asked again")

    with monkeypatch.context() as patch:
        for name in names:
            patch.setattr(observations, name, fail)
        yield


def test_killed_in_the_middle_of_reading_it_goes_on_to_the_same_bytes(
    make_model: Callable[..., Path],
    corpus_file: Path,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model("byte_level", "llama", False)
    places = [str(model), str(corpus_file), str(tmp_path / "killed.safetensors"), repr(FEW)]
    killed = subprocess.run([sys.executable, "-c", KILLED, *places], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "killed.safetensors").exists()
    [kept] = (cache / "observations").iterdir()
    assert sorted(p.stem for p in kept.iterdir()) == ["continuations"]

    with nothing_is_asked_again(monkeypatch, "observe_continuations"):
        resumed = trim(model, corpus_file, tmp_path / "resumed.safetensors")
    assert sorted(p.stem for p in kept.iterdir()) == ["continuations", "texts"]
    with nothing_is_asked_again(monkeypatch, "observe_continuations", "observe_texts"):
        again = trim(model, corpus_file, tmp_path / "again.safetensors")
    fresh = trim(model, corpus_file, tmp_path / "fresh.safetensors", resume=False)
    assert resumed == again == fresh
    assert [entry.name for entry in entries()] == [kept.name]

    # Another question is not answered by what was said to this one, nor by half a file.
    with (
        nothing_is_asked_again(monkeypatch, "observe_continuations"),
        pytest.raises(AssertionError, match="asked again"),
    ):
        trim(model, corpus_file, tmp_path / "longer.safetensors", max_tokens=7)
    (kept / "continuations.safetensors").write_bytes(b"half")
    assert trim(model, corpus_file, tmp_path / "mended.safetensors") == fresh
    card = (tmp_path / "mended.safetensors.md").read_text("utf-8")
    assert f"lmhead verify {model} mended.safetensors" in card


def test_the_oldest_answers_make_room(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "MOST", 2)
    for number, key in enumerate(("first", "second", "third")):
        made = Memory(key).once("stage", lambda: {"a": torch.arange(3)})
        assert made["a"].tolist() == [0, 1, 2]
        path = cache / "observations" / key / "stage.safetensors"
        os.utime(path, (number + 1, number + 1))
    assert sorted(p.name for p in (cache / "observations").iterdir()) == ["second", "third"]
    found = Memory("third").once("stage", dict)
    assert found["a"].tolist() == [0, 1, 2]
    assert not (cache / "none").exists()
    assert Memory(None).once("stage", lambda: {"b": torch.ones(1)})["b"].tolist() == [1]


def test_a_folder_has_a_card_and_says_what_was_not_run(
    make_model: Callable[..., Path], corpus_file: Path, cache: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(make_model("byte_level", "llama"), model)
    (model / "README.md").write_text("---\nlicense: mit\n---\n# The original\n")
    request = TrimRequest(str(model), corpus=Corpus((corpus_file,)), run=False)
    report = trim_model(request, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert card.startswith("---\nlicense: mit\n---\n")
    assert f"{report.ids.kept_rows:,} of {report.ids.rows:,} rows" in card
    assert "No model ran" in card
    assert "# The original" in (tmp_path / "out" / "README.original.md").read_text("utf-8")
    reported = json.loads((tmp_path / "out" / "lmhead_trim.json").read_text("utf-8"))["proof"]
    assert (reported["models_ran"], reported["left_out"]) == (False, ["logits", "greedy text"])
