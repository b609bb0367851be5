"""Tiny models on disk, with a tokenizer of whole words."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ["<unk>", *(f"w{i}" for i in range(1, 60))]
Save = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Return a function that saves a tiny model: all its words, or those of a keep-set."""

    def saved(
        name: str, kept: Sequence[int] | None = None, noise: float = 0.0, rows: Sequence[int] = ()
    ) -> Path:
        ids = list(range(len(WORDS)) if kept is None else kept)
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(WORDS), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16,
            bos_token_id=None, eos_token_id=0, pad_token_id=0,
        )  # fmt: skip
        model = LlamaForCausalLM(config).eval()
        with torch.no_grad():
            model.lm_head.weight.mul_(20)
            model.lm_head.weight[list(rows)] += noise * torch.randn(len(rows), 16)
            for layer in (model.lm_head, model.model.embed_tokens):
                layer.weight = torch.nn.Parameter(layer.weight[ids].clone())
        model.config.vocab_size = len(ids)
        folder = tmp_path / name
        model.save_pretrained(folder)
        vocab = {WORDS[old]: new for new, old in enumerate(ids)}
        tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<unk>"
        )
        fast.save_pretrained(folder)
        return folder

    return saved
