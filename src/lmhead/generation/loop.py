"""The decoding loop: a left-padded batch, a key-value cache, and the head on the last position.

Symbols: B sequences still going, T the longest prompt, h `[B, d]` what enters the head.
A sequence that ends leaves the batch, so that the others pay nothing for it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from lmhead.body import Body, State
from lmhead.generation.asking import next_ids
from lmhead.generation.text import TextStream
from lmhead.head import Head
from lmhead.loading import Model
from lmhead.sampling import Logprobs, Sampler, SequenceState


@dataclass(frozen=True)
class Generation:
    """One continuation of a prompt.

    `ids` are all ids that were drawn, the one that ended the text included; `text` is what they
    say, without special tokens and without the stop string.
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


@dataclass
class Ongoing:
    """A sequence on its way."""

    index: int
    prompt: str
    prompt_ids: list[int]
    max_tokens: int
    state: SequenceState
    text: TextStream
    logprobs: list[Logprobs] = field(default_factory=list)

    def result(self, reason: str) -> Generation:
        """Return what has become of it."""
        return Generation(
            self.prompt,
            self.text.text,
            tuple(self.prompt_ids),
            tuple(self.state.output_ids),
            reason,
            self.text.stopped_by,
            tuple(self.logprobs) if self.logprobs else None,
        )


@dataclass(frozen=True)
class Event:
    """New text of one sequence; with its last text comes its result."""

    index: int
    text: str
    result: Generation | None = None


def decode(model: Model, head: Head, sampler: Sampler, batch: Sequence[Ongoing]) -> Iterator[Event]:
    """Continue a batch of sequences, and tell of each as its text grows."""
    going = list(batch)
    cache = Cache(model.body, [s.prompt_ids for s in going])
    with torch.inference_mode():
        h = cache.prefill()
    while going:
        with torch.inference_mode():
            drawn, logprobs = next_ids(head, h, sampler, [s.state for s in going])
        keep: list[int] = []
        for row, (sequence, token) in enumerate(zip(going, drawn, strict=True)):
            if logprobs is not None:
                sequence.logprobs.append(logprobs[row])
            stops = token in sampler.params.stop_ids
            text = "" if stops else sequence.text.push(token)
            stops = stops or sequence.text.stopped_by is not None or sequence.state.finished
            if stops or len(sequence.state.output_ids) >= sequence.max_tokens:
                text += sequence.text.finish()
                stops = stops or sequence.text.stopped_by is not None
                result = sequence.result("stop" if stops else "length")
                yield Event(sequence.index, text, result)
            else:
                keep.append(row)
                if text:
                    yield Event(sequence.index, text)
        if len(keep) < len(going):
            going = [going[row] for row in keep]
            if going:
                cache.select(keep)
        if going:
            with torch.inference_mode():
                h = cache.step([drawn[row] for row in keep])


class Cache:
    """The body's memory of a batch, and how it goes on: by its prompts, then one id at a time."""

    def __init__(self, body: Body, prompts: Sequence[Sequence[int]]) -> None:
        self._body = body
        self._ids, self._state = State.of_prompts(prompts)

    def prefill(self) -> Tensor:
        """Read the prompts; return h `[B, d]` of their last tokens."""
        return self._run(self._ids)

    def step(self, ids: list[int]) -> Tensor:
        """Read one id per sequence; return its h `[B, d]`."""
        return self._run(torch.tensor(ids).unsqueeze(-1))

    def _run(self, ids: Tensor) -> Tensor:
        h, self._state = self._body.run(ids, self._state)
        return h[:, -1]

    def select(self, rows: list[int]) -> None:
        """Keep these rows of the batch."""
        self._state.select(rows)

    def reorder(self, rows: Tensor) -> None:
        """Let row i go on from what row rows[i] was."""
        self._state.select(rows.tolist())
