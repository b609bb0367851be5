"""The loss gives what plain torch gives, no less exactly, and never holds the logits."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lmhead.errors import BadInput
from lmhead.loss import chunk_for, linear_cross_entropy


def plain(
    h: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """The same loss by holding the logits."""
    z = h.reshape(-1, h.shape[-1]) @ weight.T
    z = z if bias is None else z + bias
    z = z if scale is None else z * scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    t = targets.reshape(-1)
    loss = F.cross_entropy(z, t, None, None, ignore_index, None, "none", label_smoothing)
    kept = t != ignore_index
    loss = loss + z_loss * torch.where(kept, z.logsumexp(-1).square(), 0.0)
    if reduction == "mean":
        return loss.sum() / kept.sum()
    return loss.sum() if reduction == "sum" else loss.view(targets.shape)


def case(
    *shape: int, V: int, dtype: torch.dtype = torch.float64, bias: bool = False, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Draw h [*shape], weight [V, d], targets and bias [V] with logits of a few units."""
    draw = torch.Generator().manual_seed(seed)
    d = shape[-1]
    h = torch.randn(shape, generator=draw, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, d, generator=draw, dtype=dtype).mul_(3 / math.sqrt(d))
    targets = torch.randint(V, shape[:-1], generator=draw)
    b = torch.randn(V, generator=draw, dtype=dtype).requires_grad_() if bias else None
    return h, weight.requires_grad_(), targets, b


def grads(loss: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [x for x in tensors if x is not None]))


VARIANTS: list[dict[str, Any]] = [
    {},
    {"bias": True},
    {"softcap": 2.5},
    {"scale": 0.125},
    {"label_smoothing": 0.1},
    {"label_smoothing": 1.0},
    {"z_loss": 0.05},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"bias": True, "softcap": 3.0, "scale": 1.7, "label_smoothing": 0.2, "z_loss": 0.01},
    {"bias": True, "softcap": 3.0, "scale": 1.7, "z_loss": 0.01, "reduction": "none"},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("chunk", [None, 1, 4])
def test_gradcheck_with_ignored_targets(variant: dict[str, Any], chunk: int | None) -> None:
    options = dict(variant)
    h, weight, targets, bias = case(2, 5, 6, V=11, bias=options.pop("bias", False))
    targets[0, 1] = targets[1, 4] = -100

    def loss(h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear_cross_entropy(h, weight, targets, bias, chunk=chunk, **options)

    torch.testing.assert_close(
        loss(h, weight, bias), plain(h, weight, targets, bias, **options), rtol=1e-12, atol=1e-12
    )
    assert torch.autograd.gradcheck(loss, (h, weight, bias))


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_gradcheck_with_every_target_ignored(reduction: Any) -> None:
    h, weight, targets, bias = case(5, 6, V=11, bias=True)
    targets.fill_(3)

    def loss(*args: Tensor) -> Tensor:
        return linear_cross_entropy(
            args[0], args[1], targets, args[2], ignore_index=3, reduction=reduction, z_loss=0.1
        )

    assert torch.autograd.gradcheck(loss, (h, weight, bias))
    assert not loss(h, weight, bias).any()  # type: ignore[arg-type]


def test_every_target_ignored_is_nan_with_zero_gradients_as_in_torch() -> None:
    h, weight, targets, _ = case(5, 6, V=11)
    targets.fill_(-100)
    ours, theirs = linear_cross_entropy(h, weight, targets), F.cross_entropy(h @ weight.T, targets)
    assert ours.isnan()
    assert theirs.isnan()
    for a, b in zip(grads(ours, h, weight), grads(theirs, h, weight), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("chunk", [None, 64, 251])
def test_odd_shapes_match_torch(variant: dict[str, Any], chunk: int | None) -> None:
    options = dict(variant)
    h, weight, targets, bias = case(252, 123, V=507, bias=options.pop("bias", False), seed=1)
    targets[::7] = -100
    ours = linear_cross_entropy(h, weight, targets, bias, chunk=chunk, **options)
    theirs = plain(h, weight, targets, bias, **options)
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(
        grads(ours.sum(), h, weight, bias),
        grads(theirs.sum(), h, weight, bias),
        rtol=1e-9,
        atol=1e-11,
    )


@pytest.mark.parametrize("certain", [False, True], ids=["uncertain", "certain"])
def test_error_at_real_size_is_not_larger_than_torchs_own(certain: bool) -> None:
    """Against float64, on the same float32 inputs: root mean square and largest error."""
    N, d, V = 64, 576, 49_152
    draw = torch.Generator().manual_seed(2)
    weight = torch.randn(V, d, generator=draw).mul_(0.04)
    targets = torch.randint(V, (N,), generator=draw)
    h = torch.randn(N, d, generator=draw).mul_(4.0)
    if certain:
        h += 10 * weight[targets]  # the target leads by some 10 logits
    tensors = [h.requires_grad_(), weight.requires_grad_()]

    def measure(loss: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        given = [x.detach().to(dtype).requires_grad_() for x in tensors]
        value = loss(*given, targets)
        return [value.detach(), *torch.autograd.grad(value, given)]

    def torchs(h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(h @ weight.T, targets)

    oracle = measure(torchs, torch.float64)
    ours, theirs = measure(linear_cross_entropy, torch.float32), measure(torchs, torch.float32)
    for name, a, b, o in zip(["loss", "h", "weight"], ours, theirs, oracle, strict=True):
        assert (a - o).norm() <= (b - o).norm(), name
        assert (a - o).abs().max() <= (b - o).abs().max(), name


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation gives."""

    numel = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, Tensor):
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_no_tensor_of_the_size_of_the_logits_is_ever_made(variant: dict[str, Any]) -> None:
    options = dict(variant)
    N, d, V = 512, 16, 1000
    h, weight, targets, bias = case(N, d, V=V, bias=options.pop("bias", False))
    with Largest() as seen:
        linear_cross_entropy(h, weight, targets, bias, chunk=64, **options).sum().backward()
    assert seen.numel == 64 * V
    with Largest() as seen:
        plain(h, weight, targets, bias, **options).sum().backward()
    assert seen.numel >= N * V  # the instrument does see them


class Products(TorchDispatchMode):
    """Counts the multiplications of all matrix products, and the buffers as large as the head."""

    def __init__(self, V: int, d: int) -> None:
        super().__init__()
        self.head, self.multiplications, self.buffers = [V, d], 0, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm"):
            a, b = args[-2:]
            self.multiplications += a.shape[0] * a.shape[1] * b.shape[1]
        elif name in ("new_empty", "new_zeros") and list(args[1]) == self.head:
            self.buffers += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("h_grad", "weight_grad", "reduction", "products"),
    [
        (True, True, "mean", 3),
        (True, False, "mean", 2),
        (False, True, "sum", 2),
        (False, False, "mean", 1),
        (True, True, "none", 4),
        (True, False, "none", 3),
    ],
)
def test_what_needs_no_gradient_costs_nothing(
    h_grad: bool, weight_grad: bool, reduction: Any, products: int
) -> None:
    N, d, V = 60, 8, 40
    h, weight, targets, _ = case(N, d, V=V)
    h.requires_grad_(h_grad)
    weight.requires_grad_(weight_grad)
    with Products(V, d) as count:
        loss = linear_cross_entropy(h, weight, targets, chunk=20, reduction=reduction).sum()
        if h_grad or weight_grad:
            loss.backward()
    assert count.multiplications == products * N * V * d
    assert count.buffers == weight_grad
    assert (weight.grad is not None) is weight_grad
    assert (h.grad is not None) is h_grad


def test_no_grad_takes_one_product_and_ignored_targets_none() -> None:
    N, d, V = 60, 8, 40
    h, weight, targets, _ = case(N, d, V=V)
    targets[10:50] = -100
    with Products(V, d) as count, torch.no_grad():
        loss = linear_cross_entropy(h, weight, targets)
    assert not loss.requires_grad
    assert count.multiplications == 20 * V * d


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_tensors_lose_only_their_own_rounding(half: torch.dtype) -> None:
    h, weight, targets, bias = case(200, 64, V=20_000, dtype=torch.float32, bias=True)
    given = [x.detach().to(half).requires_grad_() for x in (h, weight, bias) if x is not None]
    exact = [x.detach().double().requires_grad_() for x in given]
    loss = linear_cross_entropy(given[0], given[1], targets, given[2], scale=0.3, softcap=8.0)
    oracle = plain(exact[0], exact[1], targets, exact[2], scale=0.3, softcap=8.0)
    assert loss.dtype == torch.float32
    assert abs(loss.item() - oracle.item()) < 1e-5
    ulp = torch.finfo(half).eps
    for g, o in zip(grads(loss * 3, *given), grads(oracle * 3, *exact), strict=True):
        assert g.dtype == half
        normal = o.abs() > torch.finfo(half).tiny  # what float16 cannot hold is not ours to keep
        assert ((g - o).abs()[normal] <= ulp * o.abs()[normal] + 1e-9).all()


def test_bfloat16_autocast_accumulates_in_float32() -> None:
    h, weight, targets, _ = case(200, 64, V=20_000, dtype=torch.float32)
    oracle = plain(h.double(), weight.double(), targets)
    expected = grads(oracle, h, weight)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = linear_cross_entropy(h, weight, targets), plain(h, weight, targets)
        got = grads(ours, h, weight)  # backward inside the region must not be cast either
    assert ours.dtype == torch.float32
    assert abs(ours - oracle) < 1e-6 < abs(theirs - oracle)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-8)


def test_products_in_bfloat16_still_add_up_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of devices with bfloat16 units: many chunks and blocks lose no more than one."""
    monkeypatch.setattr("lmhead.loss.linear.product_type", lambda h, weight: torch.bfloat16)
    monkeypatch.setattr("lmhead.loss.products.BLOCK", 300)
    h, weight, targets, _ = case(256, 64, V=2000, dtype=torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in (h, weight)]
    oracle = plain(*exact, targets)
    loss = linear_cross_entropy(h, weight, targets, chunk=16)
    assert abs(loss - oracle) < 2e-3
    for g, o in zip(grads(loss, h, weight), grads(oracle, *exact), strict=True):
        assert (g - o).norm() / o.norm() < 2 * torch.finfo(torch.bfloat16).eps


def test_second_backward_through_a_kept_graph_gives_the_same() -> None:
    h, weight, targets, _ = case(30, 8, V=50)
    loss = linear_cross_entropy(h, weight, targets)
    loss.backward(retain_graph=True)
    first = [h.grad.clone(), weight.grad.clone()]  # type: ignore[union-attr]
    (2 * loss).backward()
    torch.testing.assert_close([h.grad, weight.grad], [3 * g for g in first])
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_second_derivative_says_that_there_is_none() -> None:
    h, weight, targets, _ = case(3, 4, V=5)
    loss = linear_cross_entropy(h, weight, targets)
    with pytest.raises(BadInput, match="no second derivative"):
        torch.autograd.grad(loss, h, create_graph=True)


def test_the_gradient_is_handed_over_without_a_copy() -> None:
    """A copy of W's gradient in the backward pass would double the largest buffer there is."""
    h, weight, targets, _ = case(30, 8, V=50)
    loss = linear_cross_entropy(h, weight, targets)
    address = loss.grad_fn.grads.weight.data_ptr()  # type: ignore[union-attr]
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.data_ptr() == address


def test_extreme_logits_stay_finite() -> None:
    weight = torch.tensor([[1e4], [0.0], [-1e4]], requires_grad=True)
    h = torch.tensor([[1.0], [1.0]], requires_grad=True)
    loss = linear_cross_entropy(h, weight, torch.tensor([0, 2]), reduction="none")
    assert loss.tolist() == [0.0, 2e4]
    assert all(g.isfinite().all() for g in grads(loss.sum(), h, weight))


def test_a_row_barred_by_minus_infinity() -> None:
    h, weight, targets, _ = case(4, 3, V=6)
    targets.fill_(1)
    bias = torch.zeros(6, dtype=torch.float64)
    bias[4] = -math.inf
    ours, theirs = (loss(h, weight, targets, bias) for loss in (linear_cross_entropy, plain))
    torch.testing.assert_close(ours, theirs)
    targets.fill_(4)
    assert linear_cross_entropy(h, weight, targets, bias).item() == math.inf


def test_no_tokens_at_all() -> None:
    h, weight, targets, _ = case(0, 3, V=6)
    loss = linear_cross_entropy(h, weight, targets, reduction="sum")
    loss.backward()
    assert loss.item() == 0
    assert weight.grad is not None
    assert not weight.grad.any()


@pytest.mark.parametrize(("V", "d"), [(49_152, 576), (262_144, 640), (128_256, 4096), (257, 64)])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_the_chosen_chunk_does_not_grow_with_the_tokens(
    V: int, d: int, softcap: float | None
) -> None:
    sizes = [chunk_for(N, V, d, softcap) for N in (1024, 8192, 65_536)]
    buffers = 1 if softcap is None else 2
    assert max(sizes) * V * buffers <= max(V * max(2 * d // 3, 128), 2**23)
    assert all(size % 64 == 0 for size in sizes)
    assert [chunk_for(N, V, d, softcap) for N in (0, 1, 3)] == [1, 1, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": torch.tensor([0, 1])}, r"targets have shape \[2\], but h has \[3, 4\]"),
        ({"targets": torch.tensor([0, 5, 1])}, "target 5 is outside the head's 5 rows"),
        ({"targets": torch.tensor([0, -1, 1])}, "target -1 is outside"),
        ({"targets": torch.zeros(3)}, "targets are torch.float32"),
        ({"weight": torch.zeros(5, 6)}, r"h has shape \[3, 4\] and weight \[5, 6\]"),
        ({"weight": torch.zeros(4)}, r"weight \[4\]"),
        ({"bias": torch.zeros(4)}, r"bias has shape \[4\]; expected \[5\]"),
        ({"h": torch.zeros(3, 4, dtype=torch.long)}, "h is torch.int64"),
        ({"reduction": "avg"}, "'avg'"),
        ({"label_smoothing": 1.5}, "1.5"),
        ({"softcap": 0.0}, "softcap is 0.0"),
        ({"scale": math.nan}, "scale is nan"),
        ({"chunk": 0}, "chunk is 0"),
        ({"targets": torch.zeros(3, dtype=torch.long, device="meta")}, "targets on meta"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "h": torch.zeros(3, 4),
        "weight": torch.zeros(5, 4),
        "targets": torch.tensor([0, 1, 4]),
    }
    assert linear_cross_entropy(**given).item() == pytest.approx(math.log(5))
    with pytest.raises(BadInput, match=message):
        linear_cross_entropy(**{**given, **change})


@pytest.mark.parametrize("chunk", [None, 64, 7])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_float16_with_a_scale_of_8_has_finite_gradients(chunk: int | None, reduction: Any) -> None:
    torch.manual_seed(0)
    targets = torch.randint(0, 300, (64,))
    tensors = [(4 * torch.randn(64, 32)).half(), torch.randn(300, 32).half()]
    mine = [x.clone().requires_grad_() for x in tensors]
    linear_cross_entropy(*mine, targets, scale=8.0, reduction=reduction, chunk=chunk).backward()
    exact = [x.double().requires_grad_() for x in tensors]
    logits = 8.0 * exact[0] @ exact[1].T
    torch.nn.functional.cross_entropy(logits, targets, reduction=reduction).backward()
    for x, oracle in zip(mine, exact, strict=True):
        largest = float(oracle.grad.abs().max())  # type: ignore[union-attr]
        assert float((x.grad.double() - oracle.grad).abs().max()) <= 1e-3 * largest  # type: ignore
