"""Observing a model: its choices, its probability, and the honest interval."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import binomtest

import lmhead.trim.observing as observing_module
from lmhead.loading import Model, load
from lmhead.trim.coverage import Observed, covering, estimate
from lmhead.trim.estimate import News, binomial_interval
from lmhead.trim.observing import (
    AT_LEAST,
    Group,
    best_by_screen,
    continue_greedily,
    observe_continuations,
    observe_texts,
)
from lmhead.trim.sample import cut_prompts


@pytest.fixture(scope="module")
def model(make_model: Callable[..., Path]) -> Model:
    return load(make_model("byte_level", "llama"))


def observed(masses: list[float], chosen: list[int], positions: int = 10) -> Observed:
    mask = torch.zeros(len(masses), dtype=torch.bool)
    mask[chosen] = True
    return Observed(torch.tensor(masses, dtype=torch.float64), mask, mask.long(), positions)


def test_observing_is_the_softmax_of_every_position(model: Model) -> None:
    ids = list(range(300, 900))  # more than one window
    seen, _ = observe_texts(model, [ids])
    p = []
    for at in (0, 256, 512):
        z = model.body.model(torch.tensor([ids[at : at + 256]])).logits[0, :, : model.reachable]
        p.append(torch.softmax(z.detach(), -1))
    p_all = torch.cat(p)
    assert seen.positions == 600
    torch.testing.assert_close(seen.mass.float(), p_all.sum(0), rtol=1e-4, atol=1e-6)
    choices = torch.bincount(p_all.argmax(-1), minlength=model.reachable)
    assert torch.equal(seen.choices, choices)
    assert seen.chosen[choices > 0].all()


def test_greedy_continuations_are_those_of_transformers(model: Model) -> None:
    prompts = [list(range(n, n + length)) for n, length in ((300, 4), (500, 8), (700, 4))]
    [said] = observe_continuations(model, Group(prompts, states=2), max_tokens=12)
    seen, found = said.seen, said.texts
    # every position of the prompts, and every step
    assert seen.positions == sum(len(p) - 1 for p in prompts) + sum(map(len, found))
    assert [state.shape[0] for state in said.states] == [len(text) for text in found[:2]]
    for text, states in zip(found, said.states, strict=False):
        choices = model.head(states)[:, : model.reachable].argmax(-1).tolist()
        assert choices == text
    for prompt, text in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt])
        made = model.body.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
        )[0, len(prompt) :].tolist()
        assert text == made
        assert seen.chosen[text].all()
    assert found == continue_greedily(model, prompts, 12)


@pytest.mark.parametrize("large", [2**26, 0])  # by the product, and by the screen
def test_groups_run_together_and_only_some_choose_rows(
    model: Model, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observing_module, "LARGE", large)
    assert (best_by_screen(model) is None) == (large > 0)
    prompts = [list(range(n, n + length)) for n, length in ((300, 4), (500, 8), (700, 4))]
    [first] = observe_continuations(model, Group(prompts[:1]), max_tokens=9)
    [second] = observe_continuations(model, Group(prompts[1:]), max_tokens=9)
    groups = Group(prompts[:1]), Group(prompts[1:], whole=False, states=1)
    a, b = observe_continuations(model, *groups, max_tokens=9)
    assert (a.texts, b.texts) == (first.texts, second.texts)
    torch.testing.assert_close(a.seen.mass, first.seen.mass, rtol=1e-4, atol=1e-6)
    assert torch.equal(b.seen.choices, second.seen.choices)
    assert torch.equal(b.seen.chosen, b.seen.choices > 0)
    assert not b.seen.mass.any()
    assert (b.seen.positions, len(b.states)) == (second.seen.positions, 1)
    uncounted = Group(prompts[1:], whole=False, counted=False)
    _, c = observe_continuations(model, groups[0], uncounted, max_tokens=9)
    assert c.texts == b.texts
    assert c.seen.positions == sum(map(len, c.texts))


def test_the_screen_leaves_what_is_nearly_a_tie_to_the_head(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observing_module, "LARGE", 0)
    best = best_by_screen(model)
    assert best is not None
    h, _ = model.body(torch.arange(300, 420).view(4, 30))
    h = h.reshape(-1, h.shape[-1]).detach()
    z = observing_module.logits(model.head, h)[:, : model.reachable].detach()
    assert torch.equal(best(h), z.argmax(-1))
    asked: list[int] = []

    def noting(head: Any, h: torch.Tensor) -> torch.Tensor:
        asked.append(len(h))
        return head(h)  # type: ignore[no-any-return]

    monkeypatch.setattr(observing_module, "logits", noting)
    two = z.topk(2).values
    leads = two[:, 0] - two[:, 1]
    middle = float(leads.sort().values[60:62].mean())  # between two of them
    monkeypatch.setattr(observing_module, "NEAR_TIE", middle)
    assert torch.equal(best(h), z.argmax(-1))
    assert asked == [61]


def test_a_continuation_stops_at_the_end_token(model: Model) -> None:
    prompts = [[300, 301], [400, 401], [500, 501]]
    free = continue_greedily(model, prompts, 10)
    end = free[1][3]
    config = model.body.model.generation_config
    before = config.eos_token_id
    config.eos_token_id = [end, 0]
    try:
        stopped = continue_greedily(model, prompts, 10)
    finally:
        config.eos_token_id = before
    for whole, text in zip(free, stopped, strict=True):
        assert text == (whole[: whole.index(end) + 1] if end in whole else whole)


def test_prompts_leave_something_to_say() -> None:
    texts = [list(range(n)) for n in (0, 1, 2, 5, 33, 200)]
    assert [len(p) for p in cut_prompts(texts)] == [1, 1, 4, 32, 32]


def test_covering_adds_choices_then_the_likeliest() -> None:
    seen = observed([50.0, 30.0, 10.0, 6.0, 3.0, 1.0, 0.0], chosen=[5])
    assert covering(seen, {0, 1}, 0.0) == {5}
    assert covering(seen, {0, 1}, 0.9) == {5, 2}
    assert covering(seen, {0, 1}, 0.97) == {5, 2, 3}
    assert covering(seen, {0, 1}, 1.0) == {5, 2, 3, 4}  # never what no one would say
    assert covering(seen, {0, 1, 2, 3, 4, 5, 6, 99}, 1.0) == set()
    for share in (0.85, 0.95, 0.999):
        kept = {0, 1} | covering(seen, {0, 1}, share)
        assert seen.share(kept) >= share


@pytest.mark.parametrize(("hits", "trials"), [(0, 50), (1, 50), (7, 50), (50, 50), (3, 4000)])
def test_the_interval_is_clopper_and_pearson(hits: int, trials: int) -> None:
    found = binomial_interval(hits, trials)
    wanted = binomtest(hits, trials).proportion_ci(0.95, method="exact")
    assert found == pytest.approx((wanted.low, wanted.high), abs=1e-9)


def test_the_estimate_counts_steps_and_texts() -> None:
    seen = observed([1.0] * 6, chosen=[1, 4])
    found = estimate(seen, [[1, 2], [2, 4], [4, 4]], {1, 2}, 2)
    assert (found.texts, found.texts_left) == (3, 2)
    assert (found.steps, found.steps_left) == (10, 1)
    assert found.low < 2 / 3 < found.high


def test_batches_of_texts_are_heard_as_one_by_one(model: Model) -> None:
    rng = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 300, (40,), generator=rng).tolist()
    texts = [torch.randint(300, 2000, (n,), generator=rng).tolist() for n in lengths]
    together, _ = observe_texts(model, texts)
    alone = [observe_texts(model, [text])[0] for text in texts]
    mass = sum((seen.mass for seen in alone[1:]), alone[0].mass)
    torch.testing.assert_close(together.mass, mass, rtol=1e-4, atol=1e-6)
    assert together.positions == sum(lengths)
    choices = sum((seen.choices for seen in alone[1:]), alone[0].choices)
    assert int((together.choices - choices).abs().sum()) <= 4  # a tie may fall otherwise


def test_reading_stops_when_it_is_known_how_much_is_new(model: Model) -> None:
    texts = [[400 + i % 7, *range(500, 530)] for i in range(1000)]
    before, _ = observe_texts(model, texts[:7])
    seen, news = observe_texts(model, texts, before=before, stop=True)  # the same few choices
    assert AT_LEAST <= seen.positions < 10_000
    assert news.is_known
    whole, _ = observe_texts(model, texts[:200], stop=False)
    assert whole.positions == 200 * 31


def test_news_have_an_interval_over_texts() -> None:
    found = News.of([(100, 1)] * 5 + [(100, 3)] * 5)
    assert (found.rate, found.positions) == (0.02, 1000)
    wide = 1.96 * (10 * 10 / 9) ** 0.5 / 1000
    assert (found.low, found.high) == pytest.approx((0.02 - wide, 0.02 + wide))
    none = News.of([(100, 0)] * 10)
    assert (none.rate, none.low, none.high) == (0, 0, 0.003)
    # Ten steps of one text tell less than ten of ten.
    assert News.of([(100, 0)] * 19 + [(100, 10)]).high > News.of([(100, 1)] * 20).high
    assert News.of([]).high == News.of([(500, 3)]).high == 1


def test_a_lot_is_judged_by_what_would_be_kept_without_it(model: Model) -> None:
    texts = [[400 + i % 7, *range(500, 530)] for i in range(200)]
    first, news = observe_texts(model, texts)
    assert 0 < news.rate < 0.5  # the first lot knows nothing, the others the same few choices
    _, again = observe_texts(model, texts, before=first)
    assert again.rate == 0
    everything = range(model.reachable)
    assert observe_texts(model, texts, known=everything)[1].rate == 0
