"""The guard: its limits hold for every token, measured without its own code."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lmhead.errors import BadInput
from lmhead.generation import generate, next_tokens
from lmhead.head import Head, LMHead
from lmhead.head.trimmed import TrimmedHead
from lmhead.loading import Model
from lmhead.steer import HEAD, Guarded, SteeringVector, guard, steer
from lmhead.steer.bound.guarding import mix

Tiny = Callable[[str], Model]
FAMILIES = ("llama", "gpt2", "gemma3")
PROMPTS = ["a", "the cat", "some longer words"]


def vector(layer: int | str, alpha: float = 5.0, d: int = 24) -> SteeringVector:
    v = torch.randn(d, generator=torch.Generator().manual_seed(1))
    return SteeringVector(v, layer, alpha)


def kl(z: Tensor, other: Tensor) -> Tensor:
    p, q = (torch.log_softmax(x.double(), dim=-1) for x in (z, other))
    return (p.exp() * (p - q).nan_to_num(0.0)).sum(-1)


class Recorded(LMHead):
    """A guarded head that remembers every logit it gave."""

    def __init__(self, inner: LMHead) -> None:
        super().__init__(inner.weight)
        self.inner, self.given = inner, []  # type: ignore[var-annotated]

    def forward(self, h: Tensor, *, from_block: bool = False) -> Tensor:
        z: Tensor = self.inner(h, from_block=from_block)
        self.given.append(z.clone())
        return z


def check_text(model: Model, guarded: Guarded, prompt: str, cap: float, n: int) -> int:
    """Generate, then read the whole text once more with the plain model; return tokens."""
    head = Recorded(guarded.head)
    (result,) = generate(prompt, replace(guarded.model, head=head), max_tokens=n)
    given = torch.cat(head.given)  # [n, V]
    ids = [*result.prompt_ids, *result.ids]
    with torch.no_grad():
        z = model.body.model(torch.tensor([ids]), use_cache=False).logits[0]
    z = z[len(result.prompt_ids) - 1 : -1]
    V = model.reachable
    found = kl(z[:, :V], given[:, :V])
    assert len(found) == len(result.ids)
    assert float(found.max()) <= cap
    assert list(result.ids) == given[:, :V].argmax(-1).tolist()
    return len(result.ids)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layers", [[1], [HEAD], [0, HEAD]])
def test_the_cap_holds_at_every_token(tiny: Tiny, family: str, layers: list[int | str]) -> None:
    model = tiny(family)
    vectors = [vector(layer) for layer in layers]
    guarded = guard(model, vectors, kl_cap=0.05)
    for prompt in PROMPTS:
        assert check_text(model, guarded, prompt, 0.05, 12) > 0
    assert guarded.log.held_back > 0
    assert 0 < guarded.log.max_kl <= 0.05


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layer", [1, HEAD])
def test_a_cap_that_never_binds_is_plain_steering(
    tiny: Tiny, family: str, layer: int | str
) -> None:
    model, v = tiny(family), vector(layer, alpha=1.0)
    guarded = guard(model, v, kl_cap=1e4, budget=1e4)
    options = {"max_tokens": 10, "batch_size": 3}
    expected = [r.ids for r in generate(PROMPTS, steer(model, v), **options)]
    assert [r.ids for r in generate(PROMPTS, guarded.model, **options)] == expected
    assert [r.ids for r in generate(PROMPTS, guarded.model, head=guarded.head, **options)] == (
        expected
    )
    assert guarded.log.held_back == 0
    assert guarded.log.mean_strength == 1.0
    assert guarded.log.tokens == 2 * sum(map(len, expected))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cap_of_next_to_nothing_is_no_steering(tiny: Tiny, family: str) -> None:
    model = tiny(family)
    guarded = guard(model, vector(1), kl_cap=1e-12)
    options = {"max_tokens": 10, "batch_size": 3}
    assert [r.ids for r in generate(PROMPTS, guarded.model, **options)] == [
        r.ids for r in generate(PROMPTS, model, **options)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_beams_keep_both_halves_of_the_cache(tiny: Tiny, family: str) -> None:
    model, v = tiny(family), vector(1, alpha=0.5)
    free = guard(model, v, kl_cap=1e4)
    for prompt in PROMPTS:
        (expected,) = generate(prompt, steer(model, v), beams=4, max_tokens=8)
        (found,) = generate(prompt, free.model, beams=4, max_tokens=8)
        assert found.ids == expected.ids
    tight = guard(model, v, kl_cap=0.01)
    generate(PROMPTS, tight.model, beams=4, max_tokens=8)
    assert tight.log.max_kl <= 0.01


def test_sequences_that_end_leave_the_batch(tiny: Tiny) -> None:
    model, v = tiny("llama"), vector(1, alpha=0.5)
    guarded = guard(model, v, kl_cap=0.2)
    stop = generate(PROMPTS[1], guarded.model, max_tokens=14)[0].text[2]  # ends the middle one
    alone = [generate(p, guarded.model, max_tokens=14, stop=stop)[0] for p in PROMPTS]
    together = generate(PROMPTS, guarded.model, max_tokens=14, stop=stop, batch_size=3)
    assert len({len(r.ids) for r in alone}) > 1
    assert [r.ids for r in together] == [r.ids for r in alone]


@pytest.mark.parametrize("layer", [1, HEAD])
def test_the_budget_holds_for_the_range(tiny: Tiny, layer: int | str) -> None:
    model = tiny("llama")
    guarded = guard(model, vector(layer), budget=1.5)
    ids = torch.tensor([model.encode("some longer words")])
    with torch.no_grad():
        h, _ = guarded.model.body(ids, use_cache=False)
        z = model.head(model.body(ids, use_cache=False)[0])
        moved = (guarded.head(h) - z)[0, :, : model.reachable]
    ranges = moved.amax(-1) - moved.amin(-1)
    assert float(ranges.max()) <= 1.5
    assert float(ranges.min()) > 1.49  # as far as it may go
    assert guarded.log.held_back == ids.numel()


def test_next_tokens_and_samples_of_a_guarded_model(tiny: Tiny) -> None:
    guarded = guard(tiny("gpt2"), vector(1), kl_cap=0.1)
    assert len(next_tokens("the cat", guarded.model, top=5).tokens) == 5
    results = generate("the", guarded.model, temperature=0.9, top_k=5, seed=1, samples=3)
    assert len(results) == 3
    assert guarded.log.max_kl <= 0.1


def test_a_keep_set_is_capped_over_what_it_keeps(tiny: Tiny) -> None:
    model = tiny("llama")
    kept = list(range(5, 60, 2))
    trimmed: Head = TrimmedHead(model.head, kept)
    guarded = guard(model, vector(1), kl_cap=0.05, head=trimmed)
    ids = torch.tensor([model.encode("some longer words")])
    with torch.no_grad():
        h, _ = guarded.model.body(ids, use_cache=False)
        given = guarded.head(h)[0]
        z = model.head(model.body(ids, use_cache=False)[0])[0]
    assert float(kl(z[:, kept], given[:, kept]).max()) <= 0.05
    gone = [i for i in range(97) if i not in kept]
    assert (given[:, gone] == -math.inf).all()
    assert guarded.log.held_back > 0


@settings(deadline=None, max_examples=200)
@given(
    seed=st.integers(0, 2**20),
    V=st.integers(2, 80),
    size=st.floats(0.01, 60),
    push=st.floats(0, 200),
    kl_cap=st.one_of(st.none(), st.floats(1e-9, 20)),
    budget=st.one_of(st.none(), st.floats(1e-3, 50)),
    gone=st.integers(0, 3),
)
def test_no_logits_break_it(
    seed: int,
    V: int,
    size: float,
    push: float,
    kl_cap: float | None,
    budget: float | None,
    gone: int,
) -> None:
    g = torch.Generator().manual_seed(seed)
    z = size * torch.randn(4, V, generator=g)
    other = z + push * torch.randn(4, V, generator=g)
    other[3] = z[3]
    gone = min(gone, V - 1)
    z[:, :gone] = other[:, :gone] = -math.inf
    reachable = V - (seed % 2) * (V - gone > 2)
    mixed, m, _, _ = mix(z, other, reachable, kl_cap, budget)
    assert ((m >= 0) & (m <= 1)).all()
    assert torch.equal(mixed[3], z[3])
    kept = slice(gone, reachable)
    found = kl(z[:, kept], mixed[:, kept])
    moved = (mixed.double() - z.double())[:, kept]
    ranges = moved.amax(-1) - moved.amin(-1)
    if kl_cap is not None:
        assert (found <= kl_cap + 1e-13).all()
    if budget is not None:
        assert (ranges <= budget).all()
    # where nothing binds it is the steered logits, and else it goes as far as it may
    free = m == 1
    assert torch.equal(mixed[free], other[free])
    if kl_cap is not None and kl_cap > 1e-4:
        tight = found >= 0.99 * kl_cap
        if budget is not None:
            tight |= ranges >= 0.99 * budget
        rounding = size > 20  # large logits are coarse in float32
        assert (free | tight | rounding).all()


def test_logits_that_are_no_numbers_are_not_followed() -> None:
    z = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    other = z + 1
    other[0, 2], other[1, 4] = math.nan, math.inf
    mixed, m, found, _ = mix(z, other, 7, 0.1, None)
    assert m.tolist()[:2] == [0, 0]
    assert torch.equal(mixed[:2], z[:2])
    assert torch.equal(mixed[2], other[2])  # a common shift is no change
    assert float(found.max()) < 1e-9


def test_bad_input(tiny: Tiny) -> None:
    model = tiny("llama")
    for options, message in (
        ({}, "neither kl_cap nor budget"),
        ({"kl_cap": 0.0}, "the KL cap is 0.0; expected a positive number"),
        ({"kl_cap": -1.0}, "the KL cap is -1.0"),
        ({"budget": math.nan}, "the budget is nan"),
        ({"kl_cap": 1.0, "alpha": 0.0}, "alpha is 0.0"),
    ):
        with pytest.raises(BadInput, match=message):
            guard(model, vector(1), **options)
    head = guard(model, vector(1), kl_cap=1.0).head
    with pytest.raises(BadInput, match="two states of a guarded model"):
        head(torch.zeros(1, 3))


@pytest.mark.model
def test_the_real_model_collapses_unguarded_and_not_guarded(real: Model) -> None:
    v = torch.randn(576, generator=torch.Generator().manual_seed(0))
    collapsing = SteeringVector(v / v.norm(), 15, 200.0)
    prompt = "The capital of France is"
    (wild,) = generate(prompt, steer(real, collapsing), max_tokens=24)
    assert len(set(wild.ids)) < 12
    guarded = guard(real, collapsing, kl_cap=0.2)
    assert check_text(real, guarded, prompt, 0.2, 24) == 24
    assert guarded.log.held_back > 12
