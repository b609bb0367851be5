"""A rank that is killed, frozen or late is named on all others in time; nothing is half-written."""

import os
import time
from pathlib import Path

import pytest

from world import World

TIMES = int(os.environ.get("LMHEAD_TIMES", "1"))  # each kind; docs/scaling.md has a run of ten


@pytest.mark.parametrize(
    ("what", "victim", "how"),
    [
        ("loss", 1, "SIGKILL"),
        ("topk", 1, "SIGKILL"),
        ("topk", 2, "SIGSTOP"),
        ("save", 0, "SIGKILL"),
        ("save", 2, "SIGKILL"),
    ],
)
def test_a_lost_rank_is_named(what: str, victim: int, how: str, tmp_path: Path) -> None:
    for _ in range(TIMES):
        world = World(3)
        try:
            world.ask("lost_checks.lost", what, victim, how, 0.3, str(tmp_path), size=3)
            others = [rank for rank in range(3) if rank != victim]
            if how == "SIGKILL":
                world.ranks[victim].join(60)
            else:
                _wait_until_stopped(world.ranks[victim].pid)
            gone = time.time()
            for good, reported in world.answers(others, 60):
                assert good, reported[1]
                ranks, words, when = reported
                assert ranks == (victim,)
                assert words.startswith(f"rank {victim} ")
                assert when - gone <= 30
        finally:
            world.close()
        if what == "save":  # the last one that was whole, and nothing that looks like one
            assert (tmp_path / "saved" / ".metadata").is_file()


def test_a_late_rank_is_named() -> None:
    world = World(3)
    try:
        reported = world.run("lost_checks.late", size=3)
    finally:
        world.close()
    for rank in (0, 2):
        assert reported[rank][0] == (1,)
        assert "has not come to a meeting for 2 s" in reported[rank][1]


def _wait_until_stopped(pid: int | None) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            return
        time.sleep(0.02)
    raise AssertionError("the rank did not stop")
