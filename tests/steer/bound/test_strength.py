"""Vectors lowered to a budget: as far as it takes, and no further."""

from collections.abc import Callable

import pytest
import torch

from lmhead.errors import BadInput
from lmhead.loading import Model
from lmhead.steer import HEAD, SteeringVector, audit, certify, fitted
from lmhead.steer.bound import strength

Tiny = Callable[[str], Model]
SHORT = ("the cat sat there.", "some longer words", "a b c", "1 2 3 and 4", "x y", "so be it.")


@pytest.fixture(autouse=True)
def few_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strength, "NEUTRAL", SHORT)


def vector(layer: int | str, alpha: float, seed: int = 1) -> SteeringVector:
    v = torch.randn(24, generator=torch.Generator().manual_seed(seed))
    return SteeringVector(v, layer, alpha)


def measured(model: Model, vectors: list[SteeringVector]) -> float:
    return audit(model, vectors, SHORT, max_tokens=1).max_range


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(
    "vectors",
    [
        [vector(0, 50.0)],
        [-vector(1, 50.0)],
        [vector(0, 20.0), vector(1, 30.0, 2), vector(HEAD, 5.0, 3)],
    ],
    ids=["one", "turned round", "three layers"],
)
def test_lowered_to_the_budget_as_the_audit_measures_it(
    tiny: Tiny, family: str, vectors: list[SteeringVector]
) -> None:
    model = tiny(family)
    budget = measured(model, vectors) / 8
    lowered = fitted(model, vectors, budget)
    shares = [new.alpha / old.alpha for new, old in zip(lowered, vectors, strict=True)]
    assert shares == pytest.approx([shares[0]] * len(shares))
    assert 0 < shares[0] < 1
    found = measured(model, lowered)
    assert 0.8 * budget < found <= budget * 1.001
    again = fitted(model, lowered, 8 * budget)  # never raised
    assert [v.alpha for v in again] == [v.alpha for v in lowered]


def test_at_the_head_it_is_certified(tiny: Tiny) -> None:
    model = tiny("llama")
    (lowered,) = fitted(model, vector(HEAD, 50.0), 2.0)
    assert certify(model.head, lowered).range == pytest.approx(2.0, rel=1e-6)
    assert certify(model.head, lowered).range <= 2.0


@pytest.mark.parametrize("layer", [1, HEAD])
def test_lowered_to_a_kl_cap_and_to_a_plain_range(tiny: Tiny, layer: int | str) -> None:
    model = tiny("llama")
    (lowered,) = fitted(model, vector(layer, 50.0), kl_cap=0.05)
    seen = audit(model, lowered, SHORT, max_tokens=1)
    assert 0.02 < seen.max_kl <= 0.05
    (ranged,) = fitted(model, vector(layer, 50.0), kl_cap=1e6)
    assert 0.8 * strength.PLAIN_RANGE < measured(model, [ranged]) <= strength.PLAIN_RANGE * 1.001
    with pytest.raises(BadInput, match="neither a budget nor a KL cap"):
        fitted(model, vector(layer, 1.0))
    with pytest.raises(BadInput, match="the KL cap"):
        fitted(model, vector(layer, 1.0), kl_cap=-1.0)


def test_a_budget_that_is_none(tiny: Tiny) -> None:
    with pytest.raises(BadInput, match="budget"):
        fitted(tiny("llama"), vector(0, 1.0), 0.0)
