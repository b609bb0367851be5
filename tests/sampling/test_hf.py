"""Order `hf` against transformers' own processors: same kept sets, same probabilities.

Where the two disagree on a token, float64 must show why: the token ties with the last one kept
(the documented tie rule), or it lies so near the limit that transformers' float32 decides it.
"""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from lmhead.sampling import Sampler, SamplingParams

NO_IDS = torch.zeros(1, 1, dtype=torch.long)

# name: the values it is tried with, and transformers' processor for one
FILTERS = {
    "temperature": (st.floats(0.05, 4.0), hf.TemperatureLogitsWarper),
    "top_k": (st.one_of(st.integers(1, 60), st.integers(1, 300_000)), hf.TopKLogitsWarper),
    "top_p": (st.one_of(st.floats(0, 0.999), st.just(1e-18)), hf.TopPLogitsWarper),
    "min_p": (st.floats(1e-6, 1.0), hf.MinPLogitsWarper),
    "typical_p": (st.floats(0.01, 0.99), hf.TypicalLogitsWarper),
    "epsilon_cutoff": (st.floats(1e-6, 0.5), hf.EpsilonLogitsWarper),
    "eta_cutoff": (st.floats(1e-6, 0.5), hf.EtaLogitsWarper),
}


def make_logits(V: int, seed: int, shape: str, masked: float) -> torch.Tensor:
    """Logits [1, V] of a shape, a share of them -inf (never all)."""
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(1, V, generator=g)
    if shape == "ties":
        z = (z * 2).round()
    elif shape == "flat":
        z = z * 0.01
    elif shape == "equal":
        z = torch.full_like(z, 1.25)
    elif shape == "spike":
        z[0, V // 2] = 40.0
    else:
        z = z * 3
    out = torch.rand(1, V, generator=g) < masked
    out[0, int(torch.randint(V, (1,), generator=g))] = False
    return z.masked_fill(out, -torch.inf)


SHAPES = st.sampled_from(["gauss", "ties", "flat", "equal", "spike"])
MASKED = st.sampled_from([0.0, 0.3, 0.999])


def ours(name: str, value: float, z: torch.Tensor) -> torch.Tensor:
    """Run one filter of ours and give the logits back, [1, V]."""
    c = Sampler.from_params(SamplingParams(**{name: value}), "hf").process(z)
    if c.ids is None:
        return c.z
    full = torch.full((1, c.V + 1), -torch.inf)
    return full.scatter_(-1, c.ids, c.z)[:, : c.V]


def explain(name: str, value: float, z: torch.Tensor, differ: np.ndarray) -> None:
    """Assert that each differing token is a tie or a float32 borderline case."""
    x = z[0].double().numpy()
    logp = x - np.logaddexp.reduce(x)
    p = np.exp(logp)
    if name == "top_k":
        kth = np.sort(x)[::-1][value - 1]
        assert (x[differ] == kth).all()
        return
    entropy = -(p[p > 0] * logp[p > 0]).sum()
    if name in ("top_p", "typical_p"):
        # a token stays while the mass before it is below p; equals have no order among them.
        # At V = 262,144 transformers' float32 sums of sorted probabilities are off by 6e-5, and
        # its distances from the entropy by 2e-4: by so much it may differ, and no more
        score, noise = x, 0.0
        if name == "typical_p":
            score = -np.abs(logp + entropy)
            rough = z.log_softmax(-1)
            rough = (rough - (rough * rough.exp()).nansum(-1, keepdim=True)).abs()[0].numpy()
            finite = np.isfinite(x)
            noise = 1e-6 + 2 * np.abs(rough[finite] + score[finite]).max()  # both of two move
        order = np.argsort(score)
        sums = np.concatenate([[0.0], p[order].cumsum()])
        as_sorted = order if name == "top_p" else order[::-1].copy()
        rough = z[0, as_sorted].softmax(-1).double().numpy()
        lost = 2e-6 + np.abs(rough.cumsum() - p[as_sorted].cumsum()).max()
        above = 1 - sums[np.searchsorted(score[order], score[differ] + noise, side="right")]
        at_or_above = 1 - sums[np.searchsorted(score[order], score[differ] - noise, side="left")]
        assert (above - lost <= value).all()
        assert (value <= at_or_above + lost).all()
        return
    lost = abs(float(z.softmax(-1).double().sum()) - 1)
    noise = 1e-5 + lost + abs(float(torch.distributions.Categorical(logits=z).entropy()) - entropy)
    level = {
        "min_p": np.log(value) + logp.max(),
        "epsilon_cutoff": np.log(value),
        "eta_cutoff": min(np.log(value), 0.5 * np.log(value) - entropy),
    }[name]
    assert np.allclose(logp[differ], min(level, logp.max()), atol=noise, rtol=0)


def compare(name: str, value: float, z: torch.Tensor) -> torch.Tensor:
    """Compare one filter with transformers' on the same logits; returns ours, [1, V]."""
    theirs = FILTERS[name][1](value)(NO_IDS, z.clone())
    mine = ours(name, value, z)
    differ = ((mine > -torch.inf) != (theirs > -torch.inf))[0].numpy()
    if differ.any():
        explain(name, value, z, differ)
    else:
        torch.testing.assert_close(mine.softmax(-1), theirs.softmax(-1), atol=1e-6, rtol=0)
    exact = mine[0].double().softmax(-1)
    mass = Sampler.from_params(SamplingParams(**{name: value})).probs(z)[0].double()
    torch.testing.assert_close(mass, exact, atol=1e-6, rtol=0)
    return mine


def check_filter(name: str, V: int, data: st.DataObject) -> None:
    value = data.draw(FILTERS[name][0])
    z = make_logits(V, data.draw(st.integers(0, 2**20)), data.draw(SHAPES), data.draw(MASKED))
    compare(name, value, z)


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("V", [1, 2])
@settings(max_examples=50, deadline=None, derandomize=True)
@given(data=st.data())
def test_each_filter_keeps_what_transformers_keeps_in_tiny_vocabularies(name, V, data):
    check_filter(name, V, data)


@pytest.mark.parametrize("name", FILTERS)
@settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(data=st.data())
def test_each_filter_keeps_what_transformers_keeps_at_50257(name, data):
    check_filter(name, 50_257, data)


@pytest.mark.parametrize("name", FILTERS)
@settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(data=st.data())
def test_each_filter_keeps_what_transformers_keeps_at_262144(name, data):
    check_filter(name, 262_144, data)


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    values=st.fixed_dictionaries(
        {}, optional={name: values for name, (values, _) in FILTERS.items()}
    ),
    seed=st.integers(0, 2**20),
    V=st.sampled_from([1, 2, 50_257]),
    shape=SHAPES,
    masked=MASKED,
)
def test_the_whole_chain_follows_transformers_order(values, seed, V, shape, masked):
    start = z = make_logits(V, seed, shape, masked)
    for name in FILTERS:  # the order of transformers' own list
        if name in values:
            z = compare(name, values[name], z)
    together = Sampler.from_params(SamplingParams(**values), "hf").probs(start)
    torch.testing.assert_close(together.double(), z.double().softmax(-1), atol=1e-6, rtol=0)


HISTORIES = st.lists(st.integers(0, 19), min_size=1, max_size=60)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    history=HISTORIES,
    split=st.integers(0, 60),
    penalty=st.floats(0.2, 3.0),
    size=st.integers(1, 4),
    seed=st.integers(0, 2**20),
)
def test_penalties_equal_transformers(history, split, penalty, size, seed):
    z = make_logits(24, seed, "gauss", 0.3)
    ids = torch.tensor([history])
    for params, processor in [
        ({"repetition_penalty": penalty}, hf.RepetitionPenaltyLogitsProcessor(penalty)),
        ({"no_repeat_ngram_size": size}, hf.NoRepeatNGramLogitsProcessor(size)),
        ({"banned_ids": (3, 5)}, hf.SuppressTokensLogitsProcessor([3, 5])),
        (
            {"min_tokens": 5, "stop_ids": (1, 2)},
            hf.MinNewTokensLengthLogitsProcessor(min(split, len(history)), 5, [1, 2]),
        ),
        ({"logit_bias": {4: penalty}}, hf.SequenceBiasLogitsProcessor([[[4], penalty]])),
    ]:
        theirs = processor(ids, z.clone())
        if not (theirs > -torch.inf).any():
            continue  # all forbidden: tested with the traps
        sampler = Sampler.from_params(SamplingParams(**params))
        seq = sampler.start(history[:split])
        for token in history[split:]:
            seq.accept(token)
        mine = sampler.process(z, [seq])
        full = torch.full((1, 25), -torch.inf)
        columns = torch.arange(24)[None] if mine.ids is None else mine.ids
        full.scatter_(-1, columns, mine.z)
        torch.testing.assert_close(full[:, :24], theirs, atol=1e-6, rtol=1e-6)
