"""Losses and gradients of N tokens, a chunk at a time, over the rows of the head that are here.

A rank that has V_r of the V rows knows four numbers of every token: the largest of its logits, the
sum of their exponentials relative to that, the target's logit if the row is its own, and the sum of
all its logits where labels are smoothed. `Partial` holds them; put together they are those of the
whole head. One rank alone is the case R = 1 of the same code, with nothing to exchange.

Symbols: N tokens, m of them in a chunk, d hidden size, z logits `[V_r, m]`.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lmhead.loss import products
from lmhead.loss.rules import Grads, Needs, Rules, wide_type
from lmhead.ranks import Ranks


class Share(NamedTuple):
    """Which of the V rows of the head are here: `rows` of them, from `start` on."""

    ranks: Ranks
    start: int
    rows: int
    V: int


class Partial(NamedTuple):
    """What is known of m tokens from some of the rows, `[m]` each."""

    top: Tensor  # the largest logit
    total: Tensor  # sum of exp(z - top)
    target: Tensor  # the target's logit; 0 where its row is elsewhere
    sum: Tensor  # of all logits, where labels are smoothed; else 0

    def joined(self, ranks: Ranks) -> "Partial":
        """Put together what all ranks know: one exchange of four numbers for each token."""
        if ranks.size == 1:
            return self
        (every,) = ranks.gather(torch.stack(self), what="a loss")  # [R, 4, m]
        tops, totals, targets, sums = every.unbind(1)  # [R, m]
        top = tops.amax(0)
        total = (totals * (tops - top).exp_()).sum(0)
        return Partial(top, total, targets.sum(0), sums.sum(0))


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


def walk(
    h: Tensor,  # [N, d]
    weight: Tensor,  # [V_r, d]
    bias: Tensor | None,  # [V_r]
    targets: Tensor,  # [N]
    rules: Rules,
    needs: Needs,
    upstream: Tensor | None,
    share: Share,
) -> tuple[Tensor, Grads]:
    """Walk the tokens chunk by chunk.

    Gives the losses, [N], and where `upstream` [N], the gradient of each of them, is given, the
    gradients that `needs` names: of W and bias those of the rows here, of h the part that these
    rows give.
    """
    (N, d), V = h.shape, weight.shape[0]
    ranks, alone = share.ranks, share.ranks.size == 1
    wide = wide_type(torch.promote_types(h.dtype, weight.dtype))
    needs = needs if upstream is not None else Needs(False, False, False)
    places = (targets != rules.ignore_index).nonzero().squeeze(1)  # [n]
    n = places.numel()
    # by all V rows: ranks walk in the same steps, and the buffer shrinks with their number
    B = min(rules.chunk or chunk_for(n, share.V, d, rules.softcap), max(n, 1))

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
            if not alone:  # the targets whose rows are here, and which tokens they are of
                t = t - share.start
                tokens = ((t >= 0) & (t < V)).nonzero().squeeze(1)
                t = t[tokens]
            hs = h[rows].to(wide)  # [m, d]
            if rules.scale != 1.0:
                hs = hs * rules.scale
            z = store[: V * m].view(V, m)
            products.project(weight, hs, z, rules.product)
            if bias is not None:
                z.add_(bias.to(wide).unsqueeze(1), alpha=rules.scale)
            squash = squash_store[: V * m].view(-1, m)
            if rules.softcap is not None:
                torch.tanh(z.div_(rules.softcap), out=squash)
                torch.mul(squash, rules.softcap, out=z)

            mine = _partial(z, t, tokens, rules)  # z now holds exp(z - mine.top)
            top, total, z_t, z_sum = mine.joined(ranks)
            lse = top + total.log()
            # (top - z_t) first: it is exact for a token that the model is sure of
            loss = (top - z_t) + total.log()
            if rules.label_smoothing:
                loss += rules.label_smoothing * (z_t - z_sum / share.V)
            if rules.z_loss:
                loss += rules.z_loss * lse.square()
            losses[rows] = loss
            if upstream is None:
                continue

            # from here on z holds softmax(z) * total
            factor = None if alone else (mine.top - top).exp_()
            if rules.z_loss:
                slope = 1 + 2 * rules.z_loss * lse
                factor = slope if factor is None else factor * slope
            if factor is not None:
                z.mul_(factor)
            if rules.label_smoothing:
                z.sub_(total * (rules.label_smoothing / share.V))
            z[t, tokens] -= total[tokens] * (1 - rules.label_smoothing)
            if rules.softcap is not None:
                z.mul_(squash.square_().neg_().add_(1))  # tanh' = 1 - tanh^2
            # z now holds dloss/dx * total, x the scaled scores; what is one number per token is
            # multiplied into the [m, d] side of each product rather than into [V, m]
            each = (upstream[rows].to(wide) / total).unsqueeze(1)  # [m, 1]
            if grad_b is not None:
                grad_b.add_(z @ each.squeeze(1), alpha=rules.scale)
            if grad_h is not None:
                grad_h[rows] = products.back(weight, z, rules.product).mul_(each * rules.scale)
            if grad_W is not None:
                products.gather(grad_W, z, hs * each, rules.product, first=start == 0)
    return losses, Grads(grad_h, grad_W, grad_b)


def _partial(z: Tensor, t: Tensor, tokens: Tensor, rules: Rules) -> Partial:
    """Take from logits z `[V_r, m]` what the loss needs; z becomes exp(z - top), in place.

    `tokens` are those whose target has its row here, `t` these rows.
    """
    m = z.shape[1]
    target = z.new_zeros(m)
    target[tokens] = z[t, tokens]
    summed = z.sum(0) if rules.label_smoothing else z.new_zeros(m)
    top = z.amax(0) if len(z) else z.new_full((m,), -torch.inf)
    return Partial(top, z.sub_(top).exp_().sum(0), target, summed)
