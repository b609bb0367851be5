"""Every parameter of a model and its shape, from the configuration alone.

A family is written down once, as the modules outside its layers and those inside one layer. What
Llama founded differs only in switches (biases, norms, fused projections), so it is one family.
Symbols: V rows of the vocabulary, d hidden size, f width of the feed-forward, q and k the widths of
all query heads and of all key heads.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lmhead.errors import BadCheckpoint, UnsupportedModel
from lmhead.files import limits
from lmhead.models.architecture import Shape, class_name, is_tied, model_type, short, text_config

_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "num_layers"),
    *("n_embd", "n_inner", "n_layer", "n_positions", "ffn_dim", "word_embed_proj_dim"),
)

Config = Mapping[str, Any]
Module = tuple[Shape, int]  # the weight's shape, and the bias's length (0 for none)
Modules = dict[str, Module]


@dataclass(frozen=True)
class Body:
    """A family's modules: `outside` by full name, `layer` by name below `prefix.<index>.`"""

    outside: Modules
    prefix: str
    count: int
    layer: Modules
    head: Module  # where it is not tied


def parameter_shapes(config: Config, where: str) -> dict[str, Shape]:
    """Return name -> shape of every parameter, a tied head's once; `where` is for errors."""
    text = text_config(config)
    family = _FAMILIES.get(model_type(text))
    if family is None or text is not config:
        known = ", ".join(sorted(_FAMILIES))
        raise UnsupportedModel(
            f"{where} has no weights here, and a {class_name(config)} cannot be counted from its "
            f"configuration (only {known} can); give a folder with the weights, or a .gguf file"
        )
    _check_sizes(config, where)
    try:
        body = family(config)
    except KeyError as error:
        raise UnsupportedModel(
            f"the configuration of {where} lacks {error}, without which a "
            f"{class_name(config)} cannot be counted; give a folder with the weights"
        ) from error
    except (TypeError, ValueError, ArithmeticError) as error:  # a text times a list, and the like
        raise _wrong(where, str(error)) from error
    _check_counts(body, where)
    modules = dict(body.outside)
    for i in range(body.count):
        modules |= {f"{body.prefix}.{i}.{name}": module for name, module in body.layer.items()}
    if not is_tied(config):
        modules["lm_head"] = body.head
    shapes: dict[str, Shape] = {}
    for name, (weight, bias) in modules.items():
        shapes[f"{name}.weight"] = weight
        if bias:
            shapes[f"{name}.bias"] = (bias,)
    return shapes


def _check_sizes(config: Config, where: str) -> None:
    """Refuse a size that is not a count before anything is multiplied by it: a list would grow."""
    for key in _SIZES:
        value = config.get(key)
        if value is not None and (type(value) is not int or not 0 <= value <= limits.WIDTH):
            raise _wrong(where, f"{key} is {short(value)}")


def _check_counts(body: Body, where: str) -> None:
    """Refuse what no model has: layers or widths that are no counts, or beyond all bounds."""
    if type(body.count) is not int or not 0 <= body.count <= limits.LAYERS:
        raise _wrong(where, f"{short(body.count)} layers, expected up to {limits.LAYERS:,}")
    for name, (shape, bias) in {**body.outside, **body.layer, "head": body.head}.items():
        for size in (*shape, bias):
            if type(size) is not int or not 0 <= size <= limits.WIDTH:
                raise _wrong(where, f"{name} would have a width of {short(size)}")


def _wrong(where: str, why: str) -> BadCheckpoint:
    return BadCheckpoint(
        f"the configuration of {where} gives no shapes ({why}); expected counts; fetch it again"
    )


def _linear(out: int, into: int, bias: bool = True) -> Module:
    return (out, into), out if bias else 0


def _transposed(into: int, out: int) -> Module:
    return (into, out), out


def _layer_norm(d: int) -> Module:
    return (d,), d


def _plain(*shape: int) -> Module:
    return shape, 0


def _gpt2(c: Config) -> Body:
    V, d = c["vocab_size"], c["n_embd"]
    f = c.get("n_inner") or 4 * d
    return Body(
        outside={
            "transformer.wte": _plain(V, d),
            "transformer.wpe": _plain(c["n_positions"], d),
            "transformer.ln_f": _layer_norm(d),
        },
        prefix="transformer.h",
        count=c["n_layer"],
        layer={
            "ln_1": _layer_norm(d),
            "attn.c_attn": _transposed(d, 3 * d),
            "attn.c_proj": _transposed(d, d),
            "ln_2": _layer_norm(d),
            "mlp.c_fc": _transposed(d, f),
            "mlp.c_proj": _transposed(f, d),
        },
        head=_plain(V, d),
    )


def _gpt_neo(c: Config) -> Body:
    V, d = c["vocab_size"], c["hidden_size"]
    f = c.get("intermediate_size") or 4 * d
    return Body(
        outside={
            "transformer.wte": _plain(V, d),
            "transformer.wpe": _plain(c["max_position_embeddings"], d),
            "transformer.ln_f": _layer_norm(d),
        },
        prefix="transformer.h",
        count=c["num_layers"],
        layer={
            "ln_1": _layer_norm(d),
            "attn.attention.q_proj": _plain(d, d),
            "attn.attention.k_proj": _plain(d, d),
            "attn.attention.v_proj": _plain(d, d),
            "attn.attention.out_proj": _linear(d, d),
            "ln_2": _layer_norm(d),
            "mlp.c_fc": _linear(f, d),
            "mlp.c_proj": _linear(d, f),
        },
        head=_plain(V, d),
    )


def _gptj(c: Config) -> Body:
    V, d = c["vocab_size"], c["n_embd"]
    f = c.get("n_inner") or 4 * d
    return Body(
        outside={"transformer.wte": _plain(V, d), "transformer.ln_f": _layer_norm(d)},
        prefix="transformer.h",
        count=c["n_layer"],
        layer={
            "ln_1": _layer_norm(d),
            "attn.q_proj": _plain(d, d),
            "attn.k_proj": _plain(d, d),
            "attn.v_proj": _plain(d, d),
            "attn.out_proj": _plain(d, d),
            "mlp.fc_in": _linear(f, d),
            "mlp.fc_out": _linear(d, f),
        },
        head=_linear(V, d),
    )


def _gpt_neox(c: Config) -> Body:
    V, d, f = c["vocab_size"], c["hidden_size"], c["intermediate_size"]
    bias = c.get("attention_bias", True)
    return Body(
        outside={"gpt_neox.embed_in": _plain(V, d), "gpt_neox.final_layer_norm": _layer_norm(d)},
        prefix="gpt_neox.layers",
        count=c["num_hidden_layers"],
        layer={
            "input_layernorm": _layer_norm(d),
            "post_attention_layernorm": _layer_norm(d),
            "attention.query_key_value": _linear(3 * d, d, bias),
            "attention.dense": _linear(d, d, bias),
            "mlp.dense_h_to_4h": _linear(f, d),
            "mlp.dense_4h_to_h": _linear(d, f),
        },
        head=_plain(V, d),
    )


def _bloom(c: Config) -> Body:
    V, d = c["vocab_size"], c["hidden_size"]
    return Body(
        outside={
            "transformer.word_embeddings": _plain(V, d),
            "transformer.word_embeddings_layernorm": _layer_norm(d),
            "transformer.ln_f": _layer_norm(d),
        },
        prefix="transformer.h",
        count=c["n_layer"],
        layer={
            "input_layernorm": _layer_norm(d),
            "self_attention.query_key_value": _linear(3 * d, d),
            "self_attention.dense": _linear(d, d),
            "post_attention_layernorm": _layer_norm(d),
            "mlp.dense_h_to_4h": _linear(4 * d, d),
            "mlp.dense_4h_to_h": _linear(d, 4 * d),
        },
        head=_plain(V, d),
    )


def _opt(c: Config) -> Body:
    V, d, f = c["vocab_size"], c["hidden_size"], c["ffn_dim"]
    e = c.get("word_embed_proj_dim") or d  # the width of embedding and head
    bias = c.get("enable_bias", True)
    norm = _layer_norm(d) if c.get("layer_norm_elementwise_affine", True) else None
    outside = {
        "model.decoder.embed_tokens": _plain(V, e),
        "model.decoder.embed_positions": _plain(c["max_position_embeddings"] + 2, d),
    }
    if e != d:
        outside |= {
            "model.decoder.project_in": _plain(d, e),
            "model.decoder.project_out": _plain(e, d),
        }
    layer = {
        "self_attn.q_proj": _linear(d, d, bias),
        "self_attn.k_proj": _linear(d, d, bias),
        "self_attn.v_proj": _linear(d, d, bias),
        "self_attn.out_proj": _linear(d, d, bias),
        "fc1": _linear(f, d, bias),
        "fc2": _linear(d, f, bias),
    }
    if norm:
        layer |= {"self_attn_layer_norm": norm, "final_layer_norm": norm}
        if c.get("do_layer_norm_before", True) and not c.get("_remove_final_layer_norm"):
            outside["model.decoder.final_layer_norm"] = norm
    return Body(outside, "model.decoder.layers", c["num_hidden_layers"], layer, head=_plain(V, e))


def _phi(c: Config) -> Body:
    V, d, f = c["vocab_size"], c["hidden_size"], c["intermediate_size"]
    k = d // c["num_attention_heads"] * (c.get("num_key_value_heads") or c["num_attention_heads"])
    layer = {
        "input_layernorm": _layer_norm(d),
        "self_attn.q_proj": _linear(d, d),
        "self_attn.k_proj": _linear(k, d),
        "self_attn.v_proj": _linear(k, d),
        "self_attn.dense": _linear(d, d),
        "mlp.fc1": _linear(f, d),
        "mlp.fc2": _linear(d, f),
    }
    if c.get("qk_layernorm"):
        head_norm = _layer_norm(d // c["num_attention_heads"])
        layer |= {"self_attn.q_layernorm": head_norm, "self_attn.k_layernorm": head_norm}
    return Body(
        outside={"model.embed_tokens": _plain(V, d), "model.final_layernorm": _layer_norm(d)},
        prefix="model.layers",
        count=c["num_hidden_layers"],
        layer=layer,
        head=_linear(V, d),
    )


@dataclass(frozen=True)
class _Llama:
    """The switches by which Llama's descendants differ."""

    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    qk_norm: bool = False  # one over each head's query and key
    qkv_bias: bool = False
    fused: bool = False  # one matrix for q, k and v, one for gate and up
    free_width: bool = False  # of a head: not d / heads, so the configuration must state it

    def __call__(self, c: Config) -> Body:
        V, d, f = c["vocab_size"], c["hidden_size"], c["intermediate_size"]
        heads = c["num_attention_heads"]
        # Left out, it means "as many" only in the oldest family; elsewhere defaults differ.
        kv_heads = (c.get(_KV) if c["model_type"] == "llama" else c[_KV]) or heads
        width = c["head_dim"] if self.free_width else c.get("head_dim") or d // heads
        q, k = heads * width, kv_heads * width
        bias, mlp_bias = bool(c.get("attention_bias")), bool(c.get("mlp_bias"))
        layer = {name: _plain(d) for name in self.norms}
        if self.fused:
            layer |= {
                "self_attn.qkv_proj": _plain(q + 2 * k, d),
                "self_attn.o_proj": _plain(d, q),
                "mlp.gate_up_proj": _plain(2 * f, d),
                "mlp.down_proj": _plain(d, f),
            }
        else:
            layer |= {
                "self_attn.q_proj": _linear(q, d, bias or self.qkv_bias),
                "self_attn.k_proj": _linear(k, d, bias or self.qkv_bias),
                "self_attn.v_proj": _linear(k, d, bias or self.qkv_bias),
                "self_attn.o_proj": _linear(d, q, bias),
                "mlp.gate_proj": _linear(f, d, mlp_bias),
                "mlp.up_proj": _linear(f, d, mlp_bias),
                "mlp.down_proj": _linear(d, f, mlp_bias),
            }
        if self.qk_norm:
            layer |= {"self_attn.q_norm": _plain(width), "self_attn.k_norm": _plain(width)}
        elif c.get("use_qk_norm"):
            layer["self_attn.q_norm"] = _plain(heads, width)
            layer["self_attn.k_norm"] = _plain(kv_heads, width)
        return Body(
            outside={"model.embed_tokens": _plain(V, d), "model.norm": _plain(d)},
            prefix="model.layers",
            count=c["num_hidden_layers"],
            layer=layer,
            head=_plain(V, d),
        )


_KV = "num_key_value_heads"
_FOUR_NORMS = (*_Llama.norms, "pre_feedforward_layernorm", "post_feedforward_layernorm")

_FAMILIES: Mapping[str, Callable[[Config], Body]] = {
    "bloom": _bloom,
    "cohere": _Llama(norms=("input_layernorm",)),
    "gemma": _Llama(free_width=True),
    "gemma2": _Llama(norms=_FOUR_NORMS, free_width=True),
    "gemma3_text": _Llama(norms=_FOUR_NORMS, qk_norm=True, free_width=True),
    "gpt2": _gpt2,
    "gpt_neo": _gpt_neo,
    "gpt_neox": _gpt_neox,
    "gptj": _gptj,
    "granite": _Llama(),
    "llama": _Llama(),
    "mistral": _Llama(),
    "opt": _opt,
    "phi": _phi,
    "phi3": _Llama(fused=True),
    "qwen2": _Llama(qkv_bias=True),
    "qwen3": _Llama(qk_norm=True, free_width=True),
    "smollm3": _Llama(),
}
