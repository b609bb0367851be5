"""Effect against harm: more budget, more of both; the picture and the table."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lmhead.cli.plots import draw_frontier
from lmhead.errors import BadInput
from lmhead.loading import Model
from lmhead.steer.bound.constraints import Constraints
from lmhead.steer.judge import frontier
from lmhead.steer.judge.frontier import STEERING, Frontier, Point, find_frontier
from lmhead.steer.learn import gradient, training
from lmhead.steer.learn.builtin import builtin_data
from lmhead.steer.learn.data import Data
from lmhead.steer.learn.request import Request
from lmhead.steer.learn.tsv import Settings

FAST = Settings(epochs=3, learning_rate=0.1)
Tiny = Callable[[str], Model]
SHORT = ("a plain text.", "and another one, as plain.")


@pytest.fixture
def data() -> Data:
    pairs = tuple(p for p in builtin_data().pairs if len(p.prompt) < 30)[::4]
    return Data("some", tuple(row for p in pairs for row in p.rows), pairs)


@pytest.fixture(autouse=True)
def short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gradient, training, frontier):
        monkeypatch.setattr(module, "NEUTRAL", SHORT)


def test_a_detectors_frontier(tiny: Tiny, data: Data) -> None:
    request = Request(method="tsv", layer=1, labels=20, unlabelled=0, validation=12, settings=FAST)
    settings = [("none", Constraints()), ("budget 0.5", Constraints(budget=0.5))]
    found = find_frontier(data, tiny("llama"), request, settings=settings, seeds=(0, 1))
    assert [(p.name, p.seed) for p in found.points] == [
        ("none", 0), ("none", 1), ("budget 0.5", 0), ("budget 0.5", 1),
    ]  # fmt: skip
    free, held = found.means()
    assert held.max_delta <= 0.5 < free.max_delta
    assert held.max_kl < free.max_kl
    assert found.measure == "AUROC (validation)"
    assert all(0 <= p.effect <= 1 for p in found.points)
    assert len(found.to_dict()["points"]) == 4


def test_a_steering_frontier(tiny: Tiny, data: Data) -> None:
    request = Request(job="steer", method="mean-diff", layer=1)
    settings = STEERING[:2]
    found = find_frontier(data, tiny("llama"), request, settings=settings, seeds=(0,))
    low, high = found.points
    assert low.max_kl < high.max_kl
    assert found.measure == "log-odds gain (held-out pairs)"


def point(name: str, seed: int, effect: float, max_kl: float) -> Point:
    return Point(name, seed, effect, 1.0, max_kl, 0.0, 0.0, "text")


def test_means_and_the_best_within() -> None:
    found = Frontier(
        "detect", 10, "AUROC",
        (point("a", 0, 0.9, 2.0), point("a", 1, 0.8, 4.0), point("b", 0, 0.7, 0.1)),
    )  # fmt: skip
    a, b = found.means()
    assert (a.effect, a.max_kl) == (pytest.approx(0.85), 3.0)
    assert found.best_within(0.5) == b
    assert found.best_within(0.01) is None


@pytest.mark.bare
def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    found = Frontier("detect", 10, "AUROC", (point("a", 0, 0.9, 2.0), point("b", 0, 0.7, 0.0)))
    draw_frontier(found, tmp_path / "f.png")
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(BadInput, match=r"name that ends in \.png"):
        draw_frontier(found, tmp_path / "f.txt")


def test_what_harms_nothing_has_no_frontier(tiny: Tiny, data: Data) -> None:
    with pytest.raises(BadInput, match="harms"):
        find_frontier(data, tiny("llama"), Request(method="probe"))
