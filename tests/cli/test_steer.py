"""`lmhead steer`: what is wrong with a call is said in one line, before a model is loaded."""

from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
import torch

from lmhead import loading
from lmhead.cli import run
from lmhead.steer import Card, SteeringVector

NOWHERE = "no-such-model-at-all"  # whoever tried to load it would say so


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = run([str(a) for a in arguments])
    captured = capsys.readouterr()
    assert captured.out == ""
    return code, " ".join(captured.err.split())


@pytest.fixture
def vectors(tmp_path: Path) -> dict[str, Path]:
    made = {"steer": Card("steer"), "detect": Card("detect", detector={"kind": "linear"})}
    return {
        job: SteeringVector(torch.ones(8), 1, 1.0, card).save(tmp_path / f"{job}.safetensors")
        for job, card in made.items()
    }


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_options: object) -> None:
        raise AssertionError("a model was loaded before the call was checked")

    monkeypatch.setattr(loading, "load", refuse)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--job", "steer", "--method", "mean-diff", "--kl", "1"], "trains nothing"),
        (["--job", "steer", "--mean", "0.2"], "a penalty that detectors are compared by"),
        (["--method", "probe", "--alpha", "3"], "--alpha is for --method tsv"),
        (["--job", "steer", "--epochs", "3"], "--epochs is for --method tsv"),
        (["--method", "tsv", "--alpha", "-1"], "trained with a positive one"),
        (["--layer", "top"], "the layer is 'top'"),
    ],
)
def test_a_wrong_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    out = tmp_path / "v.safetensors"
    code, err = call(capsys, "steer", "train", "builtin", "-m", NOWHERE, "-o", out, *options)
    assert code == 2
    assert message in err
    assert not out.exists()


def test_data_without_pairs_cannot_steer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.csv"
    data.write_text("statement,label\nIce is cold.,1\nFire is cold.,0\n")
    out = tmp_path / "v.safetensors"
    code, err = call(capsys, "steer", "train", data, "-m", NOWHERE, "-o", out, "--job", "steer")
    assert code == 2
    assert "holds no pairs" in err


def test_a_file_is_replaced_only_if_that_is_meant(
    tmp_path: Path, vectors: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    precious = tmp_path / "precious.safetensors"
    precious.write_text("mine")
    for command in (
        ["steer", "train", "builtin", "-m", NOWHERE],
        ["steer", "convert", vectors["steer"]],
    ):
        code, err = call(capsys, *command, "-o", precious)
        assert code == 2
        assert "--force" in err
        assert precious.read_text() == "mine"
    folder = tmp_path / "folder.safetensors"
    folder.mkdir()
    (folder / "precious").write_text("mine")
    code, _ = call(capsys, "steer", "convert", vectors["steer"], "-o", folder, "--force")
    assert code == 2
    assert (folder / "precious").read_text() == "mine"
    assert run(["steer", "convert", str(vectors["steer"]), "-o", str(precious), "--force"]) == 0
    assert SteeringVector.load(precious).layer == 1


@pytest.mark.parametrize(
    ("job", "options", "message"),
    [
        ("steer", ["--budget", "-1"], "the budget is -1.0"),
        ("steer", ["--kl-cap", "0"], "the KL cap is 0.0"),
        ("steer", ["--alpha", "0"], "alpha is 0.0"),
        ("steer", ["--fit"], "to no budget"),
        ("detect", ["--budget", "1"], "this one detects"),
    ],
)
def test_a_wrong_evaluation(
    vectors: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    job: str,
    options: list[str],
    message: str,
) -> None:
    code, err = call(capsys, "steer", "eval", vectors[job], "builtin", "-m", NOWHERE, *options)
    assert code == 2
    assert message in err


def test_the_old_name_of_the_job_still_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "v.safetensors"
    data = tmp_path / "data.csv"
    data.write_text("statement,label\nIce is cold.,1\nFire is cold.,0\n")
    code, err = call(capsys, "steer", "train", data, "-m", NOWHERE, "-o", out, "--for", "steer")
    assert code == 2
    assert "--for is now called --job" in err
    assert "holds no pairs" in err


def test_a_wrong_detection(
    vectors: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = (vectors["detect"], "-m", NOWHERE)
    code, err = call(capsys, "detect", *at, "a text", "--lines", "--json")
    assert code == 2
    assert "--lines and --json are both given" in err
    for given, said in ((b"\n \n", "stdin holds no text"), (b"caf\xe9\n", "stdin is not UTF-8")):
        monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(given)))
        code, err = call(capsys, "detect", *at, "-")
        assert code == 2
        assert said in err
