"""Pairs of a true and a false ending, held at one layer.

The log-odds of a pair are log p(true ending | prompt) - log p(false ending | prompt), each over all
of its tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmhead.body.blocks import Blocks
from lmhead.head import Head
from lmhead.loading import Model
from lmhead.progress import Progress, silent
from lmhead.steer.learn.data import Pair, Row
from lmhead.steer.runs import Run, Runs


@dataclass(frozen=True)
class PairRuns:
    """Pairs held at one layer: true endings first, then the false ones in the same order."""

    runs: Runs
    count: int

    @classmethod
    def read(
        cls,
        model: Model,
        pairs: Sequence[Pair],
        layer: int | str,
        *,
        blocks: Blocks | None = None,
        progress: Progress = silent,
    ) -> "PairRuns":
        """Run both texts of every pair as far as the layer."""
        texts = [Row(p.prompt + p.true, 1, p.prompt) for p in pairs]
        texts += [Row(p.prompt + p.false, 0, p.prompt) for p in pairs]
        runs = Runs.read(model, texts, layer, blocks=blocks, progress=progress)
        return cls(runs, len(pairs))

    @torch.no_grad()
    def log_odds(self, head: Head, added: Tensor | None) -> Tensor:
        """Return the log-odds of every pair, `[N]`, with a vector `[d]` added at every token.

        A guarded head gets the states without and with it, and keeps its limits.
        """
        result = torch.zeros(2 * self.count)
        for run in self.runs.chunks(range(2 * self.count)):
            h = run.run(added)
            if head.hidden_size == 2 * h.shape[-1]:
                h = torch.cat([run.unsteered(), h], dim=-1)
            result[run.indices] = ending_logprob(head, run, h)
        return result[: self.count] - result[self.count :]


def ending_logprob(head: Head, run: Run, h: Tensor) -> Tensor:
    """Return log p of each ending, `[B]`, from h `[B, T, d]`; gradients reach h."""
    B, T = h.shape[:2]
    ids = torch.zeros(B, T, dtype=torch.long)
    scored = torch.zeros(B, T - 1, dtype=torch.bool)  # positions whose next token is of the ending
    for b, i in enumerate(run.indices):
        tokens, first = run.runs.encoded[i]
        ids[b, : len(tokens)] = torch.tensor(tokens)
        scored[b, first - 1 : len(tokens) - 1] = True
    states, targets = h[:, :-1][scored], ids[:, 1:][scored]
    losses = head.loss(states, targets, reduction="none")
    return -torch.zeros(B).index_add(0, scored.nonzero()[:, 0], losses.float())
