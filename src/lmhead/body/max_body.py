"""GPT-2 up to its head as one MAX graph, on the weights of `lmhead.models.gpt2`.

The modules and their parameters have the names that they have there. Read that file first: here
is the same path in MAX's words, with the cache going in and out of the graph.

Symbols: B sequences, T tokens read now, P tokens in the cache, S = P + T, H attention heads,
n their width, d = H n, h hidden state [B, T, d].
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lmhead.body.adding import row_changes
from lmhead.body.base import HEAD, Additions
from lmhead.body.prefill import padded_prefill
from lmhead.body.state import State
from lmhead.errors import BadInput, UnsupportedModel
from lmhead.models.gpt2 import GPT2BodyOutput, GPT2Config, GPT2LMHeadModel, KVCache, mask_of
from lmhead.models.max_runtime import compile_graph, missing_max
from lmhead.progress import Progress, silent

try:
    from max.experimental import functional as F
    from max.experimental.compilation import as_subgraph
    from max.experimental.nn import Embedding, Linear, Module
    from max.experimental.nn.norm import LayerNorm
    from max.experimental.tensor import Tensor
except ImportError as error:
    raise missing_max() from error

_TAKES = frozenset({"position_ids"})  # of the arguments that not every model has


class Attention(Module):  # type: ignore[misc]
    """Causal self-attention over the tokens of the cache and those of now."""

    def __init__(self, config: GPT2Config) -> None:
        d = config.n_embd
        self.heads, self.width = config.n_head, d // config.n_head
        self.c_attn = Linear(d, 3 * d)
        self.c_proj = Linear(d, d)

    def forward(
        self, h: Tensor, mask: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Map h [B, T, d], the mask to add [B, 1, T, S] and the cache [B, H, P, n]."""
        B, T, d = h.shape
        S = mask.shape[3]
        q, k, v = (
            F.permute(F.reshape(x, [B, T, self.heads, self.width]), [0, 2, 1, 3])
            for x in F.split(self.c_attn(h), [d, d, d], axis=2)
        )  # [B, H, T, n]
        # P + T and S are one number, which MAX cannot know by itself
        full = [B, self.heads, S, self.width]
        keys = F.rebind(F.concat([keys, k], axis=2), full)
        values = F.rebind(F.concat([values, v], axis=2), full)
        scores = q @ F.permute(keys, [0, 1, 3, 2]) / math.sqrt(self.width) + mask  # [B, H, T, S]
        mixed = F.permute(F.softmax(scores) @ values, [0, 2, 1, 3])  # [B, T, H, n]
        return self.c_proj(F.reshape(mixed, [B, T, d])), keys, values


class MLP(Module):  # type: ignore[misc]
    """Each token by itself: widen, bend, narrow."""

    def __init__(self, config: GPT2Config) -> None:
        inner = config.n_inner or 4 * config.n_embd
        self.c_fc = Linear(config.n_embd, inner)
        self.c_proj = Linear(inner, config.n_embd)
        self.bend = "none" if config.activation_function == "gelu" else "tanh"

    def forward(self, h: Tensor) -> Tensor:
        """Map [B, T, d] to [B, T, d]."""
        return self.c_proj(F.gelu(self.c_fc(h), approximate=self.bend))


class Block(Module):  # type: ignore[misc]
    """Attention, then the MLP; each reads a normed h and adds to the plain one."""

    def __init__(self, config: GPT2Config) -> None:
        self.ln_1 = LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.attn = Attention(config)
        self.ln_2 = LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def forward(
        self, h: Tensor, mask: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Map h [B, T, d] and the cache [B, H, P, n] to h and the cache [B, H, S, n]."""
        added, keys, values = self.attn(self.ln_1(h), mask, keys, values)
        h = h + added
        return h + self.mlp(self.ln_2(h)), keys, values


class GPT2Graph(Module):  # type: ignore[misc]
    """Everything below the head."""

    def __init__(self, config: GPT2Config) -> None:
        self.wte = Embedding(config.vocab_size, dim=config.n_embd)
        self.wpe = Embedding(config.n_positions, dim=config.n_embd)
        self.h = [Block(config) for _ in range(config.n_layer)]
        self.ln_f = LayerNorm(config.n_embd, config.layer_norm_epsilon)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Read ids and positions [B, T]; return h [B, T, d] and each block's cache."""
        h = self.wte(ids) + self.wpe(positions)
        new_keys, new_values = [], []
        for block, k, v in zip(self.h, keys, values, strict=True):
            # one definition that all blocks share is compiled once, not once per block
            h, k, v = as_subgraph(block, name="block")(h, mask, k, v)
            new_keys.append(k)
            new_values.append(v)
        return self.ln_f(h), new_keys, new_values


class MaxBody:
    """GPT-2 up to the input of its head, computed by MAX in float32 on the CPU.

    It takes the weights of `model` without copying them, where they are float32, and answers as
    `lmhead.body.TorchBody` does: h [B, T, d] and an output that holds the cache.
    """

    def __init__(self, model: GPT2LMHeadModel, progress: Progress = silent) -> None:
        config = model.config
        cache = [("float32", ["B", config.n_head, "P", config.n_embd // config.n_head])]
        self.model = model
        self._run = compile_graph(
            lambda: GPT2Graph(config),
            (
                ("int64", ["B", "T"]),
                ("int64", ["B", "T"]),
                ("float32", ["B", 1, "T", "S"]),
                cache * config.n_layer,
                cache * config.n_layer,
            ),
            _weights(model),
            "GPT-2",
            progress,
        )

    @classmethod
    def from_pretrained(cls, model: str | Path, progress: Progress = silent) -> "MaxBody":
        """Read MODEL: whatever `GPT2LMHeadModel.from_pretrained` reads."""
        return cls(GPT2LMHeadModel.from_pretrained(model, progress), progress)

    @property
    def config(self) -> GPT2Config:
        """The configuration of the model."""
        return self.model.config

    @property
    def context(self) -> int:
        """The longest sequence that the model reads."""
        return self.config.n_positions

    @property
    def vocab_size(self) -> int:
        """How many ids it reads."""
        return self.config.vocab_size

    @property
    def generation_config(self) -> None:
        """There is none: the configuration says which id ends a text."""
        return None

    def __call__(
        self, input_ids: torch.Tensor, *inputs: Any, **named: Any
    ) -> tuple[torch.Tensor, GPT2BodyOutput]:
        """Run ids [B, T]; return h [B, T, d] as it enters the head, and the output.

        The arguments are those of `GPT2LMHeadModel.forward`.
        """
        return self._pass(input_ids, *inputs, **named)

    def run(
        self,
        ids: torch.Tensor,
        state: State | None = None,
        *,
        rows: Sequence[Additions] | None = None,
    ) -> tuple[torch.Tensor, State]:
        """Read ids [B, T] behind what `state` remembers; return h [B, T, d] and the memory.

        `rows` may add at the layer "head" alone: the graph runs its blocks as one.
        """
        changes = row_changes(rows, len(ids)) if rows else {}
        if set(changes) - {HEAD}:
            raise UnsupportedModel(
                "a MAX graph runs its blocks as one, so nothing can be added between them; load "
                "the model with body='torch', or steer at the layer 'head'"
            )
        state = State() if state is None else state
        h, output = self._pass(**state.inputs(ids, _TAKES))
        state.take(ids, output)
        return (changes[HEAD](h) if changes else h), state

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        rows: Sequence[Additions] | None = None,
        room: int = 0,
        whole: bool = False,
    ) -> tuple[torch.Tensor, State]:
        """Read prompts, padded on the left; return h `[B, d]` of their last tokens, and memory."""
        return padded_prefill(self, prompts, rows, room, whole)

    def _pass(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: KVCache | None = None,
        use_cache: bool = False,
    ) -> tuple[torch.Tensor, GPT2BodyOutput]:
        B, T = input_ids.shape
        cache = past_key_values or KVCache()
        past = cache.get_seq_length()
        S = past + T
        if (C := self.context) < S:
            raise BadInput(f"the sequence has {S:,} tokens, but this GPT-2 reads at most {C:,}")
        if attention_mask is None:
            attention_mask = torch.ones(B, S, dtype=torch.long)
        if attention_mask.shape != (B, S):
            raise BadInput(
                f"attention_mask has shape {list(attention_mask.shape)}; expected [{B}, {S}]: "
                f"the {past} tokens in the cache and the {T} new ones"
            )
        if position_ids is None:
            position_ids = (attention_mask.long().cumsum(1) - 1).clamp(min=0)[:, past:]  # [B, T]
        _check_rows("input_ids", input_ids, self.config.vocab_size)
        _check_rows("position_ids", position_ids, C)
        allowed = mask_of(attention_mask, past, T, input_ids.device)  # [B, 1, T, S]
        assert allowed is not None  # it is None only where no attention mask is given
        # not -inf, which minus itself is not a number
        added = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)
        h, keys, values = self._run(
            input_ids, position_ids.expand(B, T), added, *self._past(cache, B)
        )
        result = KVCache()
        result.keys, result.values = keys, values
        return h, GPT2BodyOutput(h, result if use_cache else None)

    def _past(self, cache: KVCache, B: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        if cache.keys:
            return cache.keys, cache.values
        config = self.config
        nothing = torch.empty(B, config.n_head, 0, config.n_embd // config.n_head)
        return [nothing] * config.n_layer, [nothing] * config.n_layer


def _check_rows(name: str, ids: torch.Tensor, rows: int) -> None:
    """Refuse ids that are no row of an embedding: MAX would read beyond it."""
    low, high = (int(bound) for bound in ids.aminmax())
    if low < 0 or high >= rows:
        wrong = low if low < 0 else high
        raise BadInput(f"{name} holds {wrong:,}; expected numbers from 0 to {rows - 1:,}")


def _weights(model: GPT2LMHeadModel) -> Mapping[str, torch.Tensor]:
    named: dict[str, Any] = dict(model.transformer.named_parameters())
    return {name: p.detach().float() for name, p in named.items()}
