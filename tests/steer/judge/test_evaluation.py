"""Figures beside their baselines, on rows that the vector has not seen."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lmhead.errors import BadInput
from lmhead.loading import Model, load
from lmhead.steer.bound import auditing, strength
from lmhead.steer.judge import controls
from lmhead.steer.judge.baselines import surface
from lmhead.steer.judge.evaluation import Detected, Steered, evaluate
from lmhead.steer.learn import gradient
from lmhead.steer.learn.builtin import builtin_data
from lmhead.steer.learn.data import Data, Row, split_pairs
from lmhead.steer.learn.pairs import PairRuns
from lmhead.steer.learn.request import Request
from lmhead.steer.learn.training import train
from lmhead.steer.measure import token_head
from lmhead.steer.metrics import (
    auroc,
    auroc_gain,
    auroc_interval,
    calibration,
    mean_interval,
)

Tiny = Callable[[str], Model]
SMALL: dict[str, Any] = {"labels": 18, "unlabelled": 12}


@pytest.fixture
def data() -> Data:
    pairs = tuple(p for p in builtin_data().pairs if len(p.prompt) < 30)[::4]
    return Data("some", tuple(row for p in pairs for row in p.rows), pairs)


def test_a_detector_stands_beside_its_baselines(tiny: Tiny, data: Data) -> None:
    model = tiny("llama")
    vector = train(data, model, method="probe", seed=2, **SMALL)
    found = evaluate(vector, data, model)
    assert isinstance(found, Detected)
    assert found.seed == 2
    assert found.rows == len(Request(seed=2, **SMALL).split(data).test)
    assert [b.name for b in found.baselines] == [
        "last tokens", "perplexity", "likelihood", "surface", "mean-diff", "probe",
        "probe, all labels",
    ]  # fmt: skip
    by_name = {b.name: b for b in found.baselines}
    # The probe baseline is the same training on the same split.
    assert by_name["probe"].auroc == found.auroc
    assert by_name["probe"].gain.to_dict() == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert found.labels == by_name["probe"].labels == 18
    assert by_name["probe, all labels"].labels > 20
    assert by_name["last tokens"].labels == 0
    for b in found.baselines:
        assert b.gain.value == pytest.approx(found.auroc.value - b.auroc.value)
    assert found.control is not None
    assert 0 <= found.calibration.brier <= 1
    assert sum(b.rows for b in found.calibration.bins) == found.rows
    assert set(found.to_dict()) >= {"auroc", "baselines", "surface_solves"}


def test_seen_rows_are_refused_unless_told(tiny: Tiny, data: Data) -> None:
    model = tiny("llama")
    vector = train(data, model, method="probe", layer=1, **SMALL)
    with pytest.raises(BadInput, match=r"was trained on .* of these"):
        evaluate(vector, data, model, seed=1)
    assert isinstance(evaluate(vector, data, model, seed=1, seen=True), Detected)


def test_data_that_form_alone_solves_is_named(tiny: Tiny) -> None:
    words = ["ant", "bee", "cow", "dog", "eel", "fox", "gnu", "hen", "ibis", "jay"]
    rows = [Row(f"{a} {b}" + (" and more." if i % 2 else "."), i % 2)
            for i, (a, b) in enumerate((a, b) for a in words for b in words)]  # fmt: skip
    data = Data("long ones are true", tuple(rows))
    model = tiny("llama")
    vector = train(data, model, method="probe", layer=1, **SMALL)
    found = evaluate(vector, data, model)
    assert isinstance(found, Detected)
    assert found.surface_solves
    even = Data("builtin", builtin_data().rows)
    assert surface(even.rows[:4]).shape == (4, 8)


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    g = torch.Generator().manual_seed(0)
    inside = 0
    for trial in range(60):
        found = mean_interval(torch.randn(50, generator=g), seed=trial, resamples=300)
        inside += found.low <= 0 <= found.high
    assert 50 <= inside <= 60
    y = torch.arange(80) % 2
    sure = auroc_interval(y.float(), y)
    assert (sure.value, sure.low, sure.high) == (1.0, 1.0, 1.0)
    chance = auroc_interval(torch.randn(80, generator=g), y)
    assert chance.low < 0.5 < chance.high


def test_a_gain_is_paired_and_surer_than_two_intervals() -> None:
    g = torch.Generator().manual_seed(0)
    y = torch.arange(200) % 2
    shared = torch.randn(200, generator=g)
    worse = y + 1.5 * shared
    better = y + 1.4 * shared  # the same noise, a little less of it
    gain = auroc_gain(better, worse, y)
    assert gain.value == pytest.approx(auroc(better, y) - auroc(worse, y))
    assert gain.low > 0
    assert auroc_interval(worse, y).high > auroc_interval(better, y).low
    assert auroc_gain(worse, better, y).high < 0


def test_a_probability_that_means_what_it_says() -> None:
    g = torch.Generator().manual_seed(0)
    p = torch.rand(4000, generator=g)
    y = (torch.rand(4000, generator=g) < p).long()
    honest, sure = calibration(p, y), calibration((p > 0.5).float(), y)
    assert honest.error < 0.03
    assert honest.brier == pytest.approx(float((p - y).square().mean()), abs=1e-6)
    assert sure.error > 0.2 > honest.brier
    assert [b.rows for b in sure.bins] == [int((p <= 0.5).sum()), int((p > 0.5).sum())]
    assert calibration(torch.ones(4), torch.tensor([1, 1, 1, 0])).bins[0].true == 0.75


def test_a_steering_vector_is_evaluated_on_held_out_pairs(
    tiny: Tiny, data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient, "NEUTRAL", ("a plain text.", "and another one, as plain."))
    monkeypatch.setattr(auditing, "NEUTRAL", ("a plain text.", "and another one."))
    model = tiny("llama")
    vector = train(data, model, job="steer", method="mean-diff", layer=1)
    found = evaluate(vector, data, model)
    assert isinstance(found, Steered)
    _, held = split_pairs(data.pairs, 0)
    runs = PairRuns.read(model, held, 1)
    head = token_head(model)
    gain = runs.log_odds(head, vector.added) - runs.log_odds(head, None)
    assert found.gain.value == pytest.approx(float(gain.mean()), abs=1e-5)
    assert found.pairs == len(held)
    assert found.audit.max_range <= 2.5
    assert set(found.to_dict()) >= {"gain", "right", "neutral", "log_odds"}
    with pytest.raises(BadInput, match="was trained on"):
        evaluate(vector, data, model, seed=5)


def test_controls_know_nothing_of_truth(
    tiny: Tiny, data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (gradient, auditing, controls):
        monkeypatch.setattr(module, "NEUTRAL", ("a plain text.", "and another one, as plain."))
    model = tiny("llama")
    vector = train(data, model, job="steer", method="mean-diff", layer=1)
    found = evaluate(vector, data, model, controls=True)
    assert isinstance(found, Steered)
    assert [c.name for c in found.controls] == ["shuffled labels", "orthogonal"]
    for c in found.controls:
        assert c.more.value == pytest.approx(found.gain.value - c.gain.value, abs=1e-5)
    sure = found.gain.low > 0 and all(c.more.low > 0 for c in found.controls)
    assert found.moves_truth is sure
    assert evaluate(vector, data, model).to_dict()["moves_truth"] is None

    made = controls.control_vectors(vector, data, model, seed=0, test=0.25)
    assert float(made["orthogonal"].direction @ vector.direction) == pytest.approx(0, abs=1e-5)
    assert made["shuffled labels"].card.budget == vector.card.budget
    shuffled = controls.swapped(data, 0)
    turned = [p.true != q.true for p, q in zip(data.pairs, shuffled.pairs, strict=True)]
    assert sum(turned) == len(turned) // 2
    of_a_file = replace(vector, card=replace(vector.card, method=None))
    only = controls.control_vectors(of_a_file, data, model, seed=0, test=0.25)
    assert list(only) == ["orthogonal"]


def test_what_the_guard_lets_through_is_evaluated(
    tiny: Tiny, data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient, "NEUTRAL", ("a plain text.", "and another one, as plain."))
    monkeypatch.setattr(auditing, "NEUTRAL", ("a plain text.", "and another one."))
    model = tiny("llama")
    vector = train(data, model, job="steer", method="mean-diff", layer=1)
    strong = 20 * vector.alpha
    free = evaluate(vector, data, model, alpha=strong)
    held = evaluate(vector, data, model, alpha=strong, budget=0.5)
    loose = evaluate(vector, data, model, alpha=strong, budget=1e6, kl_cap=1e6)
    assert isinstance(free, Steered)
    assert isinstance(held, Steered)
    assert isinstance(loose, Steered)
    assert held.audit.max_range <= 0.5 < free.audit.max_range
    assert held.audit.max_kl < free.audit.max_kl
    # A guard with nothing to do changes nothing.
    assert loose.gain.value == pytest.approx(free.gain.value, abs=1e-4)
    assert loose.audit.max_kl == pytest.approx(free.audit.max_kl, rel=1e-4)
    monkeypatch.setattr(strength, "NEUTRAL", ("a plain text.", "and another one, as plain."))
    lowered = evaluate(vector, data, model, alpha=strong, budget=0.5, fit=True)
    assert isinstance(lowered, Steered)
    assert lowered.alpha < strong == held.alpha
    assert lowered.audit.max_range <= 0.5
    with pytest.raises(BadInput, match="to no budget"):
        evaluate(vector, data, model, fit=True)
    detector = train(data, model, method="probe", layer=1, **SMALL)
    with pytest.raises(BadInput, match="this one detects"):
        evaluate(detector, data, model, budget=2.0)


@pytest.mark.model
def test_truth_has_a_direction_in_the_real_model(smollm2: Path) -> None:
    """Learned on some tables of facts, it moves held-out pairs the right way."""
    model = load(smollm2)
    train_, held = split_pairs(builtin_data().pairs[::3], seed=0)
    known = PairRuns.read(model, train_, 15)
    x = torch.stack([x[-1] for x in known.runs.x])
    v = x[: known.count].mean(0) - x[known.count :].mean(0)
    runs = PairRuns.read(model, held, 15)
    gain = runs.log_odds(model.head, 2 * v / v.norm()) - runs.log_odds(model.head, None)
    assert mean_interval(gain).low > 0
