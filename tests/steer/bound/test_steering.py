"""Steered models: the vector is there at every position, on every engine and in every family."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lmhead.errors import BadInput, UnsupportedModel
from lmhead.generation import generate, next_tokens
from lmhead.head.screened import ScreenedHead
from lmhead.loading import Model
from lmhead.steer import HEAD, Card, SteeringVector, SteeringWarning, certify, steer_model
from lmhead.steer.bound.steering import SteeredBody

Tiny = Callable[[str], Model]
FAMILIES = ("llama", "gpt2", "gemma3")
PROMPTS = ["a", "the cat", "some longer words"]


def vector(layer: int | str, alpha: float = 2.0, **card: Any) -> SteeringVector:
    direction = torch.randn(24, generator=torch.Generator().manual_seed(1))
    return SteeringVector(direction, layer, alpha, Card(**card))


def by_hand(model: Model, ids: list[int], layer: int | str, added: torch.Tensor) -> torch.Tensor:
    """The logits `[T, V]` of a steered model by a hook of our own, without a cache."""
    blocks = next(
        m for m in model.body.model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 3
    )
    module = model.body.model.get_output_embeddings() if layer == HEAD else blocks[int(layer)]

    def before(_m: Any, args: Any) -> Any:
        return (args[0] + added, *args[1:])

    def after(_m: Any, _args: Any, out: Any) -> Any:
        return (out[0] + added, *out[1:]) if isinstance(out, tuple) else out + added

    hook = (
        module.register_forward_pre_hook(before)
        if layer == HEAD
        else module.register_forward_hook(after)
    )
    try:
        with torch.no_grad():
            return model.body.model(torch.tensor([ids]), use_cache=False).logits[0]
    finally:
        hook.remove()


def greedy(model: Model, prompt: str, layer: int | str, added: torch.Tensor, n: int) -> list[int]:
    ids, out = model.encode(prompt), []
    for _ in range(n):
        z = by_hand(model, [*ids, *out], layer, added)[-1, : model.reachable]
        out.append(int(z.argmax()))
        if out[-1] in model.stop_ids:
            break
    return out


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layer", [0, 1, 2, HEAD])
def test_the_logits_are_those_of_a_hook_by_hand(tiny: Tiny, family: str, layer: int | str) -> None:
    model, v = tiny(family), vector(layer)
    ids = model.encode("the cat sat")
    steered = steer_model(model, v)
    with torch.no_grad():
        h, _ = steered.body(torch.tensor([ids]), use_cache=False)
        plain, _ = model.body(torch.tensor([ids]), use_cache=False)
    expected = by_hand(model, ids, layer, v.added)
    assert torch.allclose(steered.head(h[0]), expected, atol=1e-5)
    assert ((h - plain)[0].abs().amax(-1) > 1e-3).all()  # the first position, too


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layer", [1, HEAD])
def test_a_padded_batch_with_a_cache_says_the_same(
    tiny: Tiny, family: str, layer: int | str
) -> None:
    model, v = tiny(family), vector(layer)
    together = generate(PROMPTS, steer_model(model, v), max_tokens=8, batch_size=3)
    plain = generate(PROMPTS, model, max_tokens=8, batch_size=3)
    for prompt, result in zip(PROMPTS, together, strict=True):
        assert list(result.ids) == greedy(model, prompt, layer, v.added, 8)
    assert [r.ids for r in together] != [r.ids for r in plain]


@pytest.mark.parametrize("family", FAMILIES)
def test_beams_and_samples_run(tiny: Tiny, family: str) -> None:
    steered = steer_model(tiny(family), [vector(0), vector(HEAD), vector(0, alpha=0.1)])
    (best,) = generate("the cat", steered, beams=3, max_tokens=6)
    assert 0 < len(best.ids) <= 6
    one, two = (
        generate("the cat", steered, temperature=1.0, seed=3, max_tokens=6, samples=2)
        for _ in range(2)
    )
    assert [r.ids for r in one] == [r.ids for r in two]


def test_the_screened_engine_takes_steered_states(tiny: Tiny) -> None:
    model = tiny("llama")
    screened = ScreenedHead.from_head(model.head, kernels="torch")
    for layer in (1, HEAD):
        steered = steer_model(model, vector(layer))
        dense = generate(PROMPTS, steered, max_tokens=6)
        assert [r.ids for r in generate(PROMPTS, steered, max_tokens=6, head=screened)] == [
            r.ids for r in dense
        ]
    assert screened.stats.states > 0


def test_steering_twice_adds_both(tiny: Tiny) -> None:
    model, v, w = tiny("llama"), vector(1), vector(HEAD, alpha=0.7)
    ids = torch.tensor([model.encode("the cat")])
    with torch.no_grad():
        nested, _ = steer_model(steer_model(model, v), w).body(ids, use_cache=False)
        together, _ = steer_model(model, [v, w]).body(ids, use_cache=False)
    assert torch.equal(nested, together)


def test_next_tokens_of_a_steered_model(tiny: Tiny) -> None:
    model, v = tiny("llama"), vector(HEAD)
    ids = model.encode("the cat")
    z = by_hand(model, ids, HEAD, v.added)[-1, : model.reachable]
    reported = next_tokens("the cat", steer_model(model, v), top=1).tokens[0]
    assert reported.id == int(z.argmax())


@pytest.mark.parametrize("budget", [0.01, 2.0])
def test_a_budget_at_the_head_is_kept(tiny: Tiny, budget: float) -> None:
    model = tiny("llama")
    several = [vector(HEAD, 9.0), vector(HEAD, 1.3)]
    body = steer_model(model, several, budget=budget).body
    assert isinstance(body, SteeredBody)
    r = certify(model.head, body.added[HEAD]).range
    assert 0.9999 * budget < r <= budget
    weak = steer_model(
        model, vector(HEAD, 1e-4), budget=budget
    ).body  # what keeps it stays as it is
    assert isinstance(weak, SteeredBody)
    assert torch.equal(weak.added[HEAD], vector(HEAD, 1e-4).added)


def test_a_budget_below_the_head_needs_the_guard(tiny: Tiny) -> None:
    with pytest.raises(BadInput, match="guard the model"):
        steer_model(tiny("llama"), vector(1), budget=2.0)


def test_a_detector_without_a_budget_is_told_of_one(tiny: Tiny) -> None:
    model = tiny("llama")
    with pytest.warns(SteeringWarning, match=r"made to detect.*--budget 2 would keep 0\.\d+ of"):
        steer_model(model, vector(HEAD, 50.0, job="detect"))
    with pytest.warns(SteeringWarning, match=r"made to detect.*--kl-cap 0\.5 would hold it back"):
        steer_model(model, vector(1, 5.0, job="detect"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steer_model(model, vector(HEAD, 50.0, job="detect"), budget=1.0)
        steer_model(model, vector(HEAD, 50.0))


def test_another_head_is_told_and_certified_again(tiny: Tiny) -> None:
    model = tiny("llama")
    card = {"head_sha256": "ab" * 32, "model": "other", "certificate": {"range": 1.25}}
    r = certify(model.head, vector(HEAD)).range
    with pytest.warns(SteeringWarning, match=f"abab.*of other.*again: .* is {r:.3g}, not 1.25"):
        steer_model(model, vector(HEAD, **card))
    with pytest.warns(SteeringWarning, match="measured elsewhere"):
        steer_model(model, vector(1, **card))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steer_model(model, vector(HEAD, head_sha256=model.head.sha256))


def test_the_cards_budget_holds_unless_alpha_is_asked_for(tiny: Tiny) -> None:
    model, v = tiny("llama"), vector(HEAD, 9.0, budget=1.0)
    with pytest.warns(SteeringWarning, match="above the budget 1 on the card; lowered"):
        body = steer_model(model, v).body
    assert isinstance(body, SteeredBody)
    assert certify(model.head, body.added[HEAD]).range <= 1.0
    with pytest.warns(SteeringWarning, match="above the budget 1 on the card$"):
        body = steer_model(model, v, alpha=9.0).body
    assert isinstance(body, SteeredBody)
    assert torch.equal(body.added[HEAD], v.added)


def test_what_does_not_fit(tiny: Tiny) -> None:
    model = tiny("llama")
    for vectors, options, message in (
        (SteeringVector(torch.ones(5), 1), {}, "width 5"),
        (SteeringVector(torch.ones(24), 3), {}, "the model has 3 blocks"),
        (vector(1), {"alpha": 0}, "alpha is 0"),
        (vector(1), {"alpha": float("nan")}, "alpha is nan"),
        (vector(HEAD), {"budget": -1.0}, "the budget is -1.0"),
        ([], {}, "no vector"),
    ):
        with pytest.raises(BadInput, match=message):
            steer_model(model, vectors, **options)  # type: ignore[arg-type]


def test_a_body_that_is_one_graph_is_refused(tiny: Tiny) -> None:
    class Graph:  # what MAX's body is to us: a body that is no Body
        model = tiny("gpt2").body.model

    model = replace(tiny("gpt2"), body=Graph())  # type: ignore[arg-type]
    for layer in (1, HEAD):
        with pytest.raises(UnsupportedModel, match=r"runs in torch.*engine 'max'"):
            steer_model(model, vector(layer))


@pytest.mark.model
def test_the_real_model_in_chat_and_screened(real: Model, tmp_path: Path) -> None:
    direction = torch.randn(576, generator=torch.Generator().manual_seed(0))
    v = SteeringVector(direction / direction.norm(), 15, 30.0)
    steered = steer_model(real, v)
    (plain,) = generate("What is the capital of France?", real, chat=True, max_tokens=12)
    (moved,) = generate("What is the capital of France?", steered, chat=True, max_tokens=12)
    assert "Paris" in plain.text
    assert moved.ids != plain.ids
    screened = ScreenedHead.from_head(real.head)
    (same,) = generate(
        "What is the capital of France?", steered, chat=True, max_tokens=12, head=screened
    )
    assert same.ids == moved.ids
