"""The command line as a person meets it: results on stdout, the rest on stderr, exit codes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest

from lmhead.cli.sampling import CONTROLS

Run = Callable[..., subprocess.CompletedProcess[str]]
LMHEAD = [sys.executable, "-m", "lmhead"]


@pytest.fixture
def run() -> Run:
    def call(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*LMHEAD, *arguments], capture_output=True, text=True, **options)  # type: ignore[call-overload,no-any-return]

    return call


def test_help_names_every_command(run: Run) -> None:
    done = run("--help")
    assert done.returncode == 0
    for name in ("inspect", "next", "generate", "models", "pull"):
        assert name in done.stdout


def test_no_command_is_help(run: Run) -> None:
    assert "Usage" in run().stdout + run().stderr


def test_version(run: Run) -> None:
    import lmhead

    assert run("--version").stdout.strip() == f"lmhead {lmhead.__version__}"


def test_every_sampling_control_is_an_option() -> None:
    from lmhead.sampling import SamplingParams

    assert set(CONTROLS) == {field.name for field in fields(SamplingParams)}


@pytest.mark.parametrize(
    ("name", "head", "total"),
    [
        ("gpt2", 38_597_376, 124_439_808),
        ("gpt-neo-1.3b", 102_926_336, 1_315_575_808),
        ("gemma-2b", 524_288_000, 2_506_172_416),
        ("gemma-7b", 786_432_000, 8_537_680_896),
        ("smollm2-135m", 28_311_552, 134_515_008),
        ("gemma3-270m", 167_772_160, 268_098_176),
        ("llama-3.2-1b", 262_668_288, 1_235_814_400),
        ("llama-3-8b", 525_336_576, 8_030_261_248),
    ],
)
def test_inspect_json_has_the_true_counts(run: Run, name: str, head: int, total: int) -> None:
    report = json.loads(run("inspect", name, "--json").stdout)
    assert (report["head_parameters"], report["total_parameters"]) == (head, total)


def test_inspect_as_a_table(run: Run) -> None:
    done = run("inspect", "gemma-7b")
    assert "786,432,000" in done.stdout
    assert "8,537,680,896" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["inspect", "gema-7b"], 1, "gemma-7b"),
        (["next", ""], 2, "the prompt is empty"),
        (["generate", "Hi", "--top-p", "2"], 2, "--top-p is 2.0; expected"),
        (["generate"], 2, "either PROMPT or --prompts"),
        (["generate", "Hi", "--logit-bias", "7042"], 2, "--logit-bias"),
        (["generate", "Hi", "--order", "top_k,nonsense", "--top-k", "3"], 2, "is not a filter"),
        (["next", "Hi", "-m", "smolm2-135m"], 1, "did you mean 'smollm2-135m'?"),
        (["pull", "smolm2-135m"], 2, "did you mean 'smollm2-135m'?"),
        (["next", "Hi", "--top", "0"], 2, "--top"),
        (["nonsense"], 2, "nonsense"),
    ],
)
def test_a_users_mistake_is_one_clear_message(
    run: Run, arguments: list[str], code: int, message: str
) -> None:
    done = run(*arguments)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_debug_shows_the_traceback(run: Run) -> None:
    assert "Traceback" in run("inspect", "gema-7b", "--debug").stderr


def test_models_lists_licence_and_presence(run: Run, tmp_path: Path) -> None:
    empty = {**os.environ, "LMHEAD_CACHE": str(tmp_path)}
    rows = json.loads(run("models", "--json", env=empty).stdout)["models"]
    assert {(r["name"], r["licence"], r["here"]) for r in rows} == {
        ("smollm2-135m", "Apache-2.0", False),
        ("gemma3-270m", "Gemma Terms of Use", False),
    }


def test_gemma_is_fetched_only_with_its_terms_accepted(run: Run, tmp_path: Path) -> None:
    done = run("pull", "gemma3-270m", env={**os.environ, "LMHEAD_CACHE": str(tmp_path)})
    assert done.returncode == 2
    assert "Gemma Terms of Use" in done.stderr
    assert "--accept-terms" in done.stderr
    assert not (tmp_path / "models").exists()


@pytest.mark.model
def test_next_names_paris(run: Run, smollm2: Path) -> None:
    done = run("next", "The capital of France is", "--json")
    result = json.loads(done.stdout)
    best = result["tokens"][0]
    assert (best["id"], best["token"]) == (7042, " Paris")
    assert best["probability"] == pytest.approx(0.77, abs=0.01)
    assert len(result["tokens"]) == 10
    last = result["tokens"][-1]["cumulative"]
    assert last + result["rest"] == pytest.approx(1)


@pytest.mark.model
def test_next_reads_stdin_and_traces_filters(run: Run, smollm2: Path) -> None:
    done = run(
        "next", "-", "--json", "--trace", "--top-k", "5", "--top-p", "0.9",
        input="The capital of France is\n",
    )  # fmt: skip
    trace = json.loads(done.stdout)["trace"]
    assert [step["name"] for step in trace["steps"]] == ["logits", "top_k", "top_p"]
    assert [step["left"] for step in trace["steps"]][:2] == [49_152, 5]
    plain = run("next", "The capital of France is", "--trace", "--top-k", "5")
    assert "Paris" in plain.stdout
    assert "top_k" in plain.stdout


@pytest.mark.model
def test_generate_writes_prompt_and_continuation(run: Run, smollm2: Path) -> None:
    done = run("generate", "The capital of France is", "-n", "3")
    assert done.returncode == 0
    assert done.stdout.startswith("The capital of France is Paris.")


@pytest.mark.model
def test_generate_from_a_file_of_prompts(run: Run, smollm2: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    prompts = ["The capital of France is", "Water boils at", "Hi"]
    file.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    lines = run("generate", "--prompts", str(file), "-n", "4", "--batch-size", "2").stdout
    results = [json.loads(line) for line in lines.splitlines()]
    assert [r["prompt"] for r in results] == prompts
    assert all(len(r["ids"]) == 4 for r in results)


@pytest.mark.model
def test_no_color_and_plain_pipes(run: Run, smollm2: Path) -> None:
    done = run("next", "Hi", env={**os.environ, "NO_COLOR": "1", "FORCE_COLOR": ""})
    assert "\x1b[" not in done.stdout


@pytest.mark.model
def test_a_broken_pipe_ends_quietly(smollm2: Path) -> None:
    command = " ".join([*LMHEAD, "generate", "--json", "Hi", "-n", "2"])
    done = subprocess.run(
        ["bash", "-c", f"{command} | true"], capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


@pytest.mark.model
def test_ctrl_c_keeps_what_was_written(smollm2: Path) -> None:
    command = [*LMHEAD, "generate", "Once upon a time", "-n", "4000", "--min-tokens", "4000"]
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=0,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a job may ignore it
    )
    assert child.stdout is not None
    shown = child.stdout.read(40)
    time.sleep(0.2)
    child.send_signal(signal.SIGINT)
    rest, errors = child.communicate(timeout=60)
    assert child.returncode == 130
    assert shown.startswith("Once upon a time")
    assert rest.endswith("\n")
    assert "Traceback" not in errors


def test_an_encoder_only_model_is_refused(run: Run, tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        vocab_size=50,
    )  # fmt: skip
    BertModel(config).save_pretrained(tmp_path)
    done = run("next", "Hi", "-m", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "causal" in done.stderr
