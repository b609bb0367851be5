"""A body whose rows have the bits that they have alone, whatever runs beside them.

What one row of a batch gets depends on the others in two places, both by rounding: a matrix product
of several rows adds up in another order than that of one, and attention over padded keys in another
than over its own alone. Here a step multiplies row by row (`head/rowwise.py`, in one pass over the
weights all the same), every row attends to its own keys, and a prompt is read by itself.

Whether that is so is tried on the model itself, as in `joining.py`; where it is not, or numba
cannot compile here, the model's own arithmetic stays, and rows are equal up to rounding.
"""

import copyreg
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmhead.body.base import Additions
from lmhead.body.joining import far, joining
from lmhead.body.state import State
from lmhead.body.torch_body import TorchBody
from lmhead.head.rowwise import can_multiply, linear, rowwise

_NAME = "lmhead_rows"
_ROWS = (0, 1, 1, 0, 1)  # of the trial: more than are multiplied at a time
_KINDS = {"full_attention", "sliding_attention"}  # of layers; where a model says what it has

# At which column of S each row of the batch begins, and S; None: nobody runs a step.
_begin: ContextVar[tuple[list[int], int] | None] = ContextVar("lmhead_begin", default=None)


class _RowLinear(nn.Linear):
    """A linear layer that multiplies row by row where that is asked for, in a step."""

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 3 and x.shape[1] == 1:
            return linear(x, self.weight, self.bias)
        return super().forward(x)

    def __reduce_ex__(self, _protocol: Any) -> Any:  # a copy or a pickle is one of torch's own
        return copyreg._reconstructor, (nn.Linear, object, None), self.__dict__  # type: ignore[attr-defined]


class RowBody(TorchBody):
    """The body of a causal model of transformers, with rows that do not depend on each other.

    It changes how the model attends and multiplies: only for a model that nobody else runs.
    """

    rowwise = True

    def run(
        self, ids: Tensor, state: State | None = None, *, rows: Sequence[Additions] | None = None
    ) -> tuple[Tensor, State]:
        """Read ids `[B, T]` behind what `state` remembers; return h `[B, T, d]` and the memory."""
        state = State() if state is None else state
        if ids.shape[1] > 1 or state.each > 1:
            return super().run(ids, state, rows=rows)
        begin = [0] * len(ids) if state.padding is None else state.padding.tolist()
        token = _begin.set((begin, state.length + 1))
        try:
            with rowwise():
                return super().run(ids, state, rows=rows)
        finally:
            _begin.reset(token)

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        rows: Sequence[Additions] | None = None,
        room: int = 0,
        whole: bool = False,
    ) -> tuple[Tensor, State]:
        """Read prompts one by one; return h `[B, d]` of their last tokens, and the memory."""
        given = [None] * len(prompts) if rows is None else rows
        each = []
        for prompt, added in zip(prompts, given, strict=True):
            alone = None if added is None else [added]
            each.append(super().prefill([prompt], rows=alone, room=room, whole=whole))
        memory = each[0][1]
        for _, other in each[1:]:
            memory.join(other)
        parts = [h for h, _ in each]
        if whole:
            longest = max(h.shape[1] for h in parts)
            parts = [F.pad(h, (0, 0, longest - h.shape[1], 0)) for h in parts]
        return torch.cat(parts), memory


def row_body(body: Any) -> Any:
    """Return a body of the same model whose rows are independent; the body itself where none is."""
    if type(body) is not TorchBody or not _may(body):
        return body
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    config, layers = body.config, _layers(body)
    with torch.inference_mode():
        plain = _steps(body, _texts(body), _ROWS)
        config._attn_implementation = _NAME
        for layer in layers:
            layer.__class__ = _RowLinear
        made = RowBody(body.model)
        if _same(made, plain):
            return made
    config._attn_implementation = "sdpa"
    for layer in layers:
        layer.__class__ = nn.Linear
    return body


def _may(body: TorchBody) -> bool:
    """Tell whether a model is of the kind that is worth a trial."""
    kinds = getattr(body.config, "layer_types", None) or ["full_attention"]
    layers = _layers(body)
    return (
        getattr(body.config, "_attn_implementation", None) == "sdpa"
        and set(kinds) <= _KINDS
        and bool(layers)
        and all(can_multiply(layer.weight) for layer in layers)
        and joining(body).in_turn is None
        and joining(body).pads
    )


def _layers(body: TorchBody) -> list[nn.Linear]:
    return [module for module in body.model.modules() if type(module) is nn.Linear]


def _texts(body: Any) -> list[list[int]]:
    """Return two beginnings of unequal length, and what to go on with."""
    ids = [k * body.vocab_size // 10 for k in range(1, 10)]
    return [ids[:2], ids[2:8], ids[8:]]


def _steps(body: Any, texts: Sequence[Sequence[int]], rows: Sequence[int]) -> Tensor:
    """Read beginnings, go on with rows that begin so; return h `[B, steps, d]`."""
    *prompts, after = texts
    _, state = body.prefill(prompts, room=len(after))
    state.select(rows)
    found = []
    for token in after:
        h, state = body.run(torch.full((len(rows), 1), token), state)
        found.append(h)
    return torch.cat(found, dim=1)


def _same(body: RowBody, plain: Tensor) -> bool:
    """Tell whether rows together have the bits of rows alone, and mean what the model means."""
    texts = _texts(body)
    try:
        together = _steps(body, texts, _ROWS)
        alone = [_steps(body, [prompt, texts[-1]], [0])[0] for prompt in texts[:-1]]
    except Exception:  # whatever the code of a model raises
        return False
    expected = torch.stack([alone[row] for row in _ROWS])
    rows = list(plain.flatten(0, 1))
    return torch.equal(together, expected) and far(together.flatten(0, 1), rows) is None


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend from query `[B, H, T, d]` to keys and values `[B, K, S, d]`; return `[B, T, H, d]`.

    In a step each row attends to its own keys alone: all that a layer kept of it.
    """
    begin = _begin.get()
    B, H, T, d = query.shape
    plain = dropout == 0 and others.get("position_bias") is None and others.get("s_aux") is None
    if begin is None or T != 1 or not plain:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
        )
    K, dropped = key.shape[1], begin[1] - key.shape[2]  # columns that a window has left behind
    queries = query.reshape(B, K, H // K, d)
    found = []
    for row, start in enumerate(begin[0]):
        q, k, v = (x.narrow(0, row, 1) for x in (queries, key, value))
        if start > dropped:
            k, v = (x[:, :, start - dropped :] for x in (k, v))
        found.append(F.scaled_dot_product_attention(q, k, v, scale=scaling))
    heads = found[0] if B == 1 else torch.cat(found)  # [B, K, H / K, d]
    return heads.reshape(B, 1, H, value.shape[-1]), None
