"""`lmhead score`: tables for people, JSON lines in and out, files and stdin."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROMPT = "The capital of France is"


@pytest.fixture
def run(call: Callable[..., Any]) -> Callable[..., Any]:
    from functools import partial

    return partial(call, "score")


@pytest.mark.model
def test_one_text_token_by_token(run: Callable[..., Any], smollm2: Path) -> None:
    done = run(f"{PROMPT} Paris")
    assert done.returncode == 0
    assert "nothing before it" in done.stdout
    (line,) = (line for line in done.stdout.splitlines() if '" Paris"' in line)
    assert line.split()[2:4] == ["7042", "-0.2581"]
    assert "perplexity" in done.stdout
    (score,) = json.loads(run(" Paris", "--prompt", PROMPT, "--json").stdout)["scores"]
    assert score["tokens"] == [" Paris"]
    assert score["logprob"] == pytest.approx(math.log(0.7725), abs=1e-3)
    assert score["perplexity"] == pytest.approx(1 / 0.7725, abs=1e-3)


@pytest.mark.model
def test_several_texts_one_line_each(run: Callable[..., Any], smollm2: Path) -> None:
    done = run(" Paris", " Rome", "--prompt", PROMPT)
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["text", "tokens", "log-probability", "perplexity"]
    assert lines[-1].startswith("all 2")
    reported = json.loads(run(" Paris", " Rome", "--prompt", PROMPT, "--json", "--summary").stdout)
    assert [s["text"] for s in reported["scores"]] == [" Paris", " Rome"]
    assert "logprobs" not in reported["scores"][0]
    mean = sum(s["logprob"] for s in reported["scores"]) / 2
    assert reported["perplexity"] == pytest.approx(math.exp(-mean))


@pytest.mark.model
def test_json_lines_in_and_out(run: Callable[..., Any], smollm2: Path, tmp_path: Path) -> None:
    rows = [
        {"id": 1, "prompt": PROMPT, "completion": " Paris", "gold": True},
        {"id": 2, "text": "Hello there."},
        {"id": 3, "prompt": PROMPT, "text": " Rome", "ids": [1]},  # as `generate` writes them
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run(str(file))
    reported = [json.loads(line) for line in done.stdout.splitlines()]
    assert [{k: v for k, v in row.items() if k != "score"} for row in reported] == rows
    assert reported[0]["score"]["logprob"] == pytest.approx(math.log(0.7725), abs=1e-3)
    assert reported[1]["score"]["logprobs"][0] is None
    assert reported[2]["score"]["logprob"] < reported[0]["score"]["logprob"]
    assert run("-", stdin=file.read_text()).stdout == done.stdout


@pytest.mark.model
def test_files_line_by_line_or_whole(
    run: Callable[..., Any], smollm2: Path, tmp_path: Path
) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("Hello there.\nHow are you?\n")
    reported = json.loads(run(str(file), "--json").stdout)["scores"]
    assert [s["text"] for s in reported] == ["Hello there.", "How are you?"]
    piped = json.loads(run("-", "--json", stdin=file.read_text()).stdout)["scores"]
    assert piped == reported
    (whole,) = json.loads(run(str(file), "--whole", "--json").stdout)["scores"]
    assert whole["text"] == file.read_text()


def test_wrong_input_is_told_before_the_model_is_loaded(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n{"prompt": "b"}\n')
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "a", "prompt": "b"}\n')
    scored = tmp_path / "scored.jsonl"
    scored.write_text('{"text": "a", "score": 1}\n')
    for arguments, message in (
        (["missing.jsonl"], "there is no file missing.jsonl"),
        ([""], "a text is empty"),
        ([str(rows)], 'line 2 of .*rows.jsonl has no "completion" or "text"'),
        ([str(prompts), "--prompt", "c"], 'line 1 of .* has a "prompt", and --prompt is given'),
        ([str(rows), "--whole"], "--whole takes a file as one text"),
        ([str(scored)], 'line 1 of .* has a field "score", which the result has too'),
        (["a", "--chat"], "--chat wraps the prompt, but there is none"),
        (["a", "--stride", "0"], "--stride is 0"),
    ):
        done = run(*arguments, "-m", str(tmp_path / "no-model"))
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert re.search(message, done.stderr), done.stderr
