"""Tiny random networks of several families."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedModel,
)

V = 97
_ENDS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
_SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    **_ENDS,
}


def config_of(family: str) -> Any:
    if family == "gpt2":
        return GPT2Config(vocab_size=V, n_positions=64, n_embd=24, n_layer=3, n_head=4, **_ENDS)
    if family == "gemma3":
        return Gemma3TextConfig(**_SIZES, sliding_window=8, query_pre_attn_scalar=6)
    return LlamaConfig(**_SIZES)


@pytest.fixture
def net() -> Callable[[str], PreTrainedModel]:
    """Return a function that builds a new tiny random network of a family."""

    def build(family: str) -> PreTrainedModel:
        torch.manual_seed(0)
        made: PreTrainedModel = AutoModelForCausalLM.from_config(config_of(family)).eval()
        with torch.no_grad():
            for p in made.parameters():
                p.add_(0.3 * torch.randn_like(p))
        return made

    return build
