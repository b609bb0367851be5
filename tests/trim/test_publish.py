"""A trim that is killed leaves its target absent or whole; see tests/files/test_whole.py."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from lmhead.trim.checkpoint import link_or_copy

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


def test_a_link_to_a_link_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text("x")
    (tmp_path / "link").symlink_to("blob")
    link_or_copy(tmp_path / "link", tmp_path / "out", link=True)
    assert not (tmp_path / "out").is_symlink()
    assert (tmp_path / "out").samefile(tmp_path / "blob")
    link_or_copy(tmp_path / "link", tmp_path / "copy")
    assert not (tmp_path / "copy").samefile(tmp_path / "blob")
    assert (tmp_path / "copy").read_text() == "x"
