"""Reading texts once: their last states at every layer, and how likely the model finds them.

Symbols: B texts that run together, T tokens of each that no other shares, G beginnings of P tokens
that several share, L blocks, d the width of a state, F figures.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lmhead.body.blocks import Blocks
from lmhead.body.likelihood import figures_of_tokens, summed_up
from lmhead.body.sharing import Shared, shared_batches
from lmhead.head import LMHead

# The ids of a text, and how many of them are its prompt: at least 1, for token 0 is never predicted
Encoded = tuple[list[int], int]


@torch.no_grad()
def read_once(
    blocks: Blocks, head: LMHead, encoded: Sequence[Encoded]
) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """Read different texts, some at a time; yield which, `[B, L + 1, d]` and figures `[B, F]`.

    What several begin with is read once, where the model's memory can be copied for each of them.
    """
    texts = [ids for ids, _ in encoded]
    plan = list(shared_batches(texts))
    if any(batch.beginnings for batch in plan) and not _copies_memory(blocks):
        plan = list(shared_batches(texts, share=False))
    for batch in plan:
        P, rests = batch.length, [texts[i][batch.length :] for i in batch.texts]
        ids = torch.zeros(len(rests), max(map(len, rests)), dtype=torch.long)
        for b, rest in enumerate(rests):
            ids[b, : len(rest)] = torch.tensor(rest)
        states = []  # what enters the head, `[positions, d]`: of beginnings, then of the rests
        if P:
            begun, memory = blocks.states_on(torch.tensor(batch.beginnings), None)
            states.append(begun[-1].flatten(0, 1))
            memory.select(batch.of)
            found, _ = blocks.states_on(ids, memory)
        else:
            found = blocks.states(ids)
        states.append(found[-1].flatten(0, 1))
        rows = torch.arange(len(rests))
        ends = torch.tensor([len(rest) - 1 for rest in rests])
        last = torch.stack([x[rows, ends].float().cpu() for x in found], 1)
        yield batch.texts, last, _likelihood(head, torch.cat(states), encoded, batch, ids.shape[1])


def _copies_memory(blocks: Blocks) -> bool:
    """Try two tokens: is their memory one that rows can be taken of, all of it keys and values?"""
    _, memory = blocks.states_on(torch.zeros(1, 2, dtype=torch.long), None)
    return memory.unjoinable is None and not memory.recurrent


def _likelihood(
    head: LMHead, h: Tensor, encoded: Sequence[Encoded], batch: Shared, T: int
) -> Tensor:
    """Return the figures of each text of a batch, from h `[G P + B T, d]`."""
    P, rests = batch.length, len(batch.beginnings) * batch.length
    scored: list[list[tuple[int, int]]] = []  # of each text: the place in h, and what it predicts
    for b, i in enumerate(batch.texts):
        ids, first = encoded[i]
        shared = batch.of[b] * P if P else 0
        places = [shared + t if t < P else rests + b * T + t - P for t in range(len(ids))]
        scored.append([(places[t - 1], ids[t]) for t in range(first, len(ids))])
    different = sorted({pair for pairs in scored for pair in pairs})
    places = sorted({place for place, _ in different})
    row = {place: k for k, place in enumerate(places)}
    each = figures_of_tokens(
        head,
        h[torch.tensor(places, dtype=torch.long, device=h.device)],
        torch.tensor([row[place] for place, _ in different], dtype=torch.long),
        torch.tensor([token for _, token in different], dtype=torch.long),
    )
    index = {pair: k for k, pair in enumerate(different)}
    return summed_up([each[[index[pair] for pair in pairs]] for pairs in scored])
