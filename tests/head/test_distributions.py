"""Sums over the vocabulary by stretches: the same as over all of it, in float64."""

import pytest
import torch

from lmhead.head.distributions import Distributions, Space, weighed


@pytest.mark.parametrize("width", [1, 7, 64, 1000])
@pytest.mark.parametrize(("V", "k"), [(1000, 5), (65, 3), (7, 7)])
def test_stretches_add_up_to_the_whole(V: int, k: int, width: int) -> None:
    z = 6 * torch.randn(5, V, generator=torch.Generator().manual_seed(V))
    z[1, -1] = 90.0  # the peak comes last
    z[2, : V // 2] = -torch.inf  # the first stretches hold nothing
    z[3] += 1e4
    z[4] = z[4].sort().values  # every stretch moves the peak
    all_, space = Distributions(5, k), Space.to_hold(5 * width)
    for first in range(0, V, width):
        all_.add(z[:, first : first + width].clone(), first, space)
    wanted = z.topk(k)
    assert torch.equal(all_.best, wanted.values)
    assert torch.equal(z.gather(1, all_.ids), wanted.values)
    logp = z.double().log_softmax(-1)
    entropy = -(logp.exp() * logp.clamp(min=-1e30)).sum(-1)
    assert all_.entropy.tolist() == pytest.approx(entropy.tolist(), rel=1e-5, abs=1e-6)
    p = all_.probability(z[:, 3])
    assert p.tolist() == pytest.approx(logp[:, 3].exp().tolist(), rel=1e-5)


def test_what_has_no_weight_may_be_minus_infinity() -> None:
    p, off = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[-1.0, -3.0, -torch.inf]])
    assert weighed(p, off, torch.empty(1, 3)).tolist() == [-2.0]
    assert weighed(p, off.flip(1), torch.empty(1, 3)).item() < -1e29
