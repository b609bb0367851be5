"""Tiny random models of any architecture, from its default configuration made small."""

import logging
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

transformers.logging.set_verbosity(logging.CRITICAL)  # advice about missing kernels and decoders
transformers.logging.disable_progress_bar()

# Small values for the names that configurations use; a name that one does not have is left out.
SIZES = {
    1: "n_shared_experts num_shared_experts topk_group",
    2: "decoder_layers encoder_layers index_topk linear_num_key_heads moe_k moe_top_k moe_topk "
    "n_group n_groups n_layer n_layers num_blocks num_decoder_layers num_encoder_layers "
    "num_expert_group num_experts_per_tok num_experts_per_token num_hidden_layers "
    "num_key_value_heads num_kv_heads num_layers o_groups swa_num_key_value_heads",
    4: "block_size decoder_attention_heads encoder_attention_heads index_n_heads "
    "linear_num_heads linear_num_value_heads moe_num_experts n_head n_heads n_mamba_heads "
    "n_routed_experts num_attention_heads num_decoder_attention_heads "
    "num_encoder_attention_heads num_experts num_heads num_local_experts num_random_blocks "
    "swa_num_attention_heads zero_expert_num",
    8: "attention_head_dim chunk_size d_rel dim_head gated_norm_rank global_head_dim head_dim "
    "index_head_dim kv_channels kv_lora_rank laurel_rank linear_head_dim linear_key_head_dim "
    "linear_value_head_dim mamba_chunk_size mamba_d_head mamba_d_state mamba_dt_rank "
    "mamba_head_dim mamba_n_heads o_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim "
    "query_pre_attn_scalar rotary_dim ssm_state_size state_size swa_head_dim swa_v_head_dim "
    "time_step_rank v_head_dim",
    24: "embedding_size input_embedding_size output_embedding_size word_embed_proj_dim",
    32: "attention_hidden_size backbone_hidden_size d_model embedding_dim emb_dim hidden_size "
    "hidden_size_global hidden_size_per_layer_input lru_width n_embd",
    64: "attention_chunk_size d_inner decoder_ffn_dim dense_intermediate_size dff dim_ff "
    "encoder_ffn_dim expert_ffn_hidden_size ffn_dim ffn_hidden_size intermediate_size "
    "intermediate_size_mlp keep_window_size mamba_d_ssm max_position_embeddings max_seq_len "
    "max_source_positions max_target_positions model_max_length moe_intermediate_size "
    "moe_shared_expert_intermediate_size n_ctx n_inner n_positions "
    "original_max_position_embeddings rel_extent shared_expert_intermediate_size "
    "shared_intermediate_size sliding_window",
    99: "decoder_vocab_size vocab_size vocab_size_per_layer_input",
}
SMALL: dict[str, Any] = {name: size for size, names in SIZES.items() for name in names.split()}
SMALL |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}

# What is done to the logits must not be done with a power of two, or a mistake could not show.
LOGITS = {
    "final_logit_softcapping": 5.0,
    "lm_head_multiplier": 0.7,
    "logit_scale": 0.3,
    "logits_mup_width_multiplier": 3.0,
    "logits_scaling": 3.0,
    "logits_soft_cap": 5.0,
    "output_logit_soft_cap": 5.0,
    "unpadded_vocab_size": 90,
}

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_INDEXER = {
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
    "indexer_head_dim": 8,
    "indexer_kv_heads": 1,
    "indexer_n_heads": 2,
}
_NO_EXTRA_INPUT = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
_ZAMBA = {
    "attention_head_dim": 16,
    "attention_hidden_size": 64,
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    "num_hidden_layers": 4,
}
# What single architectures demand beyond that.
DEMANDS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 99},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "dbrx": {"attn_config": {"clip_qkv": 8.0, "rope_theta": 10000.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "gemma3n_text": {
        "activation_sparsity_pattern": [0.95, 0.0],
        "intermediate_size": [64, 64],
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
    },
    "gemma4_assistant": {"text_config": _NO_EXTRA_INPUT},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hrm_text": {"num_layers_per_stack": None},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "reformer": {"axial_pos_embds": False, "is_decoder": True},
    "xmod": {"default_language": "en_XX"},
    "zamba": _ZAMBA,
    "zamba2": _ZAMBA,
    "zaya": {"num_experts_per_tok": 1},
}


def small(config: PretrainedConfig) -> dict[str, Any]:
    """Choose small settings for the names that a configuration has, its parts included."""
    chosen: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            chosen[name] = small(value)
        elif name in LOGITS:
            chosen[name] = LOGITS[name]
        elif name in SMALL and isinstance(value, int) and not isinstance(value, bool):
            chosen[name] = SMALL[name]
        elif name.endswith("_types") and isinstance(value, list) and isinstance(value[0], str):
            chosen[name] = [*dict.fromkeys(value), *value][:2]  # as many kinds as there is room
    if "kv_lora_rank" in chosen:
        chosen["num_key_value_heads"] = chosen["num_attention_heads"]
    return chosen


def merged(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Change settings, going into the parts of a configuration."""
    result = dict(settings)
    for name, value in changes.items():
        both = isinstance(value, dict) and isinstance(result.get(name), dict)
        result[name] = merged(result[name], value) if both else value
    return result


def config_of(model_type: str, **changes: Any) -> PretrainedConfig:
    config_class = CONFIG_MAPPING[model_type]
    demands = DEMANDS.get(model_type, {})
    # The one whose default configuration is refused by its own validation.
    default = config_class(**demands) if model_type == "gemma4_assistant" else config_class()
    return config_class(**merged(merged(small(default), demands), changes))


def randomise(model: PreTrainedModel) -> None:
    """Make norms and biases matter: they start as ones and zeros."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
        model.get_output_embeddings().weight.mul_(10)


def build(model_type: str, **changes: Any) -> PreTrainedModel:
    """Build a tiny random causal language model of a model type."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(model_type, **changes)).eval()
    randomise(model)
    return model


class NoWords:
    """A tokenizer whose tokens are their ids, the first 90 of them."""

    chat_template = None

    def get_vocab(self) -> dict[str, int]:
        return {str(i): i for i in range(90)}

    def __call__(self, _text: str, **_options: Any) -> dict[str, list[int]]:
        return {"input_ids": [1]}

    def decode(self, ids: list[int]) -> str:
        return "".join(f"<{i}>" for i in ids)


def without_words(model: PreTrainedModel) -> Any:
    """Make a tiny model one that lmhead can run, though it has no tokenizer."""
    from lmhead.body import TorchBody
    from lmhead.head import LMHead
    from lmhead.loading import Model

    tokenizer: Any = NoWords()
    return Model("tiny", None, TorchBody(model), LMHead.from_model(model), tokenizer)
