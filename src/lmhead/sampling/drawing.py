"""Drawing tokens from their probabilities, and the two functions to learn from.

The law is the inverse of the cumulative distribution: one number u, uniform in [0, 1), picks the
first token at which the running sum of the weights exceeds u times their total. The sum runs in
float64, since in float32 a sum over 262,144 tokens loses the tail. A token of weight 0 adds
nothing to the sum, so it is never picked.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lmhead.errors import BadInput
from lmhead.sampling import filters
from lmhead.sampling.params import GREEDY_BELOW, SamplingParams
from lmhead.sampling.state import SequenceState


def next_probs(
    head: Callable[[Tensor], Tensor], h: Tensor, temperature: float = 1.0, top_k: int = 0
) -> Tensor:
    """Give the next token's probabilities `[..., V]` for hidden states h `[..., d]`.

    temperature 0 puts all of it on the best token; top_k 0 keeps every token.
    """
    SamplingParams(temperature=temperature, top_k=top_k)  # checks the ranges
    logits = head(h)
    z = logits.float().cpu().reshape(-1, logits.shape[-1])
    if temperature < GREEDY_BELOW:
        p = torch.zeros_like(z).scatter_(-1, z.argmax(-1, keepdim=True), 1.0)
    else:
        cut = (z / temperature).masked_fill(~filters.top_k(z.detach(), top_k), -torch.inf)
        # in float32 the sum over the vocabulary costs five digits
        p = cut.softmax(-1, dtype=torch.float64).float()
    return p.view(logits.shape).to(logits.device)


def draw(probs: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """Draw n tokens `[..., n]`, with replacement, from probabilities `[..., V]`.

    The probabilities need not sum to 1. The generator lives on the CPU.
    """
    if n < 1:
        raise BadInput(f"n is {n}; expected at least 1 token to draw")
    total = probs.sum(-1)
    if not bool(((total > 0) & total.isfinite()).all()) or bool((probs < 0).any()):
        raise BadInput("probs must be numbers from 0 with a positive, finite sum in every row")
    u = torch.rand((*probs.shape[:-1], n), dtype=torch.float64, generator=generator)
    return invert(probs.cpu(), u).to(probs.device)


def draw_rows(z: Tensor, seqs: Sequence[SequenceState]) -> Tensor:
    """Draw one column `[B]` of each row of logits `[B, N]`, each with its sequence's generator."""
    u = torch.tensor([s.uniform() for s in seqs], dtype=torch.float64).unsqueeze(-1)
    return invert((z - z.amax(-1, keepdim=True)).exp_(), u).squeeze(-1)


def invert(w: Tensor, u: Tensor) -> Tensor:
    """Pick the columns `[..., n]` at which the sum of weights `[..., N]` passes u `[..., n]`."""
    sums = w.cumsum(-1, dtype=torch.float64)
    total = sums[..., -1:].contiguous()
    picked = torch.searchsorted(sums, u * total, right=True)
    # were u * total to round up to total: the last column of positive weight
    return torch.minimum(picked, torch.searchsorted(sums, total))
