"""Directions against closed forms, and choosing without the test rows."""

from typing import Any

import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from lmhead.body.states import States
from lmhead.steer.learn import linear
from lmhead.steer.learn.select import Known, blend, candidates, choose_layer
from lmhead.steer.metrics import auroc


def clouds(n: int = 60, d: int = 12, gap: float = 1.5, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 2
    x = torch.randn(n, d, generator=g)
    x[:, 3] += gap * y
    return x, y


def test_logistic_is_the_minimum() -> None:
    x, y = clouds()
    found = linear.logistic(x, y, l2=0.05)

    def loss(w: Any) -> float:
        z = x.double() @ torch.tensor(w[:-1]) + w[-1]
        each = torch.nn.functional.binary_cross_entropy_with_logits(z, y.double())
        return float(each + 0.025 * (torch.tensor(w[:-1]) ** 2).sum())

    best = minimize(loss, torch.zeros(13, dtype=torch.float64).numpy(), tol=1e-10)
    expected = torch.tensor(best.x, dtype=torch.float32)
    torch.testing.assert_close(found.direction, expected[:-1], atol=1e-3, rtol=1e-3)
    assert found.bias == pytest.approx(float(expected[-1]), abs=1e-3)


@pytest.mark.parametrize("method", [linear.probe, linear.mean_diff, linear.pca])
def test_every_method_points_from_false_to_true(method: object) -> None:
    x, y = clouds(gap=6.0)
    found = method(x, y)  # type: ignore[operator]
    assert auroc(found(x), y) > 0.95
    assert found.direction[3] > 0
    assert abs(float(found(x[y == 1]).mean() + found(x[y == 0]).mean())) < 4


def test_mean_diff_is_the_difference_of_means() -> None:
    x, y = clouds()
    gap = x[y == 1].mean(0) - x[y == 0].mean(0)
    found = linear.mean_diff(x, y).direction
    torch.testing.assert_close(found / found.norm(), gap / gap.norm())


def test_a_probe_does_not_mind_scale() -> None:
    x, y = clouds()
    scale = torch.logspace(-3, 3, 12)
    plain, scaled = linear.probe(x, y), linear.probe(x * scale, y)
    torch.testing.assert_close(scaled(x * scale), plain(x), atol=1e-3, rtol=1e-3)


def test_auroc_counts_pairs_and_halves_ties() -> None:
    g = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 5, (40,), generator=g).float()
    y = torch.randint(0, 2, (40,), generator=g)
    true, false = scores[y == 1], scores[y == 0]
    wins = (true[:, None] > false).float() + 0.5 * (true[:, None] == false).float()
    assert auroc(scores, y) == pytest.approx(float(wins.mean()))
    assert auroc(-scores, y) == pytest.approx(1 - float(wins.mean()))


def known(validation: bool, signal: int = 7, seed: int = 0) -> Known:
    """32 labelled rows in 10 layers of noise; the layers around `signal` know the label."""
    g = torch.Generator().manual_seed(seed)
    n = 232
    y = torch.arange(n) % 2
    last = torch.randn(n, 11, 16, generator=g)
    last[:, signal - 1 : signal + 2, 5] += 3.0 * y[:, None]
    states = States(last, torch.randn(n, generator=g))
    end = n if validation else 132
    return Known(states[:32], y[:32], states[32:132], states[132:end], y[132:end])


@pytest.mark.parametrize("validation", [True, False])
def test_the_layer_that_knows_is_chosen(validation: bool) -> None:
    layer, aurocs = choose_layer(known(validation), "probe", candidates(10), seed=0)
    assert layer == 7
    assert aurocs["7"] > 0.8
    assert set(aurocs) == {*map(str, range(2, 10)), "head"}


def test_folds_score_rows_that_the_fit_has_not_seen() -> None:
    """Labels by chance: a fit that had seen its rows would score them near 1."""
    g = torch.Generator().manual_seed(3)
    y = torch.randperm(40, generator=g) % 2
    states = States(torch.randn(40, 2, 64, generator=g), torch.zeros(40))
    chance = Known(states, y, states[:0], states[:0], y[:0])
    assert auroc(chance.fit("probe", 0)(states.at(0)), y) > 0.95
    assert 0.2 < auroc(chance.held_out("probe", 0, seed=0), y) < 0.8


@pytest.mark.parametrize("validation", [True, False])
def test_a_blend_is_as_good_as_its_parts(validation: bool) -> None:
    fitted = blend(known(validation), candidates(10), seed=0)
    fresh = known(True, seed=9).validation
    y = torch.arange(len(fresh)) % 2
    total = fitted.logprob * fresh.logprob
    for layer, term in fitted.terms.items():
        total = total + term(fresh.at(layer))
    assert auroc(total, y) > 0.85
    assert any("7" in part for part in fitted.parts)
    assert 0.3 < float((total > 0).float().mean()) < 0.7  # the bias is right, too
