"""What keeps a vector harmless while it is trained: penalties, and budgets that hold.

Symbols: h `[P, d]` and h' what enters the head at P positions without and with the vector; z, z'
their logits `[P, V]`; delta = z' - z, centred: less its mean over V, which the softmax ignores.
"""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmhead.errors import BadInput
from lmhead.head import LMHead

# Other batches and kernels give logits that differ in the last bits. What is only measured aims a
# little below its limit, so that whoever measures anew finds it kept.
AIM = 0.999


@dataclass(frozen=True)
class Constraints:
    """Which penalties join the loss, and how heavily; 0 leaves one out.

    - `kl`: KL(p || p') at the model's true output, through every block and the final norm.
    - `excess`: how far the `largest` of |centred delta| at each position exceed `threshold`.
    - `mean`: the mean over V of how far |alpha W v| exceeds `threshold`. It skips the blocks
      above, and one token among V can hide in it: it is here to be compared with.
    - `budget`: no penalty but a bound on the range of delta. At the layer `"head"` it holds in
      every context, by construction; elsewhere it is what calibration texts measured.
    """

    kl: float = 0.0
    excess: float = 0.0
    mean: float = 0.0
    budget: float | None = None
    threshold: float = 2.0
    largest: int = 50

    def __post_init__(self) -> None:
        for name in ("kl", "excess", "mean", "threshold"):
            if not 0 <= (value := getattr(self, name)) < float("inf"):
                raise BadInput(f"{name} is {value}; expected a number from 0 on")
        if self.budget is not None and not 0 < self.budget < float("inf"):
            raise BadInput(f"the budget is {self.budget}; expected a positive number of logits")
        if self.largest < 1:
            raise BadInput(f"largest is {self.largest}; expected at least 1")

    @property
    def measures(self) -> bool:
        """Whether a penalty looks at the model's output."""
        return self.kl > 0 or self.excess > 0

    def to_dict(self) -> dict[str, Any]:
        """Return what is on."""
        result = {k: v for k, v in asdict(self).items() if v}
        if not (self.excess or self.mean):
            result.pop("threshold", None)
        if not self.excess:
            result.pop("largest", None)
        return result


class Harm(NamedTuple):
    """What a vector does to the output at P positions, `[P]` each."""

    kl: Tensor  # KL(p || p'), nats
    max_delta: Tensor  # largest |centred delta|
    range: Tensor  # max delta - min delta
    flipped: Tensor  # whether the most likely token is another

    def summary(self) -> dict[str, float]:
        """Return the figures that are shown."""
        return {
            "max_kl": float(self.kl.max()),
            "median_kl": float(self.kl.median()),
            "mean_kl": float(self.kl.mean()),
            "max_delta": float(self.max_delta.max()),
            "max_range": float(self.range.max()),
            "flips": float(self.flipped.float().mean()),
        }


def kl(z: Tensor, steered: Tensor) -> Tensor:
    """KL(p || p') of each position, `[P]`, from logits `[P, V]`."""
    log_p, log_q = z.log_softmax(-1), steered.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


@torch.no_grad()
def harm(head: LMHead, h: Tensor, steered: Tensor, chunk: int = 128) -> Harm:
    """Measure h against h', `[P, d]` each, `chunk` positions at a time."""
    parts = []
    for one, other in zip(torch.split(h, chunk), torch.split(steered, chunk), strict=True):
        z, after = head(one).float(), head(other).float()
        delta = after - z
        centred = (delta - delta.mean(-1, keepdim=True)).abs().amax(-1)
        spread = delta.amax(-1) - delta.amin(-1)
        flipped = z.argmax(-1) != after.argmax(-1)
        parts.append(Harm(kl(z, after).clamp(min=0), centred, spread, flipped))
    return Harm(*(torch.cat(column) for column in zip(*parts, strict=True)))


def penalty(constraints: Constraints, head: LMHead, h: Tensor, steered: Tensor) -> Tensor:
    """Return what `kl` and `excess` add to the loss, at positions `[P, d]`; gradients reach h'."""
    with torch.no_grad():
        z = head(h).float()
    after = head(steered).float()
    total: Tensor = after.new_zeros(())
    if constraints.kl:
        total = total + constraints.kl * kl(z, after).mean()
    if constraints.excess:
        delta = after - z
        delta = delta - delta.mean(-1, keepdim=True)
        top = delta.abs().topk(min(constraints.largest, delta.shape[-1])).values
        total = total + constraints.excess * (top - constraints.threshold).relu().mean()
    return total


def mean_penalty(constraints: Constraints, head: LMHead, added: Tensor) -> Tensor:
    """Return what `mean` adds to the loss: alpha v straight to the vocabulary, `[d]`."""
    delta = added @ head.weight.detach()[: head.vocab_size].T.float()  # [V]
    return constraints.mean * (delta.abs() - constraints.threshold).relu().mean()
