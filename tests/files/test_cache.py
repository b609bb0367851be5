"""Folders in the cache are absent or whole, whoever is killed and however many ask at once."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lmhead.errors import LMHeadError
from lmhead.files.cache import build_once, cache_root
from lmhead.files.stamp import private_folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LMHEAD_CACHE", str(tmp_path))
    return tmp_path


def fill(folder: Path) -> None:
    for i in range(20):
        (folder / f"{i}").write_text(str(i))


def is_whole(folder: Path) -> bool:
    return sorted(p.name for p in folder.iterdir()) == sorted(str(i) for i in range(20))


def test_builds_once(cache: Path) -> None:
    calls: list[Path] = []

    def build(folder: Path) -> None:
        calls.append(folder)
        fill(folder)

    target = cache / "models" / "x"
    assert build_once(target, build) == build_once(target, build) == target
    assert len(calls) == 1
    assert is_whole(target)


def test_a_failed_build_leaves_nothing(cache: Path) -> None:
    def build(folder: Path) -> None:
        fill(folder)
        raise LMHeadError("no")

    with pytest.raises(LMHeadError, match="no"):
        build_once(cache / "models" / "x", build)
    assert not (cache / "models" / "x").exists()
    assert list((cache / "staging").iterdir()) == []


def test_a_folder_of_another_version_is_replaced(cache: Path) -> None:
    target = cache / "models" / "x"
    build_once(target, lambda folder: (folder / "version").write_text("1") and None)
    new = build_once(
        target,
        lambda folder: (folder / "version").write_text("2") and None,
        lambda folder: folder.is_dir() and (folder / "version").read_text() == "2",
    )
    assert (new / "version").read_text() == "2"
    assert list((cache / "staging").iterdir()) == []


_SLOW_BUILD = """
import sys, time
from pathlib import Path
from lmhead.files.cache import build_once, cache_root

def build(folder):
    for i in range(20):
        (folder / f"{i}").write_text(str(i))
        time.sleep(0.01)

build_once(cache_root() / "models" / "x", build)
"""


def test_killed_at_any_moment_the_next_run_starts_clean(cache: Path) -> None:
    """SIGKILL at moments spread over the whole build: the folder is absent or whole."""
    target = cache / "models" / "x"
    seen = set()
    for i in range(12):
        child = subprocess.Popen([sys.executable, "-c", _SLOW_BUILD])
        time.sleep(0.05 + 0.04 * i)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        seen.add(target.exists())
        assert not target.exists() or is_whole(target)
    build_once(target, fill)
    assert is_whole(target)
    if True in seen and False not in seen:
        pytest.fail("every child finished before it was killed: the test shows nothing")
    build_once(cache / "models" / "y", fill)  # its own label: sweeps only its own staging


def _racer(number: int) -> int:
    built = []

    def build(folder: Path) -> None:
        built.append(number)
        fill(folder)
        time.sleep(0.05)

    build_once(cache_root() / "models" / "raced", build)
    return len(built)


def test_two_at_once_do_not_corrupt_each_other(cache: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        built = pool.map(_racer, range(8), chunksize=1)
    assert sum(built) == 1
    assert is_whole(cache / "models" / "raced")


def test_an_unwritable_cache_says_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = cache / "file"
    blocked.write_text("")
    monkeypatch.setenv("LMHEAD_CACHE", str(blocked))
    with pytest.raises(LMHeadError, match="LMHEAD_CACHE"):
        build_once(blocked / "models" / "x", fill)


def test_what_a_killed_build_left_is_swept_whatever_its_name(cache: Path) -> None:
    code = _SLOW_BUILD.replace('"x"', '"a[b]*"').replace("time.sleep(0.01)", "time.sleep(1)")
    child = subprocess.Popen([sys.executable, "-c", code])
    until = time.monotonic() + 20
    while not (cache / "staging").is_dir() or not list((cache / "staging").iterdir()):
        assert time.monotonic() < until
        time.sleep(0.05)
    build_once(cache / "models" / "y", fill)
    assert len(list((cache / "staging").iterdir())) == 1  # another one is at work
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    build_once(cache / "models" / "z", fill)
    assert list((cache / "staging").iterdir()) == []


def test_a_full_disk_names_the_cache_and_no_network(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    def build(folder: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(LMHeadError, match=r"disk is full.*LMHEAD_CACHE") as caught:
        build_once(cache / "models" / "x", build)
    assert "network" not in str(caught.value)


def test_a_home_that_nobody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMHEAD_CACHE", "~nobody-of-that-name/cache")
    with pytest.raises(LMHeadError, match="LMHEAD_CACHE is ~nobody-of-that-name"):
        cache_root()


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
def test_a_link_in_the_place_of_a_lock_is_not_followed(cache: Path) -> None:
    precious = cache / "precious"
    precious.write_text("precious")
    (cache / "locks").mkdir()
    (cache / "locks" / "models-x.lock").symlink_to(precious)
    with pytest.raises(LMHeadError, match="cannot write"):
        build_once(cache / "models" / "x", fill)
    assert precious.read_text() == "precious"


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="rights of POSIX")
def test_what_runs_is_kept_where_nobody_else_can_write(cache: Path) -> None:
    place = cache / "numba"
    private_folder(place)
    private_folder(place)  # it may be there
    assert place.stat().st_mode & 0o777 == 0o700
    for folder in (place, cache):
        before = folder.stat().st_mode
        folder.chmod(0o777)
        with pytest.raises(LMHeadError, match="others may write to"):
            private_folder(place)
        folder.chmod(before)
    cache.chmod(0o1777)  # as /tmp is: nobody else can put another folder in its place
    private_folder(place)
    other = cache / "linked"
    other.symlink_to(place)
    with pytest.raises(LMHeadError, match="others may write to"):
        private_folder(other)
    if os.geteuid() == 0:
        os.chown(place, 12345, -1)
        with pytest.raises(LMHeadError, match="belongs to another user"):
            private_folder(place)
