"""The filters that look at what was said before: they lower or forbid single tokens.

Each takes the candidates and one `SequenceState` per row, and returns new candidates.

Sources: repetition penalty (Keskar et al. 2019), presence and frequency (OpenAI's API),
no-repeat-ngram (Paulus et al. 2018), DRY (its author's proposal in text-generation-webui, 2024).
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from lmhead.errors import BadInput
from lmhead.sampling.candidates import Candidates
from lmhead.sampling.state import SequenceState

Breakers = Mapping[int, Sequence[tuple[int, ...]]]
"""DRY's sequence breakers: the first token of each, and what must follow it (often nothing)."""

LARGEST_PENALTY = 1e30
"""A DRY penalty stays finite in float32: a repeat is made hopeless, never forbidden."""


def repetition_penalty(
    c: Candidates, seqs: Sequence[SequenceState], penalty: float, last_n: int | None = None
) -> Candidates:
    """Divide positive logits of tokens of the prompt and output by penalty, multiply the others."""

    def change(z: Tensor, row: int, found: Tensor) -> Tensor:
        return torch.where(z < 0, z * penalty, z / penalty)

    return c.edit([s.seen(last_n) for s in seqs], change)


def frequency_penalty(
    c: Candidates, seqs: Sequence[SequenceState], penalty: float, last_n: int | None = None
) -> Candidates:
    """Subtract penalty from a token's logit for each time it occurs in the output."""
    tallies = [s.tally(last_n) for s in seqs]

    def change(z: Tensor, row: int, found: Tensor) -> Tensor:
        return z - penalty * tallies[row].counts[found]

    return c.edit([t.ids for t in tallies], change)


def presence_penalty(
    c: Candidates, seqs: Sequence[SequenceState], penalty: float, last_n: int | None = None
) -> Candidates:
    """Subtract penalty once from the logit of each token that occurs in the output."""
    return c.edit([s.tally(last_n).ids for s in seqs], lambda z, row, found: z - penalty)


def logit_bias(c: Candidates, bias: Mapping[int, float]) -> Candidates:
    """Add bias[id] to the logit of each id."""
    ids = torch.tensor(list(bias), dtype=torch.int64)
    check_ids("logit_bias", ids, c.V)
    added = torch.tensor(list(bias.values()), dtype=torch.float32)
    return c.edit([ids] * c.z.shape[0], lambda z, row, found: z + added[found])


def no_repeat_ngram(c: Candidates, seqs: Sequence[SequenceState], size: int) -> Candidates:
    """Forbid the tokens that would complete a run of `size` tokens that has occurred before."""
    return c.without([_completions(s.history(), size) for s in seqs])


def _completions(history: Sequence[int], size: int) -> Tensor:
    if len(history) < size:
        return torch.empty(0, dtype=torch.int64)
    ids = torch.tensor(history, dtype=torch.int64)
    windows = ids.unfold(0, size, 1)  # [n - size + 1, size]
    same = (windows[:, :-1] == ids[len(ids) - size + 1 :]).all(-1)
    return windows[same, -1]


def dry(
    c: Candidates,
    seqs: Sequence[SequenceState],
    *,
    multiplier: float,
    base: float,
    allowed_length: int,
    last_n: int,
    breakers: Breakers,
) -> Candidates:
    """Subtract multiplier * base ** (length - allowed_length) from tokens that extend a repeat.

    length is how many of the last tokens also stand before an earlier occurrence of that token,
    counted back to the nearest sequence breaker.
    """
    # beyond this length the penalty has reached its cap
    longest = math.inf
    if base > 1 and multiplier > 0:
        steps = math.log(LARGEST_PENALTY / multiplier) / math.log(base)
        longest = allowed_length + max(math.ceil(steps), 0)
    found = [repeats(s.history(last_n), allowed_length, breakers, longest) for s in seqs]
    penalties = []
    for lengths in found:
        powers = [base ** (n - allowed_length) for n in lengths.values()]
        amounts = [min(multiplier * power, LARGEST_PENALTY) for power in powers]
        penalties.append(torch.tensor(amounts, dtype=torch.float32))

    def change(z: Tensor, row: int, which: Tensor) -> Tensor:
        return z - penalties[row][which]

    return c.edit([torch.tensor(list(f), dtype=torch.int64) for f in found], change)


def repeats(
    history: Sequence[int], allowed_length: int, breakers: Breakers, longest: float = math.inf
) -> dict[int, int]:
    """Give the tokens that would extend a repeat, and how long that repeat is already.

    Only repeats of allowed_length or more count, and lengths above `longest` are given as that.
    A token that is itself a breaker is never named.
    """
    limit = min(_since_breaker(history, breakers), longest)
    if limit < allowed_length:
        return {}
    ids = np.asarray(history)
    # ends: where an earlier copy of the last `length` tokens ends; ids[ends + 1] would extend it
    ends = np.arange(len(ids) - 1)
    length = 0
    lengths: dict[int, int] = {}
    while ends.size and length < limit:
        ends = ends[ends >= length]
        ends = ends[ids[ends - length] == ids[len(ids) - 1 - length]]
        length += 1
        if length >= allowed_length:
            lengths.update(dict.fromkeys(ids[ends + 1].tolist(), length))
    return {token: n for token, n in lengths.items() if () not in breakers.get(token, ())}


def _since_breaker(history: Sequence[int], breakers: Breakers) -> int:
    """Count the tokens after the last complete sequence breaker."""
    n = len(history)
    for start in range(n - 1, -1, -1):
        tails = breakers.get(history[start], ())
        matching = [
            len(t)
            for t in tails
            if start + len(t) < n and tuple(history[start + 1 : start + 1 + len(t)]) == t
        ]
        if matching:
            return n - 1 - start - max(matching)
    return n


def check_ids(name: str, ids: Tensor, V: int) -> None:
    """Raise BadInput when an id the caller named lies outside the vocabulary."""
    if ids.numel() and int(ids.max()) >= V:
        raise BadInput(
            f"{name} holds the id {int(ids.max())}, but the vocabulary has {V} tokens; "
            f"expected ids from 0 to {V - 1}",
            names=[name],
        )
