"""Log-probabilities to report, keyed by token id (decoded pieces of bytes would collide)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lmhead.sampling.candidates import Candidates
from lmhead.sampling.filters import weights


class Logprobs(NamedTuple):
    """The log-probability of the drawn token, and of the best ones by id, likeliest first."""

    id: int
    logprob: float
    top: dict[int, float]


def top_logprobs(source: Tensor | Candidates, drawn: Sequence[int], n: int) -> tuple[Logprobs, ...]:
    """Report the drawn id and the n best ids of each row of logits `[B, V]` or candidates.

    All numbers of a row come from the same subtraction, so the drawn token's logprob equals its
    entry in `top` exactly. Tokens of probability 0 are not listed: -inf is not JSON.
    """
    c = source if isinstance(source, Candidates) else Candidates.dense(source)
    logsumexp = weights(c.z).logsumexp.squeeze(-1).tolist()
    best = c.z.topk(min(n, c.z.shape[-1]), dim=-1)
    reports = []
    for row, token in enumerate(drawn):
        columns, _ = c.locate(row, torch.tensor([token]))
        logprob = float(c.z[row, columns[0]]) - logsumexp[row]
        ids = best.indices[row] if c.ids is None else c.ids[row, best.indices[row]]
        pairs = zip(ids.tolist(), best.values[row].tolist(), strict=True)
        top = {i: z - logsumexp[row] for i, z in pairs if z > -torch.inf}
        reports.append(Logprobs(token, logprob, top))
    return tuple(reports)
