"""Multiple choice: which of some continuations a model finds the most probable.

The log-probability of a continuation is the sum of those of its tokens, given the prompt. Long ones
have lower sums, so the mean per token is given as well. Only the rows of the options' own tokens
are needed, and the normaliser: a screened head gives that to a proven error, without all logits.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lmhead.errors import BadInput
from lmhead.generation.engines import check_engine, engine
from lmhead.generation.prompts import Source, check_head
from lmhead.generation.score import TextScore, scores
from lmhead.head import Head
from lmhead.loading import load
from lmhead.models.registry import DEFAULT_MODEL
from lmhead.progress import Progress, silent

ERROR = 0.05
"""How far off a screened head's log-probability of a token may be, in natural logarithms.

Where that leaves open which option is the best, all of them are scored again, exactly.
"""


@dataclass(frozen=True)
class Option:
    """One continuation, and how probable it is."""

    text: str
    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]  # one for each token
    logprob: float  # their sum
    mean: float  # of a token
    share: float  # among the options, by the sum


@dataclass(frozen=True)
class Choice:
    """Which of several continuations of a prompt a model finds most probable."""

    prompt: str
    options: tuple[Option, ...]  # in the order given
    best: int  # the place of the most probable one
    best_by_mean: int  # likewise, by the mean of a token
    error: float  # how far off the log-probability of a token may be

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        return asdict(self)


def choose(
    prompt: str,
    options: Sequence[str],
    model: Source = DEFAULT_MODEL,
    *,
    chat: bool = False,
    head: Head | None = None,
    engine_name: str = "auto",
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    progress: Progress = silent,
) -> Choice:
    """Score several continuations of a prompt, and show which is the most probable.

    Prompt and option are joined as they are: start an option with a space if the text has one
    there. `chat` wraps the prompt in the model's chat template; the option is then the answer.
    `head` is an engine to use instead of the one that `engine_name` selects.

    >>> choose("The capital of France is", [" Paris", " London"]).best
    0
    """
    check_options(prompt, options)
    check_engine(engine_name)
    check_head(head)
    loaded = load(model, device=device, dtype=dtype, progress=progress)
    head = head or engine(loaded, engine_name, progress=progress)
    error = 0.0 if head.reads_all else ERROR
    pairs = [(prompt, option) for option in options]
    found = []
    with progress("scoring", total=len(options)) as advance:
        for one in scores(pairs, loaded, chat=chat, head=head, error=error):
            found.append(one)
            advance(1)
    if error and not _decided(found, error):
        error = 0.0
        found = list(scores(pairs, loaded, chat=chat, head=head))
    best = max(one.logprob for one in found)
    whole = math.fsum(math.exp(one.logprob - best) for one in found)
    scored = tuple(
        Option(
            one.text, one.ids, one.tokens,
            tuple(p for p in one.logprobs if p is not None),
            one.logprob, one.logprob / one.scored, math.exp(one.logprob - best) / whole,
        )
        for one in found
    )  # fmt: skip
    places = range(len(scored))
    return Choice(
        prompt,
        scored,
        max(places, key=lambda n: scored[n].logprob),
        max(places, key=lambda n: scored[n].mean),
        error,
    )


def _decided(found: Sequence[TextScore], error: float) -> bool:
    """Tell whether the best option is the best for all log-probabilities within the error."""
    for off, value in (
        ([error * one.scored for one in found], [one.logprob for one in found]),
        ([error] * len(found), [one.logprob / one.scored for one in found]),
    ):
        best = max(range(len(found)), key=value.__getitem__)
        others = [v + e for n, (v, e) in enumerate(zip(value, off, strict=True)) if n != best]
        if not value[best] - off[best] > max(others):
            return False
    return True


def check_options(prompt: str, options: Sequence[str]) -> None:
    """Refuse what is no choice, before a model is loaded."""
    if not isinstance(prompt, str) or not prompt:
        raise BadInput("the prompt is empty; expected some text for the options to continue")
    if isinstance(options, str) or len(options) < 2:
        raise BadInput(
            f"there {'is one option' if isinstance(options, str) or options else 'are no options'}"
            "; expected at least two to choose from"
        )
    for option in options:
        if not isinstance(option, str) or not option:
            raise BadInput(f"an option is {option!r}; expected some text")
