"""Everything that a trim asks of the model before it is cut, in one pass, kept as it is done.

Prompts of texts to listen to and of texts held back are continued together. Then the model reads
other texts until it is known how often it leaves what would be kept. What it says on texts held
back has no part in what is kept: it serves the estimate, and the proof on unheard prompts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lmhead import __version__
from lmhead.errors import BadInput
from lmhead.files.stamp import sha256_of
from lmhead.loading import Model
from lmhead.progress import Advance, Progress, part_of, silent
from lmhead.trim.counts import fingerprint
from lmhead.trim.coverage import Listening
from lmhead.trim.estimate import News
from lmhead.trim.folder import ModelFolder
from lmhead.trim.inputs import Greedy
from lmhead.trim.listening import (
    Group,
    Spoken,
    listen,
    listen_to_continuations,
)
from lmhead.trim.resume import Memory, key_of, packed, unpacked
from lmhead.trim.sample import cut_prompts
from lmhead.trim.workers import Here, Workers

FEW = 24  # of a small corpus one text in so many is continued, but as many as the proof runs on
SHARE = 160  # prompts that one worker continues; smaller products would be slower
PART, LEAST = 16, 2048  # of a small corpus one token in so many is read, but so many at least

_CODE = ("listening.py", "hearing.py", "coverage.py")  # another code may say something else

Rows = list[list[int]]
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Question:
    """What the model is asked: texts as ids, in a random order, and limits."""

    texts: Rows
    held: Rows  # held back, to estimate on
    unheard: Rows  # for the proof alone, where too few are held back
    kept_anyway: frozenset[int]
    coverage: float
    positions: int
    continuations: int
    max_tokens: int
    proof_prompts: int

    @property
    def proved(self) -> int:
        """How many prompts that are listened to the proof runs on."""
        return -(-self.proof_prompts // 2)

    @property
    def heard_count(self) -> int:
        """How many of the texts are continued."""
        return min(self.continuations, max(8, self.proved, len(self.texts) // FEW))

    @property
    def prompts(self) -> Rows:
        """The beginnings of texts, to listen to."""
        return cut_prompts(self.texts[: self.heard_count])

    @property
    def held_prompts(self) -> Rows:
        """The beginnings of texts held back."""
        few = max(8, len(self.held) * 2 // 3)
        return cut_prompts(self.held[: min(self.continuations, few)])

    @property
    def read(self) -> Rows:
        """The texts to read, which listening may end before.

        The beginnings of those that are continued are read already, and count.
        """
        tokens = sum(map(len, self.texts))
        texts = [*self.texts[self.heard_count :], *self.texts[: self.heard_count]]
        already = sum(len(prompt) - 1 for prompt in self.prompts)
        least = max(LEAST // 2, max(LEAST, tokens // PART) - already)
        return within(texts, min(self.positions, least))


@dataclass(frozen=True)
class Heard:
    """What the model said: on texts, and on texts held back where there are any."""

    known: Listening
    held: Listening | None  # its choices
    continuations: Rows  # of texts held back
    news: News
    greedy: Greedy  # for the proof


def hear(
    folder: ModelFolder,
    model: Callable[[], Model],
    question: Question,
    *,
    resume: bool = True,
    workers: Workers | None = None,
    progress: Progress,
) -> Heard:
    """Ask the model, or take what it said to the same question before; then it is not loaded."""
    prompts, held_prompts, unheard = (
        question.prompts,
        question.held_prompts,
        cut_prompts(question.unheard),
    )
    if not prompts:
        raise BadInput("the corpus has too few texts to run the model on; give more")
    memory = Memory(_key(folder, question) if resume else None)
    proved = question.proved
    alone = question.proof_prompts // 2  # at most so many that it is not listened to on

    def speak() -> Tensors:
        groups = (
            Group(prompts, states=proved),
            Group(held_prompts, heard=False, states=alone),
            Group(unheard, heard=False, states=len(unheard), counted=False),
        )
        said = _continued(workers or Here(model), groups, question.max_tokens, progress)
        return {f"{at}.{k}": t for at, one in enumerate(said) for k, t in _spoken(one).items()}

    found = memory.once("continuations", speak)
    said, held_said, proof_said = (_of_spoken(found, str(at)) for at in range(3))

    def read() -> Tensors:
        heard, news = listen(
            model(),
            question.read,
            known=question.kept_anyway,
            before=said.heard,
            share=question.coverage,
            stop=True,
            workers=workers,
            progress=progress,
        )
        numbers = torch.tensor([news.rate, news.low, news.high], dtype=torch.float64)
        return {**_listening(heard), "news": numbers, "news.positions": _one(news.positions)}

    found = memory.once("texts", read)
    heard = _of_listening(found)
    rate, low, high = found["news"].tolist()
    news = News(rate, low, high, int(found["news.positions"]))
    greedy: Greedy = {}
    for rows, one in ((prompts, said), (held_prompts, held_said), (unheard, proof_said)):
        for prompt, text, states in zip(rows, one.texts, one.states, strict=False):
            greedy[tuple(prompt)] = text, states
    held = held_said.heard if held_prompts else None
    return Heard(said.heard + heard, held, held_said.texts, news, greedy)


def shares(groups: Sequence[Group], most: int) -> list[tuple[Group, ...]]:
    """Cut groups of prompts into shares of about `most` prompts, a part of every group in each."""
    count = max(1, -(-sum(len(group.prompts) for group in groups) // most))

    def part(group: Group, at: int) -> Group:
        first, end = (len(group.prompts) * i // count for i in (at, at + 1))
        states = min(max(0, group.states - first), end - first)
        return Group(group.prompts[first:end], group.heard, states, group.counted)

    return [tuple(part(group, at) for group in groups) for at in range(count)]


def _continued(
    workers: Workers, groups: Sequence[Group], max_tokens: int, progress: Progress
) -> list[Spoken]:
    """Continue groups of prompts, share by share; return what was said in each group."""
    todo = shares(groups, SHARE)
    total = sum(len(group.prompts) for group in groups) * max_tokens
    parts = []
    with progress("listening to the model as it goes on", total=total) as advance:
        own = advance if workers.is_here else None  # what shows progress cannot be sent
        said = workers.each(partial(_one_share, max_tokens=max_tokens, advance=own), todo)
        for share, found in zip(todo, said, strict=True):
            parts.append(found)
            if not workers.is_here:
                advance(sum(len(group.prompts) for group in share) * max_tokens)
    return [
        Spoken(
            sum((one.heard for one in of_group[1:]), of_group[0].heard),
            [text for one in of_group for text in one.texts],
            [state for one in of_group for state in one.states],
        )
        for of_group in zip(*parts, strict=True)
    ]


def _one_share(
    model: Model, groups: Sequence[Group], *, max_tokens: int, advance: Advance | None
) -> list[Spoken]:
    progress = silent if advance is None else part_of(advance)
    return listen_to_continuations(model, *groups, max_tokens=max_tokens, progress=progress)


def within(texts: Sequence[Sequence[int]], positions: int) -> Rows:
    """Take texts until they hold `positions` tokens."""
    taken: Rows = []
    left = positions
    for ids in texts:
        if left <= 0:
            break
        taken.append(list(ids[:left]))
        left -= len(taken[-1])
    return taken


def _key(folder: ModelFolder, question: Question) -> str:
    settings = {
        "lmhead": __version__,
        "config": dict(folder.checkpoint.config),
        "generation": dict(folder.checkpoint.generation_config),
        "tokenizer": fingerprint(folder.tokenizer),
        "coverage": question.coverage,
        "max_tokens": question.max_tokens,
        "proof_prompts": question.proof_prompts,
        "code": [sha256_of(Path(__file__).with_name(name)) for name in _CODE],
    }
    lists = (
        question.prompts,
        question.held_prompts,
        question.unheard,
        question.read,
        sorted(question.kept_anyway),
    )
    return key_of(folder.folder, settings, lists)


def _one(number: int) -> Tensor:
    return torch.tensor(number, dtype=torch.long)


def _listening(heard: Listening) -> dict[str, Tensor]:
    return {
        "mass": heard.mass,
        "chosen": heard.chosen,
        "choices": heard.choices,
        "positions": _one(heard.positions),
    }


def _of_listening(found: Tensors, start: str = "") -> Listening:
    mass, chosen, choices = (found[f"{start}{name}"] for name in ("mass", "chosen", "choices"))
    return Listening(mass, chosen, choices, int(found[f"{start}positions"]))


def _spoken(said: Spoken) -> dict[str, Tensor]:
    states = {f"state.{at}": state for at, state in enumerate(said.states)}
    return {**_listening(said.heard), **packed(said.texts), **states}


def _of_spoken(found: Tensors, at: str) -> Spoken:
    texts = unpacked(found[f"{at}.ids"], found[f"{at}.lengths"])
    count = sum(name.startswith(f"{at}.state.") for name in found)
    states = [found[f"{at}.state.{i}"] for i in range(count)]
    return Spoken(_of_listening(found, f"{at}."), texts, states)
