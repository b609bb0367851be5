"""Scoring new texts with a detector: how likely each is true, after what its card says.

Three kinds of detector, by `card.detector["kind"]`:
- `prototype`: alpha v is added in the scoring pass, and the last state compared with prototypes;
- `linear`: the unsteered state x at the vector's layer gives x @ v + bias;
- `blend`: several linear ones, and weights of the figures that say how likely the text is.
Nothing is generated from any of them, so they may be as strong as they like.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmhead.body.likelihood import FIGURES
from lmhead.body.states import States
from lmhead.errors import BadInput
from lmhead.loading import Model, load
from lmhead.progress import Progress, silent
from lmhead.steer.bound.steering import additions
from lmhead.steer.learn.data import Row, closed
from lmhead.steer.learn.tsv import score
from lmhead.steer.runs import Runs
from lmhead.steer.states import read_states
from lmhead.steer.vector import SteeringVector


@dataclass(frozen=True)
class Detection:
    """One text and how likely the detector finds it true, from 0 to 1."""

    text: str
    score: float

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {"text": self.text, "score": self.score}


def detect(
    vector: SteeringVector | str | Path,
    texts: Sequence[Row | str] | str,
    model: str | Path | Model,
    *,
    progress: Progress = silent,
) -> list[Detection]:
    """Score texts; one that has no final punctuation gets a full stop first, as in training.

    vector = lmhead.train("builtin", "smollm2-135m")
    lmhead.detect(vector, ["The capital of Italy is Rome."], "smollm2-135m")[0].score
    """
    if isinstance(vector, str | Path):
        vector = SteeringVector.load(vector)
    require_detector(vector)
    texts = [texts] if isinstance(texts, str) else texts
    if not texts:
        raise BadInput("there is no text to score; expected at least one")
    rows = [t if isinstance(t, Row) else Row(closed(t) if t.strip() else t) for t in texts]
    found = score_rows(vector, rows, load(model), progress=progress)
    return [Detection(r.text, float(s)) for r, s in zip(rows, found, strict=True)]


def detect_stream(
    vector: SteeringVector, texts: Iterable[str], model: Model, *, size: int = 64
) -> Iterator[Detection]:
    """Score texts as they come, `size` at a time; nothing is held back until all are read."""
    waiting: list[str] = []
    for text in texts:
        waiting.append(text)
        if len(waiting) == size:
            yield from detect(vector, waiting, model)
            waiting = []
    if waiting:
        yield from detect(vector, waiting, model)


def score_rows(
    vector: SteeringVector,
    rows: Sequence[Row],
    model: Model,
    *,
    states: States | None = None,
    progress: Progress = silent,
) -> Tensor:
    """Return p(true) of every row, `[N]`; `states` are theirs, where they are known already."""
    kind = require_detector(vector)
    additions(model.body, [vector])  # type: ignore[arg-type]  # whether it fits the model
    if kind == "prototype":
        runs = Runs.read(model, rows, vector.layer, progress=progress)
        return prototype_scores(vector, runs.last(vector.added))
    if states is None:
        states = read_states(model, rows, progress=progress)
    return linear_scores(vector, states)


def require_detector(vector: SteeringVector) -> str:
    """Return the kind of detector; refuse a vector that is none."""
    detector = vector.card.detector or {}
    kind = str(detector.get("kind"))
    if kind not in ("prototype", "linear", "blend") or (
        kind == "prototype" and vector.card.prototypes is None
    ):
        raise BadInput(
            f"the vector is not a detector (its job is {vector.card.job}); expected one that "
            "`lmhead steer train --job detect` wrote, unchanged"
        )
    return kind


def prototype_scores(vector: SteeringVector, r: Tensor) -> Tensor:
    """Compare states `[N, d]`, as they enter the head, with the prototypes on the card."""
    detector = vector.card.detector or {}
    prototypes = torch.tensor(vector.card.prototypes)
    return score(r, prototypes, float(detector.get("temperature", 0.1)))[:, 0].exp()


def linear_scores(vector: SteeringVector, states: States) -> Tensor:
    """Score unsteered states by the direction, and by whatever the card blends with it."""
    return read_off(vector.layer, vector.direction, vector.card.detector or {}, states).sigmoid()


def read_off(
    layer: int | str, direction: Tensor, detector: Mapping[str, Any], states: States
) -> Tensor:
    """Return the score of each text in logits, `[N]`, by what a card says of a detector."""
    total = states.at(layer) @ direction + float(detector["bias"])
    for term in detector.get("terms", ()):
        total = total + states.at(term["layer"]) @ torch.tensor(term["direction"]) + term["bias"]
    said = detector.get("likelihood", {})
    if unknown := set(said) - set(FIGURES):
        raise BadInput(
            f"the detector weighs {sorted(unknown)[0]!r}, which this version does not compute; "
            "train it again"
        )
    weights = torch.tensor([float(said.get(name, 0.0)) for name in FIGURES])
    total = total + states.likelihood @ weights
    return total + float(detector.get("logprob", 0.0)) * states.logprob  # of older files
