"""What keeps a vector harmless while it is trained: penalties, and budgets that hold.

Symbols: h `[P, d]` and h' what enters the head at P positions without and with the vector; z, z'
their logits `[P, V]`; delta = z' - z, centred, as `lmhead.steer.measure` has it.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from lmhead.errors import BadInput
from lmhead.head import LMHead
from lmhead.steer.measure import centred, kl_of


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


def penalty(constraints: Constraints, head: LMHead, h: Tensor, steered: Tensor) -> Tensor:
    """Return what `kl` and `excess` add to the loss, at positions `[P, d]`; gradients reach h'."""
    with torch.no_grad():
        z = head(h).float()
    after = head(steered).float()
    total: Tensor = after.new_zeros(())
    if constraints.kl:
        total = total + constraints.kl * kl_of(z, after).mean()
    if constraints.excess:
        delta = centred(after - z)
        top = delta.abs().topk(min(constraints.largest, delta.shape[-1])).values
        total = total + constraints.excess * (top - constraints.threshold).relu().mean()
    return total


def mean_penalty(constraints: Constraints, head: LMHead, added: Tensor) -> Tensor:
    """Return what `mean` adds to the loss: alpha v straight to the vocabulary, `[d]`."""
    delta = added @ head.weight.detach()[: head.vocab_size].T.float()  # [V]
    return constraints.mean * (delta.abs() - constraints.threshold).relu().mean()
