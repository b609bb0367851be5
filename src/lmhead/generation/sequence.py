"""A request on its way through the engine, and which rows of the body are its own.

Symbols: B sequences that are going, R >= B rows of the body (a guarded sequence has two).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lmhead.body import Additions
from lmhead.errors import BadInput
from lmhead.generation.request import Generation, Request
from lmhead.generation.text import TextStream
from lmhead.sampling import Logprobs, Sampler, SequenceState


@dataclass(eq=False)
class Running:
    """A request on its way."""

    id: int
    request: Request
    sampler: Sampler  # one object for all that are sampled alike
    max_tokens: int
    state: SequenceState
    text: TextStream
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None

    @property
    def rows(self) -> int:
        """How many rows of the body are its own."""
        return 1 if self.request.steering is None else len(self.request.steering.rows)

    @property
    def law(self) -> int:
        """Which sequences are steered as this one is: those of the same number."""
        return 0 if self.request.steering is None else id(self.request.steering.law)

    def result(self, reason: str) -> Generation:
        """Return what has become of it."""
        return Generation(
            self.request.prompt,
            self.text.text,
            tuple(self.request.ids),
            tuple(self.state.output_ids),
            reason,
            self.text.stopped_by,
            tuple(self.logprobs) if self.logprobs else None,
        )


@dataclass(frozen=True)
class Drawn:
    """What was drawn for one sequence: a token, or the reason why none could be."""

    token: int = -1
    logprobs: Logprobs | None = None
    error: Exception | None = None


def no_text(_ids: list[int]) -> str:
    """Stand for a tokenizer: who chooses by h wants ids."""
    return ""


def alike(a: Sampler, b: Sampler) -> bool:
    """Tell whether two samplers do the same but for the seed, which each sequence has its own."""
    return a is b or (
        (a.order, a.vocab_size) == (b.order, b.vocab_size)
        and replace(a.params, seed=None) == replace(b.params, seed=None)
    )


def starts_of(sequences: Sequence[Running]) -> list[int]:
    """Return the first row of the body for each sequence."""
    starts, row = [], 0
    for s in sequences:
        starts.append(row)
        row += s.rows
    return starts


def additions_of(sequences: Sequence[Running]) -> list[Additions] | None:
    """Return what is added to each row of the body; None where nothing is to any."""
    if all(s.request.steering is None for s in sequences):
        return None
    rows: list[Additions] = []
    for s in sequences:
        rows += [None] if s.request.steering is None else list(s.request.steering.rows)
    return rows if any(rows) else None


def check_request(request: Request) -> None:
    """Refuse a request whose limits or stop texts are wrong."""
    if isinstance(request.max_tokens, bool) or not isinstance(request.max_tokens, int):
        raise BadInput(f"max_tokens is {request.max_tokens!r}; expected a whole number")
    if request.max_tokens < 1:
        raise BadInput(f"max_tokens is {request.max_tokens}; expected a whole number of at least 1")
    asked = request.prompt_logprobs
    if asked is not None and (isinstance(asked, bool) or not isinstance(asked, int) or asked < 0):
        raise BadInput(f"prompt_logprobs is {asked!r}; expected a whole number from 0, or None")
    if "" in request.stop:
        raise BadInput("stop holds an empty text; expected texts of at least one character")
