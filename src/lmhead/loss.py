"""Cross-entropy through the head, forward and backward, without ever holding the logits.

For a hidden state h with target t, over a head of V rows:

    x    = scale * (W h + b)                              scores, [V]
    z    = softcap * tanh(x / softcap), or x without one  logits, [V]
    lse  = log sum_j exp z_j
    loss = lse - (1 - s) z_t - s mean_j z_j + z_loss lse^2        s: label smoothing

    dloss/dz_j = (1 + 2 z_loss lse) softmax(z)_j - (1 - s) [j = t] - s / V

N tokens take three matrix products of N V d multiplications each: the logits, the gradient of h,
the gradient of W. They need an [N, V] matrix only if one keeps it. Here B tokens at a time go
through one reused buffer: their logits become their own gradient in place, both gradient products
are taken at once, and the buffer serves the next B tokens. The backward pass then only scales.

The buffer is laid out [V, B]: with the head's rows first, the product W h^T is a fifth faster on a
CPU than h W^T, and every reduction over the vocabulary is still a plain sum of rows.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from lmhead.errors import BadInput

Reduction = Literal["mean", "sum", "none"]

# Rows of W that are converted at once where its type is not the one of the accumulation.
_BLOCK = 8192


def linear_cross_entropy(
    h: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk: int | None = None,
) -> Tensor:
    """Give the cross-entropy of `targets` under the head, as if the logits had been computed.

    >>> h, weight, targets = torch.randn(4, 8), torch.randn(100, 8), torch.tensor([1, 2, 3, 4])
    >>> dense = torch.nn.functional.cross_entropy(h @ weight.T, targets)
    >>> torch.allclose(linear_cross_entropy(h, weight, targets), dense, atol=1e-5)
    True

    The same loss and gradients as `F.cross_entropy(scale * (h @ weight.T + bias), targets)`, with
    memory for `chunk` rows of logits instead of all. A tensor that requires no gradient costs
    nothing: no buffer, no product. Sums are taken in float32 also for bfloat16 tensors and under
    autocast (float64 for float64 tensors), and that is the type of the loss.

    Like `F.cross_entropy`, "mean" divides by the number of targets that are not `ignore_index`,
    and gives nan, with gradients of zero, where every target is ignored. The gradients are computed
    in the forward pass, except for "none", where the backward pass computes the logits once more.
    There is no second derivative.

    Args:
        h: hidden states entering the head, [..., d].
        weight: the head's rows, [V, d].
        targets: the ids to predict, integers of h's leading shape [...].
        bias: one score per row, [V].
        softcap: bends the logits to softcap * tanh(x / softcap).
        scale: multiplies the scores, before the softcap.
        ignore_index: targets of this value do not count, and cost no time.
        reduction: "mean" or "sum" over the targets that count, or "none" for one loss each, [...].
        label_smoothing: the share of the target's weight that all V ids divide between them.
        z_loss: weight of lse^2, which keeps the logits from drifting.
        chunk: tokens per pass; more are faster until the head's traffic no longer counts, and
            take chunk * V numbers of memory. Chosen from the shapes when not given.
    """
    rules = _Rules(
        softcap=softcap,
        scale=1.0 if scale is None else float(scale),
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        chunk=chunk,
        product=_product_type(h, weight),
    )
    _check(h, weight, targets, bias, rules)
    grad = torch.is_grad_enabled()
    needs = _Needs(
        h=grad and h.requires_grad,
        weight=grad and weight.requires_grad,
        bias=grad and bias is not None and bias.requires_grad,
    )
    loss = cast(
        Tensor,
        _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
            h.reshape(-1, h.shape[-1]), weight, bias, targets.reshape(-1).long(), rules, needs
        ),
    )
    return loss.view(targets.shape) if reduction == "none" else loss


def chunk_for(tokens: int, V: int, d: int, softcap: float | None = None) -> int:
    """Choose how many tokens go through the head at once.

    Each chunk reads W and its gradient from memory once more. Two thirds of d tokens make that
    traffic small beside the products, and the buffer two thirds as large as W. A small head takes
    more at once, which spares Python's overhead; a softcap needs a second buffer. The chunks are
    about equally long, in steps of 64: products of odd widths are up to a fifth slower.
    """
    widest = max(min(max(2 * d // 3, 128), 512), 2**22 // V)
    if softcap is not None:
        widest = max(widest // 2, 64)
    widest -= widest % 64
    chunks = math.ceil(tokens / widest)
    return max(1, min(tokens, math.ceil(tokens / max(1, chunks) / 64) * 64))


@dataclass(frozen=True)
class _Rules:
    """What does not change from token to token."""

    softcap: float | None
    scale: float
    ignore_index: int
    reduction: Reduction
    label_smoothing: float
    z_loss: float
    chunk: int | None
    product: torch.dtype  # the type that the factors of a matrix product are given in


class _Needs(NamedTuple):
    """Which gradients somebody waits for."""

    h: bool
    weight: bool
    bias: bool


class _Grads(NamedTuple):
    """Gradients in the accumulation type: [N, d], [V, d], [V]; None where nobody waits."""

    h: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,  # [N, d]
        weight: Tensor,  # [V, d]
        bias: Tensor | None,  # [V]
        targets: Tensor,  # [N]
        rules: _Rules,
        needs: _Needs,
    ) -> Tensor:
        kept = int((targets != rules.ignore_index).sum())
        unit: Tensor | None = None  # the gradient that the loss gives each token, [N]
        if any(needs) and rules.reduction != "none":
            unit = _unit(targets, kept, rules, weight)
        losses, grads = _run(h, weight, bias, targets, rules, needs, unit)
        ctx.save_for_backward(h, weight, bias, targets)
        ctx.rules, ctx.needs, ctx.kept = rules, needs, kept
        ctx.grads = None if unit is None else grads
        if rules.reduction == "none":
            return losses
        total = losses.sum(dtype=torch.float64)
        if rules.reduction == "mean":
            total = total / kept if kept else total * math.nan
        return total.to(losses.dtype)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # else create_graph=True would silently get a constant
            raise BadInput(
                "linear_cross_entropy has no second derivative; expected backward without "
                "create_graph=True: use F.cross_entropy(h @ weight.T, targets) for that"
            )
        # The gradients are handed over, not copied: autograd may then keep them as `.grad`. After
        # `backward(retain_graph=True)` a second call finds none, and computes them again.
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            h, weight, bias, targets = ctx.saved_tensors
            per_token = upstream
            if ctx.rules.reduction != "none":
                per_token = upstream * _unit(targets, ctx.kept, ctx.rules, weight)
            _, grads = _run(h, weight, bias, targets, ctx.rules, ctx.needs, per_token)
        else:
            h, weight, bias, _ = ctx.saved_tensors
            for grad in grads:
                if grad is not None:
                    grad.mul_(upstream)
        given = (h, weight, bias)
        typed = (None if g is None else g.to(x.dtype) for g, x in zip(grads, given, strict=True))
        return (*typed, None, None, None)


def _unit(targets: Tensor, kept: int, rules: _Rules, weight: Tensor) -> Tensor:
    """Give each token's share of the reduced loss, [N]."""
    share = 1.0 / max(kept, 1) if rules.reduction == "mean" else 1.0
    return weight.new_full(targets.shape, share, dtype=_wide(weight.dtype))


def _run(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    rules: _Rules,
    needs: _Needs,
    upstream: Tensor | None,
) -> tuple[Tensor, _Grads]:
    """Walk the tokens chunk by chunk.

    Gives the losses, [N], and where `upstream` [N], the gradient of each of them, is given, the
    gradients that `needs` names.
    """
    (N, d), V = h.shape, weight.shape[0]
    wide = _wide(torch.promote_types(h.dtype, weight.dtype))
    needs = needs if upstream is not None else _Needs(False, False, False)
    places = (targets != rules.ignore_index).nonzero().squeeze(1)  # [n]
    n = places.numel()
    B = min(rules.chunk or chunk_for(n, V, d, rules.softcap), max(n, 1))

    losses = h.new_zeros(N, dtype=wide)
    grad_h = h.new_zeros(N, d, dtype=wide) if needs.h else None
    grad_W = weight.new_empty(V, d, dtype=wide) if needs.weight else None
    grad_b = weight.new_zeros(V, dtype=wide) if needs.bias else None
    if grad_W is not None and n == 0:
        grad_W.zero_()
    store = h.new_empty(V * B, dtype=wide)
    squash_store = h.new_empty(V * B if rules.softcap is not None else 0, dtype=wide)

    with torch.no_grad(), torch.autocast(h.device.type, enabled=False):
        for start in range(0, n, B):
            at = places[start : start + B]
            m = at.numel()
            rows = slice(start, start + m) if n == N else at  # a slice is read without a copy
            t, tokens = targets[rows], torch.arange(m, device=h.device)
            hs = h[rows].to(wide)  # [m, d]
            if rules.scale != 1.0:
                hs = hs * rules.scale
            z = store[: V * m].view(V, m)
            _project(weight, hs, z, rules.product)
            if bias is not None:
                z.add_(bias.to(wide).unsqueeze(1), alpha=rules.scale)
            squash = squash_store[: V * m].view(-1, m)
            if rules.softcap is not None:
                torch.tanh(z.div_(rules.softcap), out=squash)
                torch.mul(squash, rules.softcap, out=z)

            z_t = z[t, tokens]  # [m]
            z_mean = z.mean(0) if rules.label_smoothing else None
            top = z.amax(0)
            total = z.sub_(top).exp_().sum(0)  # z now holds softmax(z) * total
            lse = top + total.log()
            # (top - z_t) first: it is exact for a token that the model is sure of
            loss = (top - z_t) + total.log()
            if z_mean is not None:
                loss += rules.label_smoothing * (z_t - z_mean)
            if rules.z_loss:
                loss += rules.z_loss * lse.square()
            losses[rows] = loss
            if upstream is None:
                continue

            if rules.z_loss:
                z.mul_(1 + 2 * rules.z_loss * lse)
            if rules.label_smoothing:
                z.sub_(total * (rules.label_smoothing / V))
            z[t, tokens] -= total * (1 - rules.label_smoothing)
            if rules.softcap is not None:
                z.mul_(squash.square_().neg_().add_(1))  # tanh' = 1 - tanh^2
            # z now holds dloss/dx * total, x the scaled scores; what is one number per token is
            # multiplied into the [m, d] side of each product rather than into [V, m]
            each = (upstream[rows].to(wide) / total).unsqueeze(1)  # [m, 1]
            if grad_b is not None:
                grad_b.add_(z @ each.squeeze(1), alpha=rules.scale)
            if grad_h is not None:
                grad_h[rows] = _back(weight, z, rules.product).mul_(each * rules.scale)
            if grad_W is not None:
                _gather(grad_W, z, hs * each, rules.product, first=start == 0)
    return losses, _Grads(grad_h, grad_W, grad_b)


def _project(weight: Tensor, hs: Tensor, z: Tensor, product: torch.dtype) -> None:
    """Write W h^T into z: [V, d] x [m, d] -> [V, m]."""
    factor = hs.to(product).T
    for v in _blocks(weight, z):
        if product == z.dtype:
            torch.mm(weight[v].to(product), factor, out=z[v])
        else:
            z[v] = weight[v].to(product) @ factor


def _back(weight: Tensor, z: Tensor, product: torch.dtype) -> Tensor:
    """Give z^T W: [V, m] x [V, d] -> [m, d]."""
    out = z.new_empty(z.shape[1], weight.shape[1])
    for i, v in enumerate(_blocks(weight, z)):
        _add_product(out, z[v].T, weight[v], product, first=i == 0)
    return out


def _gather(grad_W: Tensor, z: Tensor, hs: Tensor, product: torch.dtype, first: bool) -> None:
    """Add z h to the gradient of W: [V, m] x [m, d] -> [V, d]."""
    for v in _blocks(grad_W, z) if product == z.dtype else _cut(z.shape[0]):
        _add_product(grad_W[v], z[v], hs, product, first)


def _add_product(out: Tensor, a: Tensor, b: Tensor, product: torch.dtype, first: bool) -> None:
    """Add a @ b to `out`, or put it there if it is the first term."""
    a, b = a.to(product), b.to(product)
    if product == out.dtype:
        torch.addmm(out, a, b, beta=0 if first else 1, out=out)
    elif first:
        out.copy_(a @ b)
    else:
        out.add_(a @ b)


def _blocks(matrix: Tensor, z: Tensor) -> Iterator[slice]:
    """Cut the V rows where they must be converted; a whole product is faster where not."""
    return iter([slice(None)]) if matrix.dtype == z.dtype else _cut(z.shape[0])


def _cut(V: int) -> Iterator[slice]:
    return (slice(v, v + _BLOCK) for v in range(0, V, _BLOCK))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _product_type(h: Tensor, weight: Tensor) -> torch.dtype:
    """Choose the type of the factors of a product.

    A CPU multiplies bfloat16 no faster than float32, so there the factors are widened as well.
    Other devices have units for it, which accumulate in float32.
    """
    both = torch.promote_types(h.dtype, weight.dtype)
    if h.device.type == "cpu":
        return _wide(both)
    if torch.is_autocast_enabled(h.device.type):
        return torch.get_autocast_dtype(h.device.type)
    return both


def _check(h: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, rules: _Rules) -> None:
    """Say what is wrong with the input, showing both sides."""
    if weight.dim() != 2 or h.dim() < 1 or h.shape[-1] != weight.shape[1]:
        raise BadInput(
            f"h has shape {list(h.shape)} and weight {list(weight.shape)}; "
            "expected [..., d] and [V, d] with the same d"
        )
    V = weight.shape[0]
    if targets.shape != h.shape[:-1]:
        raise BadInput(
            f"targets have shape {list(targets.shape)}, but h has {list(h.shape)}; "
            f"expected one target per hidden state: {list(h.shape[:-1])}"
        )
    if bias is not None and bias.shape != (V,):
        raise BadInput(f"bias has shape {list(bias.shape)}; expected [{V}], one per row of weight")
    for name, tensor in (("h", h), ("weight", weight), ("bias", bias)):
        if tensor is not None and not tensor.is_floating_point():
            raise BadInput(f"{name} is {tensor.dtype}; expected a floating-point type")
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise BadInput(f"targets are {targets.dtype}; expected integers, the ids to predict")
    if len({x.device for x in (h, weight, targets, bias) if x is not None}) > 1:
        raise BadInput(
            f"h is on {h.device}, weight on {weight.device}, targets on {targets.device}; "
            "expected one device: move them with .to(device)"
        )
    if rules.reduction not in ("mean", "sum", "none"):
        raise BadInput(f"reduction is {rules.reduction!r}; expected 'mean', 'sum' or 'none'")
    if not 0.0 <= rules.label_smoothing <= 1.0:
        raise BadInput(f"label_smoothing is {rules.label_smoothing}; expected 0 to 1")
    if rules.softcap is not None and not 0.0 < rules.softcap < math.inf:
        raise BadInput(f"softcap is {rules.softcap}; expected a number above 0, or None")
    if not math.isfinite(rules.scale) or not math.isfinite(rules.z_loss):
        raise BadInput(f"scale is {rules.scale} and z_loss {rules.z_loss}; expected finite numbers")
    if rules.chunk is not None and rules.chunk < 1:
        raise BadInput(f"chunk is {rules.chunk}; expected at least 1 token, or None to choose")
    outside = (targets != rules.ignore_index) & ((targets < 0) | (targets >= V))
    if bool(outside.any()):
        raise BadInput(
            f"target {int(targets[outside][0])} is outside the head's {V:,} rows; expected "
            f"0 to {V - 1:,}, or ignore_index = {rules.ignore_index} for positions to leave out"
        )
