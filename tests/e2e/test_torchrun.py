"""`torchrun -m lmhead ...`: all ranks agree, the first one prints, and it is what one rank says."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lmhead
from world import World

PROMPT = "The capital of France is"


def together(*words: str, size: int = 2) -> list[tuple[int, str, str]]:
    world = World(size, preload=["transformers.models.llama.modeling_llama", "lmhead.cli.app"])
    try:
        return world.run("lost_checks.command", list(words), size=size)
    finally:
        world.close()


def first_alone(reported: list[tuple[int, str, str]]) -> dict[str, Any]:
    assert [code for code, _, _ in reported] == [0] * len(reported), reported[0][2]
    assert all((out, err) == ("", "") for _, out, err in reported[1:])
    result: dict[str, Any] = json.loads(reported[0][1])
    return result


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Any:
    return lmhead.load("smollm2-135m")


def test_next_by_torchrun_itself(model: Any) -> None:
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "lmhead"]
    done = subprocess.run(
        [sys.executable, *command, "next", PROMPT, "--json", "--top", "5"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    reported = json.loads(done.stdout)["tokens"]  # one object: the second rank is silent
    alone = lmhead.next_tokens(PROMPT, model, top=5).tokens
    assert [row["id"] for row in reported] == [row.id for row in alone]
    assert [row["logit"] for row in reported] == pytest.approx(
        [row.logit for row in alone], abs=1e-4
    )


def test_generate_and_score(model: Any) -> None:
    controls = ("--temperature", "0.9", "--seed", "3", "-n", "12")
    reported = first_alone(together("generate", PROMPT, *controls, "--json", size=3))
    (alone,) = lmhead.generate(PROMPT, model, temperature=0.9, seed=3, max_tokens=12)
    assert reported["generations"][0]["ids"] == list(alone.ids)
    unseeded = first_alone(
        together("generate", PROMPT, "--temperature", "1.5", "-n", "8", "--json")
    )
    assert len(unseeded["generations"][0]["ids"]) == 8
    reported = first_alone(together("score", "Paris is in France.", "--json"))
    (score,) = lmhead.score_text("Paris is in France.", model)
    assert reported["scores"][0]["logprob"] == pytest.approx(score.logprob, abs=1e-4)


def test_what_ranks_cannot_do() -> None:
    for words, expected in (
        (["inspect", "smollm2-135m"], "runs on one; expected one of next, generate, score"),
        (["next", "-"], "ranks cannot share stdin"),
    ):
        reported = together(*words)
        assert [code for code, _, _ in reported] == [2, 2]
        assert expected in reported[0][2]
        assert reported[0][2].count("\n") == 1
        assert reported[1][1:] == ("", "")
