"""What each GGUF architecture is in Hugging Face's terms: its config.json and its tensors' names.

An architecture is a table of tensors (GGUF name, Hugging Face name, shape) and a function that
writes the configuration. A file must hold exactly the tensors of its table, in those shapes; what
would be dropped or guessed is refused instead. Letters of the shapes: V rows of the vocabulary,
d hidden size, q and k widths of the queries and of the keys and values, n width of one attention
head, f feed-forward width, c context length, t three times d.

llama.cpp stores some tensors otherwise than Hugging Face does; a `Move` undoes that:
the rows of Llama's queries and keys are interleaved within each head, Gemma's norms have 1 added,
and GPT-2's matrices, which multiply from the right in Hugging Face, are transposed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import pi
from typing import TYPE_CHECKING, Any

from lmhead.errors import BadCheckpoint, UnsupportedModel
from lmhead.files.gguf import GGUFArray, GGUFFile
from lmhead.models.gguf_header import GGUFHeader

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Weights = npt.NDArray[np.float32]

Table = Mapping[str, tuple[str, str]]  # GGUF name -> (Hugging Face name, shape in letters)


@dataclass(frozen=True)
class Move:
    """One tensor's way from the GGUF file to the Hugging Face folder."""

    source: str
    target: str
    shape: tuple[int, ...]  # at the target
    change: "Callable[[Weights], Weights] | None"  # None: as it is stored


@dataclass(frozen=True)
class Plan:
    """All that has to be written: the configuration and every tensor."""

    config: dict[str, Any]
    moves: list[Move]
    context: int  # the longest text that the model takes, in tokens


def plan_model(file: GGUFFile) -> Plan:
    """Say how the file's model looks as a Hugging Face folder, or why it cannot be one."""
    header = GGUFHeader(file)
    architecture = _ARCHITECTURES.get(header.architecture)
    if architecture is None:
        raise UnsupportedModel(
            f"{file.path} has the architecture {header.architecture!r}; expected one of "
            f"{', '.join(_ARCHITECTURES)}: take the original safetensors folder, or load the file "
            "with transformers' from_pretrained(folder, gguf_file=...)"
        )
    for key in _REFUSED:
        if header.get(key):
            raise header.unsupported(f"{key} = {header.get(key)!r}")

    sizes = header.sizes()
    names = _complete_table(header, architecture)
    moves = [
        Move(source, target, *_undo(header, architecture, source, letters, sizes))
        for source, (target, letters) in names.items()
    ]
    config = {
        "architectures": [architecture.model_class],
        "model_type": architecture.model_type,
        "vocab_size": sizes["V"],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": "float32",
        "transformers_version": "5.0.0",  # whose spelling of the rotary embedding this is
    }
    return Plan(config | architecture.config(header, sizes), moves, sizes["c"])


@dataclass(frozen=True)
class _Architecture:
    model_class: str
    model_type: str
    table: Table  # `blk.*.` stands for every layer
    config: "Callable[[GGUFHeader, Mapping[str, int]], dict[str, Any]]"
    interleaved: tuple[str, ...] = ()  # tensors whose rows are interleaved within each head
    transposed: tuple[str, ...] = ()
    norm_offset: int = 0


def _complete_table(header: GGUFHeader, architecture: _Architecture) -> dict[str, tuple[str, str]]:
    """Spell the table out for every layer, and check that the file holds just these tensors."""
    tensors = header.file.tensors
    layers = header.count("block_count")
    names: dict[str, tuple[str, str]] = {}
    for source, (target, letters) in architecture.table.items():
        # Stops at the first layer that is missing, however many a damaged header claims.
        for layer in range(layers if "*" in source else 1):
            name = source.replace("*", str(layer))
            if name in tensors:
                names[name] = (target.replace("*", str(layer)), letters)
            elif name != "output.weight":  # a tied head is the embedding
                raise BadCheckpoint(
                    f"{header.file.path} lacks the tensor {name}; expected all of its "
                    f"{layers} layers: fetch it again"
                )
    extra = [name for name in tensors if name not in names and name != _ROPE_FACTORS]
    if extra:
        raise header.unsupported(f"the tensor {extra[0]!r}")
    return names


def _undo(
    header: GGUFHeader,
    architecture: _Architecture,
    source: str,
    letters: str,
    sizes: Mapping[str, int],
) -> "tuple[tuple[int, ...], Callable[[Weights], Weights] | None]":
    """Return a tensor's Hugging Face shape, and what brings it there from the stored one."""
    shape = tuple(sizes[letter] for letter in letters)
    stored = header.file.tensors[source].shape
    part = source.rsplit(".", 2)[-2]
    transposed = part in architecture.transposed and len(shape) == 2
    if stored != (shape[::-1] if transposed else shape):
        raise BadCheckpoint(
            f"{header.file.path}: the tensor {source} has the shape {stored}, expected "
            f"{shape[::-1] if transposed else shape}; fetch it again"
        )
    if transposed:
        return shape, lambda weights: weights.T
    if part in architecture.interleaved:
        head = sizes["n"]
        return shape, lambda weights: _split_halves(weights, head)
    if architecture.norm_offset and part.endswith("norm"):
        return shape, lambda weights: weights - architecture.norm_offset
    return shape, None


def _split_halves(weights: "Weights", head: int) -> "Weights":
    """Order each head's rows as (first half, second half) of the rotated pairs again."""
    pairs = weights.reshape(-1, head // 2, 2, *weights.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weights.shape)


# ---- configurations


def _shared(header: GGUFHeader, sizes: Mapping[str, int]) -> dict[str, Any]:
    return {
        "hidden_size": sizes["d"],
        "intermediate_size": sizes["f"],
        "num_hidden_layers": header.count("block_count"),
        "num_attention_heads": sizes["q"] // sizes["n"],
        "num_key_value_heads": sizes["k"] // sizes["n"],
        "head_dim": sizes["n"],
        "max_position_embeddings": sizes["c"],
        "rms_norm_eps": header.real("attention.layer_norm_rms_epsilon"),
    }


def _rope(header: GGUFHeader, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Read the rotary embedding's base and its scaling for long contexts."""
    if header.get("rope.dimension_count") not in (None, sizes["n"]):
        raise header.unsupported("heads that are rotated in part")
    theta = header.real("rope.freq_base", 10000.0)
    scaling = header.get("rope.scaling.type")
    if _ROPE_FACTORS in header.file.tensors:
        return _llama3_rope(header, theta, sizes["n"])
    if scaling in (None, "none"):
        return {"rope_type": "default", "rope_theta": theta}
    if scaling == "linear":
        factor = header.real("rope.scaling.factor")
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    raise header.unsupported(f"the rope scaling {scaling!r}")


def _llama3_rope(header: GGUFHeader, theta: float, head: int) -> dict[str, Any]:
    """Recognise Llama 3's scaling by its factors, all that the file keeps of it."""
    import numpy as np

    stored = header.file.read(_ROPE_FACTORS)
    factor, low, high, original = float(stored.max()), 1.0, 4.0, 8192
    turns = original / (2 * pi * theta ** (np.arange(0, head, 2) / head))
    blend = np.clip((turns - low) / (high - low), 0, 1)
    if stored.shape != blend.shape or not np.allclose(
        stored, 1 / ((1 - blend) / factor + blend), rtol=1e-4
    ):
        raise header.unsupported("rope factors other than Llama 3's")
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _llama(header: GGUFHeader, sizes: Mapping[str, int]) -> dict[str, Any]:
    rope = _rope(header, sizes)
    return _shared(header, sizes) | {"hidden_act": "silu", "rope_parameters": rope}


def _gemma3(header: GGUFHeader, sizes: Mapping[str, int]) -> dict[str, Any]:
    shared = _shared(header, sizes)
    layers, heads = shared["num_hidden_layers"], shared["num_attention_heads"]
    window = header.get("attention.sliding_window")
    pattern = header.get("attention.sliding_window_pattern")
    if isinstance(pattern, GGUFArray):
        slides = [bool(value) for value in pattern]
    else:
        period = header.count("attention.sliding_window_pattern", 6)
        slides = [(layer + 1) % period != 0 for layer in range(layers)]
    if len(slides) != layers:
        raise header.unsupported(f"a sliding window pattern of {len(slides)} for {layers} layers")
    kinds = ["sliding_attention" if window and slide else "full_attention" for slide in slides]
    local = header.real("rope.freq_base_swa", 10000.0)
    return shared | {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": header.count("attention.sliding_window") if window else None,
        "layer_types": kinds,
        "rope_parameters": {
            "full_attention": _rope(header, sizes),
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
        # Not in the file: the 27B model, known by its 62 layers, scales by its own d / heads.
        "query_pre_attn_scalar": sizes["d"] // heads if layers == 62 else sizes["n"],
        "final_logit_softcapping": header.real("final_logit_softcapping", 0.0) or None,
    }


def _gpt2(header: GGUFHeader, sizes: Mapping[str, int]) -> dict[str, Any]:
    return {
        "n_embd": sizes["d"],
        "n_layer": header.count("block_count"),
        "n_head": header.count("attention.head_count"),
        "n_positions": sizes["c"],
        "n_inner": sizes["f"],
        "layer_norm_epsilon": header.real("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


# ---- tables

_ROPE_FACTORS = "rope_freqs.weight"
# Keys that change what the model computes, and that none of the configurations below expresses.
_REFUSED = (
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.scale",
    "attn_logit_softcapping",
    "embedding_scale",
    "expert_count",
    "logit_scale",
    "pooling_type",
    "residual_scale",
    "rope.scale_linear",
    "rope.scaling.attn_factor",
)

_ENDS: Table = {
    "token_embd.weight": ("model.embed_tokens.weight", "Vd"),
    "output_norm.weight": ("model.norm.weight", "d"),
    "output.weight": ("lm_head.weight", "Vd"),
}
_PROJECTIONS: Table = {
    "blk.*.attn_q.weight": ("model.layers.*.self_attn.q_proj.weight", "qd"),
    "blk.*.attn_k.weight": ("model.layers.*.self_attn.k_proj.weight", "kd"),
    "blk.*.attn_v.weight": ("model.layers.*.self_attn.v_proj.weight", "kd"),
    "blk.*.attn_output.weight": ("model.layers.*.self_attn.o_proj.weight", "dq"),
    "blk.*.ffn_gate.weight": ("model.layers.*.mlp.gate_proj.weight", "fd"),
    "blk.*.ffn_up.weight": ("model.layers.*.mlp.up_proj.weight", "fd"),
    "blk.*.ffn_down.weight": ("model.layers.*.mlp.down_proj.weight", "df"),
    "blk.*.attn_norm.weight": ("model.layers.*.input_layernorm.weight", "d"),
}
_HEAD_NORMS: Table = {
    "blk.*.attn_q_norm.weight": ("model.layers.*.self_attn.q_norm.weight", "n"),
    "blk.*.attn_k_norm.weight": ("model.layers.*.self_attn.k_norm.weight", "n"),
}
_LLAMA_TABLE: Table = {
    **_ENDS,
    **_PROJECTIONS,
    "blk.*.ffn_norm.weight": ("model.layers.*.post_attention_layernorm.weight", "d"),
}
_GEMMA3_TABLE: Table = {
    **_ENDS,
    **_PROJECTIONS,
    **_HEAD_NORMS,
    "blk.*.post_attention_norm.weight": ("model.layers.*.post_attention_layernorm.weight", "d"),
    "blk.*.ffn_norm.weight": ("model.layers.*.pre_feedforward_layernorm.weight", "d"),
    "blk.*.post_ffw_norm.weight": ("model.layers.*.post_feedforward_layernorm.weight", "d"),
}
_QWEN2_BIASES: Table = {
    "blk.*.attn_q.bias": ("model.layers.*.self_attn.q_proj.bias", "q"),
    "blk.*.attn_k.bias": ("model.layers.*.self_attn.k_proj.bias", "k"),
    "blk.*.attn_v.bias": ("model.layers.*.self_attn.v_proj.bias", "k"),
}
_GPT2_TABLE: Table = {
    "token_embd.weight": ("transformer.wte.weight", "Vd"),
    "position_embd.weight": ("transformer.wpe.weight", "cd"),
    "output_norm.weight": ("transformer.ln_f.weight", "d"),
    "output_norm.bias": ("transformer.ln_f.bias", "d"),
    "output.weight": ("lm_head.weight", "Vd"),
    "blk.*.attn_norm.weight": ("transformer.h.*.ln_1.weight", "d"),
    "blk.*.attn_norm.bias": ("transformer.h.*.ln_1.bias", "d"),
    "blk.*.attn_qkv.weight": ("transformer.h.*.attn.c_attn.weight", "dt"),
    "blk.*.attn_qkv.bias": ("transformer.h.*.attn.c_attn.bias", "t"),
    "blk.*.attn_output.weight": ("transformer.h.*.attn.c_proj.weight", "dd"),
    "blk.*.attn_output.bias": ("transformer.h.*.attn.c_proj.bias", "d"),
    "blk.*.ffn_norm.weight": ("transformer.h.*.ln_2.weight", "d"),
    "blk.*.ffn_norm.bias": ("transformer.h.*.ln_2.bias", "d"),
    "blk.*.ffn_up.weight": ("transformer.h.*.mlp.c_fc.weight", "df"),
    "blk.*.ffn_up.bias": ("transformer.h.*.mlp.c_fc.bias", "f"),
    "blk.*.ffn_down.weight": ("transformer.h.*.mlp.c_proj.weight", "fd"),
    "blk.*.ffn_down.bias": ("transformer.h.*.mlp.c_proj.bias", "d"),
}

# What an embedding is called in the folders that are made of GGUF files.
EMBEDDINGS = (_ENDS["token_embd.weight"][0], _GPT2_TABLE["token_embd.weight"][0])

_ARCHITECTURES: Mapping[str, _Architecture] = {
    "llama": _Architecture(
        "LlamaForCausalLM", "llama", _LLAMA_TABLE, _llama, interleaved=("attn_q", "attn_k")
    ),
    "gemma3": _Architecture(
        "Gemma3ForCausalLM", "gemma3_text", _GEMMA3_TABLE, _gemma3, norm_offset=1
    ),
    "gpt2": _Architecture(
        "GPT2LMHeadModel",
        "gpt2",
        _GPT2_TABLE,
        _gpt2,
        transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
    ),
    "qwen2": _Architecture("Qwen2ForCausalLM", "qwen2", {**_LLAMA_TABLE, **_QWEN2_BIASES}, _llama),
    "qwen3": _Architecture("Qwen3ForCausalLM", "qwen3", {**_LLAMA_TABLE, **_HEAD_NORMS}, _llama),
}
