"""What one sequence carries from step to step: its ids, its generator, mirostat, its grammar."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lmhead.sampling.guided import GuideState


class Tally(NamedTuple):
    """Token ids `[n]`, each once, and how often each occurs, `[n]` float32."""

    ids: Tensor
    counts: Tensor


class SequenceState:
    """One sequence: the prompt, the output so far, and what drawing the next token depends on.

    Each sequence has a generator of its own (always on the CPU, so that a seed means the same on
    every device): what is drawn never depends on the rest of the batch.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        generator: torch.Generator,
        mu: float = 0.0,
        guide: GuideState | None = None,
    ) -> None:
        self.prompt_ids = tuple(prompt_ids)
        self.output_ids: list[int] = []
        self.generator = generator
        self.mu = mu
        self.guide = guide
        self._seen = dict.fromkeys(self.prompt_ids)
        self._output: Counter[int] = Counter()

    @property
    def finished(self) -> bool:
        """True once the grammar is complete: nothing may follow, so do not draw again."""
        return self.guide is not None and self.guide.finished

    def accept(self, token: int) -> None:
        """Record that this token was drawn."""
        self.output_ids.append(token)
        self._seen[token] = None
        self._output[token] += 1
        if self.guide is not None:
            self.guide.accept(token)

    def uniform(self) -> float:
        """Draw a float64 from [0, 1) with this sequence's own generator."""
        return float(torch.rand((), dtype=torch.float64, generator=self.generator))

    def history(self, last_n: int = -1) -> list[int]:
        """Give the last n ids of prompt and output; -1 for all of them."""
        if last_n < 0:
            return [*self.prompt_ids, *self.output_ids]
        output = self.output_ids[max(len(self.output_ids) - last_n, 0) :]
        from_prompt = max(len(self.prompt_ids) + len(output) - last_n, 0)
        return [*self.prompt_ids[from_prompt:], *output]

    def seen(self, last_n: int | None) -> Tensor:
        """Give the ids that a repetition penalty counts: prompt and output, or the last n."""
        ids = self._seen if last_n is None else dict.fromkeys(self.history(last_n))
        return torch.tensor(list(ids), dtype=torch.int64)

    def tally(self, last_n: int | None) -> Tally:
        """Count the ids that presence and frequency penalties count: the output, or the last n."""
        counts = self._output if last_n is None else Counter(self.history(last_n))
        return Tally(
            torch.tensor(list(counts), dtype=torch.int64),
            torch.tensor(list(counts.values()), dtype=torch.float32),
        )

    def copy(self) -> "SequenceState":
        """Copy everything, the generator's position too: what the copy draws changes nothing."""
        generator = torch.Generator()
        generator.set_state(self.generator.get_state())
        guide = None if self.guide is None else self.guide.copy()
        copy = SequenceState(self.prompt_ids, generator, self.mu, guide)
        copy.output_ids = list(self.output_ids)
        copy._seen = dict(self._seen)
        copy._output = Counter(self._output)
        return copy


def generator_for(seed: int | None, index: int = 0) -> torch.Generator:
    """Make the generator of the index-th sequence of a seed; without a seed, a fresh one.

    Index 0 uses the seed itself. The others are mixed, so that (seed, 1) is not (seed + 1, 0).
    """
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    elif index == 0:
        generator.manual_seed(seed)
    else:
        mixed = np.random.SeedSequence([seed, index]).generate_state(1, np.uint64)[0]
        generator.manual_seed(int(mixed))
    return generator
