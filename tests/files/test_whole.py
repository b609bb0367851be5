"""Files and folders are absent or whole, and nobody else's folder is ever replaced."""

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lmhead.errors import BadInput, LMHeadError
from lmhead.files import whole
from lmhead.files.whole import folder_whole, is_ours, refuse_existing, scratch, written_whole


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write_file(path: Path, text: str, **options: bool) -> None:
    with written_whole(path, **options) as staging:
        staging.write_text(text)


def write_folder(path: Path, text: str, **options: bool) -> None:
    with folder_whole(path, **options) as staging:
        (staging / "text").write_text(text)


def started(code: str, *arguments: object) -> "subprocess.Popen[str]":
    """Start Python and wait for its first line."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "go\n"
    return child


def kill(child: "subprocess.Popen[str]") -> None:
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()


def test_a_file_appears_at_the_end_and_replaces_only_by_force(tmp_path: Path) -> None:
    path = tmp_path / "a" / "x"
    with written_whole(path) as staging:
        staging.write_text("1")
        assert not path.exists()
    with pytest.raises(BadInput, match="--force"):
        write_file(path, "2")
    assert path.read_text() == "1"
    write_file(path, "2", force=True)
    assert path.read_text() == "2"
    assert names(path.parent) == ["x"]


def test_an_error_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    write_file(tmp_path / "x", "1")
    with pytest.raises(UnicodeEncodeError):
        write_file(tmp_path / "x", "half" + "\ud800", force=True)
    with pytest.raises(UnicodeEncodeError):
        write_folder(tmp_path / "y", "half" + "\ud800")
    assert (tmp_path / "x").read_text() == "1"
    assert names(tmp_path) == ["x"]


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_of_somebody_else_is_never_replaced(tmp_path: Path, force: bool) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years")
    with pytest.raises(BadInput, match="did not write"):
        write_folder(precious, "x", force=force)
    with pytest.raises(BadInput, match="is a folder"):
        write_file(precious, "x", force=force)
    (tmp_path / "link").symlink_to(precious)
    with pytest.raises(BadInput, match="is a link"):
        write_folder(tmp_path / "link", "x", force=force)
    assert (precious / "thesis.txt").read_text() == "years"
    assert names(tmp_path) == ["link", "precious"]


def test_a_folder_never_replaces_a_file_nor_a_device(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("1")
    with pytest.raises(BadInput, match="is a file"):
        write_folder(tmp_path / "x", "x", force=True)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadInput, match="not a regular file"):
        write_file(tmp_path / "pipe", "x", force=True)


@pytest.mark.parametrize("exchange", [True, False])
def test_a_folder_of_ours_is_replaced_by_force(
    tmp_path: Path, exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:  # as on a system without it
        monkeypatch.setattr(whole, "_exchanged", lambda one, other: False)
    path = tmp_path / "x"
    path.mkdir()  # empty: nothing to lose
    write_folder(path, "1", force=True)
    assert is_ours(path)
    with pytest.raises(BadInput, match="--force"):
        write_folder(path, "2")
    write_folder(path, "2", force=True)
    assert (path / "text").read_text() == "2"
    assert names(path) == ["lmhead.json", "text"]
    assert names(tmp_path) == ["x"]


def test_the_old_folder_comes_back_if_the_new_one_never_came(tmp_path: Path) -> None:
    """Killed between the two renames of a system that cannot exchange."""
    old = tmp_path / ".x.lmhead-0123456789abcdef-old"
    old.mkdir()
    (old / "lmhead.json").write_text("{}")
    (old / "text").write_text("old")
    with pytest.raises(BadInput, match="--force"):
        write_folder(tmp_path / "x", "new")
    assert (tmp_path / "x" / "text").read_text() == "old"
    assert names(tmp_path) == ["x"]


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_the_umask_decides_who_may_read(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        write_file(tmp_path / "x", "1")
        write_folder(tmp_path / "y", "1")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o666 & ~mask
    assert stat.S_IMODE((tmp_path / "y").stat().st_mode) == 0o777 & ~mask


def test_staging_names_cannot_be_guessed_and_links_are_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()
    for _ in range(20):
        with written_whole(tmp_path / "x", force=True) as staging:
            seen.add(staging.name)
    assert len(seen) == 20
    victim = tmp_path / "victim"
    victim.write_text("mine")
    monkeypatch.setattr("secrets.token_hex", lambda n: "0" * 2 * n)  # were it guessed all the same
    (tmp_path / (".x.lmhead-" + "0" * 16)).symlink_to(victim)
    with pytest.raises(LMHeadError):
        write_file(tmp_path / "x", "2", force=True)
    assert victim.read_text() == "mine"


def test_a_link_at_the_target_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "x").symlink_to("victim")
    write_file(tmp_path / "x", "1", force=True)
    assert (tmp_path / "victim").read_text() == "mine"
    assert not (tmp_path / "x").is_symlink()


_HALF = """
import sys, time
from pathlib import Path
from lmhead.files.whole import folder_whole, scratch, written_whole
kind = {"file": written_whole, "folder": folder_whole, "scratch": scratch}[sys.argv[2]]
with kind(Path(sys.argv[1])) as staging:
    print("go", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("kind", ["file", "folder", "scratch"])
@pytest.mark.parametrize("name", ["x", "we[ird]*", "-x"])
def test_what_a_killed_process_left_is_swept_and_a_living_one_is_not(
    tmp_path: Path, kind: str, name: str
) -> None:
    target = tmp_path / name
    dead, alive = started(_HALF, target, kind), started(_HALF, target, kind)
    kill(dead)
    try:
        assert len(names(tmp_path)) == 2
        write_file(target, "1")
        assert len(names(tmp_path)) == 2  # ours, and what the living one is working on
    finally:
        kill(alive)
    write_file(target, "2", force=True)
    assert names(tmp_path) == [name]


def test_names_that_only_look_alike_are_left(tmp_path: Path) -> None:
    (tmp_path / ".x.lmhead-ours").symlink_to(tmp_path)
    (tmp_path / ".x.y.lmhead-0").write_text("another target's")
    (tmp_path / ".x").write_text("not ours")
    write_file(tmp_path / "x", "1")
    assert names(tmp_path) == [".x", ".x.lmhead-ours", ".x.y.lmhead-0", "x"]


def test_the_advice_is_true(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LMHeadError, match="is a file and no folder") as caught:
        write_file(tmp_path / "file" / "x", "1")
    assert "space" not in str(caught.value)
    with pytest.raises(LMHeadError, match="shorter name"):
        write_file(tmp_path / ("x" * 300), "1")


_FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from lmhead.files.whole import written_whole
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # as good as a full disk
try:
    with written_whole(Path(sys.argv[1])) as staging:
        staging.write_bytes(b"x" * 5000)
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_full_disk_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _FULL_DISK, str(tmp_path / "x")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.startswith("LMHeadError cannot write")
    assert "disk is full" in said
    assert names(tmp_path) == []


def test_what_will_fail_is_refused_before_the_work(tmp_path: Path) -> None:
    refuse_existing(tmp_path / "x", force=False, folder=False)
    (tmp_path / "x").write_text("")
    with pytest.raises(BadInput, match="--force"):
        refuse_existing(tmp_path / "x", force=False, folder=False)
    refuse_existing(tmp_path / "x", force=True, folder=False)


def test_scratch_is_gone_at_the_end(tmp_path: Path) -> None:
    with scratch(tmp_path / "x") as folder:
        (folder / "deep").mkdir()
        (folder / "deep" / "file").write_text("x")
    assert names(tmp_path) == []


_REPLACE = """
import sys
from pathlib import Path
from lmhead.files.whole import folder_whole
i = 0
print("go", flush=True)
while True:
    i += 1
    with folder_whole(Path(sys.argv[1]), force=True) as staging:
        (staging / "a").write_text(str(i))
        (staging / "b").write_text(str(i))
"""


def test_killed_while_replacing_a_folder_the_old_or_the_new_is_there(tmp_path: Path) -> None:
    target = tmp_path / "x"
    write_folder(target, "0")
    (target / "a").write_text("0")
    (target / "b").write_text("0")
    for i in range(12):
        child = started(_REPLACE, target)
        time.sleep(0.003 * i)
        kill(child)
        assert (target / "a").read_text() == (target / "b").read_text()
    write_folder(target, "0", force=True)
    assert names(tmp_path) == ["x"]
