"""What enters a screened head: states as float32 that the loops can read, and ids for each."""

import math

import torch
from torch import Tensor

from lmhead.head.base import check_ids, check_shape
from lmhead.head.dense import LMHead
from lmhead.head.screening.bounds import Float32, Ints


class Entering:
    """Gives what enters the projection, `[..., d]`, in float32 as the weight's dtype has it."""

    def __init__(self, dense: LMHead) -> None:
        self._dense = dense
        self._dtype = dense.weight.dtype
        self._width = (dense.hidden_size,)

    def __call__(self, h: Tensor, from_block: bool = False) -> Tensor:
        """Give the states h `[..., d]`, past the norm if they come from a block."""
        if not from_block and self._is_plain(h):
            return h
        with torch.no_grad():
            entering = self._dense.entering(h, from_block=from_block).to(self._dtype).float()
        return entering.detach().contiguous()

    def _is_plain(self, h: Tensor) -> bool:
        """Tell whether h can be read as it is; to ask the dense head takes longer."""
        return (
            type(h) is Tensor
            and h.dtype is torch.float32 is self._dtype
            and h.shape[-1:] == self._width
            and h.is_cpu
            and h.is_contiguous()
        )


def array_of(states: Tensor) -> Float32:
    """Give states `[..., d]` as an array `[B, d]`."""
    array: Float32 = states.detach().numpy()
    return array.reshape(-1, array.shape[-1])


def own_ids(ids: Tensor, states: Tensor, V: int) -> tuple[Ints, tuple[int, ...]]:
    """Give the ids of each of B states as an array `[B, n]`, and the shape of the answer."""
    ids = check_ids(ids, V, "ids")
    check_shape(ids, states)
    shape = *states.shape[:-1], ids.shape[-1]
    own: Ints = ids.expand(shape).reshape(math.prod(shape[:-1]), shape[-1]).cpu().numpy()
    return own, shape
