"""Tiny random models of several families with a tokenizer of single characters."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)

from lmhead.body import TorchBody
from lmhead.head import LMHead
from lmhead.loading import Model, load

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


def config_of(family: str) -> PretrainedConfig:
    if family == "gpt2":
        return GPT2Config(vocab_size=V, n_positions=64, n_embd=24, n_layer=3, n_head=4, **_ENDS)
    if family == "gemma3":
        return Gemma3TextConfig(**_SIZES, sliding_window=8, query_pre_attn_scalar=6)
    return LlamaConfig(**_SIZES)


def build(family: str) -> Model:
    torch.manual_seed(0)
    net = AutoModelForCausalLM.from_config(config_of(family)).eval()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.3 * torch.randn_like(p))
    vocab = {"<eos>": 0, **{chr(31 + i): i for i in range(1, V - 4)}}  # 4 rows without a token
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    return Model(f"tiny-{family}", Path(), TorchBody(net), LMHead.from_model(net), fast)


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep no states of random models in the user's cache."""
    monkeypatch.setenv("LMHEAD_STATES", "0")


@pytest.fixture(scope="session")
def tiny() -> Callable[[str], Model]:
    """Return a function that builds a tiny random model of a family, once."""
    built: dict[str, Model] = {}

    def get(family: str) -> Model:
        if family not in built:
            built[family] = build(family)
        return built[family]

    return get


@pytest.fixture(scope="session")
def real(smollm2: Path) -> Model:
    """The real smollm2-135m, loaded."""
    return load(smollm2)
