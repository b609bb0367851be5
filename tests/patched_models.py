"""Tiny random models of many architectures, and what `generate` makes of two prompts.

Their weights are wide enough for logits to spread, and for a softcap to bend them.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from torch import Tensor

V = 601
SMALL = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OPT = {"vocab_size": V, "hidden_size": 32, "ffn_dim": 40, "num_hidden_layers": 2}
OPT |= {"num_attention_heads": 4, "max_position_embeddings": 128, "word_embed_proj_dim": 32}
OPT |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"vocab_size": V, "n_positions": 128, "n_embd": 24, "n_layer": 2, "n_head": 4}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL)),
    "llama tied": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2)),
    "gemma2 softcap": lambda: tf.Gemma2ForCausalLM(
        tf.Gemma2Config(**SMALL, final_logit_softcapping=3.0, query_pre_attn_scalar=8)
    ),
    "gemma3": lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**SMALL)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**SMALL)),
    "phi bias": lambda: tf.PhiForCausalLM(tf.PhiConfig(**SMALL)),
    "opt": lambda: tf.OPTForCausalLM(tf.OPTConfig(**OPT)),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**SMALL)),
    "granite scaled": lambda: tf.GraniteForCausalLM(tf.GraniteConfig(**SMALL, logits_scaling=0.3)),
    "cohere scaled": lambda: tf.CohereForCausalLM(tf.CohereConfig(**SMALL, logit_scale=0.5)),
}
PROMPTS = torch.tensor([[0, 0, 1, 5, 9, 31, 5, 9], [1, 8, 9, 300, 20, 7, 9, 600]])
MASK = (PROMPTS != 0).long()


def tiny(name: str, seed: int = 0) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = MODELS[name]()
        for p in model.parameters():
            if p.ndim == 1:
                torch.nn.init.normal_(p, 1.0 if p.mean() > 0.5 else 0.0, 0.2)
            else:
                torch.nn.init.normal_(p, 0.0, 0.3)  # wide enough for a softcap to bend the logits
    return model.eval()


def ids_of(model: Any, settings: dict[str, Any], seed: int = 0, prompts: Any = None) -> Tensor:
    inputs = {"input_ids": PROMPTS, "attention_mask": MASK} if prompts is None else prompts
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        out = model.generate(**inputs, **({"max_new_tokens": 10} | copy.deepcopy(settings)))
    found: Tensor = out if isinstance(out, Tensor) else out.sequences
    return found
