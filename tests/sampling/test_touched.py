"""A filter that says which ids it touches leaves all others alone."""

import pytest
import torch

from lmhead.sampling import Candidates, Sampler, SamplingParams

V = 60


@pytest.mark.parametrize(
    "controls",
    [
        {"banned_ids": (3, 59)},
        {"min_tokens": 9, "stop_ids": (4, 7)},
        {"logit_bias": {5: 2.0, 8: -1.0}},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 1.3, "penalty_last_n": 2},
        {"frequency_penalty": 0.5},
        {"presence_penalty": 0.5, "penalty_last_n": -1},
        {"no_repeat_ngram_size": 2},
        {"dry_multiplier": 0.8, "dry_sequence_breakers": ()},
    ],
)
def test_nothing_else_is_changed(controls):
    sampler = Sampler.from_params(SamplingParams(**controls))
    seq = sampler.start([1, 2, 3, 1, 2, 3, 1, 2])
    for token in (3, 1, 2):
        seq.accept(token)
    z = torch.randn(1, V, generator=torch.Generator().manual_seed(0))
    changed = (sampler.process(Candidates.dense(z), [seq]).z != z)[0].nonzero()[:, 0]
    touched = sampler.touched(seq, V)
    assert changed.numel()
    assert set(changed.tolist()) <= set(touched.tolist())
    assert touched.tolist() == sorted(set(touched.tolist()))
    assert sampler.touched(seq, 2).tolist() == [i for i in touched.tolist() if i < 2]


def test_filters_that_look_at_all_logits_name_no_ids():
    params = SamplingParams(top_k=3, allowed_ids=(1,), temperature=0.5, top_p=0.5)
    sampler = Sampler.from_params(params)
    assert all(f.touches is None for f in sampler.filters)
    assert sampler.touched(sampler.start([1]), V).tolist() == []
