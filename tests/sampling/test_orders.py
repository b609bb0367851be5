"""The named orders `vllm` and `llama.cpp` against plain float64 pipelines written from their rules.

The pipelines below hold candidates as a list of (id, logit) and do one thing after another, as
slowly as they please. V is small and the logits are random, so no limit is met within rounding.
"""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmhead.errors import BadInput
from lmhead.sampling import FILTERS, ORDERS, Sampler, SamplingParams

V = 211
Pairs = list[tuple[int, float]]


def surprises(pairs: Pairs) -> list[float]:
    """Minus the log-probabilities, in nats."""
    x = np.array([z for _, z in pairs])
    return list(np.logaddexp.reduce(x) - x)


def softmax(pairs: Pairs) -> list[float]:
    return [math.exp(-s) for s in surprises(pairs)]


def entropy_of(pairs: Pairs) -> float:
    return sum(s * math.exp(-s) for s in surprises(pairs))


def by_logit(pairs: Pairs) -> Pairs:
    return sorted(pairs, key=lambda t: (-t[1], t[0]))


def nucleus(pairs: Pairs, p: float) -> Pairs:
    kept, total = [], 0.0
    pairs = by_logit(pairs)
    for pair, prob in zip(pairs, softmax(pairs), strict=True):
        kept.append(pair)
        total += prob
        if total >= p:
            break
    return kept


def penalised(pairs: Pairs, seen: set[int], counts: Counter, p: SamplingParams) -> Pairs:
    out = []
    for i, z in pairs:
        if i in seen:
            z = z / p.repetition_penalty if z > 0 else z * p.repetition_penalty
        if counts[i]:
            z -= counts[i] * p.frequency_penalty + p.presence_penalty
        out.append((i, z))
    return out


def vllm(z: list[float], prompt: list[int], output: list[int], p: SamplingParams) -> Pairs:
    pairs = list(enumerate(z))
    if p.allowed_ids is not None:
        pairs = [t for t in pairs if t[0] in p.allowed_ids]
    pairs = [t for t in pairs if t[0] not in p.banned_ids]
    if len(output) < p.min_tokens:
        pairs = [t for t in pairs if t[0] not in p.stop_ids]
    pairs = [(i, x + p.logit_bias.get(i, 0.0)) for i, x in pairs]
    pairs = penalised(pairs, {*prompt, *output}, Counter(output), p)
    if p.temperature == 0:
        return by_logit(pairs)[:1]
    pairs = [(i, x / p.temperature) for i, x in pairs]
    best = max(x for _, x in pairs)
    if p.min_p > 0:
        pairs = [t for t in pairs if t[1] >= best + math.log(p.min_p)]
    if p.top_k:
        pairs = by_logit(pairs)[: p.top_k]
    return nucleus(pairs, p.top_p) if p.top_p < 1 else pairs


def dry_length(history: list[int], token: int) -> int:
    """The longest tail of history that stands before an earlier occurrence of token."""
    best = 0
    for j in range(1, len(history)):
        if history[j] == token:
            n = 0
            while n < j and history[j - 1 - n] == history[len(history) - 1 - n]:
                n += 1
            best = max(best, n)
    return best


def llama_cpp(z: list[float], prompt: list[int], output: list[int], p: SamplingParams) -> Pairs:
    pairs = [(i, x + p.logit_bias.get(i, 0.0)) for i, x in enumerate(z)]
    history = [*prompt, *output]
    window = history[-p.penalty_last_n :] if p.penalty_last_n else []
    pairs = penalised(pairs, set(window), Counter(window), p)
    if p.dry_multiplier:
        for at, (i, x) in enumerate(pairs):
            n = dry_length(history, i)
            if n >= p.dry_allowed_length:
                pairs[at] = (i, x - p.dry_multiplier * p.dry_base ** (n - p.dry_allowed_length))
    if p.top_n_sigma > 0:
        x = np.array([t[1] for t in pairs])
        pairs = [t for t in pairs if t[1] >= x.max() - p.top_n_sigma * x.std()]
    pairs = by_logit(pairs)
    if p.top_k:
        pairs = pairs[: p.top_k]
    if p.typical_p < 1:
        probs = softmax(pairs)
        entropy, surprise = entropy_of(pairs), surprises(pairs)
        order = sorted(range(len(pairs)), key=lambda n: abs(surprise[n] - entropy))
        kept, total = [], 0.0
        for n in order:
            kept.append(pairs[n])
            total += probs[n]
            if total > p.typical_p:
                break
        pairs = by_logit(kept)
    if p.top_p < 1:
        pairs = nucleus(pairs, p.top_p)
    if p.min_p > 0:
        pairs = [t for t in pairs if t[1] >= pairs[0][1] + math.log(p.min_p)]
    if p.xtc_probability == 1:
        high = sum(q >= p.xtc_threshold for q in softmax(pairs))
        pairs = pairs[max(high - 1, 0) :]
    temperature = p.temperature
    if p.dynatemp_range > 0 and len(pairs) > 1:
        low, high = max(0.0, temperature - p.dynatemp_range), temperature + p.dynatemp_range
        share = entropy_of(pairs) / math.log(len(pairs))
        temperature = low + (high - low) * share**p.dynatemp_exponent
    if temperature == 0:
        return pairs[:1]
    return [(i, x / temperature) for i, x in pairs]


def check(order: str, oracle, params: SamplingParams, prompt, output, seed: int) -> None:
    z = torch.randn(1, V, generator=torch.Generator().manual_seed(seed)) * 3
    sampler = Sampler.from_params(params, order)
    seq = sampler.start(prompt)
    for token in output:
        seq.accept(token)
    pairs = oracle(z[0].tolist(), prompt, output, params)
    expected = torch.zeros(1, V, dtype=torch.float64)
    expected[0, [i for i, _ in pairs]] = torch.tensor(softmax(pairs), dtype=torch.float64)
    c = sampler.process(z, [seq])
    # logits over a low temperature are in the hundreds, where float32 has a grain of 1e-5
    torch.testing.assert_close(c.probs().double(), expected, atol=1e-5, rtol=0)
    columns = (c.z[0] > -torch.inf).nonzero().squeeze(-1)
    kept = columns if c.ids is None else c.ids[0, columns]
    assert kept.tolist() == sorted(i for i, _ in pairs)


IDS = st.lists(st.integers(0, 30), max_size=40)
PENALTIES = {
    "repetition_penalty": st.floats(0.5, 2.0),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-0.5, 0.5),
}
LIMITS = {
    "top_k": st.integers(0, 300),
    "top_p": st.floats(0, 1),
    "min_p": st.floats(0, 0.5),
    "logit_bias": st.dictionaries(st.integers(0, V - 1), st.floats(-5, 5), max_size=5),
}


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    values=st.fixed_dictionaries(
        {"temperature": st.one_of(st.just(0.0), st.floats(0.1, 3.0))},
        optional={
            **PENALTIES,
            **LIMITS,
            "allowed_ids": st.lists(st.integers(10, V - 1), min_size=5, max_size=60),
            "banned_ids": st.lists(st.integers(0, 9), max_size=5),
            "min_tokens": st.integers(0, 50),
            "stop_ids": st.just([7, 8]),
        },
    ),
    prompt=IDS,
    output=IDS,
    seed=st.integers(0, 2**20),
)
def test_order_vllm_gives_vllms_distribution(values, prompt, output, seed):
    check("vllm", vllm, SamplingParams(**values), prompt, output, seed)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    values=st.fixed_dictionaries(
        {
            "temperature": st.one_of(st.just(0.0), st.floats(0.1, 3.0)),
            "penalty_last_n": st.sampled_from([0, 1, 8, 64]),
        },
        optional={
            **PENALTIES,
            **LIMITS,
            "top_n_sigma": st.floats(0.5, 4),
            "typical_p": st.floats(0.05, 0.99),
            "xtc_probability": st.sampled_from([0.0, 1.0]),
            "xtc_threshold": st.floats(0.01, 0.5),
            "dynatemp_range": st.floats(0.1, 2.0),
            "dynatemp_exponent": st.floats(0.5, 2.0),
            "dry_multiplier": st.floats(0.1, 2.0),
            "dry_base": st.floats(1.0, 3.0),
            "dry_allowed_length": st.integers(1, 4),
        },
    ),
    prompt=IDS,
    output=IDS,
    seed=st.integers(0, 2**20),
)
def test_order_llama_cpp_gives_llama_cpps_distribution(values, prompt, output, seed):
    params = SamplingParams(**values, dry_sequence_breakers=())
    check("llama.cpp", llama_cpp, params, prompt, output, seed)


def test_the_order_decides_what_is_kept():
    z = torch.randn(1, 50_000, generator=torch.Generator().manual_seed(0)) * 3
    params = SamplingParams(top_p=0.95, temperature=0.5)
    few = int(Sampler.from_params(params, "hf").process(z).left())
    many = int(Sampler.from_params(params, "llama.cpp").process(z).left())
    assert few < 20
    assert many > 2000
    listed = Sampler.from_params(params, ["top_p", "temperature"])
    assert int(listed.process(z).left()) == many


def test_named_orders_hold_every_filter_once():
    for names in ORDERS.values():
        assert sorted(names) == sorted(FILTERS)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("vlm", "did you mean 'vllm'.*hf, vllm, llama.cpp, or a list"),
        (["top_p", "tempratur"], "did you mean 'temperature'"),
        (["top_p", "temperature", "top_p"], "2 times"),
        (["temperature"], "top_p is set, but the order temperature has no place for it"),
        ([], "temperature, top_p is set"),
    ],
)
def test_a_wrong_order_is_an_error_that_says_the_right_ones(order, message):
    with pytest.raises(BadInput, match=message):
        Sampler.from_params(SamplingParams(temperature=0.5, top_p=0.9), order)
