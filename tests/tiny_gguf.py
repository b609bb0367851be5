"""Tiny random models written as GGUF files, as llama.cpp would write them.

The names of the tensors come from the gguf package, not from the tables that read them.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

Q = gguf.GGMLQuantizationType
V = 99  # odd, and no multiple of a quantisation block

COMMON = {
    "vocab_size": V,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 80,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def llama(**changes: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**COMMON | {"head_dim": 16} | changes))


def gemma3(**changes: Any) -> PreTrainedModel:
    # transformers does not take query_pre_attn_scalar from a GGUF file: its default is 256
    sizes = {"num_hidden_layers": 7, "head_dim": 256, "sliding_window": 8}
    return Gemma3ForCausalLM(Gemma3TextConfig(**COMMON | sizes | changes))


def gpt2(**changes: Any) -> PreTrainedModel:
    # transformers does not take n_positions from a GGUF file: its default is 1024
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024}
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    return GPT2LMHeadModel(GPT2Config(vocab_size=V, **sizes | ends | changes))


def qwen2(**changes: Any) -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**COMMON | changes))


def qwen3(**changes: Any) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**COMMON | {"head_dim": 128} | changes))


ARCHITECTURES: Mapping[str, Callable[..., PreTrainedModel]] = {
    "llama": llama,
    "gemma3": gemma3,
    "gpt2": gpt2,
    "qwen2": qwen2,
    "qwen3": qwen3,
}


def randomise(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Give every parameter, norms and biases too, values that a mistake would show in."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator) * 0.2
        parameter.data = noise + (parameter.data if parameter.ndim == 1 else 0)
    return model.eval()


def as_llama_cpp_stores(arch: str, name: str, weights: np.ndarray, config: Any) -> np.ndarray:
    if arch == "llama" and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
        return halves.swapaxes(1, 2).reshape(weights.shape)
    if arch == "gemma3" and name.endswith("norm.weight"):
        return weights + 1
    if arch == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
        return weights.T
    return weights


def write_gguf(
    path: Path,
    arch: str,
    model: PreTrainedModel,
    kind: Q = Q.F32,
    change: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    drop: tuple[str, ...] = (),
    tokenizer: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    if arch == "gpt2":
        writer.add_feed_forward_length(config.n_inner or 4 * config.n_embd)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_vocab_size(config.vocab_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if arch == "llama":
        writer.add_rope_dimension_count(config.head_dim)
    if arch == "gemma3":
        writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
        writer.add_sliding_window(config.sliding_window)
    elif arch != "gpt2":
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    (tokenizer or byte_level_vocabulary)(writer)
    change(writer)

    arch_id = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(arch_id, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        if gguf_name in drop:
            continue
        weights = as_llama_cpp_stores(arch, name, tensor.numpy(), config)
        weights = np.ascontiguousarray(weights)
        if kind != Q.F32 and weights.ndim == 2:
            writer.add_tensor(gguf_name, quantize(weights, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def merged_vocabulary(writer: gguf.GGUFWriter) -> None:
    """Write a vocabulary with a merge, without which llama.cpp takes none."""
    byte_level_vocabulary(writer, merge=True)


def byte_level_vocabulary(writer: gguf.GGUFWriter, count: int = V, *, merge: bool = False) -> None:
    tokens = ["<pad>", "<s>", "</s>", *(chr(33 + i) for i in range(count - 3))]
    if merge:
        tokens[-1] = "ab"
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens[:count])
    writer.add_token_types([3, 3, 3, *[1] * (count - 3)])
    writer.add_token_merges(["a b"] if merge else [])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
