"""Penalties that see the largest change, and budgets that hold."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lmhead.errors import BadInput
from lmhead.head import LMHead
from lmhead.loading import Model
from lmhead.steer.bound.constraints import Constraints, mean_penalty, penalty
from lmhead.steer.bound.strength import alpha_within
from lmhead.steer.learn.tsv import largest_share
from lmhead.steer.measure import harm
from lmhead.steer.runs import Runs

Tiny = Callable[[str], Model]


def states(P: int = 7, d: int = 8, V: int = 501) -> tuple[LMHead, Tensor]:
    g = torch.Generator().manual_seed(0)
    return LMHead(torch.randn(V, d, generator=g)), torch.randn(P, d, generator=g)


def test_harm_against_float64() -> None:
    head, h = states()
    other = h + 0.3 * torch.randn(h.shape, generator=torch.Generator().manual_seed(1))
    found = harm(head, h, other, chunk=3)
    z, after = (x.double() @ head.weight.double().T for x in (h, other))
    p, q = z.softmax(-1), after.softmax(-1)
    expected = (p * (p / q).log()).sum(-1).float()
    torch.testing.assert_close(found.kl, expected, atol=1e-5, rtol=1e-4)
    delta = after - z
    torch.testing.assert_close(found.range, (delta.amax(-1) - delta.amin(-1)).float())
    centred = (delta - delta.mean(-1, keepdim=True)).abs().amax(-1)
    torch.testing.assert_close(found.delta, centred.float())
    assert found.flipped.tolist() == (z.argmax(-1) != after.argmax(-1)).tolist()
    assert harm(head, h, h).summary() == {
        "max_kl": 0, "median_kl": 0, "mean_kl": 0, "max_delta": 0, "max_range": 0, "flips": 0,
    }  # fmt: skip


def test_one_token_hides_in_a_mean_but_not_among_the_largest() -> None:
    """A token of 50,000 pushed by 470: the mean over the vocabulary does not notice."""
    weight = torch.zeros(50_000, 2)
    weight[17, 0] = 470.0
    head, h = LMHead(weight), torch.zeros(1, 2)
    added = torch.tensor([1.0, 0.0])
    mean = mean_penalty(Constraints(mean=0.2), head, added)
    largest = penalty(Constraints(excess=0.2, largest=50), head, h, h + added)
    one = penalty(Constraints(excess=0.2, largest=1), head, h, h + added)
    assert 0 < float(mean) < 0.01
    assert float(largest) > 1
    assert float(one) > 90


@pytest.mark.parametrize(
    "on", [{"kl": 0.5}, {"excess": 0.5, "threshold": 0.1}, {"kl": 1.0, "excess": 1.0}]
)
def test_penalties_have_gradients_and_vanish_without_a_change(on: dict[str, float]) -> None:
    head, h = states()
    v = torch.full((8,), 0.2, requires_grad=True)
    price = penalty(Constraints(**on), head, h, h + v)  # type: ignore[arg-type]
    price.backward()
    assert price > 0
    assert v.grad is not None
    assert v.grad.abs().max() > 0
    assert float(penalty(Constraints(**on), head, h, h)) == pytest.approx(0, abs=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong", [{"kl": -1}, {"excess": float("nan")}, {"budget": 0}, {"largest": 0}]
)
def test_wrong_constraints(wrong: dict[str, float]) -> None:
    with pytest.raises(BadInput, match=next(iter(wrong))):
        Constraints(**wrong)  # type: ignore[arg-type]


def test_only_what_is_on_is_told() -> None:
    assert Constraints().to_dict() == {}
    assert Constraints(kl=0.1, budget=2.0).to_dict() == {"kl": 0.1, "budget": 2.0}
    assert Constraints(mean=0.2).to_dict() == {"mean": 0.2, "threshold": 2.0}


def test_the_largest_share_is_within() -> None:
    assert largest_share(lambda share: 10 * share, 20.0, steps=4) == 1.0
    share = largest_share(lambda share: 10 * share, 3.0, steps=8)
    assert 0.29 < share <= 0.3
    assert 0 < largest_share(lambda share: 10 * share, 1e-4, steps=2) <= 1e-5


@pytest.mark.parametrize("layer", [0, 1, "head"])
def test_a_budget_is_reached_and_not_passed(tiny: Tiny, layer: int | str) -> None:
    model = tiny("llama")
    runs = Runs.read(model, ["one text.", "and another one."], layer)
    v = torch.randn(24, generator=torch.Generator().manual_seed(0))
    alpha = alpha_within(model.head, runs, v, 1.5)
    ranges = [
        float(harm(model.head, *runs.compare(share * alpha * v)).range.max())
        for share in (1.0, 1.1)
    ]
    assert ranges[0] <= 1.5 + 1e-4  # float32 logits, where the certificate counts in float64
    assert ranges[1] > 1.5
    with pytest.raises(BadInput, match="all zeros"):
        alpha_within(model.head, runs, torch.zeros(24), 1.5)
