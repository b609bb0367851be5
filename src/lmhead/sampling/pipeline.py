"""The sampler: filters in an explicit order, then a draw.

>>> sampler = Sampler.from_params(SamplingParams(temperature=0.7, top_p=0.9, seed=1))
>>> seqs = [sampler.start([3, 1, 2])]  # the prompt's ids
>>> logits = torch.tensor([[0.0, 9.0, 0.0, 0.0]])  # [rows, V]
>>> drawn = sampler.step(logits, seqs)  # draws one token per row and records it in seqs
>>> seqs[0].output_ids
[1]

Nothing here knows when a text ends but for one thing: a sequence whose grammar is complete says
`finished`. Give `step` only the rows of sequences that go on.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmhead.errors import BadInput
from lmhead.sampling.build import Filter, build
from lmhead.sampling.candidates import Candidates, NothingLeft
from lmhead.sampling.drawing import draw_rows
from lmhead.sampling.filters import weights
from lmhead.sampling.guided import Guide
from lmhead.sampling.logprobs import Logprobs, top_logprobs
from lmhead.sampling.orders import resolve_order
from lmhead.sampling.params import SamplingParams
from lmhead.sampling.state import SequenceState, generator_for
from lmhead.sampling.trace import FilterStep, Trace, step_of


class Drawn(NamedTuple):
    """One step: the drawn ids `[B]`, and one `Logprobs` per row if they were asked for."""

    ids: Tensor
    logprobs: tuple[Logprobs, ...] | None


@dataclass(frozen=True)
class Sampler:
    """Filters in the order in which they run.

    vocab_size: how many rows of the head are tokens; logits beyond are padding and never drawn.
    """

    params: SamplingParams
    filters: tuple[Filter, ...]
    vocab_size: int | None = None
    guide: Guide | None = None

    @classmethod
    def from_params(
        cls,
        params: SamplingParams,
        order: str | Sequence[str] = "hf",
        *,
        vocab_size: int | None = None,
        tokenizer: Any = None,
    ) -> "Sampler":
        """Arrange the filters that params switch on in an order: `hf`, `vllm`, `llama.cpp` or a
        list.

        tokenizer is needed for json_schema, regex, grammar, and for DRY's sequence breakers.
        """
        names = resolve_order(order, params)
        built, guide = build(params, names, vocab_size, tokenizer)
        return cls(params, built, vocab_size, guide)

    @property
    def order(self) -> tuple[str, ...]:
        """The names of the filters that run, in order."""
        return tuple(f.name for f in self.filters)

    def touched(self, seq: SequenceState, V: int) -> Tensor:
        """Return the ids below V, ascending, whose logits the filters with `touches` may change."""
        ids = {i for f in self.filters if f.touches for i in f.touches(seq).tolist() if i < V}
        return torch.tensor(sorted(ids), dtype=torch.int64)

    def start(
        self, prompt_ids: Sequence[int] = (), *, seed: int | None = None, index: int = 0
    ) -> SequenceState:
        """Begin a sequence. seed defaults to the parameters' seed.

        index distinguishes several sequences with one seed: each gets its own generator.
        """
        return SequenceState(
            prompt_ids,
            generator_for(self.params.seed if seed is None else seed, index),
            mu=2 * self.params.mirostat_tau,
            guide=None if self.guide is None else self.guide.start(),
        )

    def complete(self, ids: Sequence[int]) -> bool:
        """Return whether the drawn `ids` satisfy the grammar completely; true without one."""
        return self.guide is None or self.guide.satisfied_by(ids)

    def process(
        self, logits: Tensor | Candidates, seqs: Sequence[SequenceState] | None = None
    ) -> Candidates:
        """Run the filters on logits `[B, V]` and return what is left to draw from.

        Instead of logits, it also accepts candidates that a head has already selected.
        """
        c = self._candidates(logits)
        seqs = self._sequences(c, seqs)
        for f in self.filters:
            c = f.apply(c, seqs)
            if f.masks:
                self._check_left(c, logits, seqs, f)
        return c

    def probs(self, logits: Tensor, seqs: Sequence[SequenceState] | None = None) -> Tensor:
        """Return the probabilities that the next token is drawn from, `[B, V]`."""
        p = self.process(logits, seqs).probs()
        return torch.nn.functional.pad(p, (0, logits.shape[-1] - p.shape[-1]))

    def step(self, logits: Tensor | Candidates, seqs: Sequence[SequenceState]) -> Drawn:
        """Draw one token for each sequence from logits `[B, V]`, and record it there."""
        c = self.process(logits, seqs)
        if self.params.greedy:
            columns = c.z.argmax(-1)
        else:
            columns = draw_rows(c.z, seqs)
        ids = c.tokens(columns)
        drawn = ids.tolist()
        logprobs = None
        if self.params.logprobs is not None:
            raw = self.params.logprobs_mode == "raw"
            if raw and isinstance(logits, Candidates):
                raise BadInput("raw logprobs need all logits [batch, V], but got candidates")
            logprobs = top_logprobs(logits if raw else c, drawn, self.params.logprobs)
        if self.params.mirostat:
            self._learn(c, columns, seqs)
        for seq, token in zip(seqs, drawn, strict=True):
            seq.accept(token)
        return Drawn(ids, logprobs)

    def trace(
        self,
        logits: Tensor,
        seqs: Sequence[SequenceState] | None = None,
        top: int = 10,
    ) -> list[Trace]:
        """Return, for each row of logits `[B, V]`, what every filter cut. Changes no sequence."""
        seqs = self._sequences(self._candidates(logits), seqs)
        traces = []
        for row, seq in enumerate(seqs):
            steps = self._steps(logits[row : row + 1], seq, top)
            if steps[-1].left == 0:
                raise NothingLeft(_nothing_left(row, steps))
            traces.append(Trace(logits.shape[-1], tuple(steps)))
        return traces

    def _steps(self, logits: Tensor, seq: SequenceState, top: int) -> list[FilterStep]:
        """Report on one row of logits `[1, V]`, up to a filter that leaves nothing."""
        seqs = [seq.copy()]
        c = Candidates.dense(logits.clone())
        step, p = step_of("logits", {}, None, c, top)
        steps = [step]
        if self.vocab_size is not None and self.vocab_size < c.V:
            c.z[:, self.vocab_size :] = -torch.inf
            step, p = step_of("padding", {"vocab_size": self.vocab_size}, p, c, top)
            steps.append(step)
        c, p = self._candidates(logits), p[: self.vocab_size]
        for f in self.filters:
            c = f.apply(c, seqs)
            step, p = step_of(f.name, f.settings, p, c, top)
            steps.append(step)
            if step.left == 0:
                break
        return steps

    def _candidates(self, logits: Tensor | Candidates) -> Candidates:
        if isinstance(logits, Candidates):
            return logits
        if logits.ndim != 2 or logits.shape[-1] == 0:
            raise BadInput(f"logits have the shape {list(logits.shape)}; expected [batch, V]")
        if self.vocab_size is not None:
            if logits.shape[-1] < self.vocab_size:
                raise BadInput(
                    f"logits have {logits.shape[-1]} columns; expected at least the "
                    f"vocabulary's {self.vocab_size}"
                )
            logits = logits[:, : self.vocab_size]
        c = Candidates.dense(logits)
        for row, best in enumerate(c.z.amax(-1).tolist()):
            if best == -torch.inf:
                raise NothingLeft(f"no token is left for row {row}: its logits are all -inf")
            if not best < torch.inf:
                raise BadInput(f"the logits of row {row} hold NaN or +inf; expected finite numbers")
        return c

    def _sequences(
        self, c: Candidates, seqs: Sequence[SequenceState] | None
    ) -> Sequence[SequenceState]:
        if seqs is None:
            return [self.start() for _ in range(c.z.shape[0])]
        if len(seqs) != c.z.shape[0]:
            raise BadInput(
                f"{len(seqs)} sequences for {c.z.shape[0]} rows of logits; expected one for each"
            )
        return seqs

    def _check_left(
        self,
        c: Candidates,
        logits: Tensor | Candidates,
        seqs: Sequence[SequenceState],
        failed: Filter,
    ) -> None:
        for row, best in enumerate(c.z.amax(-1).tolist()):
            if best > -torch.inf:
                continue
            if isinstance(logits, Candidates):
                raise NothingLeft(f"no token is left for row {row} after {failed.name}; relax it")
            raise NothingLeft(_nothing_left(row, self._steps(logits[row : row + 1], seqs[row], 1)))

    def _learn(self, c: Candidates, columns: Tensor, seqs: Sequence[SequenceState]) -> None:
        """Move mirostat's mu towards the target by the surprise of what was drawn, in bits."""
        logp = c.z.gather(-1, columns.unsqueeze(-1)) - weights(c.z).logsumexp
        for seq, bits in zip(seqs, (-logp.squeeze(-1) / math.log(2)).tolist(), strict=True):
            seq.mu -= self.params.mirostat_eta * (bits - self.params.mirostat_tau)


def _nothing_left(row: int, steps: Sequence[FilterStep]) -> str:
    counts = ", ".join(f"{s.name} {s.left:,}" for s in steps)
    return f"no token is left for row {row}; tokens left after each step: {counts}; relax one"
