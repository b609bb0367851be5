"""How much of steering a limit leaves: the largest m that keeps it, token by token.

The answer is z_m = z + m (z' - z) with the largest m in [0, 1] that keeps

    KL(p || p_m) <= kl_cap   and   range(m (z' - z)) <= budget,

p and p_m the softmax of z and z_m over the tokens that can be drawn, before any sampling control.
KL is convex in m and 0 at 0, so the chord to a point above the cap meets it at an m that keeps it.
What is returned is checked once more as the float32 numbers it is.

Symbols: z, z' `[n, V]` logits without and with the vectors; delta = z' - z.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lmhead.steer.measure import AIM

_TRIES = 60
# What float32 logits of a real model differ by from one batch or kernel to another, with room:
# smollm2-135m, tokens one by one against all at once: 7e-6 on average, 8e-5 between extremes.
ROUNDING_KL = 2e-5  # of the square root of KL
ROUNDING_RANGE = 2e-4


class Mixed(NamedTuple):
    """The mixture z_m `[n, V]`, and of each row, `[n]`: what came of it."""

    z: Tensor
    m: Tensor  # float64, in [0, 1]: how much of the steering is left
    kl: Tensor  # KL(p || p_m), float64
    range: Tensor  # of z_m - z, float64


def mix(
    z: Tensor,
    other: Tensor,
    reachable: int,
    kl_cap: float | None,
    budget: float | None,
    *,
    rounding: bool = False,
) -> Mixed:
    """Go from z towards `other`, `[n, V]` float32, as far as the limits allow.

    A row that cannot be steered at all (NaN or infinity in `other`) stays z. With `rounding`, the
    limits also leave room for what another batch or kernel makes of the same logits: little, but
    for a KL of 1e-5 or a range of 1e-3 more than nothing.
    """
    kl_aim = None if kl_cap is None else kl_cap * AIM
    range_aim = None if budget is None else budget * AIM
    if rounding and kl_aim is not None:
        # KL is near half the variance of delta: noise adds to its square root at most
        kl_aim = max(0.0, math.sqrt(kl_aim) - ROUNDING_KL) ** 2
    if rounding and range_aim is not None:
        range_aim = max(0.0, range_aim - ROUNDING_RANGE)
    there = z[:, :reachable].isfinite()  # -inf: a token that an engine left out
    delta = torch.where(there, (other - z)[:, :reachable].double(), 0.0)
    sound = delta.isfinite().all(-1)
    delta[~sound] = 0.0
    logp = torch.log_softmax(z[:, :reachable].double(), dim=-1)
    m = torch.where(sound, 1.0, 0.0).double()
    if range_aim is not None:
        widest = _range(delta, there)
        m = torch.where(widest > range_aim, m * range_aim / widest, m)
    if kl_aim is not None:
        over = _kl_at(m, logp, delta) > kl_aim
        if over.any():
            m[over] = _largest(m[over], logp[over], delta[over], kl_aim)
    step = 2.0**-12
    for _ in range(_TRIES):
        mixed = torch.where(z.isfinite(), torch.lerp(z, other, m.float().unsqueeze(-1)), z)
        mixed = torch.where((m == 0).unsqueeze(-1), z, mixed)
        kl, ranges = _measured(z[:, :reachable], mixed[:, :reachable], logp, there)
        bad = torch.zeros_like(sound)
        if kl_cap is not None:
            bad |= ~(kl <= kl_cap)
        if budget is not None:
            bad |= ~(ranges <= budget)
        bad &= m > 0
        if not bad.any():
            break
        m = torch.where(bad, m * (1 - step), m)
        step = min(2 * step, 1.0)  # in the end m is 0, and z itself is returned
    return Mixed(mixed, m, kl, ranges)


def _kl_at(m: Tensor, logp: Tensor, delta: Tensor) -> Tensor:
    """KL(p || p_m) `[n]` of the mixture in real numbers: log E exp(m delta) - m E delta."""
    moved = torch.logsumexp(logp + m.unsqueeze(-1) * delta, dim=-1)
    return moved - m * (logp.exp() * delta).sum(-1)


def _largest(high: Tensor, logp: Tensor, delta: Tensor, cap: float) -> Tensor:
    """Return m `[n]` with KL at most `cap`, and above 0.999 of it; at `high` it is more."""
    if cap <= 0:
        return torch.zeros_like(high)
    centred = delta - (logp.exp() * delta).sum(-1, keepdim=True)  # [n, V]
    m = high.clone()
    going = torch.arange(len(m))
    for _ in range(_TRIES):
        scores = logp[going] + m[going].unsqueeze(-1) * centred[going]
        kl = torch.logsumexp(scores, dim=-1)
        near = kl <= cap * 1.001
        # on the chord from 0, which lies above the convex KL, there is the cap itself
        m[going[near]] *= (cap / kl[near]).clamp(max=1)
        if near.all():
            return m
        going, kl, scores = going[~near], kl[~near], scores[~near]
        slope = (torch.softmax(scores, dim=-1) * centred[going]).sum(-1)
        m[going] -= (kl - cap) / slope  # Newton's steps stay above the cap: KL is convex
    m[going] = 0.0
    return m


def _measured(z: Tensor, mixed: Tensor, logp: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
    """KL and range `[n]` of the float32 logits as they are, over the tokens that are there."""
    logq = torch.log_softmax(mixed.double(), dim=-1)
    kl = (logp.exp() * torch.where(there, logp - logq, 0.0)).sum(-1).clamp(min=0)
    moved = torch.where(there, mixed.double() - z.double(), 0.0)
    return kl, _range(moved, there)


def _range(delta: Tensor, there: Tensor) -> Tensor:
    """Return max - min `[n]` of delta `[n, V]` over the tokens that are there."""
    inf = float("inf")
    return delta.masked_fill(~there, -inf).amax(-1) - delta.masked_fill(~there, inf).amin(-1)
