"""The command line within this process: importing torch anew would take most of the time."""

import io
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from lmhead import cli


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


Call = Callable[..., Done]


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    def called(*arguments: str, stdin: str = "") -> Done:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        capfd.readouterr()
        code = cli.run(list(arguments))
        return Done(code, *capfd.readouterr())

    return called
