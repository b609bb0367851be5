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

Rows may be split over ranks: `walk.py` has the numbers that they exchange.
"""

import math
from typing import Any, cast

import torch
from torch import Tensor

from lmhead.errors import BadInput
from lmhead.loss.placed import rows_here, states_here, targets_here
from lmhead.loss.rules import Needs, Reduction, Rules, check, check_targets, product_type, wide_type
from lmhead.loss.walk import Share, walk
from lmhead.ranks import Group, Ranks, ranks_of
from lmhead.ranks.autograd import entering, own_tokens, tokens_of_all


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
    group: Group = None,
    sequence_parallel: bool = False,
) -> Tensor:
    """Return the cross-entropy of `targets` under the head, as if the logits had been computed.

    >>> h, weight, targets = torch.randn(4, 8), torch.randn(100, 8), torch.tensor([1, 2, 3, 4])
    >>> dense = torch.nn.functional.cross_entropy(h @ weight.T, targets)
    >>> torch.allclose(linear_cross_entropy(h, weight, targets), dense, atol=1e-5)
    True

    The same loss and gradients as `F.cross_entropy(scale * (h @ weight.T + bias), targets)`, with
    memory for `chunk` rows of logits instead of all. A tensor that requires no gradient costs
    nothing: no buffer, no product. Sums are accumulated in float32 even for bfloat16 tensors and
    under autocast (float64 for float64 tensors), and that is the dtype of the loss.

    Like `F.cross_entropy`, "mean" divides by the number of targets that are not `ignore_index`,
    and gives nan, with gradients of zero, where every target is ignored. The gradients are computed
    in the forward pass, except for "none", where the backward pass computes the logits once more.
    Second derivatives are not supported.

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
        group: the ranks that share the head's rows: a process group of torch.distributed, a
            DeviceMesh, or (mesh, dimension). `weight` and `bias` are then this rank's rows, in the
            order of the ranks, any number each; `h` and `targets` are the same on all of them, and
            so is the loss. They exchange four numbers for each token, never logits, and on the way
            back the gradient of h. A `weight` that is a DTensor knows its group.
        sequence_parallel: each rank has tokens of its own in `h` and `targets`. The loss is that of
            all tokens ("none": of the own ones), the gradient of h that of the own ones.
    """
    rows = rows_here(weight, bias, group)
    states, summed = states_here(h)
    targets = targets_here(targets)
    ranks = Ranks(None) if rows.group is None else ranks_of(rows.group)
    rules = Rules(
        softcap=softcap,
        scale=1.0 if scale is None else float(scale),
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        chunk=chunk,
        product=product_type(states, rows.weight),
    )
    check(states, rows.weight, targets, rows.bias, rules)
    share, counts = _share(ranks, len(rows.weight), targets.numel(), sequence_parallel)
    check_targets(targets, share.V, rules)
    flat, ids = states.reshape(-1, states.shape[-1]), targets.reshape(-1).long()
    if sequence_parallel:
        flat = tokens_of_all(flat, counts, ranks)
        ids = ranks.gather_rows(ids, counts, "a loss")
    elif not summed:
        flat = entering(flat, ranks)
    grad = torch.is_grad_enabled()
    needs = Needs(
        h=grad and flat.requires_grad,
        weight=grad and rows.weight.requires_grad,
        bias=grad and rows.bias is not None and rows.bias.requires_grad,
    )
    loss = cast(
        Tensor,
        _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
            flat, rows.weight, rows.bias, ids, rules, needs, share
        ),
    )
    if reduction != "none":
        return loss
    return (own_tokens(loss, counts, ranks) if sequence_parallel else loss).view(targets.shape)


def _share(
    ranks: Ranks, rows: int, tokens: int, sequence_parallel: bool
) -> tuple[Share, tuple[int, ...]]:
    """Tell which rows of the whole head are here, and how many tokens each rank has."""
    if ranks.size == 1:
        return Share(ranks, 0, rows, rows), (tokens,)
    (every,) = ranks.gather(torch.tensor([rows, tokens]), what="a loss")  # [R, 2]
    all_rows, all_tokens = every.unbind(1)
    counts = tuple(all_tokens.tolist())
    if not sequence_parallel and len(set(counts)) > 1:
        raise BadInput(
            f"the ranks have {', '.join(map(str, counts))} tokens; expected the same h and targets "
            "on all of them, or sequence_parallel=True where each has its own"
        )
    start = int(all_rows[: ranks.rank].sum())
    share = Share(ranks, start, rows, int(all_rows.sum()))
    return share, counts


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,  # [N, d]
        weight: Tensor,  # [V, d]
        bias: Tensor | None,  # [V]
        targets: Tensor,  # [N]
        rules: Rules,
        needs: Needs,
        share: Share,
    ) -> Tensor:
        kept = int((targets != rules.ignore_index).sum())
        unit: Tensor | None = None  # the gradient that the loss gives each token, [N]
        if any(needs) and rules.reduction != "none":
            unit = _unit(targets, kept, rules, weight)
        losses, grads = walk(h, weight, bias, targets, rules, needs, unit, share)
        ctx.save_for_backward(h, weight, bias, targets)
        ctx.rules, ctx.needs, ctx.kept, ctx.share = rules, needs, kept, share
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
            _, grads = walk(h, weight, bias, targets, ctx.rules, ctx.needs, per_token, ctx.share)
        else:
            h, weight, bias, _ = ctx.saved_tensors
            for grad in grads:
                if grad is not None:
                    grad.mul_(upstream)
        given = (h, weight, bias)
        typed = (None if g is None else g.to(x.dtype) for g, x in zip(grads, given, strict=True))
        return (*typed, None, None, None, None)


def _unit(targets: Tensor, kept: int, rules: Rules, weight: Tensor) -> Tensor:
    """Give each token's share of the reduced loss, [N]."""
    share = 1.0 / max(kept, 1) if rules.reduction == "mean" else 1.0
    return weight.new_full(targets.shape, share, dtype=wide_type(weight.dtype))
