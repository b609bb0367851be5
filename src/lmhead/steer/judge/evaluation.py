"""Whether a vector does its job on data it has not seen, and what it does besides."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmhead.body.states import States
from lmhead.errors import BadInput
from lmhead.head import Head
from lmhead.loading import Model
from lmhead.progress import Progress, silent
from lmhead.steer.bound.auditing import Audit, audit
from lmhead.steer.bound.certificate import check_budget
from lmhead.steer.bound.guarding import guard
from lmhead.steer.bound.steering import with_alpha
from lmhead.steer.bound.strength import fitted
from lmhead.steer.judge.baselines import SURFACE, Baseline, score_baselines, shuffled
from lmhead.steer.judge.controls import Control, control_vectors
from lmhead.steer.judge.detector import read_off, score_rows
from lmhead.steer.learn.data import Data, Pair, Row, require_both, split, split_pairs
from lmhead.steer.learn.pairs import PairRuns
from lmhead.steer.learn.request import AUTO
from lmhead.steer.learn.select import METHODS, Known
from lmhead.steer.learn.training import fit_detector, known
from lmhead.steer.measure import token_head
from lmhead.steer.metrics import (
    Calibration,
    Interval,
    auroc_interval,
    calibration,
    mean_interval,
)
from lmhead.steer.states import read_states
from lmhead.steer.vector import SteeringVector, check_alpha


@dataclass(frozen=True)
class Detected:
    """How well a detector tells true from false, beside simpler ways on the same rows."""

    data: str
    seed: int
    rows: int
    labels: int  # all that the detector has used, to learn or to choose by
    auroc: Interval
    calibration: Calibration
    baselines: tuple[Baseline, ...]
    control: Baseline | None  # the same training on shuffled labels; None for tsv
    group: str | None = None  # the column that says which rows belong together
    offered: tuple[str, ...] = ()

    @property
    def surface_solves(self) -> bool:
        """Whether the form of the texts alone does as well, or nothing shows that it does not."""
        return any(
            b.name == SURFACE and b.auroc.low > 0.5 and b.gain.low <= 0 for b in self.baselines
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "job": "detect",
            "data": self.data,
            "seed": self.seed,
            "rows": self.rows,
            "labels": self.labels,
            "auroc": self.auroc.to_dict(),
            "calibration": self.calibration.to_dict(),
            "baselines": [b.to_dict() for b in self.baselines],
            "control": None if self.control is None else self.control.to_dict(),
            "surface_solves": self.surface_solves,
            "group": self.group,
            "offered": list(self.offered),
        }


@dataclass(frozen=True)
class Steered:
    """What a vector does to held-out pairs, and to neutral text."""

    data: str
    seed: int
    pairs: int
    alpha: float  # that it was evaluated with
    log_odds: float  # unsteered, mean
    gain: Interval
    right: tuple[float, float]  # share of pairs whose true ending is likelier, before and after
    audit: Audit
    controls: tuple[Control, ...] = ()

    @property
    def moves_truth(self) -> bool | None:
        """Whether it gains, and more than every control; None where none was looked at."""
        if not self.controls:
            return None
        return self.gain.low > 0 and all(c.more.low > 0 for c in self.controls)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        found = self.audit.to_dict()
        found.pop("continuations")
        return {
            "job": "steer",
            "data": self.data,
            "seed": self.seed,
            "pairs": self.pairs,
            "alpha": self.alpha,
            "log_odds": self.log_odds,
            "gain": self.gain.to_dict(),
            "right": {"unsteered": self.right[0], "steered": self.right[1]},
            "controls": [c.to_dict() for c in self.controls],
            "moves_truth": self.moves_truth,
            "neutral": found,
        }


def evaluate(
    vector: SteeringVector,
    data: Data,
    model: Model,
    *,
    seed: int | None = None,
    test: float | None = None,
    seen: bool = False,
    alpha: float | None = None,
    kl_cap: float | None = None,
    budget: float | None = None,
    fit: bool = False,
    controls: bool = False,
    states: States | None = None,
    progress: Progress = silent,
) -> Detected | Steered:
    """Evaluate a vector on the part of `data` that its own seed holds out.

    `seed` and `test` (the share held out) default to those on its card. Rows that the vector was
    trained on are refused unless `seen`; `states` are those of all rows of `data`,
    where they are known already. A steering vector can be given another `alpha`; with `kl_cap` or
    `budget` the guard holds it back, and what gets through is evaluated; `fit` lowers it to these
    limits first, as `fitted` does. `controls` trains one on shuffled labels and draws another, to
    say what a vector that knows nothing of truth gains.
    """
    seed = (vector.card.seed or 0) if seed is None else seed
    test = float(vector.card.data.get("test", 0.25)) if test is None else test
    check_evaluation(vector, data, alpha=alpha, kl_cap=kl_cap, budget=budget, fit=fit)
    if vector.card.job == "steer":
        [vector] = with_alpha(vector, alpha)
        if fit:
            [vector] = fitted(model, vector, budget, kl_cap, progress=progress)
        return _steered(vector, data, model, seed, test, seen, kl_cap, budget, controls, progress)
    return _detected(vector, data, model, seed, test, seen, states, progress)


def check_evaluation(
    vector: SteeringVector,
    data: Data,
    *,
    alpha: float | None = None,
    kl_cap: float | None = None,
    budget: float | None = None,
    fit: bool = False,
) -> None:
    """Say what is wrong with an evaluation; it needs no model."""
    if vector.card.job == "detect":
        if fit or any(value is not None for value in (alpha, kl_cap, budget)):
            raise BadInput(
                "alpha, kl_cap, budget and fit are for a vector that steers; this one detects, "
                "and nothing is generated from it"
            )
        require_both(data.labelled, data.name)
        return
    if alpha is not None:
        check_alpha(alpha)
    for name, limit in (("the budget", budget), ("the KL cap", kl_cap)):
        if limit is not None:
            check_budget(limit, name)
    if fit and budget is None and kl_cap is None:
        raise BadInput("a vector is to be fitted, but to no budget or KL cap; give one")
    if not data.pairs:
        raise BadInput(
            f"{data.name} holds no pairs; a steering vector is evaluated on prompt, true and false"
        )


def refuse_seen(vector: SteeringVector, rows: Sequence[Row | Pair], seen: bool) -> None:
    """Refuse rows whose hash is on the card, unless told that this is meant."""
    trained = set(vector.card.data.get("sha256", ()))
    known_rows = sum(row.sha256 in trained for row in rows)
    if known_rows and not seen:
        raise BadInput(
            f"the vector was trained on {known_rows:,} of these {len(rows):,} rows, so the figure "
            "would flatter it; evaluate with the seed and test share it was trained with, on other "
            "data, or allow rows that it has seen (--seen)"
        )


def _detected(
    vector: SteeringVector,
    data: Data,
    model: Model,
    seed: int,
    test: float,
    seen: bool,
    states: States | None,
    progress: Progress,
) -> Detected:
    sizes = {k: v for k, v in _sizes(vector).items() if k in ("labels", "unlabelled", "validation")}
    parts = split(data, seed, test=test, **sizes)
    require_both(parts.test, f"the test part of {data.name}")
    refuse_seen(vector, parts.test, seen)
    rows = (*parts.labelled, *parts.unlabelled, *parts.validation, *parts.test)
    if states is None:
        states = read_states(model, rows, progress=progress)
    else:
        index = {row: i for i, row in enumerate(data.rows)}
        states = states[torch.tensor([index[row] for row in rows])]
    n = len(rows) - len(parts.test)
    y = torch.tensor([row.label for row in parts.test])
    scores = score_rows(vector, parts.test, model, states=states[n:], progress=progress)
    taught, held = known(parts, states[:n]), states[n:]
    others = score_baselines(parts, taught, held, seed)
    control = None
    if (method := str(vector.card.method)) in (AUTO, *METHODS):
        layer = AUTO if method == AUTO else vector.layer

        def train(dealt: Known) -> Callable[[States], Tensor]:
            where, found, detector, _ = fit_detector(dealt, method, layer, seed)
            return lambda some: read_off(where, found.direction, detector, some)

        control = shuffled(taught, held, seed, train).judged(scores, y, seed)
    return Detected(
        data.name,
        seed,
        len(parts.test),
        parts.labels,
        auroc_interval(scores, y, seed=seed),
        calibration(scores, y),
        tuple(other.judged(scores, y, seed) for other in others),
        control,
        data.group,
        data.offered,
    )


def _sizes(vector: SteeringVector) -> dict[str, int]:
    """How many rows of each kind the vector was trained with: baselines get the same."""
    found = vector.card.data.get("sizes", {})
    return {str(k): int(v) for k, v in found.items()}


def _steered(
    vector: SteeringVector,
    data: Data,
    model: Model,
    seed: int,
    test: float,
    seen: bool,
    kl_cap: float | None,
    budget: float | None,
    controls: bool,
    progress: Progress,
) -> Steered:
    _, held = split_pairs(data.pairs, seed, test)
    refuse_seen(vector, held, seen)
    runs = PairRuns.read(model, held, vector.layer, progress=progress)
    before = runs.log_odds(token_head(model), None)

    def odds(one: SteeringVector) -> Tensor:
        head: Head = token_head(model)
        if kl_cap is not None or budget is not None:
            head = guard(model, one, kl_cap, budget).head
        return runs.log_odds(head, one.added)

    after, judged = odds(vector), []
    if controls:
        others = control_vectors(vector, data, model, seed=seed, test=test, progress=progress)
        for name, other in others.items():
            found = odds(other)
            more = mean_interval(after - found, seed=seed)
            judged.append(Control(name, mean_interval(found - before, seed=seed), more))
    return Steered(
        data.name,
        seed,
        len(held),
        vector.alpha,
        float(before.mean()),
        mean_interval(after - before, seed=seed),
        (float((before > 0).float().mean()), float((after > 0).float().mean())),
        audit(model, vector, kl_cap=kl_cap, budget=budget, progress=progress),
        tuple(judged),
    )
