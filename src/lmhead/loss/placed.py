"""Weights and states as torch's tensor parallelism leaves them, taken as they are.

A `DTensor` knows which of its rows are on this rank, and of which process group. Here it becomes
the plain tensor of those rows; gradients find their way back into the DTensor.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from lmhead.errors import BadInput
from lmhead.ranks import Group

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Rows(NamedTuple):
    """The rows of a weight that are here, and the group that shares all; None: here is all."""

    weight: Tensor  # [V_r, d]
    bias: Tensor | None  # [V_r]
    group: Group


def is_placed(tensor: object) -> bool:
    """Tell whether a tensor is a DTensor, without importing what defines it."""
    return type(tensor) not in (Tensor, nn.Parameter) and hasattr(tensor, "placements")


def rows_here(weight: Tensor, bias: Tensor | None, group: Group) -> Rows:
    """Give the plain rows of a weight and its bias."""
    if not is_placed(weight):
        if is_placed(bias):
            raise BadInput("the bias is a DTensor and the weight is not; expected both, or neither")
        return Rows(weight, bias, group)
    if group is not None:
        raise BadInput("the weight is a DTensor, which knows its group; leave out group")
    placed: Any = weight
    dimension = _dimension(placed, "the weight")
    group = None if dimension is None else (placed.device_mesh, dimension)
    if bias is not None and is_placed(bias):
        whole: Any = bias
        if _dimension(whole, "the bias") != dimension:
            raise BadInput("the bias is not split as the weight is; expected the same rows")
        bias = _plain(whole)
    elif bias is not None and dimension is not None:
        raise BadInput("the weight is a DTensor and the bias is not; expected both, or neither")
    return Rows(_plain(placed), bias, group)


def states_here(h: Tensor) -> tuple[Tensor, bool]:
    """Give h as a plain tensor that every rank has whole, and whether its gradient is summed.

    Of a DTensor torch adds up the parts of the gradient itself, and hands each rank its own tokens.
    """
    if not is_placed(h):
        return h, False
    from torch.distributed.tensor import Partial, Replicate

    placed: DTensor = h  # type: ignore[assignment]
    everywhere = [Replicate()] * placed.device_mesh.ndim
    whole = placed.redistribute(placements=everywhere)
    return whole.to_local(grad_placements=[Partial()] * placed.device_mesh.ndim), True


def targets_here(targets: Tensor) -> Tensor:
    """Give targets as a plain tensor that every rank has whole."""
    if not is_placed(targets):
        return targets
    placed: Any = targets
    return placed.full_tensor()  # type: ignore[no-any-return]


def _plain(placed: Any) -> Tensor:
    local: Tensor = placed.to_local()
    return local.view_as(local)  # FSDP's is marked as a parameter, which it is not


def _dimension(tensor: Any, what: str) -> int | None:
    """Return the dimension of the mesh that splits the rows; None where none does."""
    split = []
    for dimension, placement in enumerate(tensor.placements):
        if placement.is_replicate() or tensor.device_mesh.size(dimension) == 1:
            continue
        if type(placement).__name__ != "Shard" or placement.dim != 0:
            raise BadInput(
                f"{what} is placed as {tensor.placements}; expected Shard(0), rows over ranks, in "
                "one dimension of the mesh and Replicate() in the others: redistribute it first"
            )
        split.append(dimension)
    if len(split) > 1:
        raise BadInput(
            f"{what} is split over {len(split)} dimensions of its mesh; expected one: "
            "redistribute it first, to Replicate() in the others"
        )
    return split[0] if split else None
