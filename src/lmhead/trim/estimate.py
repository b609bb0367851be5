"""How often greedy text would leave a keep-set, and how sure that is. Needs no torch."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

ENOUGH = 0.0025  # a share of steps that leave is known well enough within this much


@dataclass(frozen=True)
class Estimate:
    """How often greedy text would leave a keep-set, on texts that had no part in making it."""

    steps: int
    steps_left: int
    texts: int
    texts_left: int
    max_tokens: int  # per text
    # 95 % interval of the share of texts; steps of one text are not independent, texts are.
    low: float
    high: float

    @property
    def step_rate(self) -> float:
        """The share of steps whose choice was not in the keep-set."""
        return self.steps_left / max(1, self.steps)

    @property
    def text_rate(self) -> float:
        """The share of continuations with such a step."""
        return self.texts_left / max(1, self.texts)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {**asdict(self), "step_rate": self.step_rate, "text_rate": self.text_rate}


@dataclass(frozen=True)
class News:
    """How often the model chose what would not have been kept, while it read texts.

    Every lot of texts is judged by the keep-set that all before it would have made. The last one
    knows the most, so this is rather too high than too low for the keep-set in the end.
    """

    rate: float
    low: float  # 95 % interval; texts are independent, steps of one text are not
    high: float
    positions: int

    @property
    def is_known(self) -> bool:
        """Whether reading on would tell little more."""
        return (self.high - self.low) / 2 <= ENOUGH

    @classmethod
    def of(cls, texts: "Sequence[tuple[int, int]]") -> "News":
        """Estimate it from texts, given as (positions, how many of them chose something new)."""
        positions, new = sum(n for n, _ in texts), sum(k for _, k in texts)
        rate = new / max(1, positions)
        if len(texts) < 2:
            return cls(rate, 0.0, 1.0, positions)
        spread = sum((k - rate * n) ** 2 for n, k in texts) * len(texts) / (len(texts) - 1)
        wide = 1.96 * math.sqrt(spread) / positions
        # Where nothing was new, the rule of three says how often it may be all the same.
        high = rate + max(wide, 3 / positions if new == 0 else 0.0)
        return cls(rate, max(0.0, rate - wide), min(1.0, high), positions)


def binomial_interval(hits: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the Clopper-Pearson interval of a share: never narrower than its confidence says."""
    if trials == 0:
        return 0.0, 1.0
    tail = (1 - confidence) / 2

    def at_most(k: int, p: float) -> float:
        logs = (
            math.lgamma(trials + 1) - math.lgamma(i + 1) - math.lgamma(trials - i + 1)
            + i * math.log(p) + (trials - i) * math.log1p(-p)
            for i in range(k + 1)
        )  # fmt: skip
        return sum(map(math.exp, logs))

    def solve(k: int, wanted: float) -> float:
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            if at_most(k, middle) > wanted:  # falls as p grows
                low = middle
            else:
                high = middle
        return (low + high) / 2

    lower = 0.0 if hits == 0 else solve(hits - 1, 1 - tail)
    upper = 1.0 if hits == trials else solve(hits, tail)
    return lower, upper
