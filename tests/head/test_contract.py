"""Every engine has every verb and gives the answers of its own logits, whatever is asked."""

import inspect
import math
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmhead.errors import BadInput
from lmhead.head import Edit, Head, LMHead, Scale
from lmhead.head.answers import ranked
from lmhead.head.max_head import MaxHead
from lmhead.head.screened import ScreenedHead
from lmhead.head.trimmed import TrimmedHead

V, D = 507, 123
KEPT = sorted(torch.randperm(V, generator=torch.Generator().manual_seed(1))[:99].tolist())
VERBS = ("__call__", "topk", "score", "candidates", "sample", "loss")
Make = Callable[[LMHead], Head]


def trimmed(head: LMHead) -> Head:
    return TrimmedHead(head, KEPT)


@cache
def compiled(head: LMHead) -> Head:
    if head is not plain():
        pytest.skip("to compile one head takes long enough")
    return MaxHead.from_head(head)


@cache
def plain(**options: Any) -> LMHead:
    return LMHead(random(V, D), random(V, seed=1), nn.LayerNorm(D), **options)


ENGINES = [
    pytest.param(lambda head: head, id="dense"),
    pytest.param(lambda head: ScreenedHead.from_head(head, kernels="torch"), id="screened"),
    pytest.param(
        lambda head: ScreenedHead.from_head(head, kernels="numba"),
        id="screened-numba",
        marks=pytest.mark.skipif(find_spec("numba") is None, reason="numba is missing"),
    ),
    pytest.param(trimmed, id="trimmed"),
    pytest.param(
        compiled,
        id="max",
        marks=pytest.mark.skipif(find_spec("max") is None, reason="needs the extra `max`"),
    ),
]
engines = pytest.mark.parametrize("make", ENGINES)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def whole(**options: Any) -> LMHead:
    """A head of small whole numbers: every sum is exact, so that every engine agrees to the bit."""
    weight = random(V, D).mul(2).round().clamp(-3, 3)
    return LMHead(weight, random(V, seed=1).round(), **options)


def whole_states(*shape: int) -> Tensor:
    return random(*shape, D, seed=3).mul(2).round().clamp(-3, 3)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@engines
def test_every_verb_is_there_with_the_same_words(make: Make) -> None:
    head = make(plain())
    assert isinstance(head, Head)
    assert (head.vocab_size, head.hidden_size, len(head.sha256)) == (V, D, 64)
    for verb in VERBS:
        expected = inspect.signature(getattr(Head, verb)).parameters
        place = "forward" if verb == "__call__" and isinstance(head, nn.Module) else verb
        got = inspect.signature(getattr(type(head), place)).parameters
        for name, parameter in expected.items():
            assert got[name].kind == parameter.kind, (verb, name)
            assert got[name].default == parameter.default, (verb, name)
        assert "from_block" in expected


SHAPES = [(), (1,), (5,), (2, 3), (0,), (1, 1, 4), (17,)]


@engines
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", [{}, {"scale": Scale(3.0, True), "softcap": 30.0}])
def test_every_answer_is_that_of_the_logits(
    make: Make, shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    head, h = make(plain(**options)), random(*shape, D, seed=2)
    z = head(h).detach()
    assert z.shape == (*shape, V)
    best = head.topk(h, 7)
    assert torch.equal(best.ids, ranked(z, 7).ids)
    torch.testing.assert_close(best.logits, ranked(z, 7).logits, rtol=1e-5, atol=1e-4)
    assert torch.equal(head.sample(h, 0.0), best.ids[..., 0])
    assert torch.equal(head.sample(h, 1.0, top_k=1), best.ids[..., 0])
    ids = head.sample(h, 0.7, generator=rng())
    assert ids.shape == shape
    assert ids.dtype == torch.int64
    targets = torch.full(shape, KEPT[0])
    loss = head.loss(h, targets, reduction="none")
    expected = F.cross_entropy(z.reshape(-1, V), targets.reshape(-1), reduction="none")
    torch.testing.assert_close(loss.reshape(-1), expected, rtol=1e-4, atol=1e-4)


@engines
@pytest.mark.parametrize("shape", SHAPES)
def test_score_is_that_part_of_the_logits(make: Make, shape: tuple[int, ...]) -> None:
    """Within the bound that `LMHead.score` states; the dropped rows of a trim are -inf."""
    dense = plain()
    head, h = make(dense), random(*shape, D, seed=2)
    z = head(h).detach()
    size = dense.weight.norm(dim=1) * h.norm(dim=-1, keepdim=True) + dense.bias.abs()  # [..., V]
    bound = 2 * (D + 2) * 2.0**-24 * size
    same = torch.tensor([5, KEPT[3], 5, 0, V - 1, KEPT[-1]])
    own = torch.randint(V, (*shape, 9), generator=rng(4))
    for ids in (same, own, same[:0], own.to(torch.int32)):
        got = head.score(h, ids)
        at = ids.long().expand(*shape, ids.shape[-1])
        expected = z.gather(-1, at)
        assert got.shape == expected.shape
        assert torch.equal(got.isneginf(), expected.isneginf())
        off = torch.where(expected.isneginf(), 0.0, got - expected).abs()
        assert bool((off <= bound.gather(-1, at)).all())


@engines
@pytest.mark.parametrize("options", [{}, {"scale": 0.5}, {"scale": 2.0, "vocab_size": V - 20}])
def test_score_is_bit_equal_where_sums_are_exact(make: Make, options: dict[str, Any]) -> None:
    dense = whole(**options)
    if make is trimmed and "vocab_size" in options:
        pytest.skip("the keep-set has ids beyond that vocabulary")
    head, h = make(dense), whole_states(4)
    ids = torch.arange(dense.vocab_size)
    assert torch.equal(head.score(h, ids), head(h).detach())
    assert torch.equal(head.score(h, ids.expand(4, -1)), head(h).detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_score_in_other_dtypes(dtype: torch.dtype) -> None:
    head, h = LMHead(random(V, D).to(dtype)), random(6, D, seed=2)
    ids = torch.randint(V, (6, 40), generator=rng(4))
    z, got = head(h).gather(-1, ids), head.score(h, ids)
    assert got.dtype == dtype
    # Half precision is added up in float32 and rounded once: to the same number or its neighbour.
    ulp = torch.finfo(dtype).eps * z.double().abs().clamp(min=1)
    if dtype == torch.float64:  # added up in either order: D roundings of the sum of sizes at most
        sizes = (h.double().abs() @ head.weight.detach().abs().T).gather(-1, ids)
        ulp = D * torch.finfo(dtype).eps * sizes
    assert bool(((got.double() - z.double()).abs() <= 2 * ulp).all())


def test_score_reads_those_rows_alone() -> None:
    weight = random(V, D)
    weight[100:] = math.nan  # who reads one of these, says so
    head, h = LMHead(weight), random(3, D, seed=2)
    assert head.score(h, torch.tensor([0, 99])).isfinite().all()
    assert head.score(h, torch.tensor([[0], [99], [1]])).isfinite().all()


def test_score_has_gradients() -> None:
    weight, h = random(50, 4).requires_grad_(), random(3, 4, seed=1).requires_grad_()
    for ids in (torch.tensor([7, 7, 2]), torch.tensor([[7, 7], [2, 1], [0, 3]])):
        at = ids.expand(3, ids.shape[-1])
        ours = torch.autograd.grad(LMHead(weight).score(h, ids).sin().sum(), (weight, h))
        theirs = torch.autograd.grad(LMHead(weight)(h).gather(-1, at).sin().sum(), (weight, h))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)


@engines
def test_ids_that_cannot_be_scored(make: Make) -> None:
    head, h = make(plain()), random(3, D, seed=2)
    for ids, reported in (
        (torch.tensor([V]), f"hold {V}"),
        (torch.tensor([-1]), "hold -1"),
        (torch.tensor([0.5]), "whole numbers"),
        (torch.tensor([True]), "whole numbers"),
        (torch.zeros(2, 4, dtype=torch.int64), "separate ones for each"),
        (torch.tensor(3), "separate ones for each"),
        ([1, 2], "tensor"),
    ):
        with pytest.raises(BadInput, match=reported):
            head.score(h, ids)  # type: ignore[arg-type]


@engines
@pytest.mark.parametrize("limit", [1, 64, 65, V - 1, V])
def test_a_limit_leaves_out_the_rest(make: Make, limit: int) -> None:
    head, h = make(whole()), whole_states(5)
    z = head(h).detach()[:, :limit]
    there = int(z[0].isfinite().sum())
    if not there:
        with pytest.raises(BadInput, match="no token of this head is below the limit 1"):
            head.topk(h, 1, limit=limit)
        return
    for k in {1, min(4, there), there}:
        best = head.topk(h, k, limit=limit)
        assert torch.equal(best.ids, ranked(z, k).ids)
        assert torch.equal(best.logits, ranked(z, k).logits)
    assert int(head.sample(h, 50.0, limit=limit, generator=rng()).max()) < limit
    assert int(head.candidates(h, 9, limit=limit).ids.max()) < limit
    for wrong in (0, V + 1, 2.0, True):
        with pytest.raises(BadInput, match="limit is"):
            head.topk(h, 1, limit=wrong)  # type: ignore[arg-type]


@engines
def test_the_whole_vocabulary_in_order(make: Make) -> None:
    """k = V, with nothing but ties: lower ids first."""
    dense = LMHead(torch.tensor([[1.0], [2.0]]).repeat(V // 2 + 1, D)[:V])
    head = make(dense)
    count = V if make is not trimmed else len(KEPT)
    h = torch.ones(2, D)
    best = head.topk(h, count)
    expected = ranked(head(h).detach(), count)
    assert torch.equal(best.ids, expected.ids)
    assert torch.equal(best.logits, expected.logits)
    with pytest.raises(BadInput, match="k is"):
        head.topk(h, V + 1)


EDITS = Edit.add({5: 9.0, KEPT[0]: -3.0}).then(Edit.ban([KEPT[1], 7])).then(
    Edit.repetition([KEPT[2], KEPT[3]], 1.7)
)  # fmt: skip


def edited(z: Tensor, edit: Edit | None) -> Tensor:
    z = z.double().clone()
    if edit is not None:
        z[edit.ids] = edit.change(z[edit.ids])
    return z


@engines
def test_edits_come_first(make: Make) -> None:
    head, h = make(plain()), random(3, D, seed=2)
    z = head(h).detach()
    each = [EDITS, None, Edit.ban(head.topk(h[2], 3).ids.tolist())]
    for given, used in ((EDITS, [EDITS] * 3), (each, each)):
        best = head.topk(h, 6, edits=given)
        expected = torch.stack([edited(row, edit) for row, edit in zip(z, used, strict=True)])
        assert torch.equal(best.ids, ranked(expected, 6).ids)
        torch.testing.assert_close(best.logits, ranked(expected, 6).logits.float())
        assert torch.equal(head.sample(h, 0.0, edits=given), best.ids[:, 0])
        assert torch.equal(head.sample(h, 1.0, 1, edits=given), best.ids[:, 0])
    only = Edit.ban(i for i in range(V) if i != KEPT[5])
    assert head.sample(h, 3.0, edits=only, generator=rng()).tolist() == [KEPT[5]] * 3
    nothing = Edit.ban([]).then(Edit.add({}))
    assert torch.equal(head.topk(h, 4, edits=nothing).ids, head.topk(h, 4).ids)
    assert torch.equal(
        head.sample(h, 0.8, edits=nothing, generator=rng(1)), head.sample(h, 0.8, generator=rng(1))
    )


@engines
@pytest.mark.parametrize("state", [1.0, math.nan])
def test_edits_that_cannot_be_done(make: Make, state: float) -> None:
    head, h = make(plain()), torch.full((2, D), state)
    for edit, reported in (
        (Edit(torch.tensor([1, 2]), lambda z: z[:1]), r"shape \[1\]; expected a tensor \[2\]"),
        (Edit(torch.tensor([1, 2]), lambda z: z.tolist()), "list; expected a tensor"),
        (Edit.ban([V]), f"the id {V}"),
        ([EDITS], "1 edits for 2 states"),
        ([EDITS, "none"], "str; expected lmhead.Edit"),
    ):
        with pytest.raises(BadInput, match=reported):
            head.topk(h, 3, edits=edit)  # type: ignore[arg-type]
    for ids in (torch.tensor([True, False]), torch.tensor([1.0]), torch.tensor([[1]]), [1]):
        with pytest.raises(BadInput, match="an edit got ids"):
            Edit(ids, lambda z: z)  # type: ignore[arg-type]
    small = Edit(torch.tensor([3, 4], dtype=torch.int32), lambda z: z + 1)
    assert head.topk(h, 3, edits=small).ids.shape == (2, 3)


@engines
@pytest.mark.parametrize("options", [{}, {"min_p": 0.1}, {"top_k": 5}, {"top_p": 0.9}])
def test_nothing_left_to_draw(make: Make, options: dict[str, Any]) -> None:
    head = make(plain())
    with pytest.raises(BadInput, match="nothing to sample from"):
        head.sample(random(2, D), edits=Edit.ban(range(V)), **options)
    with pytest.raises(BadInput, match="nothing to sample from"):
        head.sample(torch.full((2, D), math.nan), **options)


@engines
def test_candidates_hold_whatever_an_edit_can_bring(make: Make) -> None:
    dense = plain()
    head, h = make(dense), random(4, D, seed=2)
    z = head(h).detach()
    touched = [torch.tensor([3, KEPT[0]]), torch.tensor([], dtype=torch.int64), torch.arange(40),
               head.topk(h[3], 5).ids]  # fmt: skip
    found = head.candidates(h, 6, touched)
    assert found.ids.shape == found.logits.shape
    for n, ids in enumerate(touched):
        mine = found.ids[n][found.ids[n] < V]
        assert len(set(mine.tolist())) == len(mine)
        assert set(ids.tolist()) <= set(mine.tolist())
        others = z[n].index_fill(0, ids, -math.inf)
        assert set(ranked(others, 6).ids.tolist()) <= set(mine.tolist())
        torch.testing.assert_close(found.logits[n][: len(mine)], z[n][mine], rtol=1e-5, atol=1e-4)
        assert found.logits[n][len(mine) :].isneginf().all()
    assert torch.equal(head.candidates(h, 6).ids, head.topk(h, 6).ids)
    many = head.candidates(h, 10 * V)  # no more than there are
    assert many.ids.shape[-1] >= len(KEPT)
    with pytest.raises(BadInput, match="states"):
        head.candidates(h, 6, touched[:2])
    with pytest.raises(BadInput, match=f"hold {V}"):
        head.candidates(h, 6, [torch.tensor([V])] * 4)


@engines
@pytest.mark.parametrize(
    "options", [{}, {"top_k": 5}, {"min_p": 0.05}, {"top_k": 20, "top_p": 0.6}, {"top_p": 0.7}]
)
def test_samples_follow_the_law(make: Make, options: dict[str, Any]) -> None:
    """3,000 draws; six standard errors, false in one of 10^8 seeds."""
    head = make(plain())
    h = random(2, D, seed=2) * 0.25
    p = (edited(head(h[1]).detach(), EDITS) / 1.3).softmax(-1)
    order = p.argsort(descending=True)
    kept = torch.ones(V, dtype=torch.bool)
    if k := options.get("top_k"):
        kept[order[k:]] = False
    p = torch.where(kept, p, 0.0)
    if top := options.get("top_p"):
        share = p[order] / p.sum()
        kept[order[share.cumsum(0) - share >= top]] = False
    if least := options.get("min_p"):
        kept &= p >= least * p.max()
    p = torch.where(kept, p, 0.0)
    p = p / p.sum()
    n = 3000
    ids = head.sample(h[1].expand(n, D), 1.3, edits=EDITS, generator=rng(5), **options)
    got = ids.bincount(minlength=V) / n
    assert not got[~kept].any()
    often = p * n > 20  # the others together: one by one they come too rarely for a normal law
    got = torch.cat([got[often], got[~often].sum().unsqueeze(0)])
    p = torch.cat([p[often], p[~often].sum().unsqueeze(0)])
    assert bool(((got - p).abs() <= 6 * (p * (1 - p) / n).sqrt() + 1e-12).all())


@engines
@pytest.mark.parametrize("options", [{}, {"top_k": 9}, {"min_p": 0.01}, {"edits": EDITS}])
def test_one_generator_for_each_state(make: Make, options: dict[str, Any]) -> None:
    head, h = make(plain()), random(6, D, seed=2) * 0.2
    together = head.sample(h, 0.9, generator=[rng(i) for i in range(6)], **options)
    alone = [int(head.sample(h[i], 0.9, generator=rng(i), **options)) for i in range(6)]
    assert together.tolist() == alone
    assert len(set(alone)) > 1
    with pytest.raises(BadInput, match="2 generators for 6 states"):
        head.sample(h, 0.9, generator=[rng(), rng()])


@engines
def test_bfloat16(make: Make) -> None:
    dense = LMHead(random(V, D).bfloat16())
    head, h = make(dense), random(4, D, seed=2).bfloat16()
    exact = head(h).detach().float()
    best = head.topk(h, 9)
    # among logits that bfloat16 rounds to the same number, a screened head still knows the order
    torch.testing.assert_close(
        exact.gather(-1, best.ids), ranked(exact, 9).logits, rtol=2**-6, atol=0
    )
    ids = torch.tensor([KEPT[0], KEPT[9]])
    torch.testing.assert_close(head.score(h, ids).float(), exact[:, ids], rtol=2**-7, atol=2**-5)
    assert head.sample(h, generator=rng()).shape == (4,)
    loss = head.loss(h, torch.full((4,), KEPT[4]))
    expected = F.cross_entropy(exact, torch.full((4,), KEPT[4]))
    torch.testing.assert_close(loss.float(), expected, rtol=2e-2, atol=2e-2)


@engines
def test_a_dropped_target_is_infinitely_surprising(make: Make) -> None:
    head, h = make(plain()), random(3, D, seed=2)
    gone = next(i for i in range(V) if i not in KEPT)
    targets = torch.tensor([KEPT[0], gone, -100])
    z = head(h).detach()
    for reduction in ("none", "mean", "sum"):
        loss = head.loss(h, targets, reduction=reduction)
        torch.testing.assert_close(loss, F.cross_entropy(z, targets, reduction=reduction))


@engines
def test_states_that_are_none(make: Make) -> None:
    head, h = make(plain()), random(3, D)
    for wrong in (h.numpy(), h.tolist(), None, "h"):
        for ask in (head, lambda x: head.topk(x, 1), head.sample, lambda x: head.candidates(x, 1)):
            with pytest.raises(BadInput, match="expected a torch tensor of hidden states"):
                ask(wrong)
    with pytest.raises(BadInput, match="not ids"):
        head(torch.zeros(3, D, dtype=torch.int64))
    with pytest.raises(BadInput, match="width 5"):
        head.topk(torch.zeros(5), 1)
    with pytest.raises(BadInput, match="width 0"):
        head.topk(torch.tensor(1.0), 1)
