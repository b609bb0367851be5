"""Exchanges that gradients pass through.

All ranks run the same program on the same h; a layer whose rows are split gives each of them a part
of h's gradient. `entering` stands before such a layer and adds the parts up on the way back;
`tokens_of_all` does the same where each rank has tokens of its own (sequence parallelism).
"""

from typing import Any, cast

import torch
from torch import Tensor

from lmhead.ranks.group import Ranks


class _Entering(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return h.view_as(h)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.ranks.sum_(grad.clone(), "adding up the gradient of h"), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: Ranks) -> Tensor:
        return ranks.sum_(part.clone(), "adding up scores")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, counts: tuple[int, ...], ranks: Ranks) -> Tensor:
        first = sum(counts[: ranks.rank])
        ctx.mine = slice(first, first + counts[ranks.rank])
        rows = z.reshape(-1, z.shape[-1]).T  # [V_r, n]
        whole = ranks.gather_rows(rows, counts, "gathering logits").T
        return whole.reshape(*z.shape[:-1], sum(counts))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad[..., ctx.mine], None, None


class _Tokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, counts: tuple[int, ...], ranks: Ranks) -> Tensor:
        ctx.counts, ctx.ranks = counts, ranks
        return ranks.gather_rows(h, counts, "gathering hidden states")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        mine = ctx.ranks.sum_rows(grad, ctx.counts, "adding up the gradient of h")
        return mine, None, None


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, losses: Tensor, counts: tuple[int, ...], ranks: Ranks) -> Tensor:
        ctx.counts, ctx.ranks = counts, ranks
        return torch.split(losses, list(counts))[ranks.rank].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.ranks.gather_rows(grad, ctx.counts, "gathering gradients"), None, None


def entering(h: Tensor, ranks: Ranks) -> Tensor:
    """Pass on h; its gradient is the sum of what the ranks give it."""
    return h if ranks.size == 1 else cast(Tensor, _Entering.apply(h, ranks))  # type: ignore[no-untyped-call]


def summed(part: Tensor, ranks: Ranks) -> Tensor:
    """Add up a tensor over the ranks."""
    return part if ranks.size == 1 else cast(Tensor, _Summed.apply(part, ranks))  # type: ignore[no-untyped-call]


def columns_of_all(z: Tensor, counts: tuple[int, ...], ranks: Ranks) -> Tensor:
    """Put the columns of all ranks side by side: `[..., V_r]` to `[..., V]`."""
    if ranks.size == 1:
        return z
    return cast(Tensor, _Columns.apply(z, counts, ranks))  # type: ignore[no-untyped-call]


def tokens_of_all(h: Tensor, counts: tuple[int, ...], ranks: Ranks) -> Tensor:
    """Put the tokens of all ranks one after the other: `[N_r, d]` to `[N, d]`."""
    if ranks.size == 1:
        return h
    return cast(Tensor, _Tokens.apply(h, counts, ranks))  # type: ignore[no-untyped-call]


def own_tokens(losses: Tensor, counts: tuple[int, ...], ranks: Ranks) -> Tensor:
    """Give this rank's part `[N_r]` of the losses `[N]` of all tokens."""
    if ranks.size == 1:
        return losses
    return cast(Tensor, _Own.apply(losses, counts, ranks))  # type: ignore[no-untyped-call]
