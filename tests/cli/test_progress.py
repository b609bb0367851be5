"""Every command that may take more than a second shows how far it is."""

import inspect
from importlib import import_module

import pytest

from lmhead.cli.app import COMMANDS

# These read headers, lists and small files; nothing in them takes a second.
INSTANT = {"models", "doctor"}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_progress_or_is_instant(command: str) -> None:
    module = import_module(f"lmhead.cli.{COMMANDS[command].split('.')[0]}")
    function = getattr(module, COMMANDS[command].split(".")[1])
    source = inspect.getsource(function if command in INSTANT else module)
    assert ("render.progress" in source) != (command in INSTANT)
