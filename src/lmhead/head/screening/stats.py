"""What a screened head did."""

from collections import Counter
from dataclasses import dataclass, field

from lmhead.head.screening.rejection import Drawn
from lmhead.head.screening.scanner import Counts


@dataclass
class Stats:
    """What a screened head did since it was made, or since `clear`.

    - states: how many were asked about; rescored: rows scored exactly for them
    - draws, proposals: full-softmax draws, and rows proposed for them
    - fallbacks: how often the dense head answered instead, and why
    """

    states: int = 0
    rescored: int = 0
    draws: int = 0
    proposals: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)

    def add(self, states: int, counts: Counts) -> None:
        """Count what compiled loops settled of some states; who settles the rest counts it."""
        self.states += states - counts.unsettled
        self.rescored += counts.rescored
        self.proposals += counts.proposed

    def count(self, drawn: Drawn) -> None:
        """Count one full-softmax draw."""
        self.draws += 1
        self.proposals += drawn.proposals
        if drawn.fallback:
            self.fallbacks[drawn.fallback] += 1

    def clear(self) -> None:
        """Begin again at 0."""
        self.states = self.rescored = self.draws = self.proposals = 0
        self.fallbacks.clear()
