"""What the model itself would say: the output side of a keep-set.

A corpus tells which tokens are read. A model may answer with tokens that the corpus does not hold,
and a keep-set without them changes the answer. So listen to the model: at every position of the
corpus, and along its own greedy continuations of it. Keep its choice at each of these positions,
and then the likeliest ids until a share of all probability is held: the coverage.

A softmax gives every token something, so the last nines of a coverage take most of the vocabulary,
in shares of a millionth; greedy text needs none of them.

Symbols: z logits `[..., V]`, p probabilities `[..., V]`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from lmhead.generation import Engine, Request
from lmhead.loading import Model
from lmhead.progress import Progress, silent
from lmhead.sampling import Sampler, SamplingParams
from lmhead.trim.sample import WINDOW

PROMPTS = (32, 16, 8, 4, 2, 1)  # lengths that prompts are cut to: equal ones run as one batch
LOT = 2048  # tokens that the model reads at once: below that a matrix product is slow
TOGETHER = 160  # prompts that are continued at once, where memory allows
MEMORY = 2**30  # bytes of keys and values
LOGITS = 2**24  # logits that are held at once
NEAR_TIE = 0.01  # logits; nearer than this, rounding in another batch may choose the other
ENOUGH = 0.0025  # a share of steps that leave is known well enough within this much
AT_LEAST = 4096  # positions, before listening may stop


@dataclass(frozen=True)
class Listening:
    """What a model said at some positions."""

    mass: Tensor  # [V] float64: the probability of each id, summed over positions
    chosen: Tensor  # [V] bool: the greedy choice somewhere, or as good as
    choices: Tensor  # [V] int64: how often it was the greedy choice
    positions: int

    def __add__(self, other: "Listening") -> "Listening":
        return Listening(
            self.mass + other.mass,
            self.chosen | other.chosen,
            self.choices + other.choices,
            self.positions + other.positions,
        )

    def share(self, ids: Iterable[int]) -> float:
        """Return which share of all probability `ids` hold, averaged over positions."""
        index = torch.tensor(sorted(i for i in ids if i < len(self.mass)), dtype=torch.long)
        return float(self.mass[index].sum() / self.mass.sum())


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
    """How often the model chose what nothing before had asked for, while it was listened to.

    Every lot of texts is judged by what was known before it. Only the later half counts, for at
    the beginning everything is new.
    """

    rate: float
    low: float  # 95 % interval; texts are independent, steps of one text are not
    high: float
    positions: int

    @property
    def is_known(self) -> bool:
        """Whether listening on would tell little more."""
        return (self.high - self.low) / 2 <= ENOUGH

    @classmethod
    def of(cls, texts: "Sequence[tuple[int, int]]") -> "News":
        """Estimate it from texts, given as (positions, how many of them chose something new)."""
        total = sum(n for n, _ in texts)
        later, start = [], 0
        for n, new in texts:
            if 2 * start >= total:
                later.append((n, new))
            start += n
        positions, new = sum(n for n, _ in later), sum(k for _, k in later)
        rate = new / max(1, positions)
        if len(later) < 2:
            return cls(rate, 0.0, 1.0, positions)
        spread = sum((k - rate * n) ** 2 for n, k in later) * len(later) / (len(later) - 1)
        wide = 1.96 * math.sqrt(spread) / positions
        # Where nothing was new, the rule of three says how often it may be all the same.
        high = rate + max(wide, 3 / positions if new == 0 else 0.0)
        return cls(rate, max(0.0, rate - wide), min(1.0, high), positions)


class Listener:
    """Runs a model and adds up what it says."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.heard = _nothing(model.reachable)

    def hear(self, h: Tensor) -> Tensor:
        """Take in the states `h [n, d]` that enter the head, return the greedy choices `[n]`."""
        V = self.model.reachable
        mass, near = self.heard.mass.clone(), self.heard.chosen.clone()
        choices = []
        for part in torch.split(h, max(1, LOGITS // V)):
            z: Tensor = logits(self.model.head, part).float()[:, :V]  # [n, V]
            choice = z.argmax(-1, keepdim=True)
            p = z.sub_(z.gather(-1, choice)).exp_()  # 1 where it is the best
            near |= p.amax(0) >= math.exp(-NEAR_TIE)
            mass += (p.sum(-1).reciprocal() @ p).double()
            choices.append(choice[:, 0])
        chosen = torch.cat(choices)
        count = torch.bincount(chosen, minlength=V)
        self.heard = Listening(
            mass, near, self.heard.choices + count, self.heard.positions + len(h)
        )
        return chosen


def logits(head: Any, h: Tensor) -> Tensor:
    """Return the logits `[n, V]` of what enters the projection, `[n, d]`; free to be changed."""
    z: Tensor = head(h)
    return z


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


def listen(
    model: Model,
    texts: Sequence[Sequence[int]],
    *,
    known: Iterable[int] = (),
    stop: bool = False,
    title: str = "listening to the model",
    progress: Progress = silent,
) -> tuple[Listening, News]:
    """Run the model over texts, given as ids, and note what it would say after every token.

    `known` are ids that are kept anyway. With `stop`, the texts come in a random order, and
    listening ends as soon as it is known well enough how often something new is chosen.
    """
    listener = Listener(model)
    windows = [list(ids[at : at + WINDOW]) for ids in texts for at in range(0, len(ids), WINDOW)]
    seen = torch.zeros(model.reachable, dtype=torch.bool)
    seen[[i for i in known if i < model.reachable]] = True
    judged: list[tuple[int, int]] = []
    with progress(title, total=sum(map(len, windows))) as advance, torch.inference_mode():
        for lot in lots(windows):
            longest = max(map(len, lot))
            # What is filled up stands behind a text, where no model that generates looks.
            filled = [[*ids, *[ids[-1]] * (longest - len(ids))] for ids in lot]
            h, _ = model.body(torch.tensor(filled), use_cache=False)  # [n, T, d]
            rows = torch.cat([h[at, : len(ids)] for at, ids in enumerate(lot)])
            chosen = listener.hear(rows)
            new = torch.split(~seen[chosen], [len(ids) for ids in lot])
            judged += [(len(ids), int(part.sum())) for ids, part in zip(lot, new, strict=True)]
            seen |= listener.heard.chosen
            advance(len(rows))
            enough = listener.heard.positions >= AT_LEAST
            if stop and enough and News.of(judged).is_known:
                break
    return listener.heard, News.of(judged)


def cut_prompts(texts: Iterable[Sequence[int]]) -> list[list[int]]:
    """Cut the beginning off each text, to one of few lengths."""
    prompts = []
    for ids in texts:
        # Something must be left to continue; a text of one token is its own prompt.
        length = next((n for n in PROMPTS if n < max(2, len(ids))), 0)
        if len(ids) and length:
            prompts.append([int(i) for i in ids[:length]])
    return prompts


Choose = Callable[[Tensor, Sequence[int]], Tensor]


def continue_greedily(
    model: Model,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    choose: Choose | None = None,
    title: str = "continuing prompts",
    progress: Progress = silent,
) -> list[list[int]]:
    """Continue each prompt by its `max_tokens` best tokens, or up to the end-of-text token.

    `choose` makes ids `[n]` of the states `h [n, d]` that enter the head, and of the numbers of
    their prompts; the model's best, if not given. It sees only prompts that have not come to their
    end, and ends one itself by giving -1, which is left out.
    """
    if choose is None:

        def choose(h: Tensor, _which: Sequence[int]) -> Tensor:
            return logits(model.head, h)[:, : model.reachable].argmax(-1)

    place: dict[int, int] = {}  # the number of the prompt that a request of the engine is

    def chosen(h: Tensor, ids: Sequence[int]) -> list[int]:
        found: list[int] = choose(h, [place[i] for i in ids]).tolist()
        return found

    results: list[list[int]] = [[] for _ in prompts]
    params = SamplingParams(temperature=0.0, stop_ids=tuple(_end_ids(model)))
    sampler = Sampler.from_params(params, vocab_size=model.reachable)
    groups: dict[int, list[int]] = {}  # prompts of one length need no padding
    for at, prompt in enumerate(prompts):
        groups.setdefault(len(prompt), []).append(at)
    most = {n: _together(model, n + max_tokens) for n in groups}
    lots = [g[i : i + most[n]] for n, g in groups.items() for i in range(0, len(g), most[n])]
    with progress(title, total=len(prompts) * max_tokens) as advance:
        for lot in lots:
            engine = Engine(model, batch_size=len(lot), choose=chosen)
            place = {engine.submit(Request(prompts[at], sampler, max_tokens)): at for at in lot}
            for event in engine.run():
                advance(1)
                if event.result is not None:
                    results[place[event.id]] = list(event.result.ids)
                    advance(max_tokens - len(event.result.ids))
    return results


def listen_to_continuations(
    model: Model,
    *groups: Sequence[Sequence[int]],
    max_tokens: int,
    title: str = "listening to the model's own words",
    progress: Progress = silent,
) -> list[tuple[Listening, list[list[int]]]]:
    """Continue groups of prompts greedily, all together; return what was said in each group."""
    listeners = [Listener(model) for _ in groups]
    prompts = [prompt for group in groups for prompt in group]
    owner = torch.tensor([at for at, group in enumerate(groups) for _ in group])

    def choose(h: Tensor, which: Sequence[int]) -> Tensor:
        owners = owner[list(which)]
        chosen = torch.zeros(len(h), dtype=torch.long)
        for at, listener in enumerate(listeners):
            mine = owners == at
            if mine.any():
                chosen[mine] = listener.hear(h[mine])
        return chosen

    texts = continue_greedily(
        model, prompts, max_tokens, choose=choose, title=title, progress=progress
    )
    results, start = [], 0
    for listener, group in zip(listeners, groups, strict=True):
        results.append((listener.heard, texts[start : start + len(group)]))
        start += len(group)
    return results


def covering(heard: Listening, kept: Iterable[int], share: float) -> set[int]:
    """Return the ids to add to `kept`: every choice, then the likeliest, until `share` is held."""
    held = torch.zeros(len(heard.mass), dtype=torch.bool)
    held[[i for i in kept if i < len(held)]] = True
    added = heard.chosen & ~held
    outside = heard.mass.masked_fill(held | added, 0.0)
    lacking = float(outside.sum() - (1 - share) * heard.mass.sum())
    if lacking > 0:
        mass, order = outside.sort(descending=True, stable=True)
        before = mass.cumsum(0) - mass
        added[order[(before < lacking) & (mass > 0)]] = True
    return set(added.nonzero()[:, 0].tolist())


def estimate(
    heard: Listening, continuations: Sequence[Sequence[int]], kept: Iterable[int], max_tokens: int
) -> Estimate:
    """Tell how often the model left `kept`, in steps and in whole continuations."""
    ids = set(kept)
    inside = torch.zeros(len(heard.mass), dtype=torch.bool)
    inside[[i for i in ids if i < len(inside)]] = True
    left = sum(any(i not in ids for i in text) for text in continuations)
    low, high = binomial_interval(left, len(continuations))
    return Estimate(
        steps=heard.positions,
        steps_left=int(heard.choices[~inside].sum()),
        texts=len(continuations),
        texts_left=left,
        max_tokens=max_tokens,
        low=low,
        high=high,
    )


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


def _nothing(V: int) -> Listening:
    return Listening(
        torch.zeros(V, dtype=torch.float64),
        torch.zeros(V, dtype=torch.bool),
        torch.zeros(V, dtype=torch.long),
        0,
    )


def _together(model: Model, length: int) -> int:
    """Return how many texts of a length run together, by the keys and values that they take."""
    config = model.body.config
    d = getattr(config, "hidden_size", 1024)
    heads = getattr(config, "num_attention_heads", None) or 1
    kept = getattr(config, "num_key_value_heads", None) or heads
    width = (getattr(config, "head_dim", None) or d // heads) * kept
    layers = getattr(config, "num_hidden_layers", None) or 24
    return max(1, min(TOGETHER, MEMORY // (8 * layers * width * length)))


def _end_ids(model: Model) -> set[int]:
    config = getattr(model.body.model, "generation_config", None)
    ends = getattr(config, "eos_token_id", None)
    if ends is None:
        ends = getattr(model.body.config, "eos_token_id", None)
    return set() if ends is None else {ends} if isinstance(ends, int) else set(ends)
