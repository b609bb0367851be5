"""What a screened head draws follows the exact law.

Chi-square tests: seeds are fixed, so a test passes or fails for good; a right sampler fails one
with probability 1e-4 when the seed is chosen.
"""

import math
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from lmhead.head import Edit, LMHead
from lmhead.head.screened import ScreenedHead
from lmhead.head.screening.bounds import Screen
from lmhead.head.screening.known import Known
from lmhead.head.screening.rejection import SCORED_FIRST, Chances

HAS_NUMBA = find_spec("numba") is not None
KERNELS = [
    pytest.param("numba", marks=pytest.mark.skipif(not HAS_NUMBA, reason="numba is missing")),
    "torch",
]
V, D, DRAWS = 3000, 64, 4000


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def head() -> LMHead:
    return LMHead(torch.randn(V, D, generator=torch.Generator().manual_seed(0)) / 4)


@pytest.fixture(scope="module")
def h() -> torch.Tensor:
    return torch.randn(D, generator=torch.Generator().manual_seed(1))


def law(y: torch.Tensor, temperature: float) -> np.ndarray:
    return torch.softmax(y.double() / temperature, -1).numpy()


def p_value(ids: torch.Tensor, p: np.ndarray) -> float:
    """Chi-square of draws against p `[V]`; rare tokens share a bin."""
    assert p[ids].min() > 0, "a token that cannot be drawn was drawn"
    counts = np.bincount(ids.numpy(), minlength=len(p)).astype(float)
    expected = p * len(ids)
    rare = expected < 5
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
        if expected[-1] < 1:
            counts[-2], expected[-2] = counts[-2:].sum(), expected[-2:].sum()
            counts, expected = counts[:-1], expected[:-1]
    return float(chisquare(counts, expected).pvalue) if len(counts) > 1 else 1.0


def draws(screened: ScreenedHead, h: torch.Tensor, n: int = DRAWS, **options) -> torch.Tensor:
    g = torch.Generator().manual_seed(7)
    return screened.sample(h.expand(n, -1), generator=g, **options)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.5])
def test_full_softmax(head, h, kernels, temperature):
    screened = ScreenedHead.from_head(head, kernels=kernels)
    ids = draws(screened, h, temperature=temperature)
    y = h.double() @ head.weight.double().T
    assert p_value(ids, law(y, temperature)) > 1e-4
    assert screened.stats.draws == DRAWS
    assert screened.stats.proposals < 3 * DRAWS
    assert not screened.stats.fallbacks


def test_flat_law_where_nothing_is_scored_first(head, h):
    """At a high temperature nearly every draw is a proposal from the bounds."""
    screened = ScreenedHead.from_head(head)
    ids = draws(screened, h, n=6000, temperature=20.0)
    y = h.double() @ head.weight.double().T
    p = law(y, 20.0)
    assert p[ids].min() > 0
    groups = np.arange(V) % 97  # 3,000 tokens would have too few draws each
    expected = np.bincount(groups, p) * len(ids)
    counts = np.bincount(groups[ids.numpy()], minlength=97)
    assert chisquare(counts, expected).pvalue > 1e-4
    assert screened.stats.rescored > 6000 * SCORED_FIRST


@pytest.mark.parametrize("kernels", KERNELS)
def test_softcap_scale_and_bias(h, kernels):
    g = torch.Generator().manual_seed(3)
    weight, bias = torch.randn(V, D, generator=g), torch.randn(V, generator=g)
    head = LMHead(weight, bias, softcap=4.0, scale=0.3)
    ids = draws(ScreenedHead.from_head(head, kernels=kernels), h, temperature=0.7)
    z = (h.double() @ weight.double().T + bias.double()) * 0.3
    assert p_value(ids, law(4 * torch.tanh(z / 4), 0.7)) > 1e-4


def test_with_edits(head, h):
    screened = ScreenedHead.from_head(head)
    best = screened.topk(h, 40).ids
    edit = Edit.repetition(best[::2].tolist(), 1.5).then(Edit.add({11: 6.0, 12: -1.0}))
    edit = edit.then(Edit.ban(best[1:6].tolist()))
    ids = draws(screened, h, edits=edit)
    y = h.double() @ head.weight.double().T
    y[edit.ids] = edit.change(y[edit.ids])
    assert p_value(ids, law(y, 1.0)) > 1e-4


def test_an_edit_may_hold_parameters(head, h):
    screened, strength = ScreenedHead.from_head(head), torch.nn.Parameter(torch.tensor(1e6))
    edit = Edit(torch.tensor([7]), lambda z: z + strength)
    state = h.clone().requires_grad_()
    assert int(screened.sample(state, edits=edit)) == 7
    assert int(screened.topk(state, 1, edits=edit).ids) == 7


def test_top_k_top_p_and_min_p(head, h):
    screened = ScreenedHead.from_head(head)
    y = h.double() @ head.weight.double().T
    order = y.sort(descending=True, stable=True).indices
    kept = torch.full_like(y, -torch.inf)
    kept[order[:50]] = y[order[:50]]
    assert p_value(draws(screened, h, temperature=0.8, top_k=50), law(kept, 0.8)) > 1e-4

    p = torch.softmax(kept / 0.8, -1)[order]
    nucleus = order[(p.cumsum(0) - p) < 0.6]
    cut = torch.full_like(y, -torch.inf)
    cut[nucleus] = y[nucleus]
    assert p_value(draws(screened, h, temperature=0.8, top_k=50, top_p=0.6), law(cut, 0.8)) > 1e-4
    assert not screened.stats.fallbacks

    near = torch.where(y >= y.max() + 0.8 * math.log(0.1), y, -torch.inf)
    assert p_value(draws(screened, h, temperature=0.8, min_p=0.1), law(near, 0.8)) > 1e-4
    assert not screened.stats.fallbacks


def cut_law(y: torch.Tensor, T: float, top_p=None, min_p=None, top_n_sigma=None) -> np.ndarray:
    """The law in float64, from all logits: what is better than a token weighs less than top_p."""
    z = y.double()
    if top_n_sigma:
        alive = z[z.isfinite()]
        z = z.masked_fill(z < z.max() - top_n_sigma * alive.std(correction=0), -torch.inf)
    order = z.sort(descending=True, stable=True).indices
    p = torch.softmax(z / T, -1)
    stays = torch.ones_like(p, dtype=torch.bool)
    if top_p is not None:
        sorted_p = p[order]
        stays[order] = sorted_p.cumsum(0) - sorted_p < top_p
        stays[order[0]] = True
    if min_p is not None:
        stays &= p >= min_p * p.max()
    return law(z.masked_fill(~stays, -torch.inf), T)


CUTS = [
    {"top_p": 0.9},
    {"top_p": 0.4},
    {"top_p": 0.9, "min_p": 0.02},
    {"min_p": 0.05},
    {"top_n_sigma": 1.5},
    {"top_n_sigma": 2.0, "top_p": 0.8, "min_p": 0.01},
]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_cuts_without_top_k(head, h, cut):
    screened = ScreenedHead.from_head(head)
    y = h.double() @ head.weight.double().T
    for temperature in (0.7, 1.3):
        ids = draws(screened, h, n=400, temperature=temperature, **cut)
        assert p_value(ids, cut_law(y, temperature, **cut)) > 1e-4
    # of a random head of 3,000 rows many compete: all rows are scored for a few draws
    assert screened.stats.fallbacks.total() < 0.2 * screened.stats.states


def test_cuts_with_edits_softcap_scale_and_bias(h):
    g = torch.Generator().manual_seed(3)
    weight, bias = torch.randn(V, D, generator=g), torch.randn(V, generator=g)
    edit = Edit.add({11: 3.0, 12: -1.0}).then(Edit.ban([40, 41, 2]))
    for softcap in (None, 4.0):
        head = LMHead(weight, bias, softcap=softcap, scale=0.3)
        screened = ScreenedHead.from_head(head)
        y = (h.double() @ weight.double().T + bias.double()) * 0.3
        y = y if softcap is None else softcap * torch.tanh(y / softcap)
        y[edit.ids] = edit.change(y[edit.ids])
        for cut in CUTS[::2]:
            ids = draws(screened, h, n=300, edits=edit, limit=V - 9, temperature=0.8, **cut)
            assert p_value(ids, cut_law(y[: V - 9], 0.8, **cut)) > 1e-4


@pytest.mark.parametrize("top_p", [0.0, 1e-6, 0.999999, 1.0])
def test_top_p_at_its_ends(head, h, top_p):
    screened = ScreenedHead.from_head(head)
    ids = draws(screened, h, n=40, top_p=top_p)
    best = int(screened.topk(h, 1).ids)
    assert (ids == best).all() == (top_p < 0.5)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_nucleus_is_that_of_float64(head, kernels, temperature):
    """Every token near the border of a nucleus, and some others, are in or out as float64 has it.

    Equal rows stand at the border too: the lower id is in first.
    """
    weight = head.weight.detach().clone()
    weight[1500:] = weight[:1500]
    screened = ScreenedHead.from_head(LMHead(weight), kernels=kernels)
    states = torch.randn(6, D, generator=torch.Generator().manual_seed(9))
    for n, row in enumerate(screened._rows(states.numpy(), None, V)):
        y = states[n].double() @ weight.double().T
        order = y.sort(descending=True, stable=True).indices.numpy()
        w = np.exp((y[order] - y.max()).numpy() / temperature)
        before = np.cumsum(w) - w
        for p in (0.1, 0.5, 0.9, 0.99):
            border = int(np.searchsorted(before, p * w.sum()))
            for at in {0, 1, 5, 60, 2000, *range(max(border - 3, 0), border + 3)}:
                known = Known(row.query, row.touched, row.transform, temperature)
                token = int(order[at])
                inside = known.holds(p, float(row.query.score(np.array([token])).z[0]), token)
                assert inside == (at < border or at == 0)


@pytest.mark.parametrize("kernels", KERNELS)
def test_the_normaliser_lies_between_its_ends(head, h, kernels):
    bias = torch.randn(V, generator=torch.Generator().manual_seed(4))
    for made in (head, LMHead(head.weight.detach(), bias, softcap=5.0, scale=0.7)):
        screened = ScreenedHead.from_head(made, kernels=kernels)
        y = made(h).double()
        for T in (0.5, 1.0, 3.0):
            (row,) = screened._rows(h[None].numpy(), None, V)
            known = Known(row.query, row.touched, row.transform, T)
            exact = float(((y - known.best) / T).exp().sum())
            for error in (0.3, 0.1, 0.02):
                known.narrow(error)
                low, high = known.normaliser
                assert low <= exact * (1 + 1e-5)
                assert exact <= high * (1 + 1e-5)
                assert known.widest_log() <= error


@pytest.mark.parametrize("kernels", KERNELS)
def test_loose_bounds_take_many_proposals_and_no_fall_back(head, h, kernels):
    """With 64 proposals, some of these draws were given up; each costs less than all rows do."""
    good = ScreenedHead.from_head(head).screen
    loose = Screen(good.q, good.scale, good.residual * 60, good.norm, V, D)
    screened = ScreenedHead(head, loose, kernels)
    ids = draws(screened, h, n=400, temperature=1.0)
    y = h.double() @ head.weight.double().T
    assert p_value(ids, law(y, 1.0)) > 1e-4
    assert not screened.stats.fallbacks


@pytest.mark.parametrize("kernels", KERNELS)
def test_too_many_tries_fall_back_counted_and_right(head, h, kernels, monkeypatch):
    """Bounds that are sound but useless: hardly a proposal is accepted, the law stays."""
    monkeypatch.setattr("lmhead.head.screening.rejection.TRIES", 64)
    good = ScreenedHead.from_head(head).screen
    loose = Screen(good.q, good.scale, good.residual * 60, good.norm, V, D)
    screened = ScreenedHead(head, loose, kernels)
    n = 400
    ids = draws(screened, h, n=n, temperature=1.0)
    y = h.double() @ head.weight.double().T
    assert p_value(ids, law(y, 1.0)) > 1e-4
    assert 0 < screened.stats.fallbacks["tries"] < n


def test_temperatures_too_small_for_the_weights(head, h):
    screened = ScreenedHead.from_head(head)
    assert draws(screened, h, n=3, temperature=1e-7).unique().tolist() == [
        screened.topk(h, 1).ids.item()
    ]
    assert screened.stats.fallbacks == {"temperature": 3}


@pytest.mark.parametrize("edited", [False, True])
def test_one_generator_for_each_state(head, edited):
    """A state draws the same token alone and among others."""
    screened = ScreenedHead.from_head(head)
    h = torch.randn(7, D, generator=torch.Generator().manual_seed(2))
    edits = [Edit.repetition([n, 5, 900 + n], 1.3).then(Edit.ban([28])) for n in range(len(h))]
    for seed in range(40):
        alone, together = (
            [torch.Generator().manual_seed(100 * seed + n) for n in range(len(h))] for _ in range(2)
        )
        options = {"temperature": 0.3 + seed / 10}
        ids = screened.sample(h, generator=together, edits=edits if edited else None, **options)
        for n, generator in enumerate(alone):
            one = screened.sample(
                h[n], generator=generator, edits=edits[n] if edited else None, **options
            )
            assert int(one) == int(ids[n])


@pytest.mark.skipif(not HAS_NUMBA, reason="numba is missing")
@pytest.mark.parametrize("factor", [1.0, 60.0])  # of the residuals: sound, but useless bounds
@pytest.mark.parametrize("biased", [False, True])
def test_the_compiled_loop_draws_the_same_tokens(biased, factor):
    g = torch.Generator().manual_seed(5)
    bias = torch.randn(V, generator=g) if biased else None
    softcap = 9.0 if biased else None
    head = LMHead(torch.randn(V, D, generator=g) / 4, bias, softcap=softcap, scale=0.9)
    good = ScreenedHead.from_head(head).screen
    screen = Screen(good.q, good.scale, good.residual * factor, good.norm, V, D)
    compiled, plain = (ScreenedHead(head, screen, "numba") for _ in range(2))
    h = torch.randn(21, D, generator=g)
    h[3, 5] = 1e37  # too large to be screened
    for seed in range(12):
        temperature, generator = 0.5 + seed / 10, torch.Generator().manual_seed(seed)
        drawn = compiled.sample(h, temperature, generator=generator)
        generator.manual_seed(seed)
        first = Chances().draw([generator] * len(h))
        rows = plain._rows(h.numpy(), None, V)
        one_by_one = [row.draw(temperature, generator, first[n]) for n, row in enumerate(rows)]
        for one in one_by_one:
            plain.stats.count(one)
        assert drawn.tolist() == [one.id for one in one_by_one]
    assert compiled.stats.draws == 12 * len(h)
    assert compiled.stats.proposals == plain.stats.proposals
    assert compiled.stats.fallbacks == plain.stats.fallbacks
