"""A trim on the two workers of a Ray cluster, one of which is killed: the same folder."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lmhead.errors import BadInput, LMHeadError
from lmhead.trim import counts, observations
from lmhead.trim.corpus import Corpus
from lmhead.trim.observations import shares
from lmhead.trim.observing import Group
from lmhead.trim.report import TrimRequest
from lmhead.trim.run import trim_model
from lmhead.trim.tokenizer import TokenizerJson
from lmhead.trim.workers import joined, spread

MakeModel = Callable[..., Path]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of two workers on this machine."""
    ray = pytest.importorskip("ray", reason="needs the extra `ray`")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")  # 15 on a busy machine is to stand still
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.fixture
def corpus(docstrings: tuple[str, ...], tmp_path: Path) -> Corpus:
    """A folder of many small texts."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for i, text in enumerate(docstrings[:60]):
        (folder / f"{i:03}.txt").write_text(text, "utf-8")
    return Corpus((folder,))


def working() -> list[int]:
    """Return the processes that are at a piece of work just now, by the title Ray gives them."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            title = (folder / "cmdline").read_bytes()
            owner = (folder / "stat").read_text().rsplit(")", 1)[1].split()[1]
            raylet = Path(f"/proc/{owner}/stat").read_text().rsplit(")", 1)[1].split()[1]
        except (OSError, IndexError):
            continue
        if title.startswith(b"ray::work") and int(raylet) == os.getpid():
            found.append(int(folder.name))
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_trim_on_ray_is_the_same_folder_also_when_a_worker_is_killed(
    cluster: Any,
    make_model: MakeModel,
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(counts, "_LOT", 8000)  # several jobs that count
    monkeypatch.setattr(observations, "SHARE", 16)  # several shares of few prompts
    source = make_model("byte_level", "llama", False)
    asked: dict[str, Any] = {"coverage": 0.9, "resume": False}
    asked |= {"positions": 2500, "continuations": 12, "max_tokens": 6}

    def trim(ray: str | None) -> Any:
        out = tmp_path / "out"  # the report names it
        report = trim_model(TrimRequest(str(source), corpus=corpus, ray=ray, **asked), out)
        return report, contents(out.rename(tmp_path / f"done-{ray}"))

    killed: list[int] = []
    over = threading.Event()

    def kill_one() -> None:
        before = set(working())
        while not over.is_set() and not killed:
            # A worker's first piece takes seconds, for it loads torch and the model.
            for process in set(working()) - before:
                os.kill(process, signal.SIGKILL)
                killed.append(process)
                break
            time.sleep(0.05)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so that two pieces run at once
    killer = threading.Thread(target=kill_one)
    killer.start()
    try:
        there, left = trim("auto")
        over.set()
        here, right = trim(None)
    finally:
        over.set()
        killer.join()
        torch.set_num_threads(threads)
    assert killed
    assert there.ids == here.ids
    assert there.coverage == here.coverage
    assert there.coverage.positions > 2000
    assert left.keys() == right.keys()
    assert [name for name in left if left[name] != right[name]] == []


def test_counts_on_ray_are_the_same(
    cluster: Any, make_tokenizer: Any, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counts, "_LOT", 3000)  # several jobs
    tokenizer = TokenizerJson.of(make_tokenizer("byte_level"))
    found, wanted = counts.count_on_ray(tokenizer, corpus, "auto"), counts.count(tokenizer, corpus)
    for one, other in zip(found, wanted, strict=True):
        assert np.array_equal(one.counts, other.counts)
        assert (one.texts, one.tokenizer) == (other.texts, other.tokenizer)


def test_a_piece_that_fails_is_told_and_one_that_kills_its_worker_is_given_up(cluster: Any) -> None:
    def refuse(number: int) -> int:
        if number == 2:
            raise BadInput("two is refused")
        return number

    with joined("auto"):
        assert list(spread(refuse, [3, 4, 5])) == [3, 4, 5]
        with pytest.raises(BadInput, match=r"^two is refused$"):
            list(spread(refuse, range(9)))
        with pytest.raises(LMHeadError, match="lost a worker 4 times"):
            list(spread(lambda _: os.kill(os.getpid(), signal.SIGKILL), [1]))
    assert cluster.is_initialized()  # who joined before is not thrown out


GIVING_UP = """
import random, ray
from lmhead.trim.workers import spread

def work(number):
    return number

ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
luck = random.Random(0)
for _ in range(2000):
    found = spread(work, range(40))
    count = luck.randint(1, 6)
    assert [next(found) for _ in range(count)] == list(range(count))
    found.close()
print("alive")
"""


def test_who_stops_early_lives() -> None:
    """Cancelling what was on its way ended the process within some hundred rounds."""
    pytest.importorskip("ray", reason="needs the extra `ray`")
    command = [sys.executable, "-c", GIVING_UP]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "alive\n", done.stderr[-2000:]


@pytest.mark.parametrize("sizes", [(48, 48, 10), (5, 0, 1), (200, 100, 3)])
def test_shares_are_parts_of_every_group_in_order(sizes: tuple[int, ...]) -> None:
    groups = [Group([[at, i] for i in range(n)], states=n // 2) for at, n in enumerate(sizes)]
    parts = shares(groups, 64)
    assert max(sum(len(g.prompts) for g in part) for part in parts) <= 64 + len(sizes)
    for at, group in enumerate(groups):
        assert [p for part in parts for p in part[at].prompts] == group.prompts
        kept = [p for part in parts for p in part[at].prompts[: part[at].states]]
        assert kept == group.prompts[: group.states]
