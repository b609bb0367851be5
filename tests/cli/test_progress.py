"""Every command that may take more than a second shows how far it is."""

import inspect
from importlib import import_module

import pytest

from lmhead.cli import render
from lmhead.cli.app import COMMANDS

# These read headers, lists and small files; nothing in them takes a second.
INSTANT = {"models", "doctor"}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_progress_or_is_instant(command: str) -> None:
    module = import_module(f"lmhead.cli.{COMMANDS[command].split('.')[0]}")
    function = getattr(module, COMMANDS[command].split(".")[1])
    source = inspect.getsource(function if command in INSTANT else module)
    assert ("render.progress" in source) != (command in INSTANT)


def test_no_time_is_foretold_from_next_to_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A first step of 10,000 that took 13 s, for it waited for imports, is not 36 hours."""
    times = iter((13.0, 26.0, 39.0))
    monkeypatch.setattr(render.time, "monotonic", lambda: next(times))
    advance = render._lines("watching", 10_000, started=0.0)
    for done in (1, 2_499, 2_500):
        advance(done)
    assert capsys.readouterr().err.splitlines() == [
        "watching: 0%",
        "watching: 25%, about 78 s left",
        "watching: 50%, about 39 s left",
    ]
