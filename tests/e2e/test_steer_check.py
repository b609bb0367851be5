"""`lmhead steer check`, `steer convert` and `generate --steer` as people call them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lmhead.cli import run
from lmhead.head import LMHead
from lmhead.steer import HEAD, Card, SteeringVector, alpha_for, save_control_vector

pytestmark = pytest.mark.model


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = run([str(a) for a in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def made(path: Path, layer: int | str, alpha: float, d: int = 576, **card: Any) -> Path:
    v = torch.randn(d, generator=torch.Generator().manual_seed(0))
    return SteeringVector(v / v.norm(), layer, alpha, Card(**card)).save(path)


@pytest.fixture
def few(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("The train leaves twice an hour.\nShe sat down to read the letter.\n")
    return path


@pytest.mark.bare
def test_check_at_the_head(
    smollm2: Path, tmp_path: Path, few: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    path = made(tmp_path / "v.safetensors", HEAD, 20.0)
    plot = tmp_path / "new" / "v.png"
    check = ("steer", "check", path, "-m", smollm2, "--prompts", few, "--budget", 2)
    code, out, err = call(capsys, *check, "--json", "--plot", plot)
    assert code == 1, err
    reported = json.loads(out)
    certificate, audit = reported["certificate"], reported["audit"]
    assert {"range", "kl_bound", "tv_bound", "max_alpha"} <= certificate.keys()
    v = SteeringVector.load(path)
    assert certificate["max_alpha"] == pytest.approx(
        alpha_for(LMHead.from_pretrained(smollm2), v, 2.0), rel=1e-6
    )
    assert reported["within_budget"] is False
    assert audit["max_range"] == pytest.approx(certificate["range"], rel=1e-4)
    assert audit["max_kl"] <= certificate["kl_bound"]
    assert plot.read_bytes()[:4] == b"\x89PNG"

    alpha = certificate["max_alpha"]
    code, out, err = call(capsys, *check, "--alpha", alpha)
    assert code == 0, err
    assert "within budget: range 2 <= 2, whatever the text" in out
    assert "Certificate: at most, for every possible text" in out
    assert "raised most" in out


def test_check_at_a_block(
    smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = made(tmp_path / "v.safetensors", 15, 100.0, budget=3.0, head_sha256="ab" * 32)
    code, out, err = call(capsys, "steer", "check", path, "-m", smollm2)
    assert code == 1, err
    assert "over budget: range" in out
    assert "measured on 24 prompts" in out
    assert "Certificate" not in out
    assert "was made for the head abababab" in err
    assert "the direct path does not tell" in " ".join(err.split())


def test_generate_steered(
    smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wild = made(tmp_path / "v.safetensors", 15, 200.0)
    control = save_control_vector(SteeringVector.load(wild), tmp_path / "v.gguf")
    prompt = ("generate", "The capital of France is", "-m", smollm2, "-n", 12)
    _, plain, _ = call(capsys, *prompt, "--engine", "dense")
    code, collapsed, err = call(capsys, *prompt, "--steer", wild)
    assert code == 0, err
    assert collapsed != plain
    assert call(capsys, *prompt, "--steer", control)[1] == collapsed
    code, guarded, err = call(capsys, *prompt, "--steer", wild, "--kl-cap", 0.1, "--no-fit")
    assert code == 0, err
    assert "Paris" in guarded
    assert "guard: held back" in err
    assert "fitted" not in err
    code, out, err = call(capsys, *prompt, "--steer", control, "--budget", 1.5, "--json")
    assert code == 0, err
    reported = json.loads(out)["steering"]
    assert "of itself to keep the budget 1.5, on plain texts" in " ".join(err.split())
    assert reported["fit"] is True
    assert reported["alpha"][0] < 200
    assert reported["layers"] == [15]
    assert 0 < reported["guard"]["max_range"] <= 1.5
    assert reported["guard"]["tokens"] == 12
    own = json.loads(out)["generations"][0]["guard"]
    assert len(own["kl"]) == 12
    distinct, share = own.pop("distinct_2"), own.pop("share")
    assert share in (1, 0.5, 0.25)
    assert distinct["steered"] >= 0.8 * distinct["unsteered"]
    assert own == reported["guard"]
    _, out, _ = call(capsys, *prompt, "--steer", wild, "--kl-cap", 0.1, "--no-fit", "--json")
    assert "share" not in json.loads(out)["generations"][0]["guard"]


def test_a_text_that_repeats_itself_is_written_again(
    smollm2: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wild = made(tmp_path / "v.safetensors", 25, 20.0)
    prompt = ("generate", "The capital of France is", "-m", smollm2, "-n", 6, "--engine", "dense")
    _, plain, _ = call(capsys, *prompt)
    monkeypatch.setattr("lmhead.steer.bound.keeping.LEAST", 2.0)  # more than any text has
    code, kept, err = call(capsys, *prompt, "--steer", wild, "--kl-cap", 0.5)
    assert code == 0, err
    assert kept == plain
    assert "the text repeated itself, and was written again without the vector" in " ".join(
        err.split()
    )
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("The capital of France is\nOnce upon a time\n")
    several = ("generate", "-m", smollm2, "-n", 4, "--prompts", prompts, "--steer", wild)
    code, out, err = call(capsys, *several, "--kl-cap", 0.5)
    assert code == 0, err
    assert [json.loads(line)["guard"]["share"] for line in out.splitlines()] == [0, 0]
    assert "2 of 2 texts repeated themselves" in " ".join(err.split())


def test_a_budget_at_the_head_needs_no_guard(
    smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = made(tmp_path / "v.safetensors", HEAD, 500.0, job="detect")
    prompt = ("generate", "The capital of France is", "-m", smollm2, "-n", 8, "--json")
    code, out, err = call(capsys, *prompt, "--steer", path)
    assert code == 0
    assert "made to detect" in err
    wild = json.loads(out)["generations"][0]["text"]
    code, out, err = call(capsys, *prompt, "--steer", path, "--budget", 1)
    assert code == 0
    assert "made to detect" not in err
    reported = json.loads(out)
    assert reported["steering"]["guard"] is None
    assert reported["generations"][0]["text"] != wild


def test_convert_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = made(tmp_path / "a.safetensors", 3, 1.0), made(tmp_path / "b.safetensors", 7, 2.5)
    both = tmp_path / "both.gguf"
    code, out, err = call(capsys, "steer", "convert", a, b, "-o", both, "--hint", "llama")
    assert code == 0, err
    assert "layer 3, 7" in "".join(out.splitlines())
    back = tmp_path / "back.safetensors"
    code, _, err = call(capsys, "steer", "convert", both, "-o", back)
    assert code == 2
    assert "--layer N" in err
    assert not back.exists()
    code, _, _ = call(capsys, "steer", "convert", both, "-o", back, "--layer", 7)
    assert code == 0
    assert torch.equal(SteeringVector.load(back).added, SteeringVector.load(b).added)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--alpha", "0"], "alpha is 0.0; expected a number other than 0"),
        (["--alpha", "nan"], "alpha is nan"),
        (["--budget", "-2"], "the budget is -2.0"),
        (["--plot", "x.pdf"], "expected a name that ends in .png"),
    ],
)
def test_a_wrong_check_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    path = made(tmp_path / "v.safetensors", HEAD, 1.0)
    code, out, err = call(capsys, "steer", "check", path, *options)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    ("layer", "size", "message"),
    [
        (HEAD, 5, "the vector has width 5, but the model's states at layer head have 576"),
        (3, 5, "the vector has width 5, but the model's states at layer 3 have 576"),
        (30, 576, "the layer is 30, but the model has 30 blocks; expected 0 to 29"),
    ],
)
def test_a_vector_of_another_model(
    smollm2: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    layer: int | str,
    size: int,
    message: str,
) -> None:
    path = made(tmp_path / "v.safetensors", layer, 1.0, size)
    for command in (["steer", "check", path], ["generate", "Hi", "--steer", path]):
        code, out, err = call(capsys, *command, "-m", smollm2)
        assert (code, out) == (2, ""), err
        assert message in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--alpha", "2"], "--alpha is given without a vector; add --steer VECTOR"),
        (["--kl-cap", "2"], "--kl-cap is given without a vector"),
        (["--steer", "none.safetensors"], "there is no vector at none.safetensors"),
    ],
)
def test_a_wrong_generate_is_one_line(
    capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    code, out, err = call(capsys, "generate", "Hi", *options)
    assert (code, out) == (2, "")
    assert message in err


def test_max_cannot_be_steered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = made(tmp_path / "v.safetensors", 3, 1.0)
    code, _, err = call(capsys, "generate", "Hi", "--steer", path, "--engine", "max")
    assert code == 2
    assert "cannot be steered" in err
