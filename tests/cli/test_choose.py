"""`lmhead choose`: a table for people, JSON for programs, errors before a model is loaded."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROMPT = "The capital of France is"


@pytest.mark.model
def test_the_most_probable_option(call: Callable[..., Any], smollm2: Path) -> None:
    asked = ("choose", PROMPT, "-o", " Rome", "-o", " Paris")
    reported = json.loads(call(*asked, "--json").stdout)
    assert [option["text"] for option in reported["options"]] == [" Rome", " Paris"]
    assert reported["best"] == reported["best_by_mean"] == 1
    (line,) = (line for line in call(*asked).stdout.splitlines() if "most probable" in line)
    assert '" Paris"' in line


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("-o", " Rome"), "expected at least two: --option TEXT --option TEXT"),
        ((), "no option is given"),
        (("-o", "a", "-o", "b", "--engine", "max"), "expected auto, dense or screened"),
    ],
)
def test_errors_come_first(call: Callable[..., Any], options: tuple[str, ...], error: str) -> None:
    done = call("choose", PROMPT, *options, "-m", "no-such-model")
    assert done.returncode != 0
    assert error in done.stderr
