"""A few kills of some commands in every run; `make faults` does the rest."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BREAKING = Path(__file__).with_name("breaking.py")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks, so that torch is imported once")
@pytest.mark.skipif(sys.platform != "linux", reason="kills at the system calls of Linux")
def test_broken_at_any_moment_old_or_new_is_there() -> None:
    command = [sys.executable, str(BREAKING), "count", "steer convert"]
    done = subprocess.run(
        [*command, "--kills", "3", "--rounds", "1"],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == 2
    for row in rows:
        kills, writes, renames, *_, half, lost, left = map(int, row.split("|")[2:-1])
        assert kills == 3
        assert writes >= 4
        assert renames >= 2
        assert (half, lost, left) == (0, 0, 0)
