"""The question that is put to a head never changes the answer. Small random heads, no model."""

import pytest
import torch

from lmhead.errors import BadInput
from lmhead.generation.next_ids import next_ids
from lmhead.head import LMHead
from lmhead.head.screened import ScreenedHead
from lmhead.sampling import Sampler, SamplingParams

V, D = 700, 24
PROMPTS = ([3, 5, 7, 5, 3, 5], [650, 1, 2, 1, 2], [9])


@pytest.fixture(scope="module")
def heads() -> tuple[LMHead, ScreenedHead]:
    dense = LMHead(torch.randn(V, D, generator=torch.Generator().manual_seed(0)))
    return dense, ScreenedHead.from_head(dense, kernels="torch")


def tokens(head: LMHead | ScreenedHead, params: SamplingParams, order: object = "hf") -> list:
    """Eight steps of three sequences, on states that a head has nothing to do with."""
    sampler = Sampler.from_params(params, order, vocab_size=V - 20)  # type: ignore[arg-type]
    seqs = [sampler.start(prompt, index=i) for i, prompt in enumerate(PROMPTS)]
    g = torch.Generator().manual_seed(1)
    return [next_ids(head, torch.randn(3, D, generator=g), sampler, seqs)[0] for _ in range(8)]


@pytest.mark.parametrize(
    ("controls", "order"),
    [
        ({}, "hf"),
        ({"repetition_penalty": 1.8, "presence_penalty": 2.0}, "hf"),
        ({"logit_bias": {4: 9.0, 6: 9.5, 679: 9.0}, "frequency_penalty": 3.0}, "vllm"),
        ({"banned_ids": tuple(range(600)), "min_tokens": 4, "stop_ids": (601, 699)}, "hf"),
        ({"no_repeat_ngram_size": 1}, "llama.cpp"),
        ({"repetition_penalty": 0.2, "top_k": 9, "top_p": 0.9}, "llama.cpp"),
        ({"temperature": 1.2, "top_k": 5, "repetition_penalty": 0.3, "seed": 1}, "hf"),
        ({"temperature": 0.8, "top_k": 50, "min_p": 0.02, "seed": 1, "banned_ids": (1,)}, "hf"),
        # a cut before the penalty, ties kept, min_p before top_k: only all logits can tell
        ({"temperature": 1.2, "top_k": 5, "repetition_penalty": 0.3}, ["top_k", "repetition_penalty", "temperature"]),  # noqa: E501
        ({"temperature": 1.5, "top_k": 5, "keep_ties": True}, "hf"),
        ({"temperature": 1.5, "top_k": 20, "min_p": 0.1}, "vllm"),
        ({"temperature": 0.0, "dynatemp_range": 0.5, "top_k": 3}, "hf"),
        ({"temperature": 0.0, "top_n_sigma": 1.0}, "hf"),
    ],
)  # fmt: skip
def test_the_same_tokens_as_from_all_logits(heads, controls, order):
    params = SamplingParams(**{"temperature": 0.0, "seed": 3, **controls})
    assert tokens(heads[1], params, order) == tokens(heads[0], params, order)


def test_only_what_can_be_known_beforehand_is_screened(heads):
    screened = heads[1]
    for controls, states, draws in (
        ({"temperature": 0.0, "repetition_penalty": 1.5}, 24, 0),
        ({"top_k": 7, "banned_ids": (4,)}, 24, 0),
        ({"temperature": 0.7, "presence_penalty": 1.0}, 24, 24),
        ({"top_p": 0.9}, 24, 24),
        ({"temperature": 0.6, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.3}, 24, 24),
        ({"min_p": 0.1, "banned_ids": (4,)}, 24, 24),
        ({"top_n_sigma": 1.0, "top_p": 0.9}, 24, 0),
        ({"top_p": 0.9, "keep_ties": True}, 0, 0),
        ({"top_p": 0.9, "typical_p": 0.9}, 0, 0),
        ({"allowed_ids": (1, 2, 3)}, 0, 0),
        ({"temperature": 0.7, "logprobs": 2}, 0, 0),
    ):
        screened.stats.clear()
        tokens(screened, SamplingParams(seed=0, **controls))
        assert (screened.stats.states, screened.stats.draws) == (states, draws)


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_n_sigma": 1.0}], ids=str)
def test_a_seed_is_the_same_alone_and_together(heads, cut):
    params = SamplingParams(temperature=1.3, repetition_penalty=1.4, seed=5, **cut)
    together = tokens(heads[1], params)
    sampler = Sampler.from_params(params, vocab_size=V - 20)
    seq, g = sampler.start(PROMPTS[2], index=2), torch.Generator().manual_seed(1)
    for step in range(8):
        h = torch.randn(3, D, generator=g)[2:]
        assert next_ids(heads[1], h, sampler, [seq])[0] == together[step][2:]


def test_draws_leave_out_padding_and_bans(heads):
    params = SamplingParams(temperature=5.0, banned_ids=tuple(range(0, 680, 2)), seed=0)
    drawn = [token for step in tokens(heads[1], params) for token in step]
    params = SamplingParams(temperature=5.0, banned_ids=params.banned_ids, seed=0, top_p=0.95)
    drawn += [token for step in tokens(heads[1], params) for token in step]
    assert len(set(drawn)) > 12
    assert all(token % 2 == 1 and token < 680 for token in drawn)


@pytest.mark.parametrize("controls", [{"temperature": 0.0}, {"top_k": 4}, {"temperature": 0.9}])
def test_a_state_that_is_not_a_number_is_an_error(heads, controls):
    sampler = Sampler.from_params(SamplingParams(**controls))
    with pytest.raises(BadInput, match="NaN"):
        next_ids(heads[1], torch.full((1, D), torch.nan), sampler, [sampler.start()])
