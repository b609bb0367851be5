"""Directions against closed forms, and choosing without the test rows."""

from typing import Any

import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from lmhead.body.likelihood import FIGURES, LAST
from lmhead.body.states import States
from lmhead.steer.learn import linear
from lmhead.steer.learn.blending import Blend, blend, likelihood_fit, spaced
from lmhead.steer.learn.folding import folds
from lmhead.steer.learn.ridge import ridge_logistic
from lmhead.steer.learn.select import Known, candidates, choose_layer
from lmhead.steer.metrics import auroc
from lmhead.steer.vector import HEAD


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


def known(signal: int = 7, seed: int = 0, n: int = 132, labels: int = 32) -> tuple[Known, Tensor]:
    """Labelled rows in 10 layers of noise, and the labels of all; those around `signal` know."""
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 2
    last = torch.randn(n, 11, 16, generator=g)
    last[:, signal - 1 : signal + 2, 5] += 3.0 * y[:, None]
    states = States(last, torch.randn(n, len(FIGURES), generator=g))
    groups = tuple(str(i // 2) for i in range(labels))
    return Known(states[:labels], y[:labels], states[labels:], groups), y


def test_the_layer_that_knows_is_chosen() -> None:
    layer, aurocs = choose_layer(known()[0], "probe", candidates(10), seed=0)
    assert layer == 7
    assert aurocs["7"] > 0.8
    assert set(aurocs) == {*map(str, range(2, 10)), "head"}


@pytest.mark.parametrize("method", ["probe", "mean-diff"])
def test_folds_score_rows_that_the_fit_has_not_seen(method: str) -> None:
    """Labels by chance: a fit that had seen its rows would score them near 1."""
    g = torch.Generator().manual_seed(3)
    y = torch.randperm(40, generator=g) % 2
    states = States(torch.randn(40, 2, 64, generator=g), torch.zeros(40, len(FIGURES)))
    chance = Known(states, y, states[:0], tuple(map(str, range(40))))
    assert auroc(chance.fit(method, 0)(states.at(0)), y) > 0.95
    assert 0.2 < auroc(chance.held_out(method, 0, chance.folds(0)), y) < 0.8


def test_a_probe_out_of_fold_is_the_probe_fitted_without_the_fold() -> None:
    taught, _ = known()
    x, every = taught.labelled.at(7), taught.every(7)
    expected = torch.zeros(32)
    out = folds(taught.y, taught.groups, 5, 2)
    for left in out:
        expected[left] += linear.probe(x[~left], taught.y[~left], every)(x[left]) / 2
    found = taught.held_out("probe", 7, taught.folds(5))
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def test_folds_keep_groups_whole_and_classes_even() -> None:
    g = torch.Generator().manual_seed(0)
    y = torch.randint(0, 2, (60,), generator=g)
    groups = [f"g{int(i)}" for i in torch.randint(0, 25, (60,), generator=g)]
    out = folds(y, groups, seed=1, repeats=3)
    assert out.shape == (15, 60)
    assert (out.sum(0) == 3).all()  # each row once in every repeat
    for left in out:
        inside = {group for group, here in zip(groups, left.tolist(), strict=True) if here}
        outside = {group for group, here in zip(groups, left.tolist(), strict=True) if not here}
        assert not inside & outside
        assert 4 <= int(left.sum()) <= 20
    assert torch.equal(out, folds(y, groups, seed=1, repeats=3))
    assert len(folds(torch.tensor([1, 0, 0]), ["a", "b", "b"], 0)) == 0  # nothing can be left out


def test_many_regressions_are_each_the_minimum() -> None:
    x, y = clouds()
    rows = torch.ones(3, 60, dtype=torch.bool)
    rows[1, :20] = False
    rows[2, 40:] = False
    many = ridge_logistic(x.expand(3, -1, -1), y, rows, 0.05)
    for k in range(3):
        one = linear.logistic(x[rows[k]], y[rows[k]], 0.05)
        torch.testing.assert_close(many.weights[k], one.direction, atol=1e-4, rtol=1e-3)
        assert float(many.bias[k]) == pytest.approx(one.bias, abs=1e-3)
    prior = torch.randn(12, generator=torch.Generator().manual_seed(1))
    held = ridge_logistic(x[None], y, rows[:1], 1e6, prior)
    torch.testing.assert_close(held.weights[0], prior, atol=1e-4, rtol=1e-4)


def read(fitted: Blend, states: States) -> Tensor:
    total = states.likelihood @ fitted.likelihood
    for layer, term in fitted.terms.items():
        total = total + term(states.at(layer))
    return total


def test_a_blend_is_as_good_as_its_parts() -> None:
    fitted = blend(known(n=232, labels=132)[0], candidates(10), seed=0)
    fresh, y = known(seed=9, n=232)
    scores = read(fitted, fresh.unlabelled)
    assert auroc(scores, y[32:]) > 0.85
    assert fitted.weights["states"] > fitted.weights["likelihood"]
    assert fitted.alone["states"] > 0.8
    assert 0.3 < float((scores > 0).float().mean()) < 0.7  # the bias is right, too


def test_few_labels_leave_the_prior_that_needs_none() -> None:
    """The likelier the last tokens, the truer; many labels that say otherwise are believed."""
    taught, _ = known(labels=2)
    few = likelihood_fit(taught).direction
    assert int(few.argmax()) == LAST
    against, y = known(n=800, labels=800)
    against.labelled.likelihood[:, LAST] -= 2.0 * y
    assert float(likelihood_fit(against).direction[LAST]) < 0


def test_layers_are_spaced_and_the_last_is_there() -> None:
    assert spaced(candidates(30))[-1] == HEAD
    assert len(set(spaced(candidates(30)))) == 8
    assert spaced([3]) == [3]
