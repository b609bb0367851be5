"""Every truncation against a plain float64 oracle that sorts, and the rules for ties and limits."""

import math

import numpy as np
import pytest
import torch

from lmhead.sampling import filters

CASES = {
    "gauss": lambda z: z * 3,
    "flat": lambda z: z * 0.001,
    "ties": lambda z: (z * 2).round(),
    "two values": lambda z: (z > 2).float(),
    "far outlier below": lambda z: torch.cat([z[:, 1:], torch.full_like(z[:, :1], -1e30)], 1),
    "far outlier above": lambda z: torch.cat([torch.full_like(z[:, :1], 60.0), z[:, 1:]], 1),
    "denormal": lambda z: (z * 20).round() * 1e-45,
    "mostly masked": lambda z: z.masked_fill(z < 2.5, -torch.inf),
}


def case(name: str, V: int, seed: int = 0) -> torch.Tensor:
    return CASES[name](torch.randn(2, V, generator=torch.Generator().manual_seed(seed)))


def prefix_oracle(score: np.ndarray, p: np.ndarray, target: float, keep_ties: bool) -> np.ndarray:
    """Sort by (score down, id up) and keep tokens while the mass before them is below target."""
    order = np.lexsort((np.arange(len(score)), -score))
    before = np.concatenate([[0.0], p[order].cumsum()[:-1]])
    n = max(int((before < target).sum()), 1)
    keep = np.zeros(len(score), dtype=bool)
    keep[order[:n]] = True
    return score >= score[order[n - 1]] if keep_ties else keep


def assert_same_up_to_rounding(mine: np.ndarray, oracle: np.ndarray, p: np.ndarray) -> None:
    """The sets are equal, or differ in so few tokens that only rounding can be the reason."""
    assert p[mine != oracle].sum() <= 1e-8 or (mine != oracle).sum() <= 1


@pytest.mark.parametrize("V", [2, 3, 100, 5_000, 50_257, 262_144])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("keep_ties", [False, True])
def test_top_p_and_typical_p_equal_a_full_sort(V, name, keep_ties):
    z = case(name, V)
    if not (z > -torch.inf).any(-1).all():
        z[:, 0] = 0.0
    for target in (0.0, 0.3, 0.9, 0.9999):
        for mask, typical in (
            (filters.top_p(z, target, keep_ties), False),
            (filters.typical_p(z, max(target, 1e-9), keep_ties), True),
        ):
            for row in range(2):
                x = z[row].double().numpy()
                logp = x - np.logaddexp.reduce(x)
                p = np.exp(logp)
                entropy = -(p[p > 0] * logp[p > 0]).sum()
                if typical and name in ("flat", "denormal"):
                    continue  # the order of distances below float32's grain means nothing
                # distances as the filter has them, in float32, so that the order is the same
                score = z[row].numpy()
                if typical:
                    found = filters.weights(z[row : row + 1])
                    distance = z[row : row + 1] - found.logsumexp.float()
                    score = -(distance + torch.tensor(entropy).float()).abs()[0].numpy()
                oracle = prefix_oracle(score, p, target, keep_ties)
                assert_same_up_to_rounding(mask[row].numpy(), oracle & (x > -np.inf), p)


@pytest.mark.parametrize("V", [2, 100, 50_257, 262_144])
@pytest.mark.parametrize("name", CASES)
def test_top_k_equals_a_stable_sort(V, name):
    z = case(name, V)
    for k in (1, 2, 50, 40_000):
        mask, tied = filters.top_k(z, k), filters.top_k(z, k, keep_ties=True)
        for row in range(2):
            order = z[row].sort(descending=True, stable=True).indices[:k]
            expected = torch.zeros(V, dtype=torch.bool).index_fill_(0, order, True)
            last = z[row, order[-1]]
            finite = z[row] > -torch.inf
            assert torch.equal(mask[row] & finite, expected & finite)
            assert torch.equal(tied[row], (z[row] >= last) & finite)


@pytest.mark.parametrize("V", [2, 50_257, 262_144])
@pytest.mark.parametrize("name", ["gauss", "ties", "mostly masked"])
def test_thresholds_equal_float64(V, name):
    z = case(name, V)
    z[:, 0] = 1.0
    x = z.double()
    logp = x.log_softmax(-1)
    entropy = -(logp.exp() * logp).nansum(-1, keepdim=True)
    best = logp.amax(-1, keepdim=True)
    finite = z > -torch.inf
    count = finite.sum(-1, keepdim=True)
    mean = x.masked_fill(~finite, 0).sum(-1, keepdim=True) / count
    sigma = ((x - mean).masked_fill(~finite, 0) ** 2).sum(-1, keepdim=True).div(count).sqrt()
    mu = torch.tensor([3.0, 9.0], dtype=torch.float64)
    cases = [
        (filters.min_p(z, 0.05), logp, best + math.log(0.05)),
        (filters.epsilon(z, 3e-4), logp, torch.minimum(torch.tensor(math.log(3e-4)), best)),
        (
            filters.eta(z, 3e-4),
            logp,
            torch.minimum(torch.clamp(0.5 * math.log(3e-4) - entropy, max=math.log(3e-4)), best),
        ),
        (filters.top_n_sigma(z, 1.5), x, x.amax(-1, keepdim=True) - 1.5 * sigma),
        (filters.mirostat(z, mu), logp, torch.minimum(-mu[:, None] * math.log(2), best)),
    ]
    for mask, value, level in cases:
        sure = (value - level).abs() > 1e-5
        assert torch.equal((mask & sure), (value >= level) & sure)
        assert mask.any(-1).all()
        assert not (mask & ~finite).any()


def test_entropy_is_exact_to_1e_6_at_262144():
    z = case("gauss", 262_144)
    logp = z.double().log_softmax(-1)
    expected = -(logp.exp() * logp).sum(-1, keepdim=True)
    torch.testing.assert_close(filters.entropy(z), expected, atol=1e-6, rtol=0)


def test_xtc_drops_all_high_tokens_but_the_least_probable():
    z = torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04]).log().repeat(3, 1)
    z[2] = torch.tensor([0.9, 0.04, 0.03, 0.02, 0.01]).log()  # only one reaches the threshold
    mask = filters.xtc(z, 0.1, torch.tensor([True, False, True]))
    assert mask.tolist() == [[False, False, True, True, True], [True] * 5, [True] * 5]


def test_xtc_keeps_the_highest_id_of_equally_probable_tokens():
    z = torch.tensor([[0.0, 0.0, 0.0, -9.0]])
    assert filters.xtc(z, 0.2, torch.tensor([True])).tolist() == [[False, False, True, True]]


def test_top_p_keeps_the_lowest_ids_of_equally_probable_tokens():
    z = torch.zeros(1, 300_000)
    mask = filters.top_p(z, 0.5)
    assert mask[0, :150_000].all()
    assert not mask[0, 150_000:].any()
    assert filters.top_p(z, 0.5, keep_ties=True).all()
