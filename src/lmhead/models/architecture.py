"""Where the head is in a checkpoint, told by configuration, names and shapes alone.

W is a matrix `[V, d]` outside the layers, and so is the embedding; what they are called differs
from family to family, and a tied checkpoint holds only one of them. So look for matrices with V
rows, and let the name say only which of the two each one is.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmhead.errors import BadCheckpoint, UnsupportedModel
from lmhead.files import limits

Shape = tuple[int, ...]

# Model types that tie the head to the embedding when config.json does not say.
TIED_BY_DEFAULT = frozenset(
    """
    bart bert bert-generation big_bird bigbird_pegasus biogpt blenderbot blenderbot-small bloom
    camembert cohere cohere2 cohere2_moe cohere_compass_text cpmant ctrl data2vec-text electra ernie
    ernie4_5 ernie4_5_moe falcon falcon_mamba gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text
    gemma4 gemma4_text gemma4_unified gemma4_unified_assistant gemma4_unified_text got_ocr2 gpt-sw3
    gpt2 gpt_bigcode gpt_neo gpt_neox_japanese granite_swa jetmoe lfm2 lfm2_moe mamba marian mbart
    megatron-bert minicpm3 modernbert-decoder moss_transcribe_diarize mpt mvp openai-gpt opt pegasus
    plbart prophetnet recurrent_gemma roberta roberta-prelayernorm roc_bert roformer smollm3
    starcoder2 trocr vaultgemma whisper xglm xlm xlm-roberta xlm-roberta-xl xlnet xmod youtu zamba
    zamba2 zaya
    """.split()  # noqa: SIM905
)

_NESTED = ("text_config", "language_config", "llm_config", "thinker_config")
_CAUSAL = re.compile(r"CausalLM|LMHead|ConditionalGeneration|BertGenerationDecoder")
_MASKED = re.compile(r"MaskedLM|ForPreTraining")

_IN_A_LAYER = re.compile(r"(^|\.)\d+\.")
_HEAD = re.compile(
    r"(^|\.)(lm_head|\w+_lm_head|embed_out|unembed\w*|output|output_layer|output_projection"
    r"|head|lm_loss|proj_out|decoder|pred_layer\.proj)$"
)
_EMBEDDING = re.compile(r"emb|wte|(^|\.)(shared|w)$")
_NO_TOKENS = re.compile(r"pos|wpe|token_type|per_layer")  # embeddings of something else

_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


@dataclass(frozen=True)
class HeadTensors:
    """Which stored tensors make the head and the embedding."""

    weight: str  # W, [V, d]; of a tied pair the one that is stored
    bias: str | None  # [V]
    embedding: str  # [V, d]; the same name as `weight` where only one is stored
    tied: bool

    @property
    def stored_twice(self) -> bool:
        """Whether the file holds one and the same matrix under two names."""
        return self.tied and self.weight != self.embedding


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a configuration that describes the language model."""
    while True:
        nested = (config.get(key) for key in _NESTED)
        inner = next((part for part in nested if isinstance(part, Mapping)), None)
        if inner is None:
            return config
        config = inner


def model_type(config: Mapping[str, Any]) -> str:
    """Return the model type, "unknown" where the configuration gives none."""
    kind = config.get("model_type")
    return kind if isinstance(kind, str) else "unknown"


def class_name(config: Mapping[str, Any]) -> str:
    """Return the model's class, or its model type where the configuration names no class."""
    names = config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    return model_type(config)


def vocab_size(config: Mapping[str, Any]) -> int | None:
    """Return the number of rows that the configuration gives the head, None if it does not say."""
    V = text_config(config).get("vocab_size", config.get("vocab_size"))
    if V is None:
        return None
    if type(V) is not int or not 1 <= V <= limits.VOCABULARY:
        raise BadCheckpoint(
            f"the configuration says vocab_size {short(V)}; expected a count from 1 to "
            f"{limits.VOCABULARY:,}"
        )
    return V


def short(value: Any) -> str:
    """Show a value of a configuration, however long or deep it is."""
    if isinstance(value, str):
        return repr(value[:40])
    if isinstance(value, bool | float) or value is None:
        return repr(value)
    if isinstance(value, int):
        return f"{value:,}" if abs(value) < 10**18 else "a number beyond all bounds"
    return f"a {type(value).__name__}"


def _number(key: str, value: Any) -> float | None:
    """Check a number of the configuration; None where there is none, or a switch."""
    if value is None or isinstance(value, bool):
        return None
    if not isinstance(value, int | float) or not abs(value) < 1e30:  # nor NaN
        raise BadCheckpoint(f"the configuration says {key} {short(value)}; expected a number")
    return float(value)


def says_tied(config: Mapping[str, Any]) -> bool | None:
    """Return what the configuration itself says about tying, None if it does not."""
    for part in (config, text_config(config)):
        if isinstance(value := part.get("tie_word_embeddings"), bool):
            return value
    return None


def is_tied(config: Mapping[str, Any]) -> bool:
    """Return whether the configuration ties the head, by its own word or its type's default."""
    said = says_tied(config)
    if said is not None:
        return said
    return any(model_type(part) in TIED_BY_DEFAULT for part in (config, text_config(config)))


def softcap(config: Mapping[str, Any]) -> float | None:
    """Return the c of `c * tanh(z / c)`, None where the logits are not capped."""
    text = text_config(config)
    values = (_number(key, text.get(key)) for key in _SOFTCAPS)
    return next((value for value in values if value), None)


def scale(config: Mapping[str, Any]) -> float | None:
    """Return the factor on the logits, None where it is 1."""
    text = text_config(config)
    factor = 1.0
    for key in ("logit_scale", "lm_head_multiplier"):
        if (value := _number(key, text.get(key))) is not None:
            factor *= value
    if value := _number("logits_scaling", text.get("logits_scaling")):
        # Granite divides by it; HyperCLOVA X, with the same name, multiplies.
        factor *= value if model_type(text) == "hyperclovax" else 1 / value
    return None if factor == 1.0 else factor


def require_causal(config: Mapping[str, Any], has_head: bool, where: str) -> None:
    """Refuse a model that predicts no next token: an encoder, a classifier, a bare body."""
    name = class_name(config)
    if not config.get("architectures") or _CAUSAL.search(name):
        return
    if _MASKED.search(name) or not has_head:
        raise UnsupportedModel(
            f"{where} is a {name}, which has no head for the next token; "
            "expected a causal language model (a class such as LlamaForCausalLM)"
        )


def find_head(shapes: Mapping[str, Shape], config: Mapping[str, Any], where: str) -> HeadTensors:
    """Find head and embedding among the stored tensors, given as name -> shape.

    `where` names the checkpoint in errors.
    """
    V = vocab_size(config)
    outside = {name: shape for name, shape in shapes.items() if not _IN_A_LAYER.search(name)}
    matrices = {name: shape for name, shape in outside.items() if len(shape) == 2}

    heads = [n for n, s in matrices.items() if _HEAD.search(_module(n)) and V in (None, s[0])]
    require_causal(config, bool(heads), where)
    named = next((n for n in matrices if not heads and _module(n).endswith("lm_head")), None)
    if named:
        raise BadCheckpoint(
            f"the configuration of {where} says vocab_size {V}, but {named} has "
            f"{matrices[named][0]:,} rows; correct the one that is wrong"
        )
    embeddings = [
        name
        for name, (rows, _) in matrices.items()
        if name not in heads
        and not _NO_TOKENS.search(name)
        # a few models embed more ids than they can predict
        and (rows == V or (_EMBEDDING.search(_module(name)) and rows >= (V or 0)))
    ]
    head = min(heads, key=lambda n: ("lm_head" not in n, n.count(".")), default=None)
    width = matrices[head][1] if head else None
    embedding = min(
        embeddings,
        key=lambda n: (matrices[n][1] != width, matrices[n][0] != V, n.count(".")),
        default=None,
    )
    stored = head or embedding
    if stored is None:
        rows_wanted = f"{V:,} rows" if isinstance(V, int) else "one row per token"
        raise UnsupportedModel(
            f"{where} ({class_name(config)}) holds no matrix of {rows_wanted} outside its layers; "
            "expected a head or an embedding"
        )
    tied = True
    if head and embedding:
        tied = is_tied(config) and matrices[head] == matrices[embedding]
    rows = matrices[stored][0]
    if not 1 <= rows <= limits.VOCABULARY or matrices[stored][1] < 1:
        raise BadCheckpoint(
            f"{stored!r} of {where} has the shape {list(matrices[stored])}; expected up to "
            f"{limits.VOCABULARY:,} rows of one number or more: fetch the model again"
        )
    biases = (n for n, s in outside.items() if s == (rows,) and n.endswith("bias"))
    return HeadTensors(stored, next(biases, None), embedding or stored, tied)


def _module(name: str) -> str:
    return name.removesuffix(".weight")
