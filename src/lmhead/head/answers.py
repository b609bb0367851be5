"""From logits to an answer: the k best, a cut by probability, a draw; and what is refused.

Symbols: z logits `[..., N]`.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from lmhead.errors import BadInput

Generators = torch.Generator | Sequence[torch.Generator] | None
T = TypeVar("T")


class TopK(NamedTuple):
    """The k best tokens, best first; equal logits are ordered by id."""

    ids: Tensor  # [..., k]
    logits: Tensor  # [..., k]


def ranked(z: Tensor, k: int) -> TopK:
    """Return the k largest of `z [..., V]`, equal ones in the order of their ids.

    torch.topk leaves open which of several equal logits it returns, and in which order; in
    bfloat16 equal logits are common.
    """
    check_k(k, z.shape[-1])
    values, ids = torch.topk(z, k, dim=-1)  # [..., k]
    floor = values[..., -1:]  # [..., 1]
    # Only where more logits equal the k-th than there is room for is the choice itself open.
    crowded = (z == floor).sum(-1) > (values == floor).sum(-1)  # [...]
    if crowded.any():
        rows, level = z[crowded], floor[crowded]  # [n, V], [n, 1]
        above = ~(rows <= level)  # NaN counts as largest, as in torch.topk
        equal = rows == level
        room = k - above.sum(-1, keepdim=True)
        kept = above | (equal & (equal.cumsum(-1) <= room))  # exactly k in every row
        ids[crowded] = kept.nonzero()[:, -1].view(-1, k)
    ids = ids.sort(dim=-1).values
    values, order = z.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return TopK(ids.gather(-1, order), values)


def drawn(z: Tensor, temperature: float, generator: Generators) -> Tensor:
    """Draw one column `[...]` from softmax(z / temperature), z `[..., N]`.

    One number u, uniform in [0, 1), picks the first column at which the running sum of the weights
    exceeds u times their total: the law of `lmhead.sampling`, so that a seed means the same in
    either. The sum runs in float64; in float32 it would lose the tail.
    """
    z = z.float()
    best = z.amax(-1, keepdim=True)
    if not best.isfinite().all():
        raise BadInput(
            "the largest logit is not finite, so there is nothing to sample from; "
            "check h for NaN and infinity, and what was banned"
        )
    if z.shape[-1] == 1:
        return torch.zeros(z.shape[:-1], dtype=torch.int64, device=z.device)
    y = z if temperature == 1 else z / temperature
    top = y.amax(-1, keepdim=True)
    if not top.isfinite().all():  # divided by next to nothing
        y, top = (z - best) / temperature, torch.zeros_like(best)
    sums = (y - top).exp_().reshape(-1, z.shape[-1]).cumsum(-1, dtype=torch.float64)  # [n, N]
    total = sums[:, -1:].contiguous()
    u = uniform(generator, len(sums)).to(z.device).unsqueeze(-1)  # [n, 1]
    picked = torch.searchsorted(sums, u * total, right=True)
    # were u * total to round up to total: the last column of positive weight
    return torch.minimum(picked, torch.searchsorted(sums, total)).view(z.shape[:-1])


def uniform(generator: Generators, n: int) -> Tensor:
    """Draw n float64 numbers from [0, 1), from one generator or from one each."""
    generators = each(generator, n, "generators")
    if n and all(one is generators[0] for one in generators):
        return torch.rand(n, dtype=torch.float64, generator=generators[0], device=_place(generator))
    draws = [torch.rand((), dtype=torch.float64, generator=g, device=_place(g)) for g in generators]
    return torch.stack([u.cpu() for u in draws]) if draws else torch.empty(0, dtype=torch.float64)


def _place(generator: Generators) -> torch.device:
    return generator.device if isinstance(generator, torch.Generator) else torch.device("cpu")


def nucleus(z: Tensor, temperature: float, top_p: float | None, min_p: float | None) -> Tensor:
    """Cut logits `[..., N]` by their probability: top_p (z best first), then min_p.

    The token that crosses top_p stays; what is cut becomes -inf.
    """
    if top_p is None and min_p is None:
        return z
    wide = z.double()
    p = ((wide - wide.amax(-1, keepdim=True)) / temperature).exp()
    stays = torch.ones_like(p, dtype=torch.bool)
    if top_p is not None:
        stays = p.cumsum(-1) - p < top_p * p.sum(-1, keepdim=True)
        stays[..., 0] = True
    if min_p is not None:
        stays &= p >= min_p
    return z.masked_fill(~stays & (p >= 0), -torch.inf)  # NaN stays, to be told of


def each(
    given: T | Sequence[T | None] | Sequence[T] | None, n: int, what: str
) -> Sequence[T | None]:
    """Give one for every state: the same one, or those of a list as long as there are states."""
    if given is None or not isinstance(given, Sequence):  # to ask None takes no time
        return [given] * n
    if len(given) != n:
        raise BadInput(f"got {len(given)} {what} for {n} states; expected one, or one for each")
    return given


def check_k(k: int, size: int, name: str = "k") -> None:
    """Refuse a k that is not a number of tokens of a vocabulary of `size`."""
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= size:
        raise BadInput(
            f"{name} is {k!r}; expected a whole number from 1 to the vocabulary's {size:,}"
        )


def check_temperature(temperature: float) -> None:
    """Refuse a temperature that is negative or no number."""
    try:
        good = math.isfinite(temperature) and temperature >= 0
    except TypeError:  # no number at all
        good = False
    if not good:
        raise BadInput(
            f"temperature is {temperature!r}; expected a finite number, 0 (greedy) or more"
        )


def check_share(name: str, share: float | None) -> None:
    """Refuse what is no share of a whole."""
    if share is not None and not 0 <= share <= 1:
        raise BadInput(f"{name} is {share}; expected a number from 0 to 1, or None")


def check_sigma(n: float | None) -> None:
    """Refuse what is not a number of standard deviations."""
    if n is not None and not (math.isfinite(n) and n >= 0):
        raise BadInput(f"top_n_sigma is {n}; expected a finite number, 0 (no cut) or more, or None")


def check_draw(
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    top_n_sigma: float | None,
    V: int,
) -> None:
    """Refuse controls of a draw from V tokens that mean nothing."""
    check_temperature(temperature)
    check_share("top_p", top_p)
    check_share("min_p", min_p)
    check_sigma(top_n_sigma)
    if top_k is not None:
        check_k(top_k, V)


def check_error(error: float) -> None:
    """Refuse what is no error of a log-probability."""
    if not (math.isfinite(error) and error >= 0):
        raise BadInput(f"error is {error}; expected a finite number, 0 (exact) or more")


def within_sigma(z: Tensor, n: float | None) -> Tensor:
    """Cut logits `[..., N]` more than n standard deviations (of the finite ones) below the best."""
    if not n:
        return z
    wide = z.double()
    finite = wide.isfinite()
    count = finite.sum(-1, keepdim=True)
    mean = wide.masked_fill(~finite, 0).sum(-1, keepdim=True) / count
    off = (wide - mean).masked_fill(~finite, 0).square().sum(-1, keepdim=True) / count
    return z.masked_fill(wide < wide.amax(-1, keepdim=True) - n * off.sqrt(), -torch.inf)
