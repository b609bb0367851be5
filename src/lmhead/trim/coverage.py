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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from lmhead.loading import Model
from lmhead.progress import Progress, silent

WINDOW = 256  # tokens of a text that the model reads at once
PROMPTS = (32, 16, 8, 4, 2, 1)  # lengths that prompts are cut to: equal ones run as one batch
BATCH = 25
NEAR_TIE = 0.01  # logits; nearer than this, rounding in another batch may choose the other


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
    length: int  # tokens per text
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


class Listener:
    """Runs a model and adds up what it says."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.heard = _nothing(model.reachable)

    def hear(self, h: Tensor) -> Tensor:
        """Take in the states `h [n, d]` that enter the head, return the greedy choices `[n]`."""
        z: Tensor = self.model.head(h).float()[:, : self.model.reachable]  # [n, V]
        best = z.amax(-1, keepdim=True)
        choice = z.argmax(-1)
        p = torch.softmax(z, dim=-1)
        self.heard = self.heard + Listening(
            p.sum(0).double(),
            (z >= best - NEAR_TIE).any(0),
            torch.bincount(choice, minlength=z.shape[1]),
            len(z),
        )
        return choice


def listen(
    model: Model, texts: Sequence[Sequence[int]], *, progress: Progress = silent
) -> Listening:
    """Run the model over texts, given as ids, and note what it would say after every token."""
    listener = Listener(model)
    windows = [ids[at : at + WINDOW] for ids in texts for at in range(0, len(ids), WINDOW)]
    total = sum(map(len, windows))
    with progress("listening to the model", total=total) as advance, torch.inference_mode():
        for ids in windows:
            h, _ = model.body(torch.tensor([list(ids)]), use_cache=False)  # [1, T, d]
            listener.hear(h[0])
            advance(len(ids))
    return listener.heard


def cut_prompts(texts: Iterable[Sequence[int]]) -> list[list[int]]:
    """Cut the beginning off each text, to one of few lengths."""
    prompts = []
    for ids in texts:
        # Something must be left to continue; a text of one token is its own prompt.
        length = next((n for n in PROMPTS if n < max(2, len(ids))), 0)
        if len(ids) and length:
            prompts.append(list(ids[:length]))
    return prompts


def continue_greedily(
    model: Model,
    prompts: Sequence[Sequence[int]],
    length: int,
    *,
    choose: Callable[[Tensor], Tensor] | None = None,
    progress: Progress = silent,
) -> list[list[int]]:
    """Continue each prompt by its `length` best tokens, or up to the end-of-text token.

    `choose` makes ids `[n]` of the states `h [n, d]` that enter the head; the model's best, if not
    given. It sees only prompts that have not come to their end.
    """
    ends = _end_ids(model)
    if choose is None:

        def choose(h: Tensor) -> Tensor:
            z: Tensor = model.head(h)[:, : model.reachable]
            return z.argmax(-1)

    results: list[list[int]] = [[] for _ in prompts]
    groups: dict[int, list[int]] = {}
    for at, prompt in enumerate(prompts):
        groups.setdefault(len(prompt), []).append(at)
    lots = [g[i : i + BATCH] for g in groups.values() for i in range(0, len(g), BATCH)]
    with (
        progress("continuing prompts", total=len(prompts) * length) as advance,
        torch.inference_mode(),
    ):
        for lot in lots:
            ids = torch.tensor([list(prompts[at]) for at in lot])  # [n, T]
            past, feed = None, ids
            running = list(range(len(lot)))
            for _ in range(length):
                h, out = model.body(feed, use_cache=True, past_key_values=past)
                advance(len(lot))
                chosen = choose(h[running, -1])  # [running]
                step = torch.zeros(len(lot), 1, dtype=torch.long)
                step[running, 0] = chosen
                for at, token in zip(running, chosen.tolist(), strict=True):
                    results[lot[at]].append(token)
                running = [at for at in running if results[lot[at]][-1] not in ends]
                if not running:
                    break
                ids = torch.cat([ids, step], dim=1)
                past = getattr(out, "past_key_values", None)
                feed = ids if past is None else step
    return results


def listen_to_continuations(
    model: Model,
    prompts: Sequence[Sequence[int]],
    length: int,
    *,
    progress: Progress = silent,
) -> tuple[Listening, list[list[int]]]:
    """Continue prompts greedily; return what was said, and the continuations."""
    listener = Listener(model)
    texts = continue_greedily(model, prompts, length, choose=listener.hear, progress=progress)
    return listener.heard, texts


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
    heard: Listening, continuations: Sequence[Sequence[int]], kept: Iterable[int], length: int
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
        length=length,
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


def _end_ids(model: Model) -> set[int]:
    config = getattr(model.body.model, "generation_config", None)
    ends = getattr(config, "eos_token_id", None)
    if ends is None:
        ends = getattr(model.body.config, "eos_token_id", None)
    return set() if ends is None else {ends} if isinstance(ends, int) else set(ends)
