"""What is asked of the engine, and what it tells: requests, events, and what became of them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from torch import Tensor

from lmhead.head import Head
from lmhead.sampling import Logprobs, Sampler


@dataclass(frozen=True)
class Generation:
    """One continuation of a prompt.

    `ids` are all ids that were drawn, including the one that ended the text; `text` is their text,
    without special tokens and the stop string.
    """

    prompt: str
    text: str
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    finish_reason: str  # "stop" (a stop id, a stop string, a complete grammar) or "length"
    stopped_by: str | None = None  # the stop string, where it was one
    logprobs: tuple[Logprobs, ...] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object; logprobs are keyed by id."""
        result = asdict(self)
        if self.logprobs is not None:
            result["logprobs"] = [
                {"id": row.id, "logprob": row.logprob, "top": row.top} for row in self.logprobs
            ]
        return result


class Steering(Protocol):
    """What is added to the states of a request, and how its logits come about."""

    @property
    def rows(self) -> tuple[Mapping[int | str, Tensor] | None, ...]:
        """What is added to each of the n rows that the body runs for one sequence."""
        ...

    @property
    def law(self) -> object:
        """What sequences that are steered alike share; what each notes is its own all the same."""
        ...

    def answer(self, head: Head, h: Tensor, alike: "Sequence[Steering]") -> Tensor | None:
        """Return logits `[B, V]` for the h `[B, n, d]` of B sequences of one law.

        `alike` is the steering of each of them. None: the head answers the last of the n rows as
        if it were the only one.
        """
        ...

    def alone(self) -> "Steering":
        """Return the same for another request; what that one notes is its own."""
        ...


@dataclass(frozen=True)
class Request:
    """A sequence to continue, with its own sampler, seed, limits and steering.

    - `sampler`: how tokens are chosen; its parameters hold the ids that end the text.
    - `seed` replaces the sampler's seed; `index` distinguishes several sequences with one seed.
    - `stop`: texts that end the continuation; they are not part of it.
    - `prompt`: the text that the result reports as its prompt.
    - `prompt_logprobs`: report the log-probability of every id of the prompt, with this many of the
      best alternatives; None for no report.
    """

    ids: Sequence[int]
    sampler: Sampler
    max_tokens: int = 64
    stop: tuple[str, ...] = ()
    seed: int | None = None
    index: int = 0
    steering: Steering | None = None
    prompt: str = ""
    prompt_logprobs: int | None = None


@dataclass(frozen=True)
class Event:
    """What one step did to one request: a token, the text that is now certain, the result.

    The text of a token may arrive later, with another one. A request's last event has its result
    or, if its own settings made it impossible to continue, the error. The first has the
    log-probabilities of the prompt, if requested: None for its first id.
    """

    id: int
    text: str = ""
    token: int | None = None
    logprobs: Logprobs | None = None
    result: Generation | None = None
    error: Exception | None = None
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None
