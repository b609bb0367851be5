"""Parameters: their ranges, their names, and JSON in and out."""

import json
import math

import pytest
import torch

from lmhead.errors import BadInput
from lmhead.sampling import FILTERS, RANGES, Sampler, SamplingParams
from lmhead.sampling.params import RANDOM


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; expected a number from 0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_k": 2.0}, "top_k is 2.0; expected a whole number from 0"),
        ({"top_k": True}, "top_k is True"),
        ({"top_p": 1.1}, "top_p is 1.1; expected a number from 0 to 1"),
        ({"typical_p": 0}, "typical_p is 0; expected a number above 0 to 1"),
        ({"epsilon_cutoff": 1.0}, "from 0 below 1"),
        ({"xtc_threshold": 0.6}, "xtc_threshold is 0.6; expected a number from 0 to 0.5"),
        ({"mirostat": 1}, "expected 0 .off. or 2"),
        ({"repetition_penalty": 0}, "from 0.01 to 100"),
        ({"presence_penalty": -1e39}, "from -100 to 100"),
        ({"min_p": 0.5, "dry_base": 0.9}, "dry_base is 0.9; expected a number from 1$"),
        ({"seed": -1}, "seed is -1.*or null"),
        ({"top_p": "0.9"}, "top_p is '0.9'"),
        ({"logprobs_mode": "cooked"}, "'raw' or 'processed'"),
        ({"keep_ties": 1}, "true or false"),
        ({"allowed_ids": []}, "allowed_ids is empty"),
        ({"banned_ids": [-1]}, "banned_ids holds -1"),
        ({"stop_ids": "12"}, "expected a list of token ids"),
        ({"logit_bias": {"x": 1}}, "key 'x'"),
        ({"logit_bias": {3: -math.inf}}, "use banned_ids"),
        ({"logit_bias": [1]}, "expected a map"),
        ({"dry_sequence_breakers": "abc"}, "expected a list of texts"),
        ({"dry_sequence_breakers": [""]}, "non-empty"),
        ({"regex": "a", "grammar": "b"}, "regex and grammar are given"),
    ],
)
def test_a_value_out_of_range_is_an_error_that_says_the_range(values, message):
    with pytest.raises(BadInput, match=message) as error:
        SamplingParams(**values)
    assert "\n" not in str(error.value)


def test_an_unknown_name_is_an_error_that_lists_the_names():
    with pytest.raises(BadInput, match=r"'topk' is not.*did you mean 'top_k'.*min_tokens"):
        SamplingParams.from_dict({"topk": 3})


def test_json_there_and_back():
    params = SamplingParams(
        logit_bias={5: 1.5}, allowed_ids=[1, 2, 1], temperature=0.3, json_schema={"type": "null"}
    )
    assert params.allowed_ids == (1, 2)
    assert SamplingParams.from_dict(json.loads(json.dumps(params.to_dict()))) == params


def test_nothing_runs_by_default_and_every_filter_can_be_switched_on():
    assert SamplingParams().active() == ()
    assert Sampler.from_params(SamplingParams()).order == ()
    fields = {f for spec in FILTERS.values() for f in (*spec.switches, *spec.details)}
    assert set(RANGES) - fields == {"seed", "logprobs"}


def test_ids_outside_the_vocabulary_are_an_error():
    for values in ({"allowed_ids": [9]}, {"banned_ids": [9]}, {"logit_bias": {9: 1.0}}):
        with pytest.raises(BadInput, match="the id 9, but the vocabulary has 5 tokens"):
            Sampler.from_params(SamplingParams(**values), vocab_size=5)
        with pytest.raises(BadInput, match="the id 9, but the vocabulary has 5 tokens"):
            Sampler.from_params(SamplingParams(**values)).probs(torch.zeros(1, 5))


def test_wrong_shapes_are_errors():
    sampler = Sampler.from_params(SamplingParams(), vocab_size=8)
    for z, message in (
        (torch.zeros(8), r"shape \[8\]"),
        (torch.zeros(1, 0), r"shape \[1, 0\]"),
        (torch.zeros(1, 7), "7 columns; expected at least the vocabulary's 8"),
    ):
        with pytest.raises(BadInput, match=message):
            sampler.probs(z)
    with pytest.raises(BadInput, match="1 sequences for 2 rows"):
        sampler.step(torch.zeros(2, 8), [sampler.start()])


@pytest.mark.parametrize("name", RANDOM)
def test_a_control_that_asks_for_randomness_draws(name):
    value = {"top_k": 4, "mirostat": 2, "top_n_sigma": 2.0}.get(name, 0.3)
    params = SamplingParams.asked({name: value, "banned_ids": [3]})
    assert params.temperature == (0.3 if name == "temperature" else 1.0)
    assert not params.greedy
    assert params.random


@pytest.mark.parametrize(
    "controls",
    [
        {},
        {"banned_ids": [3]},
        {"logit_bias": {3: 1.0}},
        {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"dry_multiplier": 0.8, "no_repeat_ngram_size": 2},
        {"regex": "a+"},
        {"json_schema": {}},
        {"seed": 4, "logprobs": 2, "min_tokens": 2, "stop_ids": [1], "allowed_ids": [1]},
        {"top_k": 0, "top_p": 1.0, "mirostat": 0},  # switched off
        {"keep_ties": True, "xtc_threshold": 0.2},  # details of what is not switched on
    ],
)
def test_every_other_control_leaves_the_choice_greedy(controls):
    params = SamplingParams.asked(controls)
    assert params.greedy
    assert not params.random


def test_greedy_needs_no_place_in_an_order():
    params = SamplingParams.asked({"banned_ids": [0]})
    sampler = Sampler.from_params(params, ["banned_ids"])
    assert sampler.order == ("banned_ids", "temperature")
    assert sampler.step(torch.tensor([[9.0, 1.0, 2.0]]), [sampler.start()]).ids.tolist() == [2]
