"""`lmhead generate` as a person meets it: greedy unless asked, told at once what is wrong."""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

PROMPT = "The capital of France is"


@pytest.fixture
def run(call: Callable[..., Any]) -> Callable[..., Any]:
    return partial(call, "generate")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--order", "vlm"], "--order 'vlm' is unknown; did you mean 'vllm'?"),
        (["--order", "top_k,nonsense", "--top-k", "3"], "--order holds 'nonsense'"),
        (["--stop", ""], "--stop holds an empty text"),
        (["--beams", "3", "--temperature", "1"], "--beams is given together with --temperature"),
        (["--beams", "3", "--samples", "2"], "--beams is given together with --samples"),
        (["--top-p", "2"], "--top-p is 2.0; expected a number from 0 to 1"),
        (["--regex", "a", "--grammar", "start: /a/"], "--regex and --grammar are given"),
        (["--json-schema", "missing.json"], "--json-schema is 'missing.json'; there is no such"),
        (["--json-schema", '{"type"'], """--json-schema is '{"type"', which is not JSON"""),
        (["--grammar", "missing.lark"], "--grammar is 'missing.lark'; there is no such file"),
        (["--regex", "a(("], "the regex cannot be used"),
        (["--engine", "warp"], "'warp'"),
        (["--keepset", "missing.safetensors"], "--keepset is missing.safetensors"),
        (["--head", "missing.safetensors"], "--head is now called --keepset"),
        (["--steer", "missing.safetensors"], "missing.safetensors"),
        (["--dry-sequence-breakers", "[" * 100_000], "--dry-sequence-breakers is '[[["),
        (["--logit-bias", "11"], "--logit-bias is '11'; expected ids and what to add"),
        (["--samples", "0"], "--samples"),
    ],
)
def test_wrong_options_are_told_before_the_model_is_loaded(
    run: Callable[..., Any], arguments: list[str], message: str, tmp_path: Path
) -> None:
    done = run("Hi", "-m", str(tmp_path / "no-model"), *arguments)
    assert message in done.stderr, done.stderr
    assert done.returncode in (1, 2)
    assert "no-model" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_extra_is_one_line_before_the_model_is_loaded(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    done = run("Hi", "-m", "no-model", "--regex", "a+")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "--regex" in done.stderr
    assert "[guided]'" in done.stderr


@pytest.mark.model
def test_a_control_that_draws_nothing_leaves_the_choice_greedy(
    run: Callable[..., Any], smollm2: Path
) -> None:
    control = ("-n", "8", "--banned-ids", "7042", "--repetition-penalty", "1.3")
    text = run(PROMPT, *control).stdout
    assert run(PROMPT, *control, "--temperature", "0").stdout == text


@pytest.mark.model
def test_samples_that_must_be_the_same_are_told(run: Callable[..., Any], smollm2: Path) -> None:
    done = run(PROMPT, "-n", "2", "--samples", "3", "--banned-ids", "7042")
    assert done.returncode == 0
    assert done.stderr.count("warning: --samples is 3, but nothing asks for randomness") == 1
    assert len(set(done.stdout.splitlines())) == 1
    done = run(PROMPT, "-n", "2", "--samples", "3", "--top-k", "9", "--seed", "1")
    assert "warning" not in done.stderr


@pytest.mark.model
def test_a_grammar_that_is_cut_off_says_so(run: Callable[..., Any], smollm2: Path) -> None:
    pytest.importorskip("llguidance", reason="needs the extra `guided`")
    done = run("A list:", "--regex", "[a-z]{40}", "-n", "3", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["generations"][0]["finish_reason"] == "length"
    assert "warning: the text ended at --max-tokens, before the grammar was comp" in done.stderr
    streamed = run("A list:", "--regex", "[a-z]{40}", "-n", "3")
    assert streamed.stdout.endswith("\n")
    assert "warning: the text ended" in streamed.stderr
    done = run("A number:", "--regex", "[a-z]+", "-n", "3", "--json")
    assert json.loads(done.stdout)["generations"][0]["finish_reason"] == "length"
    assert "warning" not in done.stderr  # what is there already is what the grammar asks for


@pytest.mark.model
def test_other_fields_of_a_row_are_passed_on(
    run: Callable[..., Any], smollm2: Path, tmp_path: Path
) -> None:
    rows = [{"id": "a", "prompt": PROMPT, "tags": [1]}, {"prompt": "Water boils at", "id": "b"}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ("-n", "2", "--batch-size", "1", "--samples", "2", "--top-k", "5", "--seed", "1")
    lines = run("--prompts", str(file), *arguments).stdout.splitlines()
    results = [json.loads(line) for line in lines]
    assert [r["id"] for r in results] == ["a", "a", "b", "b"]
    assert results[0]["tags"] == [1]
    assert results[0]["prompt"] == PROMPT
    piped = run("--prompts", "-", *arguments, stdin=file.read_text())
    assert piped.stdout.splitlines() == lines
    whole = json.loads(run("--prompts", str(file), "--json", *arguments).stdout)
    assert whole["generations"] == results


def test_a_field_that_the_result_would_hide_is_refused_at_once(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": PROMPT, "text": "gold"}) + "\n")
    done = run("--prompts", str(file), "-n", "1", "-m", str(tmp_path / "no-model"))
    assert done.returncode == 2
    assert 'has a field "text", which the result has too; rename it' in done.stderr


@pytest.mark.model
def test_device_and_dtype(call: Callable[..., Any], smollm2: Path) -> None:
    where = ("--device", "cpu", "--dtype", "bfloat16")
    assert call("generate", PROMPT, "-n", "2", *where).stdout == f"{PROMPT} Paris.\n"
    reported = json.loads(call("next", PROMPT, "--top", "1", "--json", *where).stdout)["tokens"][0]
    assert reported["id"] == 7042
    assert reported["logit"] == float(torch.tensor(reported["logit"]).bfloat16())  # it did run so
    (score,) = json.loads(call("score", " Paris", "--prompt", PROMPT, "--json", *where).stdout)[
        "scores"
    ]
    assert score["logprob"] == pytest.approx(-0.26, abs=0.1)
    assert score["logprob"] != pytest.approx(-0.2581, abs=1e-4)


@pytest.mark.parametrize("command", ["generate", "next", "score"])
def test_wrong_devices_and_dtypes(call: Callable[..., Any], command: str, tmp_path: Path) -> None:
    for name, value in (("--device", "warp"), ("--dtype", "float7")):
        done = call(command, "Hi", "-m", str(tmp_path / "no-model"), name, value)
        assert done.returncode == 2
        assert f"{name} is '{value}'" in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.model
def test_conversations_in_json_lines(
    run: Callable[..., Any], smollm2: Path, tmp_path: Path
) -> None:
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hello."}]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({name: said}) + "\n" for name in ("prompt", "messages")))
    lines = run("--prompts", str(file), "-n", "4").stdout.splitlines()
    first, second = map(json.loads, lines)
    assert first["prompt"] == said  # as it was given
    assert (second["messages"], second["prompt"]) == (said, "Say hello.")
    assert first["ids"] == second["ids"]
    said.append({"role": "robot", "content": "?"})
    file.write_text(json.dumps({"prompt": said}) + "\n")
    done = run("--prompts", str(file), "-m", str(tmp_path / "no-model"))
    assert "line 1 of" in done.stderr
    assert "message 3 of the conversation has the role 'robot'" in done.stderr


def test_every_command_that_runs_a_model_says_where() -> None:
    from lmhead.cli.app import command

    commands = command().commands
    steer = commands["steer"].commands
    both = [commands[name] for name in ("next", "generate", "score", "detect")]
    both += [steer[name] for name in ("check", "eval")]
    for one in (*both, steer["train"], steer["frontier"]):
        assert "--device" in {opt for param in one.params for opt in param.opts}, one.name
    for one in both:
        assert "--dtype" in {opt for param in one.params for opt in param.opts}, one.name
