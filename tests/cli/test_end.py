"""Ctrl-C while a thread computes ends the command; Python's own way out would abort it."""

import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from lmhead.cli import run

# Small products one after the other: Python ends while the thread is on its way back from one.
COMPUTING = """
import atexit, sys, threading, time
import torch
from lmhead.cli import end

def work():
    a = torch.randn(64, 64)
    while True:
        a @ a

atexit.register(print, "tidied up")
threading.Thread(target=work, name=sys.argv[1], daemon=True).start()
time.sleep(0.2)
print("last words")
end(130)
"""


def test_the_end_does_not_wait_for_a_thread_nor_abort() -> None:
    for _ in range(3):
        command = [sys.executable, "-c", COMPUTING, "lmhead-computing"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, done.stderr) == (130, "")
        assert done.stdout.split("\n") == ["last words", "tidied up", ""]


@pytest.mark.model
@pytest.mark.parametrize("command", ["serve", "explore"])
def test_ctrl_c_while_the_model_is_loaded_is_130(command: str) -> None:
    pytest.importorskip("fastapi")
    options = ("--port", "0", *(("--no-browser",) if command == "explore" else ()))
    began = time.monotonic()
    for share in (None, 0.5, 0.7, 0.9):
        process = subprocess.Popen(
            [sys.executable, "-m", "lmhead", command, "smollm2-135m", *options, "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a job may ignore it
        )
        assert process.stdout is not None
        try:
            if share is None:  # how long it takes until the first answer
                process.stdout.readline()
                whole = time.monotonic() - began
            else:
                time.sleep(share * whole)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
            process.communicate()
        assert process.returncode in (0, 130), err
        assert "terminate" not in err
        assert "Traceback" not in err


@pytest.mark.parametrize("command", ["serve", "explore"])
def test_the_model_is_an_argument_or_an_option(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("fastapi")
    assert run([command, "one", "-m", "another"]) == 2
    assert "two models are named, one and --model another" in capsys.readouterr().err
