"""A terminal sees a sign of life within a second; a pipe sees none; completion answers."""

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

LMHEAD = [sys.executable, "-m", "lmhead"]
ERASE = "\r\x1b[K"


def on_a_terminal(*arguments: str) -> tuple[float, str, str, int]:
    """Return the seconds to the first sign on stderr, all of stderr, stdout, and the exit code."""
    ours, theirs = pty.openpty()
    started = time.monotonic()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen(
        [*LMHEAD, *arguments], stdout=subprocess.PIPE, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        seen, first = b"", 0.0
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            first = first or time.monotonic() - started
            seen += part
        assert process.stdout is not None
        out = process.stdout.read().decode()
    os.close(ours)
    return first, seen.decode(), out, process.returncode


@pytest.mark.model
def test_a_sign_within_a_second(smollm2: Path) -> None:
    call = ("next", "The capital of France is", "-m", str(smollm2), "--json")
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", "import lmhead"], check=True)
    busy = time.monotonic() - started  # on an idle machine next to nothing
    first, err, out, code = min(on_a_terminal(*call) for _ in range(2))
    assert code == 0
    assert first < 1 + busy
    assert err.startswith(f"{ERASE}⠋ working")
    assert '" Paris"' in out  # the answer is on stdout, and nothing else
    assert "working" not in out
    shown = err.rpartition(ERASE)[2]
    assert "working" not in shown, "the sign is still there"


def test_no_sign_for_what_is_quick_or_in_a_pipe() -> None:
    piped = subprocess.run([*LMHEAD, "models"], capture_output=True, text=True)
    assert piped.returncode == 0
    assert piped.stderr == ""


def test_an_error_takes_the_sign_away(tmp_path: Path) -> None:
    _, err, out, code = on_a_terminal("steer", "check", str(tmp_path / "none.safetensors"))
    assert code in (1, 2)
    assert out == ""
    last = err.rpartition(ERASE)[2]
    assert last.startswith("error: ")


def complete(*words: str) -> list[str]:
    environment = {
        **os.environ,
        "_LMHEAD_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(("lmhead", *words)),
        "COMP_CWORD": str(len(words)),
    }
    done = subprocess.run(LMHEAD, capture_output=True, text=True, env=environment)
    return done.stdout.split()


def test_completion() -> None:
    assert complete("ins") == ["inspect"]
    assert complete("steer", "ch") == ["check"]
    assert "--top-p" in complete("generate", "--top")
    assert complete("next", "-m", "smol") == ["smollm2-135m"]


def test_the_script_that_completion_needs(tmp_path: Path) -> None:
    script = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m lmhead --show-completion"],
        capture_output=True, text=True, env={**os.environ, "HOME": str(tmp_path)},
    )  # fmt: skip
    assert script.returncode == 0, script.stderr
    assert "_LMHEAD_COMPLETE=complete_bash" in script.stdout
    assert "complete -o default -F _lmhead_completion lmhead" in script.stdout
