"""Mistakes that samplers are known for, each with a test that fails when it is made here."""

import json
from itertools import pairwise

import pytest
import torch

from lmhead.sampling import NothingLeft, Sampler, SamplingParams


def sampler(order="hf", vocab_size=None, **params) -> Sampler:
    return Sampler.from_params(SamplingParams(**params), order, vocab_size=vocab_size)


def kept(z: list[float], **params) -> list[int]:
    p = sampler(**params).probs(torch.tensor([z]))
    return p[0].nonzero().squeeze(-1).tolist()


def test_trap_top_k_keeps_every_tie():
    z = [5.0, 4.0, 4.0, 4.0, 1.0]
    assert kept(z, top_k=2) == [0, 1]
    assert kept(z, top_k=2, keep_ties=True) == [0, 1, 2, 3]


@pytest.mark.parametrize("k", [0, 5, 6, 10**9])
def test_trap_top_k_of_none_all_or_more_than_all(k):
    assert kept([1.0, 2.0, 3.0, 4.0, 5.0], top_k=k) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("p", [0.0, 1e-30, 1e-17, 1e-9])
def test_trap_top_p_so_small_that_one_minus_p_is_one_keeps_the_best_token(p):
    assert 1 - p == 1 or p == 1e-9
    assert kept([1.0, 3.0, 2.0], top_p=p) == [1]


def test_trap_the_token_that_crosses_p_is_kept():
    z = torch.tensor([0.5, 0.3, 0.2]).log().tolist()
    assert kept(z, top_p=0.6) == [0, 1]
    assert kept(z, top_p=0.49) == [0]


def test_trap_everything_masked_is_an_error_that_names_the_filters():
    z = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    s = sampler(allowed_ids=[3, 4], banned_ids=[3, 4], top_k=5)
    with pytest.raises(NothingLeft, match=r"row 0.*banned_ids 48, allowed_ids 0"):
        s.step(z, [s.start(), s.start()])
    with pytest.raises(NothingLeft, match=r"banned_ids 48, allowed_ids 0"):
        s.trace(z)


def test_trap_everything_masked_in_one_row_of_a_batch_names_that_row():
    z = torch.zeros(2, 4)
    z[1] = torch.tensor([-torch.inf, -torch.inf, 0.0, -torch.inf])
    s = sampler("vllm", banned_ids=[2])
    with pytest.raises(NothingLeft, match=r"row 1; .* logits 1, banned_ids 0"):
        s.step(z, [s.start(), s.start()])


def test_trap_logits_that_are_all_minus_infinity_never_give_token_0():
    with pytest.raises(NothingLeft, match="row 0: its logits are all -inf"):
        sampler().probs(torch.full((1, 9), -torch.inf))


def test_trap_min_tokens_that_forbids_the_only_allowed_token_is_an_error():
    s = sampler(min_tokens=3, stop_ids=[1], allowed_ids=[1])
    with pytest.raises(NothingLeft, match=r"min_tokens 3, allowed_ids 0"):
        s.step(torch.zeros(1, 4), [s.start()])


@pytest.mark.parametrize("order", ["hf", "vllm", "llama.cpp"])
def test_trap_temperature_zero_is_greedy_in_every_order(order):
    z = torch.randn(4, 1000, generator=torch.Generator().manual_seed(1))
    z[0, 7] = z[0, 900] = 50.0  # equals: the lower id
    s = sampler(order, temperature=0, top_k=40, top_p=0.9)
    drawn = s.step(z, [s.start() for _ in range(4)]).ids
    assert drawn.tolist() == [7, *z[1:].argmax(-1).tolist()]


def test_trap_greedy_draws_no_random_number():
    s = sampler(temperature=0, seed=3)
    seq = s.start()
    s.step(torch.randn(1, 9, generator=torch.Generator().manual_seed(0)), [seq])
    assert seq.uniform() == s.start().uniform()


@pytest.mark.parametrize("order", ["hf", "vllm", "llama.cpp"])
def test_trap_a_seed_gives_the_same_ids_whatever_else_is_in_the_batch(order):
    g = torch.Generator().manual_seed(2)
    z = torch.randn(30, 8, 3000, generator=g) * 2  # 30 steps of a batch of 8
    params = {
        "temperature": 0.9,
        "top_p": 0.95,
        "xtc_probability": 0.5,
        "mirostat": 2,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "no_repeat_ngram_size": 2,
    }
    s = sampler(order, **params)
    batch = [s.start([1, 2, row], seed=100 + row) for row in range(8)]
    for step in z:
        s.step(step, batch)
    for row in (0, 5):
        alone = s.start([1, 2, row], seed=100 + row)
        for step in z:
            s.step(step[row : row + 1], [alone])
        assert alone.output_ids == batch[row].output_ids
        assert alone.mu == pytest.approx(batch[row].mu, abs=1e-9)


def test_trap_sequences_of_one_seed_differ_and_do_not_repeat_the_next_seed():
    s = sampler()
    first = [s.start(seed=7, index=i).uniform() for i in range(50)]
    second = [s.start(seed=8, index=i).uniform() for i in range(50)]
    assert len({*first, *second}) == 100
    assert first == [s.start(seed=7, index=i).uniform() for i in range(50)]


@pytest.mark.parametrize("params", [{}, {"top_k": 3}, {"temperature": 0.0}, {"top_p": 0.5}])
def test_trap_padding_rows_of_the_head_are_never_drawn(params):
    z = torch.zeros(64, 16)
    z[:, 10:] = 30.0  # padding scores highest
    s = sampler(vocab_size=10, seed=0, **params)
    drawn = s.step(z, [s.start(index=i) for i in range(64)]).ids
    assert int(drawn.max()) < 10
    assert s.probs(z)[:, 10:].sum() == 0


def test_trap_padding_is_not_part_of_the_distribution():
    z = torch.tensor([[0.0, 0.0, 5.0]])
    assert sampler(vocab_size=2, top_p=0.4).probs(z).tolist() == [[1.0, 0.0, 0.0]]
    step = sampler(vocab_size=2).trace(z)[0].steps[1]
    assert (step.name, step.left) == ("padding", 2)
    assert step.cut == pytest.approx(0.9867, abs=1e-4)


def test_trap_minus_infinity_is_not_json():
    z = torch.randn(1, 500, generator=torch.Generator().manual_seed(4))
    z[0, 5:] = -torch.inf
    for mode in ("raw", "processed"):
        s = sampler(logprobs=20, logprobs_mode=mode, top_k=3, temperature=0.5, banned_ids=[1])
        report = s.step(z, [s.start(seed=1)]).logprobs[0]
        json.dumps(report._asdict(), allow_nan=False)
        assert len(report.top) == (5 if mode == "raw" else 3)
    json.dumps([t.to_dict() for t in s.trace(z)], allow_nan=False)
    json.dumps(s.params.to_dict(), allow_nan=False)


def test_trap_top_logprobs_are_keyed_by_id():
    z = torch.randn(3, 500, generator=torch.Generator().manual_seed(4))
    s = sampler(logprobs=5, seed=0)
    logp = z.double().log_softmax(-1)
    drawn = s.step(z, [s.start(index=i) for i in range(3)])
    for row, report in enumerate(drawn.logprobs):
        assert list(report.top) == z[row].topk(5).indices.tolist()
        assert report.id == drawn.ids[row]
        assert report.logprob == pytest.approx(float(logp[row, report.id]), abs=1e-6)
        for i, value in report.top.items():
            assert value == pytest.approx(float(logp[row, i]), abs=1e-6)


def test_trap_the_greedy_tokens_logprob_equals_its_top_entry_to_the_bit():
    z = torch.randn(50, 50_257, generator=torch.Generator().manual_seed(5))
    s = sampler(temperature=0, logprobs=1)
    for report in s.step(z, [s.start() for _ in range(50)]).logprobs:
        assert report.logprob == max(report.top.values())


def test_trap_raw_logprobs_do_not_see_the_filters_and_processed_ones_do():
    z = torch.tensor([[2.0, 1.0, 0.0]])
    raw = sampler(temperature=0.5, top_k=1, logprobs=3)
    processed = sampler(temperature=0.5, top_k=1, logprobs=3, logprobs_mode="processed")
    assert raw.step(z, [raw.start()]).logprobs[0].logprob == pytest.approx(-0.4076, abs=1e-4)
    assert processed.step(z, [processed.start()]).logprobs[0] == (0, 0.0, {0: 0.0})


def logits_after(s: Sampler, z: torch.Tensor, prompt, output) -> list[float]:
    seq = s.start(prompt)
    for token in output:
        seq.accept(token)
    return s.process(z, [seq]).z[0].tolist()


def test_trap_presence_and_frequency_count_the_output_only():
    z = torch.tensor([[1.0, 1.0, 1.0, 1.0]])
    prompt, output = [0, 0, 1], [1, 2, 2]
    assert logits_after(sampler(presence_penalty=0.5), z, prompt, output) == [1, 0.5, 0.5, 1]
    assert logits_after(sampler(frequency_penalty=0.25), z, prompt, output) == [1, 0.75, 0.5, 1]


def test_trap_repetition_counts_prompt_and_output_and_moves_negative_logits_down():
    z = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    assert logits_after(sampler(repetition_penalty=2.0), z, [0, 1], [2]) == [0.5, -2.0, 0.5, -1.0]


def test_trap_the_window_counts_the_last_tokens_of_prompt_and_output_for_all_penalties():
    z = torch.tensor([[1.0, 1.0, 1.0, 1.0]])
    prompt, output = [0, 1, 1], [2]
    window = {"penalty_last_n": 3}
    assert logits_after(sampler(frequency_penalty=0.25, **window), z, prompt, output) == [
        1.0,
        0.5,
        0.75,
        1.0,
    ]
    assert logits_after(sampler(repetition_penalty=2.0, **window), z, prompt, output) == [
        1.0,
        0.5,
        0.5,
        1.0,
    ]
    everything = sampler(presence_penalty=0.5, penalty_last_n=-1)
    assert logits_after(everything, z, prompt, output) == [0.5, 0.5, 0.5, 1.0]
    nothing = sampler(presence_penalty=0.5, penalty_last_n=0)
    assert logits_after(nothing, z, prompt, output) == [1.0] * 4


@pytest.mark.parametrize(
    ("params", "most"),
    [
        ({"top_k": 50}, 50),
        ({"top_p": 0.9}, 20_000),
        ({"min_p": 0.1}, 100),
        ({"typical_p": 0.5}, 100_000),
        ({"epsilon_cutoff": 1e-4}, 10_000),
        ({"eta_cutoff": 1e-2}, 100_000),
        ({"top_n_sigma": 1.0}, 1_000),
        ({"xtc_probability": 1.0, "xtc_threshold": 1e-3}, 262_143),
        ({"mirostat": 2, "mirostat_tau": 3.0}, 100),
        ({"allowed_ids": [5, 262_143]}, 2),
        ({"banned_ids": [262_143]}, 262_143),
        ({"no_repeat_ngram_size": 1}, 262_143),
        ({"min_tokens": 1, "stop_ids": [262_143]}, 262_143),
    ],
)
def test_trap_no_filter_silently_does_nothing_at_262144(params, most):
    z = torch.randn(1, 262_144, generator=torch.Generator().manual_seed(6)) * 3
    s = sampler(**params)
    assert 1 <= int(s.process(z, [s.start([262_143])]).left()) <= most


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.5},
        {"logit_bias": {262_143: -1.0}},
        {"dry_multiplier": 1.0, "dry_allowed_length": 1, "dry_sequence_breakers": []},
    ],
)
def test_trap_no_penalty_silently_does_nothing_at_262144(params):
    z = torch.ones(1, 262_144)
    s = sampler(**params)
    seq = s.start([9, 262_143, 9])
    assert float(s.process(z, [seq]).z[0, 262_143]) < 1.0


def test_trap_filters_do_not_change_the_callers_logits():
    z = torch.randn(2, 3000, generator=torch.Generator().manual_seed(7))
    before = z.clone()
    everything = {
        "temperature": 0.5,
        "dynatemp_range": 0.3,
        "top_k": 2900,
        "top_p": 0.99,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.1,
        "logit_bias": {4: 3.0},
        "banned_ids": [8],
        "min_tokens": 2,
        "stop_ids": [1],
        "typical_p": 0.95,
    }
    s = sampler(vocab_size=2990, logprobs=3, **everything)
    seqs = [s.start([1, 2, 3]), s.start([4])]
    s.step(z, seqs)
    s.trace(z, seqs)
    assert torch.equal(z, before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_trap_broken_logits_are_an_error_not_a_draw(bad):
    z = torch.zeros(2, 5)
    z[1, 3] = bad
    with pytest.raises(ValueError, match="row 1 hold NaN or"):
        sampler().probs(z)


def test_trap_a_token_of_probability_zero_is_never_drawn():
    z = torch.full((1, 4), -torch.inf)
    z[0, 1], z[0, 2] = 0.0, -200.0  # exp(-200) is 0 in float32
    s = sampler(seed=0)
    seq = s.start()
    for _ in range(200):
        s.step(z, [seq])
    assert set(seq.output_ids) == {1}


def test_trap_mirostat_steers_the_surprise_to_its_target():
    z = torch.randn(1, 20_000, generator=torch.Generator().manual_seed(8)) * 2
    surprises = {}
    for tau in (2.0, 5.0):
        s = sampler(mirostat=2, mirostat_tau=tau, logprobs=0, logprobs_mode="processed", seed=1)
        seq = s.start()
        assert seq.mu == 2 * tau
        bits = [-s.step(z, [seq]).logprobs[0].logprob / 0.6931 for _ in range(600)]
        surprises[tau] = sum(bits[200:]) / 400
    assert surprises[2.0] == pytest.approx(2.0, abs=0.3)
    assert surprises[5.0] == pytest.approx(5.0, abs=0.3)
    assert all(a < b for a, b in pairwise(surprises.values()))
