"""Draws follow their law, and the two functions to learn from.

The chi-square tests use fixed seeds, so they always give the same answer; a correct sampler with
fresh seeds would fail each of them once in 10,000 runs.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from lmhead.errors import BadInput
from lmhead.sampling import Candidates, Sampler, SamplingParams, draw, next_probs
from lmhead.sampling.drawing import draw_rows, invert

DRAWS = 100_000
V = 49_152


def lifelike_logits(seed: int = 0) -> torch.Tensor:
    """Logits [1, V] with a few likely tokens and a long tail, as language models have them."""
    g = torch.Generator().manual_seed(seed)
    rank = torch.randperm(V, generator=g) + 1
    return (-1.1 * rank.log() + torch.randn(V, generator=g))[None]


def assert_follows(ids: torch.Tensor, p: torch.Tensor, alpha: float = 1e-4) -> None:
    """Chi-square of drawn ids [n] against probabilities [V]; rare tokens share a bin."""
    n = ids.numel()
    assert (p[ids] > 0).all()
    order = p.argsort(descending=True)
    expected = n * p[order].double()
    counts = torch.bincount(ids, minlength=p.numel())[order].double()
    # bins of 20 expected draws or more, in order of probability
    bins = (expected.cumsum(0) / 20).floor().long()
    bins = torch.where(expected >= 20, torch.arange(p.numel()), bins + p.numel())
    _, bins = bins.unique(return_inverse=True)
    observed = torch.zeros(int(bins.max()) + 1).double().index_add_(0, bins, counts)
    mean = torch.zeros_like(observed).index_add_(0, bins, expected)
    keep = mean > 5
    statistic = ((observed - mean) ** 2 / mean)[keep].sum()
    assert observed[~keep].sum() <= mean[~keep].sum() + 20
    assert chi2.sf(float(statistic), int(keep.sum()) - 1) > alpha


@pytest.mark.parametrize(
    "params",
    [{}, {"top_k": 50}, {"top_p": 0.9}, {"temperature": 0.7, "top_k": 200, "top_p": 0.95}],
    ids=["full softmax", "top_k", "top_p", "chain"],
)
def test_chi_square_of_100_000_draws(params):
    p = Sampler.from_params(SamplingParams(**params)).probs(lifelike_logits())[0]
    assert_follows(draw(p, DRAWS, torch.Generator().manual_seed(0)), p)


def test_chi_square_of_the_first_draw_of_many_sequences_of_one_seed():
    sampler = Sampler.from_params(SamplingParams(top_k=50, seed=11))
    c = sampler.process(lifelike_logits(1))
    seqs = [sampler.start(index=i) for i in range(20_000)]
    columns = draw_rows(c.z.expand(len(seqs), -1), seqs)
    assert_follows(c.ids[0, columns], c.probs()[0])


def test_chi_square_of_one_sequence_step_by_step():
    z = torch.randn(1, 30, generator=torch.Generator().manual_seed(2)) * 1.5
    sampler = Sampler.from_params(SamplingParams(min_p=0.05, temperature=1.3, seed=5))
    seq = sampler.start()
    for _ in range(5000):
        sampler.step(z, [seq])
    assert_follows(torch.tensor(seq.output_ids), sampler.probs(z)[0])


def test_the_chi_square_notices_a_wrong_law():
    p = lifelike_logits().softmax(-1)[0]
    ids = draw((lifelike_logits() / 1.03).softmax(-1)[0], DRAWS, torch.Generator().manual_seed(0))
    with pytest.raises(AssertionError):
        assert_follows(ids, p)


def test_xtc_acts_as_often_as_it_was_asked_to():
    z = torch.tensor([[0.5, 0.4, 0.1]]).log()
    sampler = Sampler.from_params(SamplingParams(xtc_probability=0.3, seed=1))
    seq = sampler.start()
    for _ in range(4000):
        sampler.step(z, [seq])
    # token 0 is drawn only when XTC does not act: 0.7 * 0.5, standard error 0.0075
    assert seq.output_ids.count(0) / 4000 == pytest.approx(0.35, abs=0.03)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    w=st.lists(st.sampled_from([0.0, 1e-38, 1e-8, 0.3, 1.0, 7e5]), min_size=1, max_size=40),
    u=st.one_of(st.floats(0, 1, exclude_max=True), st.just(1 - 2**-53), st.just(0.0)),
)
def test_inversion_never_picks_a_weight_of_zero(w, u):
    if sum(w) == 0:
        w = [*w, 1.0]
    picked = invert(torch.tensor(w), torch.tensor([u], dtype=torch.float64))
    assert w[int(picked)] > 0


def test_inversion_reaches_the_tail_of_262144_equal_tokens():
    w = torch.full((262_144,), 1e-3)
    u = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert invert(w, u).tolist() == [0, 131_072, 262_143]


@pytest.mark.parametrize("batch", [(), (3,), (2, 3), (2, 1, 4)])
def test_next_probs_and_draw_take_any_batch_shape(batch):
    g = torch.Generator().manual_seed(0)
    W, h = torch.randn(101, 8, generator=g), torch.randn(*batch, 8, generator=g)
    p = next_probs(lambda h: h @ W.T, h, temperature=0.8, top_k=7)
    assert p.shape == (*batch, 101)
    torch.testing.assert_close(p.sum(-1), torch.ones(batch))
    assert ((p > 0).sum(-1) == 7).all()
    z = h @ W.T / 0.8
    cut = z.masked_fill(z < z.topk(7).values[..., -1:], -torch.inf)
    torch.testing.assert_close(p, cut.softmax(-1))
    ids = draw(p, 5, g)
    assert ids.shape == (*batch, 5)
    assert (p.gather(-1, ids) > 0).all()


def test_next_probs_at_temperature_zero_is_certain_of_the_best_token():
    p = next_probs(lambda h: h, torch.tensor([1.0, 3.0, 3.0]), temperature=0)
    assert p.tolist() == [0.0, 1.0, 0.0]


def test_draw_gives_the_same_for_the_same_generator():
    p = lifelike_logits().softmax(-1)
    first = draw(p, 9, torch.Generator().manual_seed(4))
    assert torch.equal(first, draw(p, 9, torch.Generator().manual_seed(4)))


@pytest.mark.parametrize("probs", [[0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0], [-0.5, 1.0]])
def test_draw_refuses_what_is_no_distribution(probs):
    with pytest.raises(BadInput, match="positive, finite sum"):
        draw(torch.tensor(probs), 1, torch.Generator())


def test_draw_refuses_to_draw_nothing():
    with pytest.raises(BadInput, match="n is 0"):
        draw(torch.ones(3), 0, torch.Generator())


def test_screened_candidates_draw_the_same_tokens_as_all_logits():
    z = lifelike_logits(3).repeat(4, 1)
    sampler = Sampler.from_params(SamplingParams(temperature=0.9, top_k=40, top_p=0.9, seed=2))
    best = z.topk(64)
    few = Candidates.of(best.indices, best.values, V)
    a = sampler.step(z, [sampler.start(index=i) for i in range(4)]).ids
    b = sampler.step(few, [sampler.start(index=i) for i in range(4)]).ids
    assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_logits_may_come_in_any_precision_with_gradients_or_without(dtype):
    z = (torch.randn(2, 500, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    with torch.inference_mode():
        inferred = z * 1
    sampler = Sampler.from_params(SamplingParams(top_k=20, top_p=0.9, temperature=0.8, seed=3))
    drawn = [
        sampler.step(logits, [sampler.start(index=i) for i in range(2)]).ids.tolist()
        for logits in (z, z.clone().requires_grad_(), inferred, z.t().contiguous().t())
    ]
    assert drawn.count(drawn[0]) == 4


def test_next_probs_lets_gradients_through():
    h = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    next_probs(lambda h: h * 2, h, temperature=0.5, top_k=4)[..., 0].sum().backward()
    assert h.grad.abs().sum() > 0


def test_an_empty_batch_draws_nothing():
    sampler = Sampler.from_params(SamplingParams(top_k=20, top_p=0.9, temperature=0.8, logprobs=2))
    drawn = sampler.step(torch.zeros(0, 50), [])
    assert drawn.ids.tolist() == []
    assert drawn.logprobs == ()
