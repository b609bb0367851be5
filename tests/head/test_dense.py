"""LMHead itself, against the same formula in float64."""

import copy
import math
import pickle
from inspect import signature
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lmhead.errors import BadCheckpoint, BadInput
from lmhead.head import Head, LMHead, Scale
from lmhead.head.answers import ranked

BATCHES = [(), (3,), (2, 5), (0,), (1, 1, 4)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def oracle(h: Tensor, weight: Tensor, bias: Tensor | None, scale: float, cap: float) -> Tensor:
    z = h.double() @ weight.double().T
    if bias is not None:
        z = z + bias.double()
    z = z * scale
    return torch.tanh(z / cap) * cap if cap else z


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("scale", "factor"), [(None, 1.0), (0.3, 0.3), (Scale(3.0, True), 1 / 3)])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_against_float64(
    batch: tuple[int, ...], with_bias: bool, scale: Any, factor: float, cap: float | None
) -> None:
    weight, h = random(123, 17), random(*batch, 17, seed=1)
    bias = random(123, seed=2) if with_bias else None
    head = LMHead(weight, bias, softcap=cap, scale=scale)
    z = head(h)
    assert z.shape == (*batch, 123)
    assert z.dtype == torch.float32
    expected = oracle(h, weight, bias, factor, cap or 0.0)
    torch.testing.assert_close(z.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("logits_dtype", [None, torch.float32])
def test_dtypes(dtype: torch.dtype, logits_dtype: torch.dtype | None) -> None:
    weight, h = random(50, 8).to(dtype), random(2, 8, seed=1)
    z = LMHead(weight, logits_dtype=logits_dtype)(h)  # h is cast to the weight's dtype
    assert z.dtype == (logits_dtype or dtype)
    loss = 8 * max(torch.finfo(dtype).eps, torch.finfo(z.dtype).eps)
    torch.testing.assert_close(z.double(), oracle(h, weight, None, 1, 0), rtol=loss, atol=loss * 4)


def test_the_norm_comes_first_where_a_state_is_from_a_block() -> None:
    norm = nn.LayerNorm(6)
    nn.init.normal_(norm.weight)
    head = LMHead(random(9, 6), norm=norm)
    h = random(4, 6, seed=3)
    assert torch.equal(head(h, from_block=True), head(norm(h)))
    assert not torch.equal(head(h, from_block=True), head(h))


def test_a_projection_before_the_head_changes_the_width() -> None:
    head = LMHead(random(9, 6), norm=nn.Linear(10, 6), state_size=10)
    assert head(random(2, 10), from_block=True).shape == (2, 9)
    assert head(random(2, 6)).shape == (2, 9)
    with pytest.raises(BadInput, match=r"width 6.*has 10"):
        head(random(2, 6), from_block=True)


def test_padding_rows_may_be_cut_off() -> None:
    weight, h = random(12, 4), random(3, 4, seed=1)
    head = LMHead(weight, vocab_size=10)
    assert head.weight is weight
    assert head.vocab_size == 10
    assert torch.equal(head(h), LMHead(weight)(h)[:, :10])
    assert head.topk(h, 10).ids.max() < 10
    with pytest.raises(BadInput, match="from 1 to the vocabulary's 10"):
        head.topk(h, 11)


def test_a_head_is_a_head() -> None:
    head: Head = LMHead(random(9, 6))
    for verb in (name for name in vars(Head) if not name.startswith("_")):
        assert hasattr(head, verb)
    for verb in (Head.topk, Head.sample):
        assert signature(verb) == signature(getattr(LMHead, verb.__name__))
    assert (head.vocab_size, head.hidden_size) == (9, 6)


# --- topk ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("k", [1, 7, 123])
def test_topk_is_the_stable_order(batch: tuple[int, ...], k: int) -> None:
    head = LMHead(random(123, 17))
    h = random(*batch, 17, seed=1)
    best = head.topk(h, k)
    z = head(h)
    order = z.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(best.ids, order.indices[..., :k])
    assert torch.equal(best.logits, order.values[..., :k])


def test_ties_go_to_the_lower_id() -> None:
    # Rows 1, 3, 5, ... are equal, and so are 0, 2, 4, ...: nothing but ties.
    weight = torch.tensor([[1.0], [2.0]]).repeat(500, 1)
    head = LMHead(weight)
    best = head.topk(torch.tensor([1.0]), 502)
    assert best.ids.tolist() == [*range(1, 1000, 2), 0, 2]
    assert head.topk(torch.tensor([-1.0]), 3).ids.tolist() == [0, 2, 4]
    assert head.topk(torch.tensor([0.0]), 4).ids.tolist() == [0, 1, 2, 3]
    assert head.sample(torch.tensor([1.0]), temperature=0).item() == 1


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40), st.data())
def test_ranked_with_many_ties(values: list[int], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(values)))
    z = torch.tensor([values, values[::-1]], dtype=torch.bfloat16)
    expected = z.sort(dim=-1, descending=True, stable=True)
    best = ranked(z, k)
    assert torch.equal(best.ids, expected.indices[:, :k])
    assert torch.equal(best.logits, expected.values[:, :k])


def test_ranked_with_infinities_and_nan() -> None:
    inf, nan = math.inf, math.nan
    assert ranked(torch.tensor([1.0, inf, -inf, inf, 1.0]), 4).ids.tolist() == [1, 3, 0, 4]
    assert ranked(torch.tensor([-inf, -inf, -inf]), 2).ids.tolist() == [0, 1]
    assert ranked(torch.tensor([1.0, nan, 1.0, 1.0]), 2).ids.tolist() == [1, 0]


def test_vocabulary_of_one() -> None:
    head = LMHead(random(1, 4))
    h = random(3, 4, seed=1)
    assert head.topk(h, 1).ids.tolist() == [[0], [0], [0]]
    assert head.sample(h).tolist() == [0, 0, 0]


@pytest.mark.parametrize("k", [0, -1, 10, 2.0, True])
def test_k_out_of_range(k: Any) -> None:
    head = LMHead(random(9, 4))
    with pytest.raises(BadInput, match="from 1 to the vocabulary's 9"):
        head.topk(random(4), k)
    with pytest.raises(BadInput, match="from 1 to the vocabulary's 9"):
        head.sample(random(4), top_k=k)


# --- sample -------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("top_k", [None, 3])
def test_sample_shapes(batch: tuple[int, ...], top_k: int | None) -> None:
    head = LMHead(random(20, 4))
    ids = head.sample(random(*batch, 4), top_k=top_k, generator=torch.Generator())
    assert ids.shape == batch
    assert ids.dtype == torch.long


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, None), (0.5, None), (2.0, 4)])
def test_sample_follows_the_law(temperature: float, top_k: int | None) -> None:
    """40,000 draws from 8 tokens; a frequency off by 0.02 is 8 standard errors or more."""
    head = LMHead(random(8, 3))
    h = random(3, seed=5)
    generator = torch.Generator().manual_seed(7)
    ids = head.sample(h.expand(40_000, 3), temperature, top_k, generator=generator)
    z = head(h).double() / temperature
    if top_k:
        z[z < z.topk(top_k).values[-1]] = -math.inf
    expected = z.softmax(-1)
    got = ids.bincount(minlength=8) / len(ids)
    torch.testing.assert_close(got.double(), expected, atol=0.02, rtol=0)


def test_top_k_keeps_exactly_k_of_equal_logits() -> None:
    head = LMHead(torch.ones(50, 1))
    ids = head.sample(torch.ones(2000, 1), top_k=2, generator=torch.Generator().manual_seed(0))
    assert set(ids.tolist()) == {0, 1}


def test_a_generator_makes_it_repeatable() -> None:
    head, h = LMHead(random(50, 4)), random(10, 4, seed=1)
    draws = [head.sample(h, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-45, 1e-30, 1e-6])
def test_cold_is_greedy(temperature: float) -> None:
    head, h = LMHead(1000 * random(50, 4)), random(10, 4, seed=1)
    assert torch.equal(head.sample(h, temperature), head(h).argmax(-1))


@pytest.mark.parametrize("temperature", [-0.1, math.nan, math.inf])
def test_no_such_temperature(temperature: float) -> None:
    with pytest.raises(BadInput, match="temperature is"):
        LMHead(random(9, 4)).sample(random(4), temperature)


def test_nothing_to_sample_from() -> None:
    with pytest.raises(BadInput, match="not finite"):
        LMHead(random(9, 4)).sample(torch.full((4,), math.nan))


# --- input --------------------------------------------------------------------------------------


def test_wrong_width_shows_both_numbers() -> None:
    head = LMHead(random(9, 4))
    with pytest.raises(BadInput, match=r"width 5.*has 4"):
        head(random(2, 5))
    with pytest.raises(BadInput, match=r"width 0.*has 4"):
        head(torch.tensor(1.0))
    with pytest.raises(BadInput, match=r"int64.*not ids"):
        head(torch.zeros(2, 4, dtype=torch.long))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weight": torch.zeros(3)}, r"shape \[3\]"),
        ({"weight": torch.zeros(3, 2, dtype=torch.int8)}, "int8"),
        ({"weight": torch.zeros(0, 2)}, r"shape \[0, 2\]"),
        ({"weight": torch.zeros(3, 2), "bias": torch.zeros(2)}, r"\[2\]; expected \[3\]"),
        ({"weight": torch.zeros(3, 2), "softcap": 0.0}, "softcap is 0.0"),
        ({"weight": torch.zeros(3, 2), "softcap": math.nan}, "softcap is nan"),
        ({"weight": torch.zeros(3, 2), "scale": 0.0}, "scale is 0.0"),
        ({"weight": torch.zeros(3, 2), "scale": math.inf}, "scale is inf"),
        ({"weight": torch.zeros(3, 2), "vocab_size": 4}, "k is 4"),
    ],
)
def test_impossible_heads(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        LMHead(**arguments)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_no_numbers(value: float) -> None:
    weight = torch.zeros(1000, 3)
    weight[17, 1] = weight[40, 0] = value
    with pytest.raises(BadCheckpoint, match=r"weight holds 2 numbers.*row 17"):
        LMHead(weight).require_finite()
    with pytest.raises(BadCheckpoint, match=r"bias holds 1 numbers.*row 2"):
        LMHead(torch.zeros(3, 1), bias=torch.tensor([0, 0, value])).require_finite()
    norm = nn.LayerNorm(3)
    nn.init.constant_(norm.weight, value)
    with pytest.raises(BadCheckpoint, match=r"norm.weight holds 3 numbers.*row 0"):
        LMHead(torch.zeros(5, 3), norm=norm).require_finite()
    LMHead(torch.full((5, 3), 3e38), bias=torch.full((5,), 3e38)).require_finite()


# --- identity -----------------------------------------------------------------------------------


def test_sha256_tells_heads_apart() -> None:
    weight, bias = random(30, 4), random(30, seed=1)
    heads = [
        LMHead(weight),
        LMHead(weight.clone().add_(1e-3)),
        LMHead(weight.view(60, 2)),
        LMHead(weight.bfloat16()),
        LMHead(weight.half()),
        LMHead(weight, bias),
        LMHead(weight, scale=2.0),
        LMHead(weight, scale=Scale(2.0, divide=True)),
        LMHead(weight, softcap=2.0),
        LMHead(weight, softcap=3.0),
        LMHead(weight, vocab_size=29),
    ]
    assert len({head.sha256 for head in heads}) == len(heads)
    same = [
        LMHead(weight.clone(), norm=nn.LayerNorm(4), tied=True),
        LMHead(weight.T.contiguous().T),
    ]
    assert {head.sha256 for head in same} == {heads[0].sha256}
    assert LMHead(weight, scale=2, softcap=3).sha256 == LMHead(weight, None, None, 3.0, 2.0).sha256


def test_sha256_never_changes() -> None:
    """A certificate that was made last year names this number."""
    weight = torch.arange(12, dtype=torch.float32).view(4, 3)
    number = "eaff19b1f80c42654d8257947beba290a092e449cc6ab6aaff0a2397eee9006a"
    assert LMHead(weight).sha256 == number


def test_sha256_follows_training() -> None:
    weight = nn.Parameter(random(30, 4))
    head = LMHead(weight)
    before = head.sha256
    assert head.sha256 == before
    with torch.no_grad():
        weight[3, 1] += 1
    assert head.sha256 != before


def test_gradients_flow() -> None:
    weight, h = random(9, 4).requires_grad_(), random(2, 4, seed=1).requires_grad_()
    norm = nn.LayerNorm(4)
    z = LMHead(weight, norm=norm, softcap=3.0, scale=0.5)(h, from_block=True)
    z.logsumexp(-1).sum().backward()
    for tensor in (weight, h, norm.weight):
        assert tensor.grad is not None
        assert tensor.grad.abs().sum() > 0


def test_a_models_parameter_stays_its_parameter() -> None:
    layer = nn.Linear(4, 9)
    head = LMHead(layer.weight, layer.bias)
    assert head.weight is layer.weight
    assert dict(head.named_parameters()).keys() == {"weight", "bias"}


def test_copies_and_pickles_give_the_same_answers() -> None:
    head = LMHead(random(9, 4), norm=nn.LayerNorm(4), scale=Scale(3.0, divide=True), softcap=2.0)
    h = random(2, 4, seed=1)
    for other in (copy.deepcopy(head), pickle.loads(pickle.dumps(head))):
        assert torch.equal(other(h, from_block=True), head(h, from_block=True))
        assert other.sha256 == head.sha256


def test_repr_tells_all() -> None:
    head = LMHead(random(9, 4), random(9), nn.LayerNorm(4), 30.0, Scale(3.0, True), tied=True)
    assert repr(head) == (
        "LMHead(9 x 4 float32, 180 bytes, tied, bias=True, norm=LayerNorm((4,), eps=1e-05, "
        "elementwise_affine=True, bias=True), scale=/ 3, softcap=30.0)"
    )
    assert repr(LMHead(random(9, 4).bfloat16(), logits_dtype=torch.float32, vocab_size=8)) == (
        "LMHead(9 x 4 bfloat16, 72 bytes, untied, bias=False, norm=None, scale=None, softcap=None, "
        "logits_dtype=float32, vocab_size=8)"
    )


def test_scale_factor() -> None:
    assert Scale(4.0).factor == 4.0
    assert Scale(4.0, divide=True).factor == 0.25


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss_is_the_cross_entropy_of_the_logits(reduction: str) -> None:
    """Norm, bias, scale, softcap and cut-off padding rows count in the loss as in the logits."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(70, 12, generator=generator, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(70, generator=generator, dtype=torch.float64, requires_grad=True)
    norm = nn.LayerNorm(12, dtype=torch.float64)
    head = LMHead(weight, bias, norm, softcap=5.0, scale=Scale(1.7, divide=True), vocab_size=67)
    h = torch.randn(3, 5, 12, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 67, (3, 5), generator=generator)
    targets[1, 2] = -100
    z = head(h, from_block=True).flatten(0, 1)
    expected = nn.functional.cross_entropy(z, targets.flatten(), reduction=reduction)
    loss = head.loss(h, targets, reduction=reduction, from_block=True)
    torch.testing.assert_close(loss.flatten(), expected.flatten())
    sources = (h, weight, bias, *norm.parameters())
    for ours, theirs in zip(
        torch.autograd.grad(loss.sum(), sources),
        torch.autograd.grad(expected.sum(), sources),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)
    same = head.loss(norm(h), targets, reduction=reduction)
    torch.testing.assert_close(same, loss)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stretch_is_a_part_of_all_logits(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(100, 16, generator=generator), torch.randn(100, generator=generator)
    head = LMHead(weight.to(dtype), bias.to(dtype), softcap=5.0, scale=0.5, vocab_size=90)
    h = torch.randn(2, 3, 16, generator=generator)
    torch.testing.assert_close(head.stretch(h, 0, 90), head(h))
    torch.testing.assert_close(head.stretch(h, 64, 77), head(h)[..., 64:77])
