"""Ranks that end as they should exit with 0, whatever other threads are doing at that moment."""

import os
import subprocess
import sys

import pytest

from world import free_port

# Beats follow each other without a pause, so that Python ends in the middle of one.
SCRIPT = """
import os, sys, threading, time
import torch.distributed as dist
from lmhead.ranks import ranks_of, watch

rank, port, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
address = f"tcp://127.0.0.1:{port}"
dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
alone = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0
watch.BEAT = 1e-6
ranks = ranks_of()
ranks.meet("a meeting")
if how == "end":
    ranks.end()
    assert not dist.is_initialized()
    if alone:  # none of the group's threads, and no beat, is left
        assert len(os.listdir("/proc/self/task")) < alone
else:
    time.sleep(0.1)  # what torch's own threads hold is not of interest here
    ranks.leave()
    assert "lmhead-beat" not in [thread.name for thread in threading.enumerate()]
"""


@pytest.mark.parametrize("how", ["end", "leave"])
def test_nothing_aborts_when_python_ends(how: str) -> None:
    for _ in range(3):
        port = free_port()
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", SCRIPT, str(rank), str(port), how],
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank in range(2)
        ]
        for rank in ranks:
            _, err = rank.communicate(timeout=120)
            assert rank.returncode == 0, err
