"""ScreenedHead gives the exact answer: the order of exact scores, equal ones by their ids."""

import math
import threading
from fractions import Fraction
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmhead.errors import BadInput, LMHeadError, MissingExtra, UnsupportedModel
from lmhead.head import Edit, LMHead, Scale
from lmhead.head.screened import ScreenedHead
from lmhead.head.screening import loops

HAS_NUMBA = find_spec("numba") is not None
KERNELS = [
    pytest.param("numba", marks=pytest.mark.skipif(not HAS_NUMBA, reason="numba is missing")),
    "torch",
]


@pytest.fixture(autouse=True)
def one_thread():
    """Small heads: a second thread costs more than it gives."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def exact_order(head: LMHead, h: torch.Tensor, k: int) -> list[int]:
    """The k best ids by rational arithmetic, each score rounded once to float64."""
    rows = head.weight.double().tolist()
    bias = [0.0] * len(rows) if head.bias is None else head.bias.double().tolist()
    state = [Fraction(x) for x in h.to(head.weight.dtype).double().tolist()]
    scores = [
        float(sum((Fraction(w) * x for w, x in zip(row, state, strict=True)), Fraction(b)))
        for row, b in zip(rows, bias, strict=True)
    ]
    return sorted(range(len(rows)), key=lambda i: (-scores[i], i))[:k]


def float64_topk(head: LMHead, h: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k best by float64 scores of h `[B, d]`, and those scores."""
    z = h.double() @ head.weight.detach().double().T
    if head.bias is not None:
        z = z + head.bias.detach().double()
    z, ids = z.sort(dim=-1, descending=True, stable=True)
    return ids[:, :k], z[:, :k]


def random_head(V: int, d: int, seed: int = 0, **options) -> LMHead:
    g = torch.Generator().manual_seed(seed)
    sizes = torch.rand(V, 1, generator=g) + 0.2
    return LMHead(torch.randn(V, d, generator=g) * sizes, **options)


def states(n: int, d: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("V", "d"), [(1, 1), (2, 3), (63, 16), (64, 17), (65, 31), (507, 123), (5000, 252)]
)
def test_topk_is_the_float64_answer(kernels, V, d):
    head = random_head(V, d, bias=torch.randn(V, generator=torch.Generator().manual_seed(3)))
    screened = ScreenedHead.from_head(head, kernels=kernels)
    h = states(19, d)  # more than one pass, and not a multiple of what a kernel does at once
    for k in {1, min(7, V), min(50, V), V}:
        ids, z = float64_topk(head, h, k)
        best = screened.topk(h, k)
        assert torch.equal(best.ids, ids)
        assert torch.equal(best.logits, z.float())


def test_states_cut_out_of_longer_ones_compile_nothing_anew():
    """The last position of every sequence is no contiguous array, but no other case either."""
    if not HAS_NUMBA:
        pytest.skip("numba is missing")
    screened = ScreenedHead.from_head(random_head(300, 20))
    h = states(15, 20).view(3, 5, 20)
    whole = screened.topk(h, 4).ids
    compiled = screened.kernels._best.signatures
    assert torch.equal(screened.topk(h[:, -1], 4).ids, whole[:, -1])
    assert torch.equal(screened.topk(h.transpose(0, 1), 4).ids, whole.transpose(0, 1))
    assert screened.kernels._best.signatures == compiled


@pytest.mark.parametrize("kernels", KERNELS)
def test_bfloat16_weights(kernels):
    head = random_head(3000, 100)
    head = LMHead(head.weight.bfloat16())
    screened = ScreenedHead.from_head(head, kernels=kernels)
    h = states(8, 100)
    ids, z = float64_topk(head, h.bfloat16(), 20)  # the head takes h in the dtype of its weight
    best = screened.topk(h, 20)
    assert torch.equal(best.ids, ids)
    assert torch.equal(best.logits, z.float())


def test_shapes_norm_scale_and_softcap_follow_the_dense_head():
    head = random_head(400, 24, norm=torch.nn.LayerNorm(24), scale=Scale(3, divide=True), softcap=5)
    screened = ScreenedHead.from_head(head)
    h = states(6, 24).view(2, 3, 24) * 4
    ours, dense = screened.topk(h, 5, from_block=True), head.topk(h, 5, from_block=True)
    assert ours.ids.shape == (2, 3, 5)
    assert torch.equal(ours.ids, dense.ids)
    torch.testing.assert_close(ours.logits, dense.logits)
    single = screened.topk(h[0, 0], 5, from_block=True)
    assert torch.equal(single.ids, dense.ids[0, 0])
    entering = head.norm(h)
    assert torch.equal(screened.topk(entering, 5).ids, dense.ids)
    assert torch.equal(screened(h), head(h))
    assert torch.equal(screened(h, from_block=True), head(entering))
    assert screened.sample(h, 0.0).shape == (2, 3)
    assert torch.equal(screened.sample(h, 0.0, from_block=True), dense.ids[..., 0])
    assert screened.topk(h[:0], 5).ids.shape == (0, 3, 5)


def test_rows_that_the_model_cuts_off_are_never_named():
    head = random_head(200, 8)
    cut = LMHead(head.weight, vocab_size=150)
    h = states(4, 8)
    expected = LMHead(head.weight[:150]).topk(h, 150).ids
    assert torch.equal(ScreenedHead.from_head(cut).topk(h, 150).ids, expected)
    screened = ScreenedHead.from_head(head)
    for limit in (1, 63, 64, 65, 150):
        best = screened.topk(h, limit, limit=limit)
        assert torch.equal(best.ids, LMHead(head.weight[:limit]).topk(h, limit).ids)


SIZES = [0.0, 1e-45, 1e-38, 1e-30, 1e-6, 1.0, 3.0, 127.0, 1e6, 1e19, 3e38]


@st.composite
def heads(draw):
    """Heads and states with huge, tiny, zero, equal and repeated rows."""
    d = draw(st.integers(1, 9))
    number = st.one_of(
        st.sampled_from(SIZES),
        st.sampled_from(SIZES).map(lambda x: -x),
        st.floats(-4, 4, width=32),
        st.integers(-3, 3).map(float),
    )
    row = st.lists(number, min_size=d, max_size=d)
    rows = draw(st.lists(row, min_size=1, max_size=12))
    order = draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=150))
    weight = torch.tensor([rows[i] for i in order])
    if draw(st.booleans()):
        weight = weight.bfloat16()
    weight = weight.nan_to_num(posinf=3e38, neginf=-3e38)
    bias = None
    if draw(st.booleans()):
        some = draw(st.lists(number, min_size=1, max_size=4))
        bias = torch.tensor([some[i % len(some)] for i in range(len(order))]).to(weight.dtype)
        bias = bias.nan_to_num(posinf=3e38, neginf=-3e38)
    h = torch.tensor(draw(row)).to(weight.dtype).nan_to_num(posinf=3e38, neginf=-3e38)
    return LMHead(weight, bias), h, draw(st.integers(1, len(order)))


@pytest.mark.parametrize("kernels", KERNELS)
@settings(max_examples=200, deadline=None)
@given(case=heads())
def test_any_head_any_state(kernels, case):
    head, h, k = case
    best = ScreenedHead.from_head(head, kernels=kernels).topk(h, k)
    assert best.ids.tolist() == exact_order(head, h, k)


@pytest.mark.parametrize("kernels", KERNELS)
def test_near_ties(kernels):
    """States at which two rows score the same to the last bits, in favour of either."""
    head = random_head(2000, 64)
    weight = head.weight.double()
    screened = ScreenedHead.from_head(head, kernels=kernels)
    h = states(200, 64, seed=5).double()
    two = (h @ weight.T).topk(2).indices  # [n, 2]
    apart = weight[two[:, 0]] - weight[two[:, 1]]
    h -= apart * ((h * apart).sum(1, keepdim=True) / (apart * apart).sum(1, keepdim=True))
    h = h.float()
    nudged = torch.cat([h, h + 1e-7 * apart.float(), h - 1e-7 * apart.float()])
    for state in nudged:
        got = screened.topk(state, 3).ids.tolist()
        close = (state.double() @ weight.T).topk(6).indices.sort().values
        small = LMHead(head.weight[close])  # rational arithmetic on six rows, not on all
        assert got == close[exact_order(small, state, 3)].tolist()


def test_equal_scores_by_their_ids_even_when_float64_sums_differ():
    """Rows that hold the same numbers in another order: equal scores, unequal float64 sums."""
    g = torch.Generator().manual_seed(0)
    row = torch.randn(97, generator=g) * 10 ** (torch.rand(97, generator=g) * 12 - 6)
    weight = torch.stack([row[torch.randperm(97, generator=g)] for _ in range(300)])
    screened = ScreenedHead.from_head(LMHead(weight))
    assert screened.topk(torch.ones(97), 300).ids.tolist() == list(range(300))
    plain = (weight.double().numpy() @ np.ones(97)).tolist()
    assert len(set(plain)) > 1, "this state no longer shows the difference"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_states_that_are_not_finite_get_the_dense_answer(value):
    head = random_head(100, 8)
    screened = ScreenedHead.from_head(head)
    h = states(3, 8)
    h[1, 2] = value
    ours, dense = screened.topk(h, 4), head.topk(h, 4)
    assert torch.equal(ours.ids, dense.ids)
    assert screened.stats.fallbacks["not finite"] == 1
    if math.isnan(value):
        with pytest.raises(BadInput, match="NaN"):
            screened.sample(h)


def test_states_too_large_for_float32_bounds_are_scored_in_full():
    head = LMHead(torch.tensor([[3e38, 1.0], [3e38, 2.0], [-3e38, 0.0]]))
    screened = ScreenedHead.from_head(head)
    assert screened.topk(torch.tensor([3e38, 1.0]), 3).ids.tolist() == [0, 1, 2]  # rounded: a tie
    assert screened.topk(torch.tensor([-3e38, 1.0]), 1).ids.tolist() == [2]
    assert screened.stats.fallbacks["range"] == 2


def edited_oracle(head: LMHead, h: torch.Tensor, edit: Edit, k: int) -> list[int]:
    z = h.double() @ head.weight.double().T
    z[edit.ids] = edit.change(z[edit.ids])
    return z.sort(descending=True, stable=True).indices[:k].tolist()


@pytest.mark.parametrize("kernels", KERNELS)
def test_edits_are_exact(kernels):
    head = random_head(1500, 40)
    screened = ScreenedHead.from_head(head, kernels=kernels)
    h = states(12, 40) * 2
    best = screened.topk(h, 30).ids
    for n, state in enumerate(h):
        said = best[n, ::2].tolist() + list(range(n, 1500, 97))
        edit = (
            Edit.repetition(said, 1.7)
            .then(Edit.add({5: 30.0, int(best[n, 3]): -4.0, 1499: 0.25}))
            .then(Edit.ban([int(best[n, 0]), int(best[n, 1]), 7]))
        )
        for k in (1, 40):
            got = screened.topk(state, k, edits=edit).ids.tolist()
            assert got == edited_oracle(head, state, edit, k)
    each = [Edit.ban([int(row[0])]) if n % 2 else None for n, row in enumerate(best)]
    got = screened.topk(h, 1, edits=each).ids[:, 0]
    assert torch.equal(got, torch.where(torch.arange(12) % 2 == 1, best[:, 1], best[:, 0]))


def test_everything_banned():
    screened = ScreenedHead.from_head(random_head(70, 4))
    with pytest.raises(BadInput, match="nothing to sample from"):
        screened.sample(states(1, 4)[0], edits=Edit.ban(range(70)))
    allowed = screened.sample(states(1, 4)[0], edits=Edit.ban(i for i in range(70) if i != 66))
    assert allowed.item() == 66


def test_candidates_hold_the_touched_and_the_best_of_the_others():
    head = random_head(900, 16)
    screened = ScreenedHead.from_head(head)
    h = states(2, 16)
    touched = [torch.tensor([3, 899]), torch.tensor([], dtype=torch.int64)]
    found = screened.candidates(h, 5, touched)
    z = h @ head.weight.T
    assert found.ids.shape == (2, 7)
    free = z[0].clone()
    free[touched[0]] = -torch.inf
    assert set(found.ids[0].tolist()) == {3, 899, *free.topk(5).indices.tolist()}
    assert set(found.ids[1].tolist()) == {900, *z[1].topk(5).indices.tolist()}
    real = found.ids < 900
    want = z.gather(-1, found.ids.clamp(max=899))
    torch.testing.assert_close(found.logits[real], want[real])
    assert bool((found.logits[~real] == -torch.inf).all())


def test_stats_tell_how_little_was_read():
    head = random_head(20_000, 64)
    screened = ScreenedHead.from_head(head)
    screened.topk(states(20, 64), 1)
    assert screened.stats.states == 20
    assert 20 <= screened.stats.rescored < 20 * 100
    assert not screened.stats.fallbacks
    screened.stats.clear()
    assert screened.stats.states == screened.stats.rescored == 0


def test_the_copy_is_about_a_quarter():
    head = random_head(1024, 576)
    screened = ScreenedHead.from_head(head)
    assert screened.screen.nbytes <= 0.27 * head.weight.nbytes
    assert "25.5% of float32" in repr(screened)


def test_weights_that_changed_are_noticed():
    head = random_head(50, 4)
    screened = ScreenedHead.from_head(head)
    head.weight.add_(1)
    with pytest.raises(LMHeadError, match="changed"):
        screened.topk(states(1, 4), 1)


def test_many_threads_at_once():
    head = random_head(3000, 32)
    screened = ScreenedHead.from_head(head)
    h = states(8, 32)
    expected = screened.topk(h, 5).ids
    wrong: list[int] = []

    def ask(n: int) -> None:
        for _ in range(20):
            if not torch.equal(screened.topk(h[n], 5).ids, expected[n]):
                wrong.append(n)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_without_numba(monkeypatch):
    monkeypatch.setattr(loops, "find_spec", lambda name: None)
    head = random_head(100, 8)
    assert not ScreenedHead.from_head(head).compiled
    with pytest.raises(MissingExtra, match="pip install numba"):
        ScreenedHead.from_head(head, kernels="numba")


def test_wrong_input_is_named():
    head = random_head(100, 8)
    screened = ScreenedHead.from_head(head)
    with pytest.raises(BadInput, match="width 9"):
        screened.topk(torch.zeros(9), 1)
    with pytest.raises(BadInput, match="k is 101"):
        screened.topk(torch.zeros(8), 101)
    with pytest.raises(BadInput, match="top_p is 2"):
        screened.sample(torch.zeros(8), top_p=2)
    with pytest.raises(BadInput, match="expected ids from 0 to 99"):
        screened.topk(torch.zeros(8), 1, edits=Edit.ban([100]))
    with pytest.raises(BadInput, match="2 edits for 1 states"):
        screened.topk(torch.zeros(8), 1, edits=[None, None])
    with pytest.raises(BadInput, match="each once"):
        Edit(torch.tensor([1, 1]), lambda z: z)
    with pytest.raises(BadInput, match="kernels"):
        ScreenedHead.from_head(head, kernels="cuda")
    with pytest.raises(UnsupportedModel, match="float64"):
        ScreenedHead.from_head(LMHead(head.weight.double()))
    with pytest.raises(UnsupportedModel, match="order"):
        ScreenedHead.from_head(LMHead(head.weight, scale=-1.0))


def test_a_bias_that_came_later_is_noticed() -> None:
    g = torch.Generator().manual_seed(0)
    head = LMHead(torch.randn(100, 16, generator=g))
    screened = ScreenedHead.from_head(head)
    h = torch.randn(1, 16, generator=g)
    screened.topk(h, 1)
    head.bias = torch.nn.Parameter(torch.randn(100, generator=g))
    with pytest.raises(LMHeadError, match="changed after its int8 copy"):
        screened.topk(h, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_an_answer_does_not_depend_on_the_rest_of_the_batch(dtype):
    """Bit for bit, for 1 to 16 states that are asked about together."""
    g = torch.Generator().manual_seed(0)
    head = ScreenedHead.from_head(LMHead(torch.randn(900, 40, generator=g).to(dtype)))
    h = torch.randn(16, 40, generator=g)
    cuts = ({}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_n_sigma": 1.0})

    def asked(states: torch.Tensor, first: int) -> list[torch.Tensor]:
        best = head.topk(states, 12)
        reported = [best.ids, best.logits, head.logprobs(states, best.ids, error=0.05)]
        for cut in cuts:
            own = [torch.Generator().manual_seed(first + n) for n in range(len(states))]
            reported.append(head.sample(states, 0.9, generator=own, **cut))
        return reported

    alone = [asked(h[n : n + 1], n) for n in range(16)]
    for size in (2, 3, 4, 7, 16):
        for first in range(0, 16 - size + 1, size):
            together = asked(h[first : first + size], first)
            for at, answer in enumerate(together):
                for n in range(size):
                    assert torch.equal(answer[n], alone[first + n][at][0])


@pytest.mark.parametrize("kernels", KERNELS)
def test_float16_weights(kernels):
    g = torch.Generator().manual_seed(1)
    head = LMHead(torch.randn(500, 24, generator=g).half())
    h = torch.randn(5, 24, generator=g)
    ids, z = float64_topk(head, h.half(), 20)
    best = ScreenedHead.from_head(head, kernels=kernels).topk(h, 20)
    assert torch.equal(best.ids, ids)
    assert torch.equal(best.logits, z.float())


def test_log_probabilities_are_as_close_as_they_are_said_to_be():
    g = torch.Generator().manual_seed(2)
    head = LMHead(torch.randn(2000, 32, generator=g), torch.randn(2000, generator=g), scale=0.4)
    screened, h = ScreenedHead.from_head(head), torch.randn(2, 3, 32, generator=g)
    ids = torch.randint(0, 1900, (2, 3, 4), generator=g)
    exact = head(h)[..., :1900].double().log_softmax(-1).gather(-1, ids)
    for error in (0.5, 0.05, 0.001, 0.0):
        reported = screened.logprobs(h, ids, error=error, limit=1900)
        assert reported.shape == ids.shape
        assert (reported - exact).abs().max() <= error + 1e-4
        assert torch.equal(reported, screened.logprobs(h, ids, error=error, limit=1900))
    with pytest.raises(BadInput, match="error"):
        screened.logprobs(h, ids, error=-1.0)
    torch.testing.assert_close(head.logprobs(h, ids[0, 0], limit=1900)[0, 0].double(), exact[0, 0])
