"""Configurations of well-known models, so that a name is enough to count them.

Only what decides a shape or what the head does is kept, in the words of each family's own
config.json. No weights, no tokenizer, and no network.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from lmhead.errors import ModelNotFound

Config = Mapping[str, Any]


def _gpt2(d: int, layers: int, heads: int) -> Config:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": d,
        "n_layer": layers,
        "n_head": heads,
        "tie_word_embeddings": True,
    }


def _gpt_neo(d: int, layers: int, heads: int) -> Config:
    return {
        "model_type": "gpt_neo",
        "architectures": ["GPTNeoForCausalLM"],
        "vocab_size": 50257,
        "max_position_embeddings": 2048,
        "hidden_size": d,
        "num_layers": layers,
        "num_heads": heads,
        "attention_types": [[["global", "local"], layers // 2]],
        "tie_word_embeddings": True,
    }


def _gpt_neox(d: int, layers: int, heads: int, V: int = 50304) -> Config:
    return {
        "model_type": "gpt_neox",
        "architectures": ["GPTNeoXForCausalLM"],
        "vocab_size": V,
        "hidden_size": d,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * d,
        "tie_word_embeddings": False,
    }


def _opt(d: int, layers: int, heads: int, projected: int | None = None) -> Config:
    return {
        "model_type": "opt",
        "architectures": ["OPTForCausalLM"],
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "hidden_size": d,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "ffn_dim": 4 * d,
        "word_embed_proj_dim": projected or d,
        "do_layer_norm_before": projected is None,
        "tie_word_embeddings": True,
    }


def _bloom(d: int, layers: int, heads: int) -> Config:
    return {
        "model_type": "bloom",
        "architectures": ["BloomForCausalLM"],
        "vocab_size": 250880,
        "hidden_size": d,
        "n_layer": layers,
        "n_head": heads,
        "tie_word_embeddings": True,
    }


def _decoder(
    model_type: str,
    V: int,
    d: int,
    layers: int,
    heads: tuple[int, int],
    ffn: int,
    *,
    tied: bool,
    **rest: Any,
) -> Config:
    """One of the family that Llama founded; `heads` counts query heads and key-value heads."""
    return {
        "model_type": model_type,
        "architectures": [_CLASSES[model_type]],
        "vocab_size": V,
        "hidden_size": d,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "intermediate_size": ffn,
        "tie_word_embeddings": tied,
        **rest,
    }


_CLASSES = {
    "cohere": "CohereForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "phi": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}


def _llama2(d: int, layers: int, heads: tuple[int, int], ffn: int) -> Config:
    return _decoder("llama", 32000, d, layers, heads, ffn, tied=False)


def _llama3(d: int, layers: int, heads: tuple[int, int], ffn: int, tied: bool = False) -> Config:
    return _decoder("llama", 128256, d, layers, heads, ffn, tied=tied, head_dim=d // heads[0])


def _smollm2(d: int, layers: int, heads: tuple[int, int], ffn: int) -> Config:
    return _decoder("llama", 49152, d, layers, heads, ffn, tied=True)


def _mistral(V: int, d: int = 4096, layers: int = 32) -> Config:
    return _decoder("mistral", V, d, layers, (32, 8), 14336, tied=False, head_dim=128)


def _qwen2(d: int, layers: int, heads: tuple[int, int], ffn: int) -> Config:
    return _decoder("qwen2", 151936, d, layers, heads, ffn, tied=True)


def _qwen3(d: int, layers: int, heads: tuple[int, int], ffn: int, tied: bool = True) -> Config:
    return _decoder("qwen3", 151936, d, layers, heads, ffn, tied=tied, head_dim=128)


def _gemma(d: int, layers: int, heads: tuple[int, int], ffn: int) -> Config:
    return _decoder("gemma", 256000, d, layers, heads, ffn, tied=True, head_dim=256)


def _gemma2(d: int, layers: int, heads: tuple[int, int], ffn: int, head_dim: int = 256) -> Config:
    rest = {"head_dim": head_dim, "final_logit_softcapping": 30.0}
    return _decoder("gemma2", 256000, d, layers, heads, ffn, tied=True, **rest)


def _gemma3(d: int, layers: int, heads: tuple[int, int], ffn: int) -> Config:
    return _decoder("gemma3_text", 262144, d, layers, heads, ffn, tied=True, head_dim=256)


def _cohere(d: int, layers: int, heads: tuple[int, int], ffn: int) -> Config:
    return _decoder("cohere", 256000, d, layers, heads, ffn, tied=True, logit_scale=0.0625)


def _phi(d: int, layers: int) -> Config:
    return _decoder("phi", 51200, d, layers, (32, 32), 4 * d, tied=False)


_GPTJ: Config = {
    "model_type": "gptj",
    "architectures": ["GPTJForCausalLM"],
    "vocab_size": 50400,
    "n_positions": 2048,
    "n_embd": 4096,
    "n_layer": 28,
    "n_head": 16,
    "rotary_dim": 64,
    "tie_word_embeddings": False,
}

KNOWN: Mapping[str, Config] = MappingProxyType(
    {
        "aya-23-8b": _cohere(4096, 32, (32, 8), 14336),
        "bloom-560m": _bloom(1024, 24, 16),
        "bloom-1b1": _bloom(1536, 24, 16),
        "bloom-7b1": _bloom(4096, 30, 32),
        "command-r": _cohere(8192, 40, (64, 64), 22528),
        "distilgpt2": _gpt2(768, 6, 12),
        "gemma-2b": _gemma(2048, 18, (8, 1), 16384),
        "gemma-7b": _gemma(3072, 28, (16, 16), 24576),
        "gemma-2-2b": _gemma2(2304, 26, (8, 4), 9216),
        "gemma-2-9b": _gemma2(3584, 42, (16, 8), 14336),
        "gemma-2-27b": _gemma2(4608, 46, (32, 16), 36864, head_dim=128),
        "gemma-3-270m": _gemma3(640, 18, (4, 1), 2048),
        "gemma-3-1b": _gemma3(1152, 26, (4, 1), 6912),
        "gpt-j-6b": _GPTJ,
        "gpt-neo-125m": _gpt_neo(768, 12, 12),
        "gpt-neo-1.3b": _gpt_neo(2048, 24, 16),
        "gpt-neo-2.7b": _gpt_neo(2560, 32, 20),
        "gpt-neox-20b": _gpt_neox(6144, 44, 64, V=50432),
        "gpt2": _gpt2(768, 12, 12),
        "gpt2-medium": _gpt2(1024, 24, 16),
        "gpt2-large": _gpt2(1280, 36, 20),
        "gpt2-xl": _gpt2(1600, 48, 25),
        "llama-2-7b": _llama2(4096, 32, (32, 32), 11008),
        "llama-2-13b": _llama2(5120, 40, (40, 40), 13824),
        "llama-2-70b": _llama2(8192, 80, (64, 8), 28672),
        "llama-3-8b": _llama3(4096, 32, (32, 8), 14336),
        "llama-3-70b": _llama3(8192, 80, (64, 8), 28672),
        "llama-3.1-8b": _llama3(4096, 32, (32, 8), 14336),
        "llama-3.2-1b": _llama3(2048, 16, (32, 8), 8192, tied=True),
        "llama-3.2-3b": _llama3(3072, 28, (24, 8), 8192, tied=True),
        "mistral-7b": _mistral(32000),
        "mistral-7b-v0.3": _mistral(32768),
        "mistral-nemo": _mistral(131072, d=5120, layers=40),
        "opt-125m": _opt(768, 12, 12),
        "opt-350m": _opt(1024, 24, 16, projected=512),
        "opt-1.3b": _opt(2048, 24, 32),
        "opt-2.7b": _opt(2560, 32, 32),
        "opt-6.7b": _opt(4096, 32, 32),
        "phi-1.5": _phi(2048, 24),
        "phi-2": _phi(2560, 32),
        "phi-3-mini": _decoder("phi3", 32064, 3072, 32, (32, 32), 8192, tied=False),
        "phi-4": _decoder("phi3", 100352, 5120, 40, (40, 10), 17920, tied=False),
        "pythia-70m": _gpt_neox(512, 6, 8),
        "pythia-160m": _gpt_neox(768, 12, 12),
        "pythia-410m": _gpt_neox(1024, 24, 16),
        "pythia-1b": _gpt_neox(2048, 16, 8),
        "pythia-1.4b": _gpt_neox(2048, 24, 16),
        "pythia-2.8b": _gpt_neox(2560, 32, 32),
        "pythia-6.9b": _gpt_neox(4096, 32, 32, V=50432),
        "pythia-12b": _gpt_neox(5120, 36, 40, V=50688),
        "qwen2.5-0.5b": _qwen2(896, 24, (14, 2), 4864),
        "qwen2.5-1.5b": _qwen2(1536, 28, (12, 2), 8960),
        "qwen2.5-3b": _qwen2(2048, 36, (16, 2), 11008),
        "qwen2.5-7b": _decoder("qwen2", 152064, 3584, 28, (28, 4), 18944, tied=False),
        "qwen3-0.6b": _qwen3(1024, 28, (16, 8), 3072),
        "qwen3-1.7b": _qwen3(2048, 28, (16, 8), 6144),
        "qwen3-4b": _qwen3(2560, 36, (32, 8), 9728),
        "qwen3-8b": _qwen3(4096, 36, (32, 8), 12288, tied=False),
        "smollm2-135m": _smollm2(576, 30, (9, 3), 1536),
        "smollm2-360m": _smollm2(960, 32, (15, 5), 2560),
        "smollm2-1.7b": _smollm2(2048, 24, (32, 32), 8192),
        "smollm3-3b": _decoder("smollm3", 128256, 2048, 36, (16, 4), 11008, tied=True),
        "tinyllama-1.1b": _llama2(2048, 22, (32, 4), 5632),
    }
)

_ALIASES = {"gemma3-270m": "gemma-3-270m", "gemma3-1b": "gemma-3-1b"}

# Whose each one is on the Hugging Face hub: `owner/name`, and the names that differ there. Only ids
# of these very models stand here; a tune of somebody else's may have other rows.
_OWNERS = {
    "CohereForAI": "aya-23-8b",
    "CohereLabs": "aya-23-8b",
    "bigscience": "bloom-560m bloom-1b1 bloom-7b1",
    "distilbert": "distilgpt2",
    "google": "gemma-2b gemma-7b gemma-2-2b gemma-2-9b gemma-2-27b gemma-3-270m",
    "EleutherAI": "gpt-j-6b gpt-neo-125m gpt-neo-1.3b gpt-neo-2.7b gpt-neox-20b pythia-70m "
    "pythia-160m pythia-410m pythia-1b pythia-1.4b pythia-2.8b pythia-6.9b pythia-12b",
    "openai-community": "gpt2 gpt2-medium gpt2-large gpt2-xl",
    "meta-llama": "llama-2-7b llama-2-13b llama-2-70b llama-3.1-8b llama-3.2-1b llama-3.2-3b",
    "mistralai": "mistral-7b-v0.3",
    "facebook": "opt-125m opt-350m opt-1.3b opt-2.7b opt-6.7b",
    "microsoft": "phi-2 phi-4",
    "Qwen": "qwen2.5-0.5b qwen2.5-1.5b qwen2.5-3b qwen2.5-7b qwen3-0.6b qwen3-1.7b qwen3-4b "
    "qwen3-8b",
    "HuggingFaceTB": "smollm2-135m smollm2-360m smollm2-1.7b smollm3-3b",
}
_OTHER_IDS = {
    "google/gemma-2b-it": "gemma-2b",
    "google/gemma-7b-it": "gemma-7b",
    "google/gemma-2-2b-it": "gemma-2-2b",
    "google/gemma-2-9b-it": "gemma-2-9b",
    "google/gemma-2-27b-it": "gemma-2-27b",
    "google/gemma-3-270m-it": "gemma-3-270m",
    "google/gemma-3-1b-pt": "gemma-3-1b",
    "google/gemma-3-1b-it": "gemma-3-1b",
    "CohereForAI/c4ai-command-r-v01": "command-r",
    "CohereLabs/c4ai-command-r-v01": "command-r",
    "meta-llama/Llama-2-7b-hf": "llama-2-7b",
    "meta-llama/Llama-2-7b-chat-hf": "llama-2-7b",
    "meta-llama/Llama-2-13b-hf": "llama-2-13b",
    "meta-llama/Llama-2-13b-chat-hf": "llama-2-13b",
    "meta-llama/Llama-2-70b-hf": "llama-2-70b",
    "meta-llama/Llama-2-70b-chat-hf": "llama-2-70b",
    "meta-llama/Meta-Llama-3-8B": "llama-3-8b",
    "meta-llama/Meta-Llama-3-8B-Instruct": "llama-3-8b",
    "meta-llama/Meta-Llama-3-70B": "llama-3-70b",
    "meta-llama/Meta-Llama-3-70B-Instruct": "llama-3-70b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "meta-llama/Llama-3.2-1B-Instruct": "llama-3.2-1b",
    "meta-llama/Llama-3.2-3B-Instruct": "llama-3.2-3b",
    "mistralai/Mistral-7B-v0.1": "mistral-7b",
    "mistralai/Mistral-7B-Instruct-v0.3": "mistral-7b-v0.3",
    "mistralai/Mistral-Nemo-Base-2407": "mistral-nemo",
    "mistralai/Mistral-Nemo-Instruct-2407": "mistral-nemo",
    "microsoft/phi-1_5": "phi-1.5",
    "microsoft/Phi-3-mini-4k-instruct": "phi-3-mini",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "smollm2-135m",
    "HuggingFaceTB/SmolLM2-360M-Instruct": "smollm2-360m",
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": "smollm2-1.7b",
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": "tinyllama-1.1b",
    "TinyLlama/TinyLlama_v1.1": "tinyllama-1.1b",
}
_IDS = {
    **{f"{owner}/{n}".lower(): n for owner, names in _OWNERS.items() for n in names.split()},
    **{hub_id.lower(): name for hub_id, name in _OTHER_IDS.items()},
}


def known_names() -> tuple[str, ...]:
    """Return the names that `known_config` takes, sorted."""
    return tuple(sorted(KNOWN))


def is_known(name: str) -> bool:
    """Return whether `known_config` takes this name."""
    return _canonical(name) in KNOWN


def known_config(name: str) -> Config:
    """Return what config.json says of a well-known model, by its name or its Hugging Face id.

    The case does not matter.
    """
    try:
        return KNOWN[_canonical(name)]
    except KeyError:
        from lmhead.models.resolve import suggestion

        hint = suggestion(name, [*KNOWN, *_ALIASES]) or f"known are {', '.join(known_names())}"
        raise ModelNotFound(
            f"{name!r} is not a folder, a .gguf file or a known model; {hint}"
        ) from None


def _canonical(name: str) -> str:
    name = name.lower()
    return _IDS.get(name) or _ALIASES.get(name, name)
