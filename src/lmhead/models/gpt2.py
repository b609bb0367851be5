"""GPT-2, whole: from token ids to a score for every token of the vocabulary.

Read it from top to bottom: configuration, attention, MLP, block, body, head. The architecture is
that of "Language Models are Unsupervised Multitask Learners" (Radford et al., 2019); parameters
are named as in Hugging Face's checkpoints, so that the two read each other's files (gpt2_files.py).

Symbols, in the order in which they appear:

    V   vocabulary: how many tokens there are             50,257 in every GPT-2
    C   context: the longest sequence                      1,024
    d   width of the hidden state                            768 in the smallest
    L   blocks, one above the other                           12
    H   attention heads in each block                         12
    n   width of one attention head, d / H                    64
    B   sequences in the batch
    T   tokens of each sequence that are read now
    S   tokens that can be attended to: those in the cache, and the T of now
    h   hidden state, [B, T, d]
    q, k, v   query, key, value, [B, H, T, n]
    z   logits, [B, T, V]

The path of one token: its id picks a row of `wte` [V, d], its place a row of `wpe` [C, d]; their
sum is h. Each block adds to h what attention gathers from earlier tokens, then what the MLP makes
of it. The final norm `ln_f` and the head `lm_head` turn h into logits. The head is `wte` again:
one matrix reads tokens at the bottom and writes them at the top.
"""

import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmhead.errors import BadInput, UnsupportedModel
from lmhead.files.checkpoint import open_checkpoint
from lmhead.models.gpt2_files import read_tensors, write_files
from lmhead.models.resolve import resolve
from lmhead.progress import Progress, silent

_ACTIVATIONS = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "none"}


@dataclass(frozen=True)
class GPT2Config:
    """The shape of a GPT-2; the fields and defaults are those of a Hugging Face config.json."""

    vocab_size: int = 50_257  # V
    n_positions: int = 1024  # C
    n_embd: int = 768  # d
    n_layer: int = 12  # L
    n_head: int = 12  # H
    n_inner: int | None = None  # width inside the MLP; None: 4 d
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    embd_pdrop: float = 0.1  # dropout after the embeddings,
    attn_pdrop: float = 0.1  # of the attention weights,
    resid_pdrop: float = 0.1  # and of what each block adds
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 50_256
    eos_token_id: int | None = 50_256

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head:
            raise BadInput(
                f"n_embd is {self.n_embd} and n_head {self.n_head}; expected heads of equal width: "
                "choose an n_embd that n_head divides"
            )
        if self.activation_function not in _ACTIVATIONS:
            raise UnsupportedModel(
                f"activation_function is {self.activation_function!r}; "
                f"expected one of {', '.join(_ACTIVATIONS)}"
            )

    @classmethod
    def named(cls, name: str) -> "GPT2Config":
        """Give the configuration of one of the four published sizes."""
        sizes = {  # d, L, H
            "gpt2": (768, 12, 12),
            "gpt2-medium": (1024, 24, 16),
            "gpt2-large": (1280, 36, 20),
            "gpt2-xl": (1600, 48, 25),
        }
        if name not in sizes:
            raise BadInput(f"there is no GPT-2 named {name!r}; expected one of {', '.join(sizes)}")
        d, L, H = sizes[name]
        return replace(cls(), n_embd=d, n_layer=L, n_head=H)

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "GPT2Config":
        """Read the content of a config.json; refuse what would make it another model."""
        if config.get("model_type", "gpt2") != "gpt2":
            raise UnsupportedModel(
                f"the configuration is of a {config['model_type']!r}; expected a 'gpt2': "
                "use lmhead.load for other architectures"
            )
        for key, usual in _FIXED.items():
            if config.get(key, usual) != usual:
                raise UnsupportedModel(
                    f"the configuration sets {key} to {config[key]}; expected {usual}: "
                    "load this variant of GPT-2 with transformers"
                )
        return cls(**{f.name: config[f.name] for f in fields(cls) if f.name in config})

    @property
    def max_position_embeddings(self) -> int:
        """C, under the name that other architectures have for it."""
        return self.n_positions

    def get_text_config(self, decoder: bool = True) -> "GPT2Config":
        """Give itself: what transformers' configurations do for a model of text alone."""
        return self


# Options of a config.json that this file has only one way for.
_FIXED = {
    "add_cross_attention": False,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
}


class KVCache:
    """The keys and values of the tokens read so far, for each block [B, H, S, n]."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def get_seq_length(self) -> int:
        """How many tokens have been read."""
        return self.keys[0].shape[2] if self.keys else 0

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append [B, H, T, n] to one block's keys and values; return all of them."""
        if layer == len(self.keys):
            self.keys.append(k)
            self.values.append(v)
        else:
            self.keys[layer] = torch.cat([self.keys[layer], k], dim=2)
            self.values[layer] = torch.cat([self.values[layer], v], dim=2)
        return self.keys[layer], self.values[layer]

    def batch_select_indices(self, rows: Tensor) -> None:
        """Keep these sequences of the batch, in this order."""
        self.keys = [k.index_select(0, rows) for k in self.keys]
        self.values = [v.index_select(0, rows) for v in self.values]

    reorder_cache = batch_select_indices  # what beam search calls it


class Attention(nn.Module):
    """Causal self-attention: each token gathers from those before it, in H ways at once."""

    def __init__(self, config: GPT2Config, layer: int) -> None:
        super().__init__()
        d = config.n_embd
        self.layer, self.heads, self.dropout = layer, config.n_head, config.attn_pdrop
        self.c_attn = nn.Linear(d, 3 * d)  # q, k and v in one product
        self.c_proj = nn.Linear(d, d)
        self.resid_dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, h: Tensor, mask: Tensor | None, cache: KVCache | None) -> Tensor:
        """Map [B, T, d] to [B, T, d]; `mask` [B, 1, T, S] is True where a token may look."""
        B, T, d = h.shape
        split = (B, T, self.heads, d // self.heads)
        q, k, v = (x.view(split).transpose(1, 2) for x in self.c_attn(h).split(d, dim=2))
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)  # [B, H, S, n]
        # softmax(q k^T / sqrt(n)) v; without a mask, token i looks at tokens 0 to i
        mixed = F.scaled_dot_product_attention(
            q, k, v, mask, self.dropout if self.training else 0.0, is_causal=mask is None and T > 1
        )  # [B, H, T, n]
        together = mixed.transpose(1, 2).reshape(B, T, d)
        out: Tensor = self.resid_dropout(self.c_proj(together))
        return out


class MLP(nn.Module):
    """Each token by itself: widen to 4 d, bend, narrow to d."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        inner = config.n_inner or 4 * config.n_embd
        self.c_fc = nn.Linear(config.n_embd, inner)
        self.c_proj = nn.Linear(inner, config.n_embd)
        self.act = nn.GELU(approximate=_ACTIVATIONS[config.activation_function])
        self.dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, h: Tensor) -> Tensor:
        """Map [B, T, d] to [B, T, d]."""
        out: Tensor = self.dropout(self.c_proj(self.act(self.c_fc(h))))  # [B, T, 4 d] inside
        return out


class Block(nn.Module):
    """Attention, then the MLP; each reads a normed h and adds to the plain one."""

    def __init__(self, config: GPT2Config, layer: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.attn = Attention(config, layer)
        self.ln_2 = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def forward(self, h: Tensor, mask: Tensor | None, cache: KVCache | None) -> Tensor:
        """Map [B, T, d] to [B, T, d]."""
        h = h + self.attn(self.ln_1(h), mask, cache)
        out: Tensor = h + self.mlp(self.ln_2(h))
        return out


class GPT2Output(NamedTuple):
    """What a forward pass gives."""

    logits: Tensor  # [B, T, V]
    past_key_values: KVCache | None


class GPT2BodyOutput(NamedTuple):
    """What the body gives: h as it enters the head."""

    last_hidden_state: Tensor  # [B, T, d]
    past_key_values: KVCache | None


class GPT2Model(nn.Module):
    """The body: everything below the head."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: KVCache | None = None,
        use_cache: bool = False,
    ) -> GPT2BodyOutput:
        """Read ids [B, T]; see GPT2LMHeadModel.forward."""
        T = input_ids.shape[1]
        cache = KVCache() if past_key_values is None and use_cache else past_key_values
        past = cache.get_seq_length() if cache is not None else 0
        S, C = past + T, self.wpe.num_embeddings
        if S > C:
            raise BadInput(f"the sequence has {S:,} tokens, but this GPT-2 reads at most {C:,}")
        if attention_mask is not None and attention_mask.shape != (len(input_ids), S):
            raise BadInput(
                f"attention_mask has shape {list(attention_mask.shape)}; expected "
                f"[{len(input_ids)}, {S}]: the {past} tokens in the cache and the {T} new ones"
            )
        if position_ids is None and attention_mask is not None:
            # padding has no place of its own: the first real token is at 0
            position_ids = (attention_mask.long().cumsum(1) - 1).clamp(min=0)[:, past:]  # [B, T]
        if position_ids is None:
            position_ids = torch.arange(past, S, device=input_ids.device)  # [T]
        h = self.drop(self.wte(input_ids) + self.wpe(position_ids))  # [B, T, d]
        mask = mask_of(attention_mask, past, T, h.device)
        for block in self.h:
            h = block(h, mask, cache)
        return GPT2BodyOutput(self.ln_f(h), cache)


def mask_of(padding: Tensor | None, past: int, T: int, device: torch.device) -> Tensor | None:
    """Say who may look at whom: [B or 1, 1, T, S], or None where plain causal order is meant."""
    if padding is None and (past == 0 or T == 1):
        return None
    causal = torch.ones(T, past + T, dtype=torch.bool, device=device).tril(past)
    if padding is None:
        return causal[None, None]
    # padding may look at itself, because attention to nothing is not a number
    itself = torch.eye(T, past + T, dtype=torch.bool, device=device).roll(past, dims=1)
    return (causal & padding.bool()[:, None, None, :]) | itself


class GPT2LMHeadModel(nn.Module):
    """GPT-2 with its head. `GPT2LMHeadModel(config)` has random weights, as before training."""

    generation_config = None  # the checkpoints that it writes hold none

    def __init__(self, config: GPT2Config, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        with torch.device("meta"):  # shapes only; each weight is then drawn once
            self.transformer = GPT2Model(config)
            self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.to_empty(device=torch.get_default_device())
        self.tie_weights()
        self._draw(generator)

    def tie_weights(self) -> None:
        """Make the head the matrix that reads tokens, where the configuration says so."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.transformer.wte.weight

    @torch.no_grad()
    def _draw(self, generator: torch.Generator | None) -> None:
        std = self.config.initializer_range
        # 2 L products add to h; with this factor it does not grow with the depth
        last = std / math.sqrt(2 * self.config.n_layer)
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                p.zero_()
            elif ".ln_" in name:
                p.fill_(1.0)
            else:
                p.normal_(0.0, last if name.endswith("c_proj.weight") else std, generator=generator)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: KVCache | None = None,
        use_cache: bool = False,
    ) -> GPT2Output:
        """Score every token after each of the ids [B, T]: logits [B, T, V].

        With `use_cache` the output holds a cache; given back as `past_key_values`, it stands for
        the tokens read so far, and only new ones are passed. `attention_mask` [B, S] is 0 for
        padding, which may stand at either end; `position_ids` [B, T] follow from it.
        """
        h, cache = self.transformer(
            input_ids, attention_mask, position_ids, past_key_values, use_cache
        )
        return GPT2Output(self.lm_head(h), cache)

    def get_input_embeddings(self) -> nn.Embedding:
        """Give the matrix that reads tokens, [V, d]."""
        return self.transformer.wte

    def get_output_embeddings(self) -> nn.Linear:
        """Give the head's projection, [V, d]."""
        return self.lm_head

    @classmethod
    def from_pretrained(cls, model: str | Path, progress: Progress = silent) -> "GPT2LMHeadModel":
        """Read MODEL: a Hugging Face folder or id, or a .gguf file, that holds a GPT-2."""
        checkpoint = open_checkpoint(resolve(model, progress))
        with torch.device("meta"):
            gpt2 = cls(GPT2Config.from_dict(dict(checkpoint.config)))
        tensors = dict(read_tensors(gpt2, checkpoint, progress))
        gpt2.load_state_dict(tensors, assign=True, strict=False)
        gpt2.tie_weights()
        return gpt2.eval()

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors, as transformers reads them."""
        write_files(self, asdict(self.config), Path(folder))
