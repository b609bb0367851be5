"""The documented flow of steering, from training to generating, on the real model."""

import json
from pathlib import Path

import pytest
import torch

from lmhead.cli import run
from lmhead.steer import SteeringVector

pytestmark = pytest.mark.model


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = run([str(a) for a in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_what_training_keeps_every_command_keeps(
    smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Train with a budget, check, generate: no warning, and nobody lowers alpha.

    Three roundings once gave three answers: alpha 0.4776112117 from training, within its budget
    by `check` though that named 0.4776112093 as the largest, and above it by `generate`.
    """
    path, few = tmp_path / "honest.safetensors", tmp_path / "prompts.txt"
    few.write_text("The train leaves twice an hour.\n")
    at = ("-m", smollm2)
    code, _, err = call(
        capsys, "steer", "train", "builtin", *at, "--job", "steer", "--layer", "head", "--budget",
        2, "--method", "mean-diff", "-o", path,
    )  # fmt: skip
    assert code == 0, err
    alpha = SteeringVector.load(path).alpha

    code, out, err = call(capsys, "steer", "check", path, *at, "--prompts", few, "--json")
    assert code == 0, err
    assert "warning" not in err
    reported = json.loads(out)
    assert reported["within_budget"] is True
    assert reported["alpha"] == alpha
    assert alpha <= reported["certificate"]["max_alpha"] <= alpha * (1 + 1e-6)
    largest = reported["certificate"]["max_alpha"]

    prompt = ("generate", "The capital of Peru is", *at, "-n", 2, "--json", "--steer", path)
    texts = []
    for options in ((), ("--budget", 2), ("--budget", 2, "--fit", "--alpha", largest)):
        code, out, err = call(capsys, *prompt, *options)
        assert code == 0, err
        assert "warning" not in err
        reported = json.loads(out)
        assert reported["steering"]["alpha"] == [largest if "--alpha" in options else alpha]
        texts.append(reported["generations"][0]["text"])
    assert len(set(texts)) == 1

    code, out, err = call(capsys, *prompt, "--budget", 2, "--kl-cap", 0.5)
    assert code == 0, err
    assert json.loads(out)["steering"]["guard"]["held_back"] == 0

    code, out, err = call(capsys, "steer", "check", path, *at, "--prompts", few, "--alpha", -alpha)
    assert code == 0, err
    assert "within budget: range 2 <= 2, whatever the text" in out
    code, out, err = call(capsys, *prompt, "--alpha", -2 * alpha)
    assert code == 0, err
    assert json.loads(out)["steering"]["alpha"] == [-2 * alpha]
    assert "above the budget 2 on the card" in " ".join(err.split())


def test_a_negative_alpha_turns_the_vector_round(
    smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    v = torch.randn(576, generator=torch.Generator().manual_seed(0))
    there = SteeringVector(v / v.norm(), 15, 60.0)
    paths = [there.save(tmp_path / "a.safetensors"), (-there).save(tmp_path / "b.safetensors")]
    prompt = ("generate", "The capital of France is", "-m", smollm2, "-n", 8)
    _, back, err = call(capsys, *prompt, "--steer", paths[0], "--alpha", -60)
    _, expected, _ = call(capsys, *prompt, "--steer", paths[1])
    assert back == expected, err
    assert back != call(capsys, *prompt, "--steer", paths[0])[1]
