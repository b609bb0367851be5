"""`lmhead next`: the table before and after the filters, on wide and narrow terminals."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROMPT = "The capital of France is"


@pytest.mark.model
def test_the_distribution_after_the_filters(call: Callable[..., Any], smollm2: Path) -> None:
    arguments = ("next", PROMPT, "--top-k", "2", "--top", "4", "--min-tokens", "1")
    done = call(*arguments)
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["token", "id", "logit", "probability", "after"]
    assert sum("cut" in line for line in lines) == 2
    assert "filter" not in done.stdout  # without --trace
    reported = json.loads(call(*arguments, "--json").stdout)
    assert [t["after"] > 0 for t in reported["tokens"]] == [True, True, False, False]
    assert reported["trace"] is None
    traced = json.loads(call(*arguments, "--json", "--trace").stdout)
    assert [s["name"] for s in traced["trace"]["steps"]] == ["logits", "min_tokens", "top_k"]
    assert traced["trace"]["steps"][1]["cut"] > 0


def test_the_help_tells_its_own_temperature(call: Callable[..., Any]) -> None:
    text = " ".join(call("next", "--help").stdout.replace("│", "").split())
    assert "(1 by default); 0 keeps only the best token" in text
    assert "--logprobs" not in text
    assert "0 is greedy, the default" not in text


def test_wrong_options_are_told_before_the_model_is_loaded(
    call: Callable[..., Any], tmp_path: Path
) -> None:
    for arguments, message in (
        (["--order", "vlm", "--trace"], "--order 'vlm' is unknown"),
        (["--top-p", "2"], "--top-p is 2.0; expected"),
        (["--json-schema", "missing.json"], "there is no such file"),
    ):
        done = call("next", "Hi", "-m", str(tmp_path / "no-model"), *arguments)
        assert done.returncode == 2
        assert message in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.model
def test_a_terminal_of_60_columns_keeps_ids_and_logits(
    call: Callable[..., Any], smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pty

    from lmhead.cli import render

    leader, follower = pty.openpty()
    try:
        with os.fdopen(follower, "w") as terminal:
            monkeypatch.setenv("COLUMNS", "60")
            monkeypatch.setenv("TERM", "xterm")
            monkeypatch.setattr("sys.stdout", terminal)
            render.out.cache_clear()
            from lmhead.cli import run

            assert run(["next", PROMPT, "--top", "3"]) == 0
            terminal.flush()
            shown = re.sub(r"\x1b\[[0-9;]*m", "", os.read(leader, 100_000).decode())
    finally:
        render.out.cache_clear()
        os.close(leader)
    assert max(map(len, shown.splitlines())) <= 60
    assert "7042" in shown
    assert "logit" in shown
    assert "77.25 %" in shown
