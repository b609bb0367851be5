"""Observing a model: it reads texts, continues prompts, and what it says is added up.

Continuations of all kinds run together, in one batch of the engine; the positions of their prompts
are seen in the same pass. The states of some are kept, so that a proof need not run them again.

Symbols: h what enters the head `[..., d]`, z logits `[..., V]`, p probabilities `[..., V]`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmhead.body.grouped import grouped_attention
from lmhead.errors import LMHeadError
from lmhead.generation import Engine, Request
from lmhead.loading import Model
from lmhead.progress import Progress, silent
from lmhead.sampling import Sampler, SamplingParams
from lmhead.trim.coverage import Observed, covered, mask_of, nothing
from lmhead.trim.estimate import News
from lmhead.trim.sample import WINDOW
from lmhead.trim.workers import Here, Workers

LOT = 1024  # tokens that the model reads at once: below that a matrix product is slow
TOGETHER = 160  # prompts that are continued at once, where memory allows
MEMORY = 2**30  # bytes of keys and values
LOGITS, ROWS = 2**24, 96  # logits that are held at once, but so many rows: W is read for each lot
NEAR_TIE = 0.01  # logits; nearer than this, rounding in another batch may choose the other
FEW_ROWS = 64  # whose products two threads take nearly twice the time of one for
LARGE = 2**26  # weights of a head, from which on its screen finds a choice much sooner
AT_LEAST = 2048  # positions of texts, before reading may stop
CONTINUING = "continuing texts, to see what the model says"
READING = "reading texts, until the model says little new"


class Observer:
    """Adds up what a model says; its choices alone, if not the `whole` of what it might say."""

    def __init__(self, model: Model, *, whole: bool = True) -> None:
        self.model, self.whole = model, whole
        self.seen = nothing(model.reachable)

    def observe(self, h: Tensor) -> Tensor:
        """Take in the states `h [n, d]` that enter the head, return the greedy choices `[n]`."""
        return observe([self], torch.zeros(len(h), dtype=torch.long), h)

    def take(self, z: Tensor, best: Tensor, choice: Tensor) -> None:
        """Add up logits `z [n, V]`, which are changed, the best of each row and whose it is."""
        p = z.sub_(best[:, None]).exp_()  # 1 where it is the best
        self.count(choice, p.amax(0) >= math.exp(-NEAR_TIE), p.sum(-1).reciprocal() @ p)

    def count(self, choice: Tensor, near: Tensor | None = None, mass: Tensor | None = None) -> None:
        """Add up choices `[n]` alone, or with what is near them and the probability of all."""
        seen = self.seen
        count = torch.bincount(choice, minlength=len(seen.choices))
        self.seen = Observed(
            seen.mass if mass is None else seen.mass + mass.double(),
            seen.chosen | (count > 0 if near is None else near),
            seen.choices + count,
            seen.positions + len(choice),
        )


def observe(
    observers: Sequence[Observer], owner: Tensor, h: Tensor, quick: "Best | None" = None
) -> Tensor:
    """Give the states `h [n, d]` to their observers; return the greedy choices `[n]`.

    `quick` finds the choices of those that want no more than them.
    """
    model = observers[0].model
    whole = torch.tensor([observer.whole for observer in observers])[owner]
    if quick is not None and not bool(whole.all()):
        found = torch.empty(len(h), dtype=torch.long)
        if bool(whole.any()):
            found[whole] = observe(observers, owner[whole], h[whole])
        found[~whole] = quick(h[~whole])
        for at, observer in enumerate(observers):
            if not observer.whole:
                observer.count(found[owner == at])
        return found
    V = model.reachable
    most = max(ROWS, LOGITS // V)
    choices = []
    for part, owners in zip(torch.split(h, most), torch.split(owner, most), strict=True):
        z: Tensor = logits(model.head, part).float()[:, :V]  # [n, V]
        best, choice = z.max(-1)
        for at, observer in enumerate(observers):
            mine = rows_of(owners, at)
            if len(choice[mine]) and observer.whole:
                observer.take(z[mine], best[mine], choice[mine])
            elif len(choice[mine]):
                observer.count(choice[mine])
        choices.append(choice)
    return torch.cat(choices)


def rows_of(owners: Tensor, owner: int) -> slice | Tensor:
    """Return which rows are an owner's: a slice where they lie together, which copies nothing."""
    rows = (owners == owner).nonzero()[:, 0]
    if not len(rows):
        return slice(0, 0)
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == len(rows) else rows


def logits(head: Any, h: Tensor) -> Tensor:
    """Return the logits `[n, V]` of what enters the projection, `[n, d]`; free to be changed."""
    z: Tensor = head(h)
    return z


Best = Callable[[Tensor], Tensor]


def best_by_screen(model: Model) -> Best | None:
    """Return what finds the best tokens `[n]` of states `[n, d]` by the head's screen.

    None where the head is so small that a product is as good, or has no screen. What is nearly a
    tie is decided by the head itself.
    """
    from lmhead.head.screened import ScreenedHead
    from lmhead.head.screening.loops import can_compile

    head, V = model.head, model.reachable
    if head.weight.numel() < LARGE or not can_compile():
        return None
    try:
        screened = ScreenedHead.from_head(head, model.folder)
    except LMHeadError:  # weights of other kinds have none
        return None

    def best(h: Tensor) -> Tensor:
        ids, z = screened.candidates(h.contiguous(), 2, limit=V)
        found, near = ids[:, 0].clone(), z[:, 0] - z[:, 1] < NEAR_TIE
        if bool(near.any()):
            found[near] = logits(head, h[near])[:, :V].argmax(-1)
        return found

    return best


def lots(texts: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Group texts of about the same length to lots of about `LOT` tokens, in the order given.

    Only neighbours are sorted by length, so that the first lots are as good a sample as all.
    """
    for first in range(0, len(texts), 64):
        near = sorted(texts[first : first + 64], key=len)
        lot: list[Sequence[int]] = []
        for ids in near:
            if lot and (len(lot) + 1) * len(ids) > LOT:
                yield lot
                lot = []
            lot.append(ids)
        if lot:
            yield lot


def observe_texts(
    model: Model,
    texts: Sequence[Sequence[int]],
    *,
    known: Iterable[int] = (),
    before: Observed | None = None,
    share: float = 0.0,
    stop: bool = False,
    workers: Workers | None = None,
    progress: Progress = silent,
) -> tuple[Observed, News]:
    """Run the model over texts, given as ids, and note what it would say after every token.

    `known` are ids that are kept anyway, `before` is what it said before, and `share` the coverage:
    with these every lot is judged by what would be kept without it. With `stop`, the texts come in
    a random order, and reading ends as soon as it is known well enough how often that is left.
    `workers` run the model; this process, if not given.
    """
    windows = [list(ids[at : at + WINDOW]) for ids in texts for at in range(0, len(ids), WINDOW)]
    held = mask_of(known, model.reachable)
    seen = nothing(model.reachable)
    earlier = before or seen
    judged: list[tuple[int, int]] = []
    todo = list(lots(windows))
    done = (workers or Here(lambda: model)).each(read_lot, todo)
    with progress(READING, total=sum(map(len, windows))) as advance, closing(done):
        for lot, (said, chosen) in zip(todo, done, strict=True):
            kept = covered(earlier + seen, held, share)
            seen = seen + said
            new = torch.split(~kept[chosen], [len(ids) for ids in lot])
            judged += [(len(ids), int(part.sum())) for ids, part in zip(lot, new, strict=True)]
            advance(len(chosen))
            enough = seen.positions >= AT_LEAST
            if stop and enough and News.of(judged).is_known:
                break
    return seen, News.of(judged)


@torch.inference_mode()
def read_lot(model: Model, lot: Sequence[Sequence[int]]) -> tuple[Observed, Tensor]:
    """Run the model over a lot of texts; return what it said, and its choice after every token."""
    longest = max(map(len, lot))
    # What is filled up stands behind a text, where no model that generates looks.
    filled = [[*ids, *[ids[-1]] * (longest - len(ids))] for ids in lot]
    h, _ = model.body(torch.tensor(filled), use_cache=False)  # [n, T, d]
    observer = Observer(model)
    chosen = observer.observe(torch.cat([h[at, : len(ids)] for at, ids in enumerate(lot)]))
    return observer.seen, chosen


Choose = Callable[[Tensor, Sequence[int]], Tensor]
Read = Callable[[Tensor, Sequence[int]], None]


def continue_greedily(
    model: Model,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    choose: Choose | None = None,
    read: Read | None = None,
    title: str = CONTINUING,
    progress: Progress = silent,
) -> list[list[int]]:
    """Continue each prompt by its `max_tokens` best tokens, or up to the end-of-text token.

    `choose` makes ids `[n]` of the states `h [n, d]` that enter the head, and of the numbers of
    their prompts; the model's best, if not given. It sees only prompts that have not come to their
    end, and ends one itself by giving -1, which is left out. `read` is given the states `[n, T, d]`
    of the prompts themselves, each at the end of its row, and their numbers.
    """
    if choose is None:

        def choose(h: Tensor, _which: Sequence[int]) -> Tensor:
            return logits(model.head, h)[:, : model.reachable].argmax(-1)

    def chosen(h: Tensor, which: Sequence[int]) -> list[int]:
        found: list[int] = choose(h, which).tolist()
        return found

    if not prompts:
        return []
    results: list[list[int]] = [[] for _ in prompts]
    params = SamplingParams(temperature=0.0, stop_ids=tuple(_end_ids(model)))
    sampler = Sampler.from_params(params, vocab_size=model.reachable)
    batch = min(len(prompts), _together(model, max(map(len, prompts)) + max_tokens))
    engine = Engine(model, batch_size=batch, choose=chosen, read=read)
    for prompt in prompts:  # the engine numbers them in the same order
        engine.submit(Request(prompt, sampler, max_tokens))
    with (
        progress(title, total=len(prompts) * max_tokens) as advance,
        grouped_attention(model.body),
        few_threads(batch),
    ):
        for event in engine.run():
            advance(1)
            if event.result is not None:
                results[event.id] = list(event.result.ids)
                advance(max_tokens - len(event.result.ids))
    return results


@dataclass(frozen=True)
class Spoken:
    """How a model goes on: greedy continuations of some prompts."""

    seen: Observed  # at the positions of the prompts, and at every step
    texts: list[list[int]]
    states: list[Tensor]  # [T, d] of the first prompts: what entered the head at each step


@dataclass(frozen=True)
class Group:
    """Prompts to continue: whether rows are chosen by them, and how many states are kept.

    Where it is not, its choices are counted all the same: at every step, and if `counted` at the
    positions of the prompts.
    """

    prompts: Sequence[Sequence[int]]
    whole: bool = True
    states: int = 0
    counted: bool = True


def observe_continuations(
    model: Model,
    *groups: Group,
    max_tokens: int,
    screen: Callable[[Model], Best | None] = best_by_screen,
    progress: Progress = silent,
) -> list[Spoken]:
    """Continue groups of prompts greedily, all together; return what was said in each group.

    `screen` finds what finds the choices of groups of which nothing more is wanted.
    """
    observers = [Observer(model, whole=group.whole) for group in groups]
    prompts = [prompt for group in groups for prompt in group.prompts]
    owner = torch.tensor([at for at, group in enumerate(groups) for _ in group.prompts])
    keep = [at < group.states for group in groups for at in range(len(group.prompts))]
    counted = [group.counted for group in groups for _ in group.prompts]
    states: list[list[Tensor]] = [[] for _ in prompts]
    quick = None if all(group.whole for group in groups) else screen(model)

    def choose(h: Tensor, which: Sequence[int]) -> Tensor:
        for place, prompt in enumerate(which):
            if keep[prompt]:
                states[prompt].append(h[place].clone())
        return observe(observers, owner[list(which)], h, quick)

    def read(h: Tensor, which: Sequence[int]) -> None:
        # The last position of a prompt is its first step.
        rows = {i: h[row, -len(prompts[i]) : -1] for row, i in enumerate(which) if counted[i]}
        lengths = torch.tensor([len(row) for row in rows.values()])
        if lengths.sum():
            owners = owner[list(rows)].repeat_interleave(lengths)
            observe(observers, owners, torch.cat(list(rows.values())), quick)

    texts = continue_greedily(
        model, prompts, max_tokens, choose=choose, read=read, progress=progress
    )
    results, start = [], 0
    for observer, group in zip(observers, groups, strict=True):
        end = start + len(group.prompts)
        kept = [torch.stack(states[at]) for at in range(start, end) if keep[at] and states[at]]
        results.append(Spoken(observer.seen, texts[start:end], kept))
        start = end
    return results


def _together(model: Model, length: int) -> int:
    """Return how many texts of a length run together, by the keys and values that they take."""
    config = model.body.config
    d = getattr(config, "hidden_size", 1024)
    heads = getattr(config, "num_attention_heads", None) or 1
    kept = getattr(config, "num_key_value_heads", None) or heads
    width = (getattr(config, "head_dim", None) or d // heads) * kept
    layers = getattr(config, "num_hidden_layers", None) or 24
    return max(1, min(TOGETHER, MEMORY // (8 * layers * width * length)))


def few_threads(rows: int, few: int = FEW_ROWS) -> AbstractContextManager[None]:
    """Leave a second thread alone where few rows run: it takes as much again and wins nothing."""
    before = torch.get_num_threads()
    return threads(1 if rows < few and before == 2 else before)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use so many threads, in the whole process, as long as the block runs."""
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _end_ids(model: Model) -> set[int]:
    config = getattr(model.body.model, "generation_config", None)
    ends = getattr(config, "eos_token_id", None)
    if ends is None:
        ends = getattr(model.body.config, "eos_token_id", None)
    return set() if ends is None else {ends} if isinstance(ends, int) else set(ends)
