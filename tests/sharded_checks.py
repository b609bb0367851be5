"""What ranks do in the tests of sharded heads and losses; see `world.py`."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmhead.errors import BadInput
from lmhead.head import Edit, LMHead, Scale
from lmhead.head.answers import drawn, ranked
from lmhead.head.sharded import ShardedHead
from lmhead.loss import linear_cross_entropy
from lmhead.ranks import ranks_of

V, D = 507, 123
EDIT = Edit.add({5: 9.0, 130: -3.0, 400: 2.0}).then(Edit.ban([7, 300])).then(
    Edit.repetition([2, 200, 506], 1.7)
)  # fmt: skip


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def uneven(total: int, size: int) -> list[int]:
    """Rows that no even split would give: 1, 3, 5, ... and the rest."""
    counts = [2 * r + 1 for r in range(size - 1)]
    return [*counts, total - sum(counts)]


def heads(group: Any, dtype: torch.dtype, options: dict[str, Any], split: str) -> Any:
    dense = LMHead(random(V, D).to(dtype), random(V, seed=1).to(dtype), nn.LayerNorm(D), **options)
    size = ranks_of(group).size
    counts = uneven(V, size) if split == "uneven" else None
    return dense, ShardedHead.from_head(dense, group, counts=counts)


def verbs(group: Any, dtype_name: str, options: dict[str, Any], split: str) -> float:
    """Every verb against LMHead; returns by how many ulp the logits differ at most."""
    dtype = getattr(torch, dtype_name)
    dense, head = heads(group, dtype, options, split)
    assert isinstance(head, ShardedHead)
    assert (head.vocab_size, head.hidden_size) == (dense.vocab_size, D)
    assert head.sha256 == dense.sha256
    off = 0.0
    for shape in ((), (1,), (5,), (2, 3), (0,), (17,)):
        h = random(*shape, D, seed=2).to(dtype)
        z, got = dense(h).detach(), head(h).detach()
        assert got.shape == z.shape
        assert got.dtype == z.dtype
        if z.numel():
            ulp = torch.finfo(z.dtype).eps * z.abs().amax(-1, keepdim=True).clamp(min=1e-30)
            off = max(off, float(((got - z).abs() / ulp).max()))
        # what is asked of all ranks is answered from the very logits that they gather
        for k in (1, 7, head.vocab_size):
            best, expected = head.topk(h, k), ranked(got, k)
            assert torch.equal(best.ids, expected.ids)
            assert torch.equal(best.logits, expected.logits)
        ids = torch.tensor([5, 130, 5, 0, head.vocab_size - 1])
        assert torch.equal(head.score(h, ids), dense.score(h, ids))
        own = torch.randint(head.vocab_size, (*shape, 9), generator=rng(4))
        assert torch.equal(head.score(h, own), dense.score(h, own))
        for limit in (1, 64, 65, 130, None):
            assert torch.equal(head.topk(h, 1, limit=limit).ids, ranked(got[..., :limit], 1).ids)
    return off


def draws(group: Any, split: str) -> None:
    """The same seed, the same token, whatever is asked; h is such that logits agree to the bit."""
    weight = random(V, D).mul(2).round().clamp(-3, 3)
    dense = LMHead(weight, random(V, seed=1).round(), scale=0.05)
    counts = uneven(V, ranks_of(group).size) if split == "uneven" else None
    head = ShardedHead.from_head(dense, group, counts=counts)
    h = random(40, D, seed=3).mul(2).round().clamp(-3, 3)
    assert torch.equal(head(h), dense(h))
    each = [EDIT, None] * 20
    for asked in (
        {}, {"temperature": 0.7}, {"temperature": 3.0}, {"temperature": 0.0},
        {"temperature": 1e-38}, {"top_k": 1}, {"top_k": 9}, {"top_k": V}, {"min_p": 0.05},
        {"top_p": 0.9}, {"top_p": 0.01}, {"top_p": 1.0}, {"top_p": 0.0},
        {"temperature": 8.0, "top_p": 0.999}, {"top_k": 20, "top_p": 0.6, "min_p": 0.01},
        {"top_p": 0.8, "min_p": 0.02}, {"edits": EDIT}, {"edits": each, "top_k": 5},
        {"edits": each, "temperature": 1.3}, {"limit": 65}, {"limit": 2, "top_p": 0.5},
        {"edits": Edit.ban(range(1, V)), "temperature": 5.0},
    ):  # fmt: skip
        for seed in range(3):
            asked_of: dict[str, Any] = asked
            got = head.sample(h, generator=rng(seed), **asked_of)
            expected = dense.sample(h, generator=rng(seed), **asked_of)
            assert torch.equal(got, expected), asked
        if "edits" not in asked_of:  # one state alone
            one = head.sample(h[3], generator=rng(1), **asked_of)
            assert torch.equal(one, dense.sample(h[3], generator=rng(1), **asked_of))
        apart = [rng(i) for i in range(40)], [rng(i) for i in range(40)]
        assert torch.equal(
            head.sample(h, generator=apart[0], **asked_of),
            dense.sample(h, generator=apart[1], **asked_of),
        )
    best, expected_best = head.topk(h, 6, edits=each), dense.topk(h, 6, edits=each)
    assert torch.equal(best.ids, expected_best.ids)
    assert torch.equal(best.logits, expected_best.logits)
    # without a generator every rank has another global seed, and all draw the same all the same
    torch.manual_seed(ranks_of(group).rank)
    (every,) = ranks_of(group).gather(head.sample(h, 5.0))
    assert bool((every == every[0]).all())
    for wrong in ({"edits": Edit.ban(range(V))}, {"edits": Edit.ban(range(V)), "top_p": 0.5}):
        with pytest.raises(BadInput, match="nothing to sample from"):
            head.sample(h, **wrong)


def touched(group: Any, split: str, screened: bool) -> None:
    """Candidates are those of LMHead; a screened shard gives the same ids, with exact logits."""
    dense = LMHead(random(V, D), random(V, seed=1))
    counts = uneven(V, ranks_of(group).size) if split == "uneven" else None
    head = ShardedHead.from_head(dense, group, counts=counts, screened=screened)
    h = random(4, D, seed=2)
    given = [torch.tensor([400, 3]), torch.tensor([], dtype=torch.int64), torch.arange(140),
             dense.topk(h[3], 5).ids]  # fmt: skip
    for limit in (None, 200, 2):
        ids = given if limit is None else [g[g < limit] for g in given]
        got, expected = (
            head.candidates(h, 6, ids, limit=limit),
            dense.candidates(h, 6, ids, limit=limit),
        )
        assert torch.equal(got.ids, expected.ids)
        torch.testing.assert_close(got.logits, expected.logits, rtol=1e-5, atol=1e-4)
    got, expected = head.topk(h, 9), dense.topk(h, 9)
    assert torch.equal(got.ids, expected.ids)
    torch.testing.assert_close(got.logits, expected.logits, rtol=1e-5, atol=1e-4)
    assert torch.equal(head.candidates(h, 9).ids, expected.ids)
    assert head.candidates(h, 10 * V).ids.shape == (4, V)
    assert torch.equal(
        head.sample(h, 0.9, 8, generator=rng(1)), dense.sample(h, 0.9, 8, generator=rng(1))
    )


def losses(group: Any, dtype_name: str, options: dict[str, Any], split: str) -> tuple[float, float]:
    """Loss and gradients against plain torch in float64; returns the largest differences."""
    ranks = ranks_of(group)
    dtype = getattr(torch, dtype_name)
    N = 37
    counts = (
        uneven(V, ranks.size)
        if split == "uneven"
        else [len(c) for c in torch.arange(V).chunk(ranks.size)]
    )
    first = sum(counts[: ranks.rank])
    mine = slice(first, first + counts[ranks.rank])
    h, W, b = (
        random(N, D, seed=2).to(dtype),
        random(V, D).mul(0.3).to(dtype),
        random(V, seed=1).to(dtype),
    )
    t = torch.randint(V, (N,), generator=rng(3))
    t[::7] = options.get("ignore_index", -100)
    exact = [x.double().requires_grad_() for x in (h, W, b)]
    expected = plain(*exact, t, **options)
    local = [x.clone().requires_grad_() for x in (h, W[mine], b[mine])]
    got = linear_cross_entropy(local[0], local[1], t, local[2], group=group, chunk=16, **options)
    weights = (
        random(N, seed=9).double() if options.get("reduction") == "none" else torch.tensor(1.5)
    )
    (expected * weights).sum().backward()
    (got * weights.to(got.dtype)).sum().backward()
    off = float((got.double() - expected).abs().max())
    grads = [exact[0].grad, exact[1].grad[mine], exact[2].grad[mine]]
    worst = max(float((a.grad.double() - e).abs().max()) for a, e in zip(local, grads, strict=True))
    again = linear_cross_entropy(h, W[mine], t, b[mine], group=group, **options)  # no gradients
    torch.testing.assert_close(again, got.detach(), rtol=1e-5, atol=1e-5)

    # each rank with tokens of its own: uneven ones, the first rank has none where there are three
    cuts = [0, *(int(N * (r / ranks.size) ** 2) for r in range(1, ranks.size)), N]
    tokens = slice(cuts[ranks.rank], cuts[ranks.rank + 1])
    own = [x.clone().requires_grad_() for x in (h[tokens], W[mine], b[mine])]
    part = linear_cross_entropy(
        own[0], own[1], t[tokens], own[2], group=group, sequence_parallel=True, **options
    )
    if options.get("reduction") == "none":
        torch.testing.assert_close(part, got[tokens], rtol=1e-5, atol=1e-5)
        (part * weights[tokens].to(part.dtype)).sum().backward()
    else:
        torch.testing.assert_close(part, got, rtol=1e-5, atol=1e-5)
        (part * 1.5).backward()
    for a, e in zip(own, (local[0].grad[tokens], local[1].grad, local[2].grad), strict=True):
        torch.testing.assert_close(
            a.grad, e, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-5
        )
    return off, worst


def plain(
    h: Tensor, W: Tensor, b: Tensor, t: Tensor, softcap: float | None = None,
    scale: float | None = None, ignore_index: int = -100, reduction: str = "mean",
    label_smoothing: float = 0.0, z_loss: float = 0.0,
) -> Tensor:  # fmt: skip
    """The definition, from all logits."""
    z = (h @ W.T + b) * (scale or 1.0)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    each = F.cross_entropy(
        z, t, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
    )
    each = each + z_loss * z.logsumexp(-1).square() * (t != ignore_index)
    if reduction == "none":
        return each
    total = each.sum()
    return total if reduction == "sum" else total / (t != ignore_index).sum()


def scale_and_padding(group: Any, split: str) -> None:
    """Softcap, a dividing scale, padding rows at the end, states from a block, gradients."""
    dense = LMHead(
        random(V, D).requires_grad_(),
        None,
        nn.LayerNorm(D),
        20.0,
        Scale(3.0, True),
        vocab_size=V - 70,
    )
    ranks = ranks_of(group)
    counts = uneven(V, ranks.size) if split == "uneven" else None
    head = ShardedHead.from_head(dense, group, counts=counts)
    h = random(3, D, seed=2).requires_grad_()
    t = torch.tensor([0, 200, V - 71])
    ids = torch.tensor([1, 300, 1])
    for ask in (
        lambda any_head: any_head.loss(h, t, from_block=True),
        lambda any_head: any_head(h, from_block=True).sin().sum(),
        lambda any_head: any_head.score(h, ids, from_block=True).sin().sum(),
    ):
        h.grad = dense.weight.grad = None
        expected = ask(dense)
        expected.backward()
        wanted = h.grad.clone(), dense.weight.grad.clone()
        h.grad = dense.weight.grad = None
        got = ask(head)
        got.backward()
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(h.grad, wanted[0], rtol=1e-4, atol=1e-6)
        whole = ranks.sum_(dense.weight.grad.clone())  # each rank has the gradient of its own rows
        torch.testing.assert_close(whole, wanted[1], rtol=1e-4, atol=1e-6)


def wrong_calls(group: Any) -> None:
    ranks = ranks_of(group)
    head = ShardedHead.from_head(LMHead(random(V, D)), group)
    h = random(3, D)
    for ask, reported in (
        (lambda: head.topk(h, V + 1), "k is"),
        (lambda: head.topk(h[:, :5], 1), "width 5"),
        (lambda: head.score(h, torch.tensor([V])), f"hold {V}"),
        (lambda: head.candidates(h, 6, [torch.tensor([V])] * 3), f"hold {V}"),
        (lambda: head.candidates(h, 6, []), "0 of 3 states"),
        (lambda: head.sample(h, -1.0), "temperature is"),
        (lambda: head.loss(h, torch.tensor([0, 1, V])), f"target {V} is outside"),
        (lambda: head.topk(h, 1, edits=Edit.ban([V])), f"the id {V}"),
        (lambda: ShardedHead(LMHead(random(4, 3 + ranks.rank)), group), "width"),
        (lambda: ShardedHead(head, group), "expected an LMHead"),
        (lambda: ShardedHead.from_head(LMHead(random(V, D)), group, counts=[V + 1]), "counts is"),
        (lambda: ShardedHead.from_head(LMHead(random(1, D)), group), "over"),
        (lambda: ranks_of("all"), "process group"),
        (
            lambda: linear_cross_entropy(
                h[: ranks.rank + 1], h, torch.zeros(ranks.rank + 1).long(), group=group
            ),
            "tokens",
        ),
    ):  # fmt: skip
        with pytest.raises(BadInput, match=reported):
            ask()


def traffic(group: Any, V: int) -> dict[str, float]:
    """Bytes that a rank receives for one token, and for one step of a loss without h's gradient."""
    ranks = ranks_of(group)
    head = ShardedHead.from_head(LMHead(random(V, 32)), group)
    h, t = random(64, 32, seed=1), torch.arange(64)
    reported = {}
    for name, ask in (
        ("topk", lambda: head.topk(h, 8)),
        ("score", lambda: head.score(h, t[:8])),
        ("sample", lambda: head.sample(h, generator=rng(1))),
        ("sample top_k", lambda: head.sample(h, 1.0, 8, generator=rng(1))),
        ("loss", lambda: head.loss(h, t)),
        ("logits", lambda: head(h)),
    ):
        before = ranks.received
        ask()
        reported[name] = (ranks.received - before) / 64
    return reported


def mesh(group: Any) -> None:
    """A DeviceMesh dimension and a DTensor weight, as they are."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    W, h = random(V, D).mul(0.3), random(9, D, seed=2)
    t = torch.randint(V, (9,), generator=rng(3))
    dense = LMHead(W)
    for given in (whole["tp"], (whole, "tp"), whole.get_group("tp")):
        head = ShardedHead.from_head(dense, given)
        assert head.ranks.size == 2
        assert torch.equal(head.topk(h, 5).ids, dense.topk(h, 5).ids)
    with pytest.raises(BadInput, match="2 dimensions"):
        ranks_of(whole)
    exact = [W.double().requires_grad_(), h.double().requires_grad_()]
    F.cross_entropy(exact[1] @ exact[0].T, t).backward()
    for placements in ([Replicate(), Shard(0)], [Shard(0), Replicate()]):
        weight = nn.Parameter(distribute_tensor(W, whole, placements))
        for states in (
            h.clone().requires_grad_(),
            distribute_tensor(h, whole["tp"], [Replicate()]).requires_grad_(),
            distribute_tensor(h, whole["tp"], [Shard(0)]).requires_grad_(),
        ):
            if isinstance(states, DTensor) and placements[0] != Replicate():
                continue  # states and weight over one and the same dimension
            weight.grad = None
            loss = linear_cross_entropy(states, weight, t)
            loss.backward()
            assert isinstance(weight.grad, DTensor)
            torch.testing.assert_close(
                weight.grad.full_tensor().double(), exact[0].grad, rtol=1e-4, atol=1e-6
            )
            grad = states.grad.full_tensor() if isinstance(states, DTensor) else states.grad
            torch.testing.assert_close(grad.double(), exact[1].grad, rtol=1e-4, atol=1e-6)
    for wrong in ([Shard(0), Shard(0)], [Replicate(), Shard(1)]):
        with pytest.raises(BadInput, match="redistribute"):
            linear_cross_entropy(h, distribute_tensor(W, whole, wrong), t)


def fully_sharded(group: Any) -> None:
    """FSDP2 leaves Shard(0) over all ranks; a head takes its rows as they are."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    layer = nn.Linear(D, V, bias=False)
    dense = LMHead(layer.weight.detach().clone())
    fully_shard(layer, mesh=init_device_mesh("cpu", (4,)))
    h, t = random(9, D, seed=2), torch.arange(9)
    torch.testing.assert_close(
        linear_cross_entropy(h, layer.weight, t), dense.loss(h, t), rtol=1e-6, atol=1e-6
    )
    from lmhead.loss.placed import rows_here

    here = rows_here(layer.weight, None, None)
    head = ShardedHead(LMHead(here.weight), here.group)
    assert torch.equal(head.topk(h, 5).ids, dense.topk(h, 5).ids)


def real_states(group: Any, folder: str, path: str, dtype_name: str) -> dict[str, Any]:
    """The real head, its own rows read from the file, on states of the real body.

    Counts what differs from LMHead, on the first rank; the others answer with it.
    """
    from safetensors.torch import load_file

    dtype = getattr(torch, dtype_name)
    first = ranks_of(group).rank == 0
    head = ShardedHead.from_pretrained(folder, group).to(dtype)
    dense = LMHead.from_pretrained(folder).to(dtype) if first else None
    reported: dict[str, Any] = {"rows": len(head.local.weight), "states": 0, "equal": True}
    reported |= {"ulp": 0.0, "topk": 0, "sample": 0, "loss": 0.0, "loss_of_its_size": 0.0}
    for i, h in enumerate(torch.split(load_file(path)["h"].to(dtype), 100)):
        with torch.no_grad():
            got, best = head(h), head.topk(h, 50)
            ids = head.sample(h, generator=rng(i))
            t = (torch.arange(len(h)) * 331 + i) % head.vocab_size
            loss = head.loss(h, t)
            if dense is None:
                continue
            z = dense(h)
            reported["states"] += len(h)
            reported["equal"] &= torch.equal(z, got)
            ulp = torch.finfo(dtype).eps * z.abs().amax(-1, keepdim=True)
            reported["ulp"] = max(reported["ulp"], float(((z - got).abs() / ulp).max()))
            reported["topk"] += int((ranked(z, 50).ids != best.ids).sum())
            reported["sample"] += int((drawn(z, 1.0, rng(i)) != ids).sum())
            want = dense.loss(h, t)
            reported["loss"] = max(reported["loss"], float((want - loss).abs()))
            # a float32 of 16 or more cannot be off by less than 1.9e-6
            off = float((want - loss).abs() / want.abs().clamp(min=1.0))
            reported["loss_of_its_size"] = max(reported["loss_of_its_size"], off)
    return reported
