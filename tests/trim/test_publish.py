"""Output is absent or whole: under kills, errors, a full disk, an existing target."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lmhead.errors import BadInput, LMHeadError
from lmhead.trim.publish import link_or_copy, staged

MakeModel = Callable[..., Path]


def test_killed_at_random_moments_the_folder_is_absent_or_whole(
    make_model: MakeModel, tmp_path: Path
) -> None:
    (tmp_path / "ids").write_text("\n".join(map(str, range(300, 900))))
    (tmp_path / "work").mkdir()
    script = Path(__file__).with_name("kill_many.py")
    arguments = [str(make_model()), str(tmp_path / "ids"), str(tmp_path / "work"), "6"]
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["half"] == 0
    assert found["left_over"] == 0
    assert found["killed"] > 0


def fail_at(target: Path) -> None:
    with staged(target, force=True, folder=True) as staging:
        staging.mkdir()
        raise RuntimeError


def write_at(target: Path, nbytes: int) -> None:
    with staged(target) as staging:
        staging.write_bytes(b"x" * nbytes)


def test_a_folder_appears_only_when_all_went_well(tmp_path: Path) -> None:
    with staged(tmp_path / "a/out", folder=True) as staging:
        staging.mkdir()
        (staging / "f").write_text("x")
        assert not (tmp_path / "a/out").exists()
    assert (tmp_path / "a/out/f").read_text() == "x"
    with pytest.raises(RuntimeError):
        fail_at(tmp_path / "a/no")
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["out"]


def test_what_is_there_is_replaced_only_by_force(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/lmhead_trim.json").write_text("old")
    with pytest.raises(BadInput, match="--force"), staged(tmp_path / "out", folder=True):
        pass
    with pytest.raises(RuntimeError):
        fail_at(tmp_path / "out")
    assert (tmp_path / "out/lmhead_trim.json").read_text() == "old"
    with staged(tmp_path / "out", force=True, folder=True) as staging:
        staging.mkdir()
    assert list((tmp_path / "out").iterdir()) == []
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    (tmp_path / "file").write_text("old")
    with pytest.raises(BadInput, match="--force"):
        write_at(tmp_path / "file", 3)
    assert (tmp_path / "file").read_text() == "old"
    with staged(tmp_path / "file", force=True) as staging:
        staging.write_text("new")
    assert (tmp_path / "file").read_text() == "new"


@pytest.mark.parametrize("folder", [True, False])
def test_a_folder_of_somebody_else_is_never_replaced(folder: bool, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/thesis.txt").write_text("years of work")
    with (
        pytest.raises(BadInput, match="precious"),
        staged(tmp_path / "precious", force=True, folder=folder) as staging,
    ):
        staging.mkdir()
    if not folder:  # nor does a folder of ours give way to a file
        (tmp_path / "precious/lmhead_trim.json").write_text("{}")
        with (
            pytest.raises(BadInput, match="is a folder"),
            staged(tmp_path / "precious", force=True) as staging,
        ):
            staging.write_text("x")
    assert (tmp_path / "precious/thesis.txt").read_text() == "years of work"


def test_a_link_goes_and_what_it_points_to_stays(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/thesis.txt").write_text("years of work")
    for folder in (True, False):
        (tmp_path / "out").symlink_to("precious")
        with staged(tmp_path / "out", force=True, folder=folder) as staging:
            staging.mkdir() if folder else staging.write_text("x")
        assert not (tmp_path / "out").is_symlink()
        (tmp_path / "out").rmdir() if folder else (tmp_path / "out").unlink()
    assert (tmp_path / "precious/thesis.txt").read_text() == "years of work"


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # as good as a full disk
    try:
        with pytest.raises(LMHeadError, match=r"cannot write .*free some space"):
            write_at(tmp_path / "out", 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_remains_are_swept_whatever_the_name(tmp_path: Path) -> None:
    import socket

    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / f".a[1].gguf.trim-{socket.gethostname()}-{dead.pid}").write_text("left")
    write_at(tmp_path / "a[1].gguf", 5)
    assert [p.name for p in tmp_path.iterdir()] == ["a[1].gguf"]


def test_the_hidden_name_cannot_be_known_before(tmp_path: Path) -> None:
    names = set()
    for _ in range(3):
        with staged(tmp_path / "out", force=True) as staging:
            names.add(staging.name)
            staging.write_text("x")
    assert len(names) == 3


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LMHeadError, match=r"cannot write .*file/out"):
        write_at(tmp_path / "file/out", 5)


def test_only_the_remains_of_dead_processes_are_swept(tmp_path: Path) -> None:
    import socket

    host = socket.gethostname()
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / f".out.trim-{host}-{dead.pid}").mkdir()
    (tmp_path / f".out.trim-{host}-{dead.pid}-0a1b").mkdir()
    (tmp_path / f".out.trim-{host}-{os.getppid()}").mkdir()
    (tmp_path / f".out.trim-another-host-{dead.pid}").mkdir()
    with staged(tmp_path / "out", folder=True) as staging:
        staging.mkdir()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        [f".out.trim-{host}-{os.getppid()}", f".out.trim-another-host-{dead.pid}", "out"]
    )


def test_a_link_to_a_link_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text("x")
    (tmp_path / "link").symlink_to("blob")
    link_or_copy(tmp_path / "link", tmp_path / "out", link=True)
    assert not (tmp_path / "out").is_symlink()
    assert (tmp_path / "out").samefile(tmp_path / "blob")
    link_or_copy(tmp_path / "link", tmp_path / "copy")
    assert not (tmp_path / "copy").samefile(tmp_path / "blob")
    assert (tmp_path / "copy").read_text() == "x"
