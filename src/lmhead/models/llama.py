"""Llama from its files alone: what a proof runs where transformers need not be imported.

"LLaMA: Open and Efficient Foundation Language Models" (Touvron et al., 2023), with shared keys
(Ainslie et al., 2023). Weights are the tensors of the files, mapped, under the names that they have
there. Only the plain form is known; `Llama.of` gives None for a folder that says anything else, and
for everything but a proof `lmhead.load` runs the model by transformers.

Symbols: V vocabulary, d width, H heads that ask, K heads that answer, n width of a head, B
sequences, T tokens read now, S tokens that can be attended to, h hidden state `[B, T, d]`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmhead.files.checkpoint import Checkpoint
from lmhead.models.gpt2 import KVCache, mask_of

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_BLOCKS = "model.layers."
_NORMS = ("input_layernorm", "post_attention_layernorm")

# Keys of a config.json that this file has only one way for, and those that decide nothing here.
_FIXED: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "rope_scaling": None,
    "pretraining_tp": 1,
    "is_llama_config": True,
    "rope_interleaved": False,
}
_NO_MATTER = {
    "vocab_size",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "transformers.js_config",
    "_name_or_path",
    "use_cache",
    "initializer_range",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
}


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a Llama; the names are those of a Hugging Face config.json."""

    hidden_size: int  # d
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int  # H
    num_key_value_heads: int  # K
    head_dim: int  # n
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "LlamaConfig | None":
        """Read a config.json; None where it says anything that is not known here."""
        own = set(cls.__dataclass_fields__)
        if not set(config) <= own | set(_FIXED) | _NO_MATTER | {"rope_parameters"}:
            return None
        if any(config.get(key, usual) != usual for key, usual in _FIXED.items()):
            return None
        if "model_type" not in config:
            return None
        found = {key: config[key] for key in own if key in config}
        if (rope := config.get("rope_parameters")) is not None:
            if not isinstance(rope, Mapping) or set(rope) != {"rope_type", "rope_theta"}:
                return None
            if rope["rope_type"] != "default" or "rope_theta" in config:
                return None
            found["rope_theta"] = rope["rope_theta"]
        found.setdefault("num_key_value_heads", config.get("num_attention_heads"))
        if found.get("head_dim") is None and (heads := config.get("num_attention_heads")):
            found["head_dim"] = config.get("hidden_size", 0) // heads
        if set(found) != own or not all(_is_number(value) for value in found.values()):
            return None
        made = cls(**found)
        good = made.num_key_value_heads > 0 and made.head_dim > 0 and made.head_dim % 2 == 0
        return made if good and made.num_attention_heads % made.num_key_value_heads == 0 else None

    def get_text_config(self, decoder: bool = True) -> "LlamaConfig":
        """Give itself: what transformers' configurations do for a model of text alone."""
        return self

    def shapes(self, rows: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor of a checkpoint whose vocabulary has `rows` rows."""
        d, inner = self.hidden_size, self.intermediate_size
        asks, answers = (
            heads * self.head_dim for heads in (self.num_attention_heads, self.num_key_value_heads)
        )
        block = {
            "self_attn.q_proj": (asks, d),
            "self_attn.k_proj": (answers, d),
            "self_attn.v_proj": (answers, d),
            "self_attn.o_proj": (d, asks),
            "mlp.gate_proj": (inner, d),
            "mlp.up_proj": (inner, d),
            "mlp.down_proj": (d, inner),
            **dict.fromkeys(_NORMS, (d,)),
        }
        whole = {"model.embed_tokens.weight": (rows, d), "model.norm.weight": (d,)}
        if not self.tie_word_embeddings:
            whole["lm_head.weight"] = (rows, d)
        for at in range(self.num_hidden_layers):
            whole |= {f"model.layers.{at}.{name}.weight": shape for name, shape in block.items()}
        return whole


class LlamaOutput(NamedTuple):
    """What a forward pass gives."""

    logits: Tensor  # [B, T, V]
    past_key_values: KVCache | None


class RMSNorm(nn.Module):
    """Divides by the root of the mean square, in float32."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight, requires_grad=False), eps

    def forward(self, h: Tensor) -> Tensor:
        """Map `[..., d]` to `[..., d]`."""
        x = h.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(h.dtype)


class _Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Draw nothing: on the meta device that imports torch's compiler, which takes seconds."""


class _Head(nn.Linear):
    def reset_parameters(self) -> None:
        """Draw nothing, as above."""


class Llama(nn.Module):
    """A Llama with its head, for reading and answering alone."""

    def __init__(
        self, config: LlamaConfig, tensors: Mapping[str, Tensor], generation: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self.config = config
        self.generation_config = SimpleNamespace(eos_token_id=generation.get("eos_token_id"))
        embedding = tensors["model.embed_tokens.weight"]
        V, d = embedding.shape
        self.embed_tokens = _Embedding(V, d, device="meta")
        self.embed_tokens.weight = nn.Parameter(embedding, requires_grad=False)
        self.norm = RMSNorm(tensors["model.norm.weight"], config.rms_norm_eps)
        self.lm_head = _Head(d, V, bias=False, device="meta")
        head = tensors.get("lm_head.weight", embedding)
        self.lm_head.weight = nn.Parameter(head, requires_grad=False)
        n = config.head_dim
        powers = torch.arange(0, n, 2, dtype=torch.float32) / n
        self.frequencies = 1.0 / (config.rope_theta**powers)  # [n / 2]
        self.blocks = [
            {
                name.removeprefix(start).removesuffix(".weight"): tensor
                for name, tensor in tensors.items()
                if name.startswith(start)
            }
            for start in (f"model.layers.{at}." for at in range(config.num_hidden_layers))
        ]
        self.norms = [
            [RMSNorm(b[name], config.rms_norm_eps) for name in _NORMS] for b in self.blocks
        ]

    @classmethod
    def of(cls, ends: Checkpoint, blocks: Checkpoint | None = None) -> "Llama | None":
        """Make the model of a folder; None where it says anything that is not known here.

        `blocks`: a folder to take the blocks from, where they are known to be the same.
        """
        found = known(ends, blocks)
        if found is None:
            return None
        config, parts = found
        tensors = {n: t for folder, names in parts for n, t in folder.read_all(names).items()}
        return cls(config, tensors, ends.generation_config or ends.config).eval()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: KVCache | None = None,
        use_cache: bool = False,
    ) -> LlamaOutput:
        """Score every token after each of the ids `[B, T]`, padded on the left by the mask's 0."""
        T = input_ids.shape[1]
        cache = KVCache() if past_key_values is None and use_cache else past_key_values
        past = cache.get_seq_length() if cache is not None else 0
        if position_ids is None:
            position_ids = torch.arange(past, past + T)[None]
        angles = position_ids[..., None].float() * self.frequencies  # [B or 1, T, n / 2]
        angles = torch.cat([angles, angles], -1).unsqueeze(1)  # [B or 1, 1, T, n]
        h = self.embed_tokens(input_ids)
        turn = angles.cos().to(h.dtype), angles.sin().to(h.dtype)
        mask = mask_of(attention_mask, past, T, h.device)
        for at in range(len(self.blocks)):
            h = self._block(at, h, turn, mask, cache)
        return LlamaOutput(self.lm_head(self.norm(h)), cache)

    def _block(
        self,
        at: int,
        h: Tensor,
        turn: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: KVCache | None,
    ) -> Tensor:
        W, (before, between), (B, T, _) = self.blocks[at], self.norms[at], h.shape
        x, n = before(h), self.config.head_dim
        q, k, v = (
            F.linear(x, W[f"self_attn.{name}_proj"]).view(B, T, -1, n).transpose(1, 2)
            for name in "qkv"
        )  # [B, H or K, T, n]
        q, k = _turned(q, turn), _turned(k, turn)
        if cache is not None:
            k, v = cache.extend(at, k, v)  # [B, K, S, n]
        mixed = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None and T > 1, enable_gqa=True
        )  # [B, H, T, n]
        h = h + F.linear(mixed.transpose(1, 2).reshape(B, T, -1), W["self_attn.o_proj"])
        x = between(h)
        wide = F.silu(F.linear(x, W["mlp.gate_proj"])) * F.linear(x, W["mlp.up_proj"])
        return h + F.linear(wide, W["mlp.down_proj"])

    def get_input_embeddings(self) -> nn.Embedding:
        """Give the matrix that reads tokens, `[V, d]`."""
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Linear:
        """Give the head's projection, `[V, d]`."""
        return self.lm_head


def known(
    ends: Checkpoint, blocks: Checkpoint | None = None
) -> tuple[LlamaConfig, list[tuple[Checkpoint, list[str]]]] | None:
    """Return the shape of a folder's model and where its tensors lie, None where it is no Llama."""
    config = LlamaConfig.of(ends.config)
    if config is None or (blocks is not None and LlamaConfig.of(blocks.config) != config):
        return None
    parts = [(ends, list(ends.tensors))]
    if blocks is not None:
        own, other = (
            [name for name in folder.tensors if name.startswith(_BLOCKS) == inside]
            for folder, inside in ((ends, False), (blocks, True))
        )
        parts = [(ends, own), (blocks, other)]
    headers = {name: folder.tensors[name] for folder, names in parts for name in names}
    dtypes = {header.dtype for header in headers.values()}
    said = ends.config.get("dtype") or ends.config.get("torch_dtype")
    rows = ends.config.get("vocab_size")
    if type(rows) is not int or len(dtypes) != 1 or _DTYPES.get(dtypes.pop()) != said:
        return None
    shapes = {name: header.shape for name, header in headers.items()}
    return (config, parts) if shapes == config.shapes(rows) else None


def _turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Turn queries or keys `[B, H, T, n]` by their places: rotary embedding (Su et al., 2021)."""
    cos, sin = turn
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], -1) * sin


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not value < 0
