"""Attention of one new token, where several heads share keys and values.

transformers copies the keys and values once for every head that reads them, as soon as a batch has
padding. For a step of a large batch that is as much work as the attention itself. Here the heads
that share keys stand as so many queries of one head; the numbers are the same but for rounding.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_NAME = "lmhead_grouped"


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
    """Attend from query `[B, H, T, d]` to keys and values `[B, K, S, d]`; return `[B, T, H, d]`."""
    B, H, T, d = query.shape
    K = key.shape[1]
    one_for_all = attention_mask is None or attention_mask.shape[1] == 1
    plain = dropout == 0 and others.get("position_bias") is None and others.get("cache") is None
    if T != 1 or H == K or not one_for_all or not plain:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
        )
    found = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(B, K, H // K, d), key, value, attn_mask=attention_mask, scale=scaling
    )
    return found.reshape(B, 1, H, value.shape[-1]), None


@contextmanager
def grouped_attention(body: Any) -> Iterator[None]:
    """Let a body of transformers attend so, as long as the block runs; others stay as they are.

    The model's configuration is changed for that long: only for a body that nobody else runs.
    """
    config = getattr(body, "config", None)
    if getattr(config, "_attn_implementation", None) != "sdpa":
        yield
        return
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    config._attn_implementation = _NAME  # type: ignore[union-attr]
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"  # type: ignore[union-attr]
