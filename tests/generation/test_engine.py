"""Requests that join and leave a running batch: each gives what it gives alone.

The oracle is the engine with one request, which test_generate.py compares with transformers.
"""

import gc
import random
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lmhead.body import TorchBody
from lmhead.errors import BadInput
from lmhead.generation import Engine, Event, Generation, Request
from lmhead.head import Head, LMHead
from lmhead.loading import Model, load
from lmhead.sampling import Sampler, SamplingParams

Tiny = Callable[..., PreTrainedModel]

WORDS = ("the", "of", "and", "to", "in", "is", "was", "he", "for", "it", "with", "as", "his", "on")
TINY: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gemma3_text": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "mamba": {},
    "mamba2": {},
    "jamba": {},
    "falcon_h1": {},
    "zamba2": {},
}
CONTROLS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 0.9, "logprobs": 2},
)


def tiny_model(network: PreTrainedModel) -> Model:
    """Put a tiny network and a tokenizer of 99 words together."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(99)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2")
    head = LMHead.from_model(network)
    return Model("tiny", Path(), TorchBody(network), head, tokenizer)


def sampler(model: Model, **controls: Any) -> Sampler:
    params = SamplingParams(**{"temperature": 0.0, **controls})
    params = replace(params, stop_ids=(*model.stop_ids, *params.stop_ids))
    return Sampler.from_params(params, vocab_size=model.reachable, tokenizer=model.tokenizer)


def alone(model: Model, request: Request) -> Generation:
    engine = Engine(model)
    engine.submit(request)
    return next(event.result for event in engine.run() if event.result)


def drawn_requests(
    model: Model, count: int, longest: int, ids: Callable[[random.Random], Sequence[int]]
) -> list[Request]:
    """Make requests with settings, lengths and seeds of their own."""
    rng = random.Random(count)
    return [
        Request(
            ids(rng),
            sampler(model, **rng.choice(CONTROLS), seed=seed),
            max_tokens=rng.randint(2, longest),
        )
        for seed in range(count)
    ]


def run_at_random(engine: Engine, requests: Sequence[Request], seed: int) -> dict[int, Generation]:
    """Submit requests between random steps, and cancel every tenth while it runs."""
    rng = random.Random(seed)
    todo = list(range(len(requests)))
    place: dict[int, int] = {}
    found: dict[int, Generation] = {}
    cancelled: set[int] = set()
    while todo or engine.busy:
        while todo and (rng.random() < 0.4 or not engine.busy):
            i = todo.pop(0)
            place[engine.submit(requests[i])] = i
        for id_, i in place.items():
            if i % 10 == 9 and i not in found and i not in cancelled and rng.random() < 0.3:
                assert engine.cancel(id_)
                cancelled.add(i)
        for event in engine.step():
            assert event.error is None
            if event.result is not None:
                found[place[event.id]] = event.result
    assert not cancelled & set(found)
    assert len(cancelled) + len(found) == len(requests)
    return found


@pytest.mark.parametrize("name", TINY)
def test_forty_requests_give_what_each_gives_alone(name: str, tiny: Tiny) -> None:
    model = tiny_model(tiny(name, **TINY[name]))
    requests = drawn_requests(
        model, 40, 24, lambda rng: [rng.randrange(3, 99) for _ in range(rng.randint(1, 20))]
    )
    expected = [alone(model, request) for request in requests]
    assert len({r.ids for r in expected}) > 30
    engine = Engine(model, batch_size=8)
    found = run_at_random(engine, requests, seed=1)
    assert engine.in_turn is None
    assert len(found) >= 36
    for i, result in found.items():
        assert result.ids == expected[i].ids
        assert result.finish_reason == expected[i].finish_reason


@pytest.mark.model
@pytest.mark.parametrize("folder", ["smollm2", "gemma3"])
def test_forty_requests_on_a_real_model(folder: str, request: pytest.FixtureRequest) -> None:
    """Rounding differs between one row and several; where two tokens score the same to 1e-5, the
    choice may too: about one in 100,000 tokens. There is none among these."""
    model = load(request.getfixturevalue(folder))
    requests = drawn_requests(
        model,
        40,
        14,
        lambda rng: model.encode(" ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 30)))),
    )
    expected = [alone(model, r) for r in requests]
    found = run_at_random(Engine(model, batch_size=8), requests, seed=2)
    assert len(found) >= 36
    for i, result in found.items():
        assert result.ids == expected[i].ids
        assert result.text == expected[i].text


def test_a_model_that_cannot_be_joined_runs_its_requests_in_turn(tiny: Tiny) -> None:
    model = tiny_model(tiny("minimax"))
    requests = drawn_requests(model, 6, 8, lambda rng: [rng.randrange(3, 99) for _ in range(5)])
    expected = [alone(model, request).ids for request in requests]
    engine = Engine(model)
    ids = [engine.submit(request) for request in requests]
    found = {}
    while engine.busy:
        assert engine.running <= 1
        found |= {e.id: e.result.ids for e in engine.step() if e.result}
    assert [found[i] for i in ids] == expected
    assert engine.in_turn is not None
    assert "MiniMaxForCausalLM" in engine.in_turn


def test_events_tell_everything(tiny: Tiny) -> None:
    model = tiny_model(tiny("gpt2"))
    engine = Engine(model)
    id_ = engine.submit(
        Request([5, 6, 7], sampler(model, logprobs=1), max_tokens=5, prompt="w5 w6 w7")
    )
    reported = list(engine.run())
    result = reported[-1].result
    assert result is not None
    assert [event.id for event in reported] == [id_] * len(reported)
    assert tuple(event.token for event in reported) == result.ids
    assert "".join(event.text for event in reported) == result.text
    assert tuple(event.logprobs for event in reported) == result.logprobs
    assert (result.prompt, result.prompt_ids) == ("w5 w6 w7", (5, 6, 7))
    assert engine.step() == []


def test_those_who_wait_come_in_order(tiny: Tiny) -> None:
    model = tiny_model(tiny("gpt2"))
    engine = Engine(model, batch_size=2)
    ids = [engine.submit(Request([5 + i], sampler(model), max_tokens=3)) for i in range(5)]
    seen: list[int] = []
    while engine.busy:
        events = engine.step()
        assert len(events) <= 2
        seen += [event.id for event in events if event.id not in seen]
    assert seen == ids


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(o), Tensor) for o in gc.get_objects())


@pytest.mark.parametrize("name", ["gpt2", "gemma3_text", "jamba"])
def test_a_cancelled_request_leaves_no_memory_behind(name: str, tiny: Tiny) -> None:
    model = tiny_model(tiny(name, **TINY[name]))
    engine = Engine(model)
    stays = engine.submit(Request([5, 6], sampler(model, stop_ids=()), max_tokens=40))
    for _ in range(2):
        engine.step()
    memory = engine._memory
    assert memory is not None
    before, size = live_tensors(), sum(t.numel() for t in memory.tensors())
    for _ in range(3):
        goes = engine.submit(Request(list(range(3, 33)), sampler(model), max_tokens=40))
        engine.step()
        watched = weakref.ref(engine._going[1])
        assert sum(t.numel() for t in memory.tensors()) > 2 * size
        assert engine.cancel(goes)
        assert not engine.cancel(goes)
        assert watched() is None
    grown = sum(t.numel() for t in memory.tensors())
    assert grown <= 3 * size  # its own three tokens, nothing of the others' thirty
    assert live_tensors() == before
    assert engine.cancel(stays)
    assert engine._memory is None
    assert not engine.busy


def test_a_waiting_request_is_cancelled(tiny: Tiny) -> None:
    model = tiny_model(tiny("gpt2"))
    engine = Engine(model, batch_size=1)
    first, second = (engine.submit(Request([5, 6], sampler(model))) for _ in range(2))
    engine.step()
    assert engine.cancel(second)
    assert {event.id for event in engine.run()} == {first}


def test_one_request_that_cannot_go_on_does_not_end_the_others(tiny: Tiny) -> None:
    model = tiny_model(tiny("gpt2"))
    request = Request([5, 6, 7], sampler(model, temperature=0.7, seed=3), max_tokens=9)
    # the only id that is allowed is also banned; equal settings, so all three are asked together
    stuck = sampler(model, temperature=0.7, seed=3, no_repeat_ngram_size=1, allowed_ids=(5,))
    engine = Engine(model)
    good = engine.submit(request)
    bad = engine.submit(Request([5], stuck, max_tokens=9))
    free = engine.submit(Request([9], stuck, max_tokens=1))
    reported = list(engine.run())
    errors = [event for event in reported if event.error is not None]
    assert [event.id for event in errors] == [bad]
    assert isinstance(errors[0].error, BadInput)
    results = {event.id: event.result for event in reported if event.result}
    assert results[good] == alone(model, request)
    assert results[free].ids == (5,)


class Counting:
    """A head that counts how often it is asked for all logits."""

    def __init__(self, head: LMHead) -> None:
        self.head, self.rows = head, list[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.head, name)

    def __call__(self, h: Tensor) -> Tensor:
        self.rows.append(len(h))
        return self.head(h)

    def topk(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError


def test_requests_that_are_sampled_alike_are_asked_together(tiny: Tiny) -> None:
    """Equal settings need not be one object, and seeds may differ."""
    model = tiny_model(tiny("gpt2"))
    head = Counting(model.head)
    engine = Engine(model, head)  # type: ignore[arg-type]
    for seed in range(4):
        engine.submit(
            Request([5, 6, seed + 7], sampler(model, min_p=0.1, temperature=1, seed=seed))
        )
    engine.step()
    assert head.rows == [4]


def test_a_prompt_that_occurs_twice_is_read_once(tiny: Tiny) -> None:
    network = tiny("gpt2")
    model = tiny_model(network)
    draws = sampler(model, temperature=1.0, seed=5)
    requests = [Request([5, 6, 7], draws, max_tokens=9, index=i) for i in range(3)]
    expected = [alone(model, request).ids for request in requests]
    assert len(set(expected)) == 3
    engine = Engine(model)
    assert engine.in_turn is None
    shapes: list[tuple[int, ...]] = []
    network.register_forward_pre_hook(
        lambda _m, _a, given: shapes.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    ids = [engine.submit(request) for request in requests]
    found = {event.id: event.result.ids for event in engine.run() if event.result}
    assert [found[i] for i in ids] == expected
    assert shapes[:2] == [(1, 3), (3, 1)]


@dataclass(frozen=True)
class Added:
    """Steering that adds at a block, or both rows of which are averaged at the end."""

    added: Mapping[int | str, Tensor]
    mixed: bool = False

    @property
    def rows(self) -> tuple[Mapping[int | str, Tensor] | None, ...]:
        return (None, self.added) if self.mixed else (self.added,)

    @property
    def law(self) -> object:
        return self

    def answer(self, head: Head, h: Tensor, alike: Sequence[Any]) -> Tensor | None:
        assert all(one is self for one in alike)
        assert len(alike) == len(h)
        return head(h).float().mean(1) if self.mixed else None


def test_every_request_has_its_own_steering(tiny: Tiny) -> None:
    model = tiny_model(tiny("llama"))
    draw = torch.Generator().manual_seed(0)
    vectors = [3 * torch.randn(model.head.hidden_size, generator=draw) for _ in range(3)]
    ways: list[Any] = [None, Added({0: vectors[0]}), Added({"head": vectors[1]})]
    ways += [Added({1: vectors[2]}, mixed=True), Added({0: vectors[0]}, mixed=True)]
    rng = random.Random(0)
    requests = [
        replace(request, steering=ways[i % 5])
        for i, request in enumerate(
            drawn_requests(
                model, 30, 16, lambda rng: [rng.randrange(3, 99) for _ in range(rng.randint(1, 9))]
            )
        )
    ]
    expected = [alone(model, request) for request in requests]
    assert any(
        alone(model, replace(r, steering=None)).ids != e.ids
        for r, e in zip(requests, expected, strict=True)
    )
    found = run_at_random(Engine(model), requests, seed=rng.randrange(9))
    for i, result in found.items():
        assert result.ids == expected[i].ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"stop": ("",)}, "empty text"),
        ({"ids": []}, "no token"),
        ({"ids": [1] * 70}, "reads at most 64"),
    ],
)
def test_wrong_requests_are_refused_when_submitted(
    change: dict[str, Any], message: str, tiny: Tiny
) -> None:
    model = tiny_model(tiny("llama"))
    engine = Engine(model)
    with pytest.raises(BadInput, match=message):
        engine.submit(replace(Request([5], sampler(model)), **change))
    assert not engine.busy


def test_a_model_that_fails_loses_its_batch_and_nothing_else(tiny: Tiny) -> None:
    network = tiny("gpt2")
    model = tiny_model(network)
    engine = Engine(model, batch_size=1)
    for _ in range(2):
        engine.submit(Request([5, 6], sampler(model), max_tokens=3))
    handle = network.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    handle.remove()
    assert (engine.running, engine.waiting) == (0, 1)
    reported: list[Event] = list(engine.run())
    assert reported[-1].result == alone(model, Request([5, 6], sampler(model), max_tokens=3))


def test_requests_that_are_sampled_differently_read_the_weight_once(tiny: Tiny) -> None:
    model = tiny_model(tiny("gpt2"))
    head = Counting(model.head)
    requests = drawn_requests(model, 8, 6, lambda rng: [rng.randrange(3, 99) for _ in range(4)])
    expected = [alone(model, request).ids for request in requests]
    engine = Engine(model, head)  # type: ignore[arg-type]
    ids = [engine.submit(request) for request in requests]
    engine.step()
    assert len({id(s.sampler) for s in engine._going}) > 1
    assert head.rows == [8]
    engine = Engine(model)
    ids = [engine.submit(request) for request in requests]
    found = {event.id: event.result.ids for event in engine.run() if event.result}
    assert [found[i] for i in ids] == expected


def test_a_caller_chooses_in_place_of_the_samplers(tiny: Tiny) -> None:
    model = tiny_model(tiny("gpt2"))
    asked: list[list[int]] = []

    def choose(h: Tensor, ids: Sequence[int]) -> list[int]:
        assert h.shape == (len(ids), model.head.hidden_size)
        asked.append(list(ids))
        return [-1 if i == 1 and len(asked) == 3 else 50 + i for i in ids]

    engine = Engine(model, choose=choose)
    for _ in range(2):
        engine.submit(Request([5, 6], sampler(model), max_tokens=4))
    found = {event.id: event.result for event in engine.run() if event.result}
    assert asked == [[0, 1], [0, 1], [0, 1], [0]]
    assert (found[0].ids, found[0].finish_reason) == ((50,) * 4, "length")
    assert (found[1].ids, found[1].finish_reason) == ((51,) * 2, "stop")
