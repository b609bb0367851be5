"""The audit: what vectors do to a model's true output on real prompts, at every position.

Unlike the certificate it holds at any layer, and unlike it says only what was measured.

Symbols: z logits `[T, V]` unsteered, z' steered, delta = z' - z; p and p' their softmax, over the
tokens that can be drawn. The direct path is what alpha W v would add if v met nothing on its way.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmhead.errors import BadInput
from lmhead.generation import generate
from lmhead.loading import Model, load
from lmhead.progress import Progress, silent
from lmhead.steer.bound.certificate import project
from lmhead.steer.bound.guarding import guard
from lmhead.steer.bound.steering import SteeredBody, Vectors, additions, torch_body, with_alpha
from lmhead.steer.measure import centred, harm_of, token_head
from lmhead.steer.prompts import NEUTRAL

_FIGURES = (
    "prompts",
    "positions",
    "max_kl",
    "mean_kl",
    "median_kl",
    "max_delta",
    "p99_delta",
    "max_raw_delta",
    "p99_raw_delta",
    "max_range",
    "flips",
)


@dataclass(frozen=True)
class Worst:
    """The position where the distribution moved most."""

    prompt: str
    context: str
    kl: float
    z: Tensor = field(repr=False)  # [V]
    delta: Tensor = field(repr=False)  # [V]


@dataclass(frozen=True, eq=False)
class Audit:
    """What was measured, steered against unsteered.

    - `*_kl`, `*_delta`, `max_range`, `flips`: as `lmhead.steer.measure` names them, over all
      positions; `*_raw_delta` are of |delta| with its mean.
    - `perplexity`, `distinct_2`, `repetition`: unsteered first, then steered; the first of the
      prompts themselves, the others of greedy continuations.
    - `direct_range`, `direct_correlation`: the range of the direct path's delta, and how the mean
      delta goes with it over the vocabulary.
    """

    prompts: int
    positions: int
    max_kl: float
    mean_kl: float
    median_kl: float
    max_delta: float
    p99_delta: float
    max_raw_delta: float
    p99_raw_delta: float
    max_range: float
    flips: float
    perplexity: tuple[float, float]
    distinct_2: tuple[float, float]
    repetition: tuple[float, float]
    continuations: tuple[tuple[str, str, str], ...]  # prompt, unsteered, steered
    direct_range: float
    direct_correlation: float
    worst: Worst
    kl: Tensor = field(repr=False)  # of every position, prompt by prompt
    mean_delta: Tensor = field(repr=False)  # [V]

    @property
    def direct_disagrees(self) -> bool:
        """Whether the direct path tells a different story from the true output."""
        low, high = sorted((self.direct_range, self.max_range))
        return high > 1.25 * low + 1e-3 or self.direct_correlation < 0.9

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object, without the tensors."""
        pairs = ("perplexity", "distinct_2", "repetition")
        return {
            **{name: getattr(self, name) for name in _FIGURES},
            **{
                name: dict(zip(("unsteered", "steered"), getattr(self, name), strict=True))
                for name in pairs
            },
            "direct_range": self.direct_range,
            "direct_correlation": self.direct_correlation,
            "direct_disagrees": self.direct_disagrees,
            "worst": {"context": self.worst.context, "kl": self.worst.kl},
            "continuations": [
                dict(zip(("prompt", "unsteered", "steered"), row, strict=True))
                for row in self.continuations
            ],
        }


@torch.no_grad()
def audit(
    model: str | Path | Model,
    vectors: Vectors,
    prompts: Sequence[str] | None = None,
    *,
    alpha: float | None = None,
    kl_cap: float | None = None,
    budget: float | None = None,
    continuations: int = 8,
    max_tokens: int = 24,
    progress: Progress = silent,
) -> Audit:
    """Measure what `vectors` do to the model on `prompts` (by default 24 plain sentences).

    The openings of the first `continuations` prompts are also continued greedily, by `max_tokens`.
    With `kl_cap` or `budget` the guard is active, and what it lets through is measured.

        found = lmhead.audit("smollm2-135m", "honest.safetensors")
        found.max_kl, found.flips, found.perplexity
    """
    model = load(model)
    texts = list(NEUTRAL if prompts is None else prompts)
    if not texts:
        raise BadInput("there is no prompt to audit on; expected at least one")
    body = torch_body(model)
    added = additions(body, with_alpha(vectors, alpha))
    if kl_cap is None and budget is None:
        steered = replace(model, body=SteeredBody(body, added))
    else:
        steered = guard(model, vectors, kl_cap, budget, alpha=alpha).model
    encoded = [model.encode(text) for text in texts]
    V = model.reachable
    tally = _Tally(V, sum(map(len, encoded)) * V)
    with progress("auditing", total=len(texts)) as advance:
        for text, ids in zip(texts, encoded, strict=True):
            z, other = (_logits(m, ids) for m in (model, steered))  # [T, V]
            tally.add(model, text, ids, z, other)
            advance(1)
    openings = [_opening(model, ids) for ids in encoded[:continuations]]
    both: list[list[tuple[int, ...]]] = []
    written: list[list[str]] = []
    for which in (model, steered):
        results = generate(openings, which, max_tokens=max_tokens, progress=progress)
        both.append([r.ids for r in results])
        written.append([r.text for r in results])
    direct = torch.zeros(V, dtype=torch.float64)
    for vector in added.values():
        if len(vector) == model.head.hidden_size:  # else no direct path leads to the head
            direct += project(token_head(model), vector)
    mean, kl = tally.mean(), torch.cat(tally.kl)
    return Audit(
        prompts=len(texts),
        positions=tally.positions,
        **tally.deltas(),
        max_kl=tally.worst.kl,
        mean_kl=float(kl.mean()),
        median_kl=float(kl.median()),
        flips=tally.flips / tally.positions,
        perplexity=tally.perplexity(),
        distinct_2=(_mean(distinct_2, both[0]), _mean(distinct_2, both[1])),
        repetition=(_mean(repetition, both[0]), _mean(repetition, both[1])),
        continuations=tuple(zip(openings, *written, strict=True)),
        direct_range=float(direct.max() - direct.min()),
        direct_correlation=_correlation(direct, mean),
        worst=tally.worst,
        kl=kl,
        mean_delta=mean,
    )


def distinct_2(ids: Sequence[int]) -> float:
    """Return the share of different pairs among all pairs of neighbours; 1 for fewer than two."""
    pairs = list(pairwise(ids))
    return len(set(pairs)) / len(pairs) if pairs else 1.0


def repetition(ids: Sequence[int], n: int = 4) -> float:
    """Return the share of runs of n ids that stood there before."""
    runs = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


class _Tally:
    """Sums and largest values over positions, one prompt after the other."""

    def __init__(self, V: int, numbers: int) -> None:
        self.positions = self.flips = 0
        self.kl: list[Tensor] = []
        self._range = 0.0
        # the largest hundredth of all |delta|, raw and centred: all that a 99th percentile needs
        self._keep = max(1, math.floor(numbers * 0.01) + 1)
        self._top = [torch.empty(0), torch.empty(0)]
        self._sum = torch.zeros(V, dtype=torch.float64)
        self._surprise = [0.0, 0.0]
        self._predicted = 0
        self.worst = Worst("", "", -1.0, torch.empty(0), torch.empty(0))

    def add(self, model: Model, text: str, ids: list[int], z: Tensor, other: Tensor) -> None:
        """Count one prompt with its logits `[T, V]`, unsteered and steered."""
        delta, harm = other - z, harm_of(z, other)
        kl = harm.kl  # [T]
        self.kl.append(kl)
        self.positions += len(ids)
        self.flips += int(harm.flipped.sum())
        self._range = max(self._range, float(harm.range.max()))
        self._sum += delta.sum(0)
        for i, moved in enumerate((delta, centred(delta))):
            top, size = self._top[i], moved.abs().flatten().float()
            if len(top) == self._keep:
                size = size[size > top[-1]]  # quicker than sorting them out below
            seen = torch.cat([top, size])
            self._top[i] = torch.topk(seen, min(self._keep, len(seen))).values
        following = torch.tensor(ids[1:]).unsqueeze(-1)
        for i, logits in enumerate((z, other)):
            logs = torch.log_softmax(logits[:-1], dim=-1)
            self._surprise[i] -= float(logs.gather(-1, following).sum())
        self._predicted += len(following)
        at = int(kl.argmax())
        if kl[at] > self.worst.kl:
            context = model.decode(ids[: at + 1])
            self.worst = Worst(text, context, float(kl[at]), z[at].clone(), delta[at].clone())

    def mean(self) -> Tensor:
        """The mean delta of every token, `[V]`."""
        return self._sum / self.positions

    def deltas(self) -> dict[str, float]:
        """The largest, and the value that a hundredth of all exceed."""
        raw, less_mean = self._top
        return {
            "max_delta": float(less_mean[0]),
            "p99_delta": float(less_mean[-1]),
            "max_raw_delta": float(raw[0]),
            "p99_raw_delta": float(raw[-1]),
            "max_range": self._range,
        }

    def perplexity(self) -> tuple[float, float]:
        """Of the prompts' own tokens, unsteered and steered."""
        n = max(1, self._predicted)
        plain, steered = (math.exp(min(s / n, 700.0)) for s in self._surprise)
        return plain, steered


def _logits(model: Model, ids: list[int]) -> Tensor:
    h, _ = model.body(torch.tensor([ids]), use_cache=False)
    z: Tensor = model.head(h[0])
    if not z[:, : model.reachable].isfinite().all():
        raise BadInput(
            "the steered model's logits are not finite; the vector is too strong: lower alpha"
        )
    return z[:, : model.reachable].double()


def _opening(model: Model, ids: list[int]) -> str:
    """The first third of a prompt, some words to go on from."""
    return model.decode(ids[: max(4, len(ids) // 3)]) or model.decode(ids)


def _mean(measure: Any, rows: Sequence[Sequence[int]]) -> float:
    return sum(map(measure, rows)) / len(rows) if rows else math.nan


def _correlation(a: Tensor, b: Tensor) -> float:
    a, b = a - a.mean(), b - b.mean()
    scale = float(a.norm() * b.norm())
    return float(a @ b) / scale if scale > 0 else 1.0
