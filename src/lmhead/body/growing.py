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
        self.place: tuple[Any, ...] | None = None  # of the keys

    def __call__(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add keys and values `[B, heads, T, d]`; return all."""
        layer: Any = self.layer()
        start, more = layer.keys.shape[-2], key_states.shape[-2]
        end = start + more
        if self.place != _place(layer.keys) or end > self.held[0].shape[-2]:
            self.held = [_with_room(x, end + self.room) for x in (layer.keys, layer.values)]
            self.place = _place(self.held[0])
        keys, values = self.held
        keys.narrow(-2, start, more).copy_(key_states)
        values.narrow(-2, start, more).copy_(value_states)
        layer.keys, layer.values = keys.narrow(-2, 0, end), values.narrow(-2, 0, end)
        return layer.keys, layer.values


def _place(keys: Tensor) -> tuple[Any, ...]:
    """Say where keys lie, however many columns: rows may be taken out of a cache."""
    return keys.data_ptr(), keys.stride(), keys.shape[:-2]


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
