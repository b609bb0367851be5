"""Everything that a trim asks of the model before it is cut, in one pass, kept as it is done.

Prompts of the texts to learn from and of those held back are continued together. Then it reads
other texts until it is known how often it leaves what would be kept. What it says on texts held
back has no part in what is kept: it serves the estimate, and the proof on fresh prompts.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event, Lock

import torch
from torch import Tensor

from lmhead import __version__
from lmhead.body.grouped import grouped_attention
from lmhead.errors import BadInput
from lmhead.files.stamp import sha256_of
from lmhead.loading import Model
from lmhead.progress import Advance, Progress, part_of, silent
from lmhead.trim.coverage import Observed
from lmhead.trim.estimate import News
from lmhead.trim.folder import ModelFolder
from lmhead.trim.inputs import Greedy
from lmhead.trim.observing import (
    CONTINUING,
    Best,
    Group,
    Spoken,
    best_by_screen,
    observe_continuations,
    observe_texts,
    threads,
)
from lmhead.trim.resume import Memory, key_of, packed, unpacked
from lmhead.trim.sample import cut_prompts
from lmhead.trim.workers import Here, Workers

FEW = 24  # of a small corpus one text in so many is continued, but as many as the proof runs on
SHARE = 160  # prompts that one worker continues; smaller products would be slower
SIDES, SIDE = 2, 48  # so many shares at once, if each has so many prompts or more
PART, LEAST = 16, 2048  # of a small corpus one token in so many is read, but so many at least

_CODE = ("observing.py", "observations.py", "coverage.py")  # another code may say something else

Rows = list[list[int]]
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Question:
    """What the model is asked: texts as ids, in a random order, and limits."""

    texts: Rows
    held: Rows  # held back, to estimate on
    fresh: Rows  # for the proof alone, where too few are held back
    kept_anyway: frozenset[int]
    coverage: float
    positions: int
    continuations: int
    max_tokens: int
    proof_prompts: int

    @property
    def proved(self) -> int:
        """How many of the prompts that rows are chosen by the proof runs on."""
        return -(-self.proof_prompts // 2)

    @property
    def continued_count(self) -> int:
        """How many of the texts are continued."""
        return min(self.continuations, max(8, self.proved, len(self.texts) // FEW))

    @property
    def prompts(self) -> Rows:
        """The beginnings of texts, to continue."""
        return cut_prompts(self.texts[: self.continued_count])

    @property
    def held_prompts(self) -> Rows:
        """The beginnings of texts held back."""
        few = max(8, len(self.held) * 2 // 3)
        return cut_prompts(self.held[: min(self.continuations, few)])

    @property
    def read(self) -> Rows:
        """The texts to read; reading may stop before their end.

        The beginnings of those that are continued are read already, and count.
        """
        tokens = sum(map(len, self.texts))
        texts = [*self.texts[self.continued_count :], *self.texts[: self.continued_count]]
        already = sum(len(prompt) - 1 for prompt in self.prompts)
        least = max(LEAST // 2, max(LEAST, tokens // PART) - already)
        return within(texts, min(self.positions, least))


@dataclass(frozen=True)
class Observations:
    """What the model said: on texts, and on texts held back where there are any."""

    known: Observed
    held: Observed | None  # its choices
    continuations: Rows  # of texts held back
    news: News
    greedy: Greedy  # for the proof


def observe(
    folder: ModelFolder,
    model: Callable[[], Model],
    question: Question,
    *,
    resume: bool = True,
    workers: Workers | None = None,
    progress: Progress,
) -> Observations:
    """Ask the model, or take what it said to the same question before; then it is not loaded."""
    prompts, held_prompts, fresh = (
        question.prompts,
        question.held_prompts,
        cut_prompts(question.fresh),
    )
    if not prompts:
        raise BadInput("the corpus has too few texts to run the model on; give more")
    memory = Memory(_key(folder, question) if resume else None)
    proved = question.proved
    alone = question.proof_prompts // 2  # at most so many that no row is chosen by

    def speak() -> Tensors:
        groups = (
            Group(prompts, states=proved),
            Group(held_prompts, whole=False, states=alone),
            Group(fresh, whole=False, states=len(fresh), counted=False),
        )
        said = _continued(workers or Here(model), groups, question.max_tokens, progress)
        return {f"{at}.{k}": t for at, one in enumerate(said) for k, t in _spoken(one).items()}

    found = memory.once("continuations", speak)
    said, held_said, proof_said = (_of_spoken(found, str(at)) for at in range(3))

    def read() -> Tensors:
        seen, news = observe_texts(
            model(),
            question.read,
            known=question.kept_anyway,
            before=said.seen,
            share=question.coverage,
            stop=True,
            workers=workers,
            progress=progress,
        )
        numbers = torch.tensor([news.rate, news.low, news.high], dtype=torch.float64)
        return {**_observed(seen), "news": numbers, "news.positions": _one(news.positions)}

    found = memory.once("texts", read)
    seen = _of_observed(found)
    rate, low, high = found["news"].tolist()
    news = News(rate, low, high, int(found["news.positions"]))
    greedy: Greedy = {}
    for rows, one in ((prompts, said), (held_prompts, held_said), (fresh, proof_said)):
        for prompt, text, states in zip(rows, one.texts, one.states, strict=False):
            greedy[tuple(prompt)] = text, states
    held = held_said.seen if held_prompts else None
    return Observations(said.seen + seen, held, held_said.texts, news, greedy)


def shares(groups: Sequence[Group], most: int) -> list[tuple[Group, ...]]:
    """Cut groups of prompts into shares of about `most` prompts, a part of every group in each."""
    count = max(1, -(-sum(len(group.prompts) for group in groups) // most))

    def part(group: Group, at: int) -> Group:
        first, end = (len(group.prompts) * i // count for i in (at, at + 1))
        states = min(max(0, group.states - first), end - first)
        return Group(group.prompts[first:end], group.whole, states, group.counted)

    return [tuple(part(group, at) for group in groups) for at in range(count)]


def _continued(
    workers: Workers, groups: Sequence[Group], max_tokens: int, progress: Progress
) -> list[Spoken]:
    """Continue groups of prompts, share by share; return what was said in each group."""
    todo, count = _parted(groups)
    prompts = [sum(len(group.prompts) for group in share) for share in todo]
    work = partial(_one_share, max_tokens=max_tokens, count=count)
    here = workers.model() if isinstance(workers, Here) else None  # loaded before the bar is shown
    with progress(CONTINUING, total=sum(prompts) * max_tokens) as advance:
        if here is None:
            parts = []
            for found, steps in zip(workers.each(work, todo), prompts, strict=True):
                parts.append(found)
                advance(steps * max_tokens)
        elif count < torch.get_num_threads():
            parts = _side_by_side(here, work, todo, count, advance)
        else:
            parts = [work(here, share, advance=advance) for share in todo]
    return [
        Spoken(
            sum((one.seen for one in of_group[1:]), of_group[0].seen),
            [text for one in of_group for text in one.texts],
            [state for one in of_group for state in one.states],
        )
        for of_group in zip(*parts, strict=True)
    ]


def _parted(groups: Sequence[Group]) -> tuple[list[tuple[Group, ...]], int]:
    """Return the shares of all prompts, and how many threads each of them is continued with.

    A step multiplies one row for each prompt. For so few rows, two threads of one product wait for
    each other: two shares side by side, of one thread each, take a seventh less. Where there are
    more threads, shares have all of them, one after the other: threads in teams would be too many.
    """
    n, total = torch.get_num_threads(), sum(len(group.prompts) for group in groups)
    if n // SIDES != 1 or total < SIDES * SIDE:
        return shares(groups, SHARE), n
    rounds = -(-total // (SIDES * SHARE))
    return shares(groups, -(-total // (SIDES * rounds))), 1


def _side_by_side(
    model: Model,
    work: Callable[..., list[Spoken]],
    todo: Sequence[tuple[Group, ...]],
    count: int,
    advance: Advance,
) -> list[list[Spoken]]:
    """Do some shares at once, in threads of this process; the first failure ends all of them."""
    lock, over = Lock(), Event()

    def forward(steps: int) -> None:
        if over.is_set():
            raise CancelledError
        with lock:
            advance(steps)

    with grouped_attention(model.body), threads(count), ThreadPoolExecutor(SIDES) as pool:
        # one copy of the head's weights for all
        screen = best_by_screen(model) if any(not group.whole for group in todo[0]) else None
        jobs = [
            pool.submit(work, model, share, screen=lambda _: screen, advance=forward)
            for share in todo
        ]
        try:
            wait(jobs, return_when=FIRST_EXCEPTION)
        finally:  # after an interruption too: who still works stops at the next token
            over.set()
            pool.shutdown(cancel_futures=True)
        failed = [job.exception() for job in jobs if job.done() and not job.cancelled()]
        for error in failed:
            if error is not None and not isinstance(error, CancelledError):
                raise error
        return [job.result() for job in jobs]


def _one_share(
    model: Model,
    groups: Sequence[Group],
    *,
    max_tokens: int,
    count: int,
    screen: Callable[[Model], Best | None] = best_by_screen,
    advance: Advance | None = None,
) -> list[Spoken]:
    progress = silent if advance is None else part_of(advance)
    with threads(count):
        return observe_continuations(
            model, *groups, max_tokens=max_tokens, screen=screen, progress=progress
        )


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
        "tokenizer": hashlib.sha256(folder.tokenizer.text.encode()).hexdigest(),
        "coverage": question.coverage,
        "max_tokens": question.max_tokens,
        "proof_prompts": question.proof_prompts,
        "code": [sha256_of(Path(__file__).with_name(name)) for name in _CODE],
    }
    lists = (
        question.prompts,
        question.held_prompts,
        question.fresh,
        question.read,
        sorted(question.kept_anyway),
    )
    return key_of(folder.folder, settings, lists)


def _one(number: int) -> Tensor:
    return torch.tensor(number, dtype=torch.long)


def _observed(seen: Observed) -> dict[str, Tensor]:
    return {
        "mass": seen.mass,
        "chosen": seen.chosen,
        "choices": seen.choices,
        "positions": _one(seen.positions),
    }


def _of_observed(found: Tensors, start: str = "") -> Observed:
    mass, chosen, choices = (found[f"{start}{name}"] for name in ("mass", "chosen", "choices"))
    return Observed(mass, chosen, choices, int(found[f"{start}positions"]))


def _spoken(said: Spoken) -> dict[str, Tensor]:
    states = {f"state.{at}": state for at, state in enumerate(said.states)}
    return {**_observed(said.seen), **packed(said.texts), **states}


def _of_spoken(found: Tensors, at: str) -> Spoken:
    texts = unpacked(found[f"{at}.ids"], found[f"{at}.lengths"])
    count = sum(name.startswith(f"{at}.state.") for name in found)
    states = [found[f"{at}.state.{i}"] for i in range(count)]
    return Spoken(_of_observed(found, f"{at}."), texts, states)
