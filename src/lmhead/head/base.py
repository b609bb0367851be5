"""What every engine of a head promises, and the order in which it names tokens.

Symbols: h hidden state `[..., d]`, z logits `[..., V]`, V vocabulary rows, d hidden size.
"""

import math
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from lmhead.errors import BadInput


class TopK(NamedTuple):
    """The k best tokens, best first; equal logits stand in the order of their ids."""

    ids: Tensor  # [..., k]
    logits: Tensor  # [..., k]


@runtime_checkable  # for tests: before Python 3.12 isinstance computes sha256
class Head(Protocol):
    """The last layer of a language model, however it is computed.

    Every verb takes what enters the projection: transformers' `last_hidden_state`, what a body
    gives. `from_block=True` says that `h` comes straight from a block instead; the head then
    applies the final norm first.
    """

    @property
    def vocab_size(self) -> int:
        """V, the number of logits."""
        ...

    @property
    def hidden_size(self) -> int:
        """d, the width of what enters the projection."""
        ...

    @property
    def sha256(self) -> str:
        """What the projection is, as one hexadecimal number."""
        ...

    def __call__(self, h: Tensor, *, from_block: bool = False) -> Tensor:
        """Score every token: `[..., d]` to logits `[..., V]`."""
        ...

    def topk(self, h: Tensor, k: int, *, from_block: bool = False) -> TopK:
        """Return the k best tokens, ids and logits `[..., k]` each."""
        ...

    def sample(
        self,
        h: Tensor,
        temperature: float = 1.0,
        top_k: int | None = None,
        *,
        generator: torch.Generator | None = None,
        from_block: bool = False,
    ) -> Tensor:
        """Draw the next token: ids `[...]`."""
        ...


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


def draw(z: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """Draw one index `[...]` from softmax(z / temperature), z `[..., V]`.

    Temperatures so small that float32 cannot divide by them are greedy, as 0 is.
    """
    check_temperature(temperature)
    best = z.amax(-1, keepdim=True)
    if not best.isfinite().all():
        raise BadInput(
            "the largest logit is not finite, so there is nothing to sample from; "
            "check h for NaN and infinity"
        )
    if temperature < torch.finfo(torch.float32).tiny:
        return ranked(z, 1).ids[..., 0]
    # The largest is taken off first: dividing by a small temperature then cannot overflow.
    p = torch.softmax((z - best).float() / temperature, dim=-1)
    ids = torch.multinomial(p.reshape(-1, z.shape[-1]), 1, generator=generator)
    return ids.view(z.shape[:-1])


def check_k(k: int, size: int) -> None:
    """Refuse a k that is no number of tokens of a vocabulary of `size`."""
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= size:
        raise BadInput(f"k is {k!r}; expected a whole number from 1 to the vocabulary's {size:,}")


def check_temperature(temperature: float) -> None:
    """Refuse a temperature that is negative or no number."""
    if not (math.isfinite(temperature) and temperature >= 0):
        raise BadInput(
            f"temperature is {temperature}; expected a finite number, 0 (greedy) or more"
        )
