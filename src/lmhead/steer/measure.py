"""What a vector does to a model's output: KL, delta and harm, measured in one way everywhere.

Symbols: P positions, z `[P, V]` logits without the vector and z' with it, delta = z' - z; p and p'
their softmax. V are the rows that have a token: padding rows, which nothing ever draws, are left
out of every figure. One naming for all of them:
- `kl`: KL(p || p') in nat;
- `delta`: |delta| less its mean over V, which the softmax ignores (centred);
- `range`: max delta - min delta, the most by which the log-odds of two tokens move;
- `flips`: the share of positions whose most likely token is another.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lmhead.head import LMHead
from lmhead.loading import Model

# Other batches and kernels give logits that differ in the last bits. What is only measured aims a
# little below its limit, so that whoever measures anew finds it kept.
AIM = 0.999


class Harm(NamedTuple):
    """What a vector does to the output at P positions, `[P]` each."""

    kl: Tensor
    delta: Tensor  # the largest of the position
    range: Tensor
    flipped: Tensor

    def summary(self) -> dict[str, float]:
        """Return the figures that are shown."""
        return {
            "max_kl": float(self.kl.max()),
            "mean_kl": float(self.kl.mean()),
            "median_kl": float(self.kl.median()),
            "max_delta": float(self.delta.max()),
            "max_range": float(self.range.max()),
            "flips": float(self.flipped.float().mean()),
        }


def token_head(model: Model) -> LMHead:
    """Return the model's head over the rows that have a token, with the same weights."""
    head = model.head
    if model.reachable == head.vocab_size:
        return head
    return LMHead(
        head.weight,
        head.bias,
        head.norm,
        head.softcap,
        head.scale,
        head.tied,
        logits_dtype=head.logits_dtype,
        vocab_size=model.reachable,
        state_size=head.state_size,
    )


def kl_of(z: Tensor, steered: Tensor) -> Tensor:
    """Return KL(p || p') of each position, `[P]`, from logits `[P, V]`; gradients pass."""
    log_p, log_q = z.log_softmax(-1), steered.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def centred(delta: Tensor) -> Tensor:
    """Take off each position's mean over V, which the softmax ignores; `[P, V]`."""
    return delta - delta.mean(-1, keepdim=True)


def spread(delta: Tensor) -> Tensor:
    """Return max - min of each position, `[P]`, of delta `[P, V]`."""
    return delta.amax(-1) - delta.amin(-1)


@torch.no_grad()
def harm_of(z: Tensor, steered: Tensor) -> Harm:
    """Compare logits `[P, V]` without and with a vector."""
    delta = steered - z
    flipped = z.argmax(-1) != steered.argmax(-1)
    largest = centred(delta).abs().amax(-1)
    return Harm(kl_of(z, steered).clamp(min=0), largest, spread(delta), flipped)


@torch.no_grad()
def harm(head: LMHead, h: Tensor, steered: Tensor, chunk: int = 128) -> Harm:
    """Compare h and h', `[P, d]` each, as `head` scores them, `chunk` positions at a time."""
    parts = [
        harm_of(head(one).float(), head(other).float())
        for one, other in zip(torch.split(h, chunk), torch.split(steered, chunk), strict=True)
    ]
    return Harm(*(torch.cat(column) for column in zip(*parts, strict=True)))
