"""Keys and values that grow where they lie.

transformers copies all keys and values of a batch for every token that is added to them, which for
a batch of a hundred is a quarter of all the work. Here there is room behind them, and the models
see the part that is filled; the numbers are the same.
"""

import weakref
from typing import Any

from torch import Tensor


class _Growing:
    """Stands for the `update` of one layer of a cache: adds keys and values where there is room."""

    def __init__(self, layer: Any, room: int) -> None:
        self.layer, self.room = weakref.ref(layer), room  # which holds us: no circle
        self.held: list[Tensor] = []  # keys and values, with room behind them

    def __call__(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add keys and values `[B, heads, T, d]`; return all."""
        layer: Any = self.layer()
        start = layer.keys.shape[-2]
        end = start + key_states.shape[-2]
        if not self._is_held(layer.keys) or end > self.held[0].shape[-2]:
            self.held = [_with_room(x, end + self.room) for x in (layer.keys, layer.values)]
        for whole, new in zip(self.held, (key_states, value_states), strict=True):
            whole[..., start:end, :] = new
        layer.keys, layer.values = (whole[..., :end, :] for whole in self.held)
        return layer.keys, layer.values

    def _is_held(self, keys: Tensor) -> bool:
        """Whether the keys still lie where we put them: rows may have been taken out since."""
        if not self.held:
            return False
        whole = self.held[0]
        return (keys.data_ptr(), keys.shape[:-2], keys.stride()) == (
            whole.data_ptr(),
            whole.shape[:-2],
            whole.stride(),
        )


def grow_in_place(past: Any, room: int) -> None:
    """Let the layers of a cache grow in place that keep everything; others stay as they are.

    The cache has read something already. `room` is for how many tokens, before it is copied once.
    """
    if not (layers := getattr(past, "layers", ())):
        return
    from transformers.cache_utils import DynamicLayer

    for layer in layers:
        if type(layer) is DynamicLayer and layer.is_initialized and layer.get_seq_length():
            layer.update = _Growing(layer, room)


def _with_room(filled: Tensor, columns: int) -> Tensor:
    whole = filled.new_empty((*filled.shape[:-2], columns, filled.shape[-1]))
    whole[..., : filled.shape[-2], :] = filled
    return whole
