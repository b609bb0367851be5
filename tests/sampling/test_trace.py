"""The funnel: what each filter cut, in numbers that a plain softmax confirms."""

import json

import pytest
import torch

from lmhead.sampling import Sampler, SamplingParams


def test_trace_tells_tokens_left_and_mass_cut():
    z = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    params = SamplingParams(banned_ids=[0], top_k=2, top_p=0.5)
    trace = Sampler.from_params(params).trace(z)[0]
    assert trace.vocab_size == 4
    names = [(s.name, s.left) for s in trace.steps]
    assert names == [("logits", 4), ("banned_ids", 3), ("top_k", 2), ("top_p", 1)]
    assert [s.cut for s in trace.steps] == pytest.approx([0, 0.4, 1 / 6, 0.4], abs=1e-6)
    assert [s.moved for s in trace.steps] == pytest.approx([0, 0.4, 1 / 6, 0.4], abs=1e-6)
    assert trace.steps[1].settings == {"banned_ids": [0]}
    assert [t.id for t in trace.steps[1].best] == [1, 2, 3]
    assert trace.steps[-1].best == ((1, 1.0),)


@pytest.mark.parametrize("order", ["hf", "vllm", "llama.cpp"])
@pytest.mark.parametrize("V", [1, 2, 50_257, 262_144])
def test_trace_agrees_with_the_distribution_at_any_size(order, V):
    z = torch.randn(1, V, generator=torch.Generator().manual_seed(V)) * 3
    params = SamplingParams(temperature=0.8, top_k=200, top_p=0.95, min_p=0.01)
    sampler = Sampler.from_params(params, order)
    trace = sampler.trace(z, top=5)[0]
    p = sampler.probs(z)[0]
    last = trace.steps[-1]
    assert last.left == int((p > 0).sum())
    for token, prob in last.best:
        assert prob == pytest.approx(float(p[token]), abs=1e-6)
    # what a truncation leaves is 1 - cut of what was there before it
    for before, step in zip(trace.steps, trace.steps[1:], strict=False):
        if step.name != "temperature":
            assert step.moved == pytest.approx(step.cut, abs=1e-6)
            kept = before.best[0].probability / step.best[0].probability
            assert kept == pytest.approx(1 - step.cut, abs=1e-6)


def test_temperature_moves_mass_but_cuts_none():
    step = (
        Sampler.from_params(SamplingParams(temperature=2.0)).trace(torch.randn(1, 50))[0].steps[1]
    )
    assert step.cut == 0
    assert step.left == 50
    assert step.moved > 0.01


def test_trace_is_json_and_changes_no_sequence():
    z = torch.randn(2, 500, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(xtc_probability=0.5, temperature=0.7, logit_bias={3: 1.0}, seed=4)
    sampler = Sampler.from_params(params)
    seqs = [sampler.start([1, 2]), sampler.start([3], index=1)]
    before = [(s.copy().uniform(), list(s.output_ids)) for s in seqs]
    data = json.loads(json.dumps([t.to_dict() for t in sampler.trace(z, seqs)], allow_nan=False))
    assert before == [(s.copy().uniform(), list(s.output_ids)) for s in seqs]
    assert data[1]["steps"][1]["settings"] == {"logit_bias": {"3": 1.0}}
    assert set(data[0]["steps"][0]["best"][0]) == {"id", "probability"}
    # what the trace shows is what the next step draws from, XTC's chance included
    drawn = sampler.process(z, [s.copy() for s in seqs])
    assert [d["steps"][-1]["left"] for d in data] == drawn.left().tolist()
