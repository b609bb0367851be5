"""What a loss is asked for, and what is refused."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lmhead.errors import BadInput

Reduction = Literal["mean", "sum", "none"]


@dataclass(frozen=True)
class Rules:
    """What does not change from token to token."""

    softcap: float | None
    scale: float
    ignore_index: int
    reduction: Reduction
    label_smoothing: float
    z_loss: float
    chunk: int | None
    product: torch.dtype  # the type that the factors of a matrix product are given in


class Needs(NamedTuple):
    """Which gradients somebody waits for."""

    h: bool
    weight: bool
    bias: bool


class Grads(NamedTuple):
    """Gradients in the accumulation type: [N, d], [V, d], [V]; None where nobody waits."""

    h: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type that sums are taken in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def product_type(h: Tensor, weight: Tensor) -> torch.dtype:
    """Choose the type of the factors of a product.

    A CPU multiplies bfloat16 no faster than float32, so there the factors are widened as well.
    Other devices have units for it, which accumulate in float32.
    """
    both = torch.promote_types(h.dtype, weight.dtype)
    if h.device.type == "cpu":
        return wide_type(both)
    if torch.is_autocast_enabled(h.device.type):
        return torch.get_autocast_dtype(h.device.type)
    return both


def check(h: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, rules: Rules) -> None:
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


def check_targets(targets: Tensor, V: int, rules: Rules) -> None:
    """Refuse targets that are no ids of a head of V rows."""
    outside = (targets != rules.ignore_index) & ((targets < 0) | (targets >= V))
    if bool(outside.any()):
        raise BadInput(
            f"target {int(targets[outside][0])} is outside the head's {V:,} rows; expected "
            f"0 to {V - 1:,}, or ignore_index = {rules.ignore_index} for positions to leave out"
        )
