"""What a body remembers of a batch, whatever the architecture: keys, values, recurrent states.

Symbols: B sequences, S columns read so far. Sequences of several lengths are padded on the left:
row b begins at column `padding[b]`, and some row always begins at column 0.

A memory is a list of tensors, each with a batch dimension. Some of them grow with every token and
have a time dimension too: all columns (attention), or the last few (sliding windows). With this
alone, rows can be taken out, put in another order, and joined by the rows of another batch.
"""

from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lmhead.errors import UnsupportedModel

# What models call their memory, as an argument and in what they return.
_NAMES = ("past_key_values", "cache_params", "state")


class State:
    """The memory of a batch; a new one remembers nothing.

    `select` and `join` change it in place, and so does the body that reads on from it.
    """

    def __init__(self) -> None:
        self.length = 0  # S
        self.padding: Tensor | None = None  # [B]: columns before each row begins; None: 0 for all
        self.each = 1  # rows of the memory for every row of the batch, one below the other
        self._name = _NAMES[0]
        self._past: Any = None  # the model's own object
        self._ids: Tensor | None = None  # [B, S], where the model keeps no memory itself

    @classmethod
    def of_prompts(cls, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, "State"]:
        """Return the ids of the prompts, `[B, T]` padded on the left, and a state to read them."""
        longest = max(map(len, prompts))
        padding = [longest - len(p) for p in prompts]
        ids = torch.tensor([[0] * n + list(p) for n, p in zip(padding, prompts, strict=True)])
        state = cls()
        if any(padding):
            state.padding = torch.tensor(padding)
        return ids, state

    def inputs(self, ids: Tensor, names: Collection[str]) -> dict[str, Any]:
        """Return all that a model with these arguments is given to read ids `[B, T]` next."""
        given: dict[str, Any] = {"input_ids": ids, "use_cache": True}
        if self._past is not None:
            given[self._name] = self._past
        elif self._ids is not None:  # no memory: everything is read again
            given["input_ids"] = torch.cat([self._ids, ids], dim=1)
        # Without padding every token sees all before it, which is the models' default.
        if self.padding is not None:
            columns = torch.arange(self.length + ids.shape[1], device=ids.device)  # [S + T]
            places = columns - self.padding.to(ids.device).unsqueeze(1)  # [B, S + T]
            given["attention_mask"] = (places >= 0).long()
            if "position_ids" in names:
                T = given["input_ids"].shape[1]
                given["position_ids"] = places[:, -T:].clamp(min=0)
        return given

    def take(self, ids: Tensor, output: Any) -> None:
        """Take over what the model remembers after ids `[B, T]`, from what it returned."""
        self.length += ids.shape[1]
        for name in _NAMES:
            if (past := getattr(output, name, None)) is not None:
                self._name, self._past, self._ids = name, past, None
                return
        self._ids = ids if self._ids is None else torch.cat([self._ids, ids], dim=1)

    def repeat(self, n: int) -> None:
        """Before the first token: let every row of the batch have n rows of the memory."""
        self.each = n
        if self.padding is not None:
            self.padding = self.padding.repeat_interleave(n)

    @property
    def past(self) -> Any:
        """The model's own memory; None before the first token, or where it keeps none."""
        return self._past

    @property
    def unjoinable(self) -> str | None:
        """Why rows of this memory cannot be told apart by us; None where they can."""
        try:
            self._slots()
        except _UnknownMemoryError as error:
            return str(error)
        return None

    @property
    def recurrent(self) -> bool:
        """Whether some of the memory has no time dimension, so that padding would enter it."""
        return any(slot.time is None for slot in self._slots())

    def tensors(self) -> list[Tensor]:
        """Return the tensors that it holds."""
        return [slot.tensor for slot in self._slots()]

    def select(self, rows: Sequence[int]) -> None:
        """Let row i be what row `rows[i]` was; a row may be taken more than once."""
        slots = self._known("select")
        if not slots:
            return
        if self.each > 1:
            rows = [row * self.each + i for row in rows for i in range(self.each)]
        index = torch.tensor(rows, dtype=torch.long, device=slots[0].tensor.device)
        for slot in slots:
            slot.put(slot.tensor.index_select(slot.batch, index))
        if self.padding is not None:
            self.padding = self.padding[index.to(self.padding.device)]
            self._shrink()

    def join(self, other: "State") -> None:
        """Put the rows of `other` below those of this batch; `other` is used up."""
        ours, theirs = self._known("join"), other._known("join")
        if [(s.batch, s.time) for s in ours] != [(s.batch, s.time) for s in theirs]:
            raise UnsupportedModel(
                f"the memory of {_described(self._past)} has {len(ours)} tensors, the one to join "
                f"{len(theirs)}; expected two memories of one model"
            )
        B, C = (_rows(slots) for slots in (ours, theirs))
        for mine, its in zip(ours, theirs, strict=True):
            parts = [mine.tensor, its.tensor]
            if mine.time is not None:
                width = max(part.shape[mine.time] for part in parts)
                parts = [_padded(part, mine.time, width) for part in parts]
            mine.put(torch.cat(parts, dim=mine.batch))
        if any(slot.time is not None for slot in ours):
            length = max(self.length, other.length)
            padding = torch.cat([_starts(self, B, length), _starts(other, C, length)])
            self.padding = padding if bool(padding.any()) else None
            self._resize(length)
        other._past = other._ids = other.padding = None

    def _shrink(self) -> None:
        """Leave out the columns that are padding in every row."""
        assert self.padding is not None
        empty = int(self.padding.min())
        if empty:
            length = self.length - empty
            for slot in self._slots():
                if slot.time is not None and (extra := slot.tensor.shape[slot.time] - length) > 0:
                    slot.put(slot.tensor.narrow(slot.time, extra, length))
            self._resize(length)
            self.padding = self.padding - empty
        if not bool(self.padding.any()):
            self.padding = None

    def _resize(self, length: int) -> None:
        self.length = length
        for layer in _layers(self._past):  # windows count what they have seen
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = length

    def _known(self, verb: str) -> list["_Slot"]:
        try:
            return self._slots()
        except _UnknownMemoryError as error:
            raise UnsupportedModel(f"cannot {verb} rows of a batch: {error}") from error

    def _slots(self) -> list["_Slot"]:
        if self._past is None:
            return [] if self._ids is None else [_Slot(self, "_ids", 0, 1)]
        return _slots_of(self._past)


class _UnknownMemoryError(Exception):
    """A memory whose tensors we cannot name."""


class _Slot(NamedTuple):
    """One tensor of a memory: where it is, and which of its dimensions is which."""

    owner: Any
    key: Any
    batch: int
    time: int | None

    @property
    def tensor(self) -> Tensor:
        found: Tensor = (
            self.owner[self.key]
            if isinstance(self.owner, list | dict)
            else getattr(self.owner, self.key)
        )
        return found

    def put(self, tensor: Tensor) -> None:
        if isinstance(self.owner, list | dict):
            self.owner[self.key] = tensor
        else:
            setattr(self.owner, self.key, tensor)


def _layers(past: Any) -> list[Any]:
    """Return the layers of transformers' caches."""
    inner = getattr(past, "self_attention_cache", past)  # a decoder that could read an encoder
    layers: list[Any] = getattr(inner, "layers", [])
    return layers


def _slots_of(past: Any) -> list[_Slot]:
    from lmhead.models.gpt2 import KVCache

    if isinstance(past, KVCache):
        lists = (past.keys, past.values)
        return [_Slot(tensors, i, 0, 2) for tensors in lists for i in range(len(tensors))]
    if isinstance(past, list) and all(isinstance(x, Tensor) for x in past):  # RWKV
        return [_Slot(past, i, 0, None) for i in range(len(past))]
    if type(past).__name__ not in ("DynamicCache", "EncoderDecoderCache"):
        raise _UnknownMemoryError(
            f"its memory is a {type(past).__name__}, which lmhead does not support"
        )
    slots: list[_Slot] = []
    for layer in _layers(past):
        if (find := _finders().get(type(layer))) is None:
            raise _UnknownMemoryError(
                f"a layer of its memory is a {type(layer).__name__}, which lmhead does not support"
            )
        slots += [s for s in find(layer) if s.tensor is not None and s.tensor.numel()]
    return slots


def _attention(layer: Any) -> list[_Slot]:
    return [_Slot(layer, name, 0, 2) for name in ("keys", "values")]


def _indexed(layer: Any) -> list[_Slot]:
    more = [_Slot(layer, "indexer_keys", 0, 1), _Slot(layer, "indexer_position_ids", 1, 2)]
    return _attention(layer) + more


def _linear(layer: Any) -> list[_Slot]:
    states = (layer.conv_states, layer.recurrent_states)
    return [_Slot(by_index, i, 0, None) for by_index in states for i in by_index]


@cache
def _finders() -> dict[type, Callable[[Any], list[_Slot]]]:
    """Return how the tensors of each kind of layer are found; of subclasses we know nothing."""
    from transformers import cache_utils

    named: dict[str, Callable[[Any], list[_Slot]]] = {
        "DynamicLayer": _attention,
        "DynamicSlidingWindowLayer": _attention,
        "DynamicIndexedLayer": _indexed,
        "LinearAttentionLayer": _linear,
        "LinearAttentionAndFullAttentionLayer": lambda x: _attention(x) + _linear(x),
        "LinearAttentionAndSlidingWindowAttentionLayer": lambda x: _attention(x) + _linear(x),
    }
    there = {name: getattr(cache_utils, name, None) for name in named}  # not in every version
    return {kind: named[name] for name, kind in there.items() if kind is not None}


def _described(past: Any) -> str:
    return f"a {type(past).__name__}" if past is not None else "a model without a cache"


def _rows(slots: Sequence[_Slot]) -> int:
    return slots[0].tensor.shape[slots[0].batch] if slots else 0


def _starts(state: State, rows: int, length: int) -> Tensor:
    """Return how many columns come before each row `[B]`, once the batch has `length` columns."""
    padding = torch.zeros(rows, dtype=torch.long) if state.padding is None else state.padding
    return padding + (length - state.length)


def _padded(tensor: Tensor, dim: int, width: int) -> Tensor:
    """Put zeros before a tensor, until dimension `dim` has this width."""
    missing = width - tensor.shape[dim]
    if not missing:
        return tensor
    return F.pad(tensor, [0, 0] * (tensor.ndim - 1 - dim) + [missing, 0])
