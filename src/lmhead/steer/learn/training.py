"""Training a vector from data: to detect, or to steer."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmhead.body.adding import check_layer
from lmhead.body.blocks import Blocks
from lmhead.body.likelihood import FIGURES
from lmhead.body.states import States
from lmhead.errors import BadInput
from lmhead.loading import Model, load
from lmhead.progress import Progress, silent
from lmhead.steer.bound.certificate import certified
from lmhead.steer.learn import tsv
from lmhead.steer.learn.blending import blend
from lmhead.steer.learn.data import Data, Row, Split, hashes
from lmhead.steer.learn.gradient import train_steering
from lmhead.steer.learn.linear import Linear
from lmhead.steer.learn.reading import read_data
from lmhead.steer.learn.request import AUTO, Request
from lmhead.steer.learn.select import Known, candidates, choose_layer
from lmhead.steer.learn.tsv import Report, Texts
from lmhead.steer.measure import token_head
from lmhead.steer.prompts import NEUTRAL
from lmhead.steer.runs import Runs, frozen
from lmhead.steer.states import read_states
from lmhead.steer.vector import HEAD, Card, SteeringVector

TRIAL_EPOCHS = 5  # that each layer gets when a layer is chosen for tsv


def train(
    data: Data | str | Path,
    model: str | Path | Model,
    request: Request | None = None,
    *,
    checkpoint: Path | None = None,
    states: States | None = None,
    progress: Progress = silent,
    report: Report | None = None,
    **options: Any,
) -> SteeringVector:
    """Train a vector; the same data, model and request give the same vector.

    `options` are fields of Request and replace those of `request`. `checkpoint` is a file from
    which an interrupted training with the method `tsv` resumes; `states` are those of all rows of
    `data`, if they are already known, for a detector with another method.

        vector = lmhead.train("builtin", "smollm2-135m", job="steer", layer="head")
        vector.save("honest.safetensors")
    """
    if request is None:
        request = Request(**options)
    elif options:
        request = replace(request, **options)
    data = data if isinstance(data, Data) else read_data(data)
    model = load(model)
    if request.layer != AUTO:
        check_layer(request.layer, Blocks(model.body).blocks)
    if checkpoint is not None and request.method != "tsv":
        raise BadInput(
            f"a checkpoint is given for the method {request.method}, which has none to go on from; "
            "leave it out, or choose tsv"
        )
    if states is not None and (request.job == "steer" or request.method == "tsv"):
        raise BadInput(
            "states are given, but this training runs the model itself; leave them out, or choose "
            "a detector that is no tsv"
        )
    if request.job == "steer":
        return train_steering(data, model, request, progress=progress, report=report)
    parts = request.split(data)
    if request.method == "tsv":
        return _tsv(data, parts, model, request, checkpoint, progress, report)
    rows = (*parts.labelled, *parts.unlabelled, *parts.validation)
    if states is None:
        found = read_states(model, rows, progress=progress)
    else:
        index = {row: i for i, row in enumerate(data.rows)}
        found = states[torch.tensor([index[row] for row in rows])]
    return linear_vector(data, parts, known(parts, found), model, request)


def known(parts: Split, states: States) -> Known:
    """Part the states of the labelled, unlabelled and validation rows, in this order.

    Validation rows, which only `tsv` has, count among the labelled ones here.
    """
    n, m = len(parts.labelled), len(parts.labelled) + len(parts.unlabelled)
    labelled = (*parts.labelled, *parts.validation)
    taught = torch.tensor([*range(n), *range(m, m + len(parts.validation))])
    groups = tuple(row.group for row in labelled)
    return Known(states[taught], labels_of(labelled), states[n:m], groups)


def labels_of(rows: Sequence[Row]) -> Tensor:
    """Return the labels, `[N]`; -1 where there is none."""
    return torch.tensor([-1 if row.label is None else row.label for row in rows], dtype=torch.long)


def linear_vector(
    data: Data, parts: Split, states: Known, model: Model, request: Request
) -> SteeringVector:
    """Fit one linear detector, or the blend that `auto` stands for."""
    layer, found, detector, metrics = fit_detector(
        states, request.method, request.layer, request.seed
    )
    card = _card(data, parts, model, request, metrics)
    return SteeringVector(found.direction, layer, 1.0, replace(card, detector=detector))


def fit_detector(
    states: Known, method: str, layer: int | str, seed: int
) -> tuple[int | str, Linear, dict[str, Any], dict[str, Any]]:
    """Return the layer, what is read there, the rest of the detector, and what was measured."""
    layers = candidates(states.labelled.last.shape[1] - 1) if layer == AUTO else [layer]
    metrics: dict[str, Any] = {"chosen_on": "folds"}
    if method != AUTO:
        layer, aurocs = choose_layer(states, method, layers, seed)
        found = states.fit(method, layer)
        metrics |= {"validation_auroc": aurocs[str(layer)], "layers": aurocs}
        return layer, found, {"kind": "linear", "bias": found.bias}, metrics
    mixed = blend(states, layers, seed)
    layer = max(mixed.terms, key=lambda key: float(mixed.terms[key].direction.norm()))
    found = mixed.terms[layer]
    terms = [_term(key, term) for key, term in mixed.terms.items() if key != layer]
    said = dict(zip(FIGURES, mixed.likelihood.tolist(), strict=True))
    metrics |= {
        "validation_auroc": mixed.auroc,
        "weights": mixed.weights,
        "alone": mixed.alone,
        "layers": [str(key) for key in mixed.terms],
    }
    detector = {"kind": "blend", "terms": terms, "likelihood": said, "bias": found.bias}
    return layer, found, detector, metrics


def _term(layer: int | str, term: Linear) -> dict[str, Any]:
    return {"layer": layer, "direction": term.direction.tolist(), "bias": term.bias}


def _card(
    data: Data, parts: Split, model: Model, request: Request, metrics: dict[str, Any]
) -> Card:
    seen = (*parts.labelled, *parts.unlabelled, *parts.validation)
    sizes = {
        "labels": request.labels - request.choosing,
        "unlabelled": request.unlabelled,
        "validation": request.choosing,
    }
    return Card(
        job="detect",
        model=model.name,
        head_sha256=model.head.sha256,
        method=request.method,
        budget=request.constraints.budget,
        data={
            "source": data.name,
            "sizes": sizes,
            "test": request.test,
            "split": parts.to_dict(),
            "sha256": hashes(seen),
        },
        seed=request.seed,
        metrics=metrics,
    )


def _tsv(
    data: Data,
    parts: Split,
    model: Model,
    request: Request,
    checkpoint: Path | None,
    progress: Progress,
    report: Report | None,
) -> SteeringVector:
    blocks = Blocks(model.body)
    layer = request.layer
    tried: dict[str, float] = {}
    with frozen(model):
        if layer == AUTO:
            layer, tried = choose_tsv_layer(parts, model, blocks, request, progress)
        texts = [
            Texts(Runs.read(model, rows, layer, blocks=blocks, progress=progress), labels_of(rows))
            if rows
            else None
            for rows in (parts.labelled, parts.unlabelled, parts.validation)
        ]
        calibration = None
        if request.constraints.budget is not None and layer != HEAD:
            calibration = Runs.read(model, NEUTRAL, layer, blocks=blocks)
        labelled, unlabelled, validation = texts
        if labelled is None:
            raise BadInput("there is no labelled row; expected some of both classes")
        found = tsv.fit(
            token_head(model),
            labelled,
            unlabelled,
            validation,
            seed=request.seed,
            settings=request.settings,
            constraints=request.constraints,
            calibration=calibration,
            checkpoint=checkpoint,
            progress=progress,
            report=report,
        )
    metrics: dict[str, Any] = {
        "chosen_on": "validation" if parts.validation else "the last epoch",
        "validation_auroc": found.auroc,
        "epoch": found.epoch,
        "history": list(found.history),
        "settings": asdict(request.settings),
        "constraints": request.constraints.to_dict(),
    }
    if tried:
        metrics["layers"] = tried
    card = replace(
        _card(data, parts, model, request, metrics),
        detector={"kind": "prototype", "temperature": request.settings.temperature},
        prototypes=found.prototypes.tolist(),
    )
    vector = SteeringVector(found.direction, layer, request.settings.alpha, card)
    return certified(vector, model)


def choose_tsv_layer(
    parts: Split, model: Model, blocks: Blocks, request: Request, progress: Progress
) -> tuple[int, dict[str, float]]:
    """Try the middle layers for a few epochs each; the best on the validation rows is it."""
    if not parts.validation:
        raise BadInput("a layer for tsv is chosen on validation rows; ask for some, or name one")
    L = len(blocks)
    tried: dict[int, float] = {}
    for layer in sorted({L // 3, 2 * L // 5, L // 2, 3 * L // 5}):
        labelled, validation = (
            Texts(Runs.read(model, rows, layer, blocks=blocks, progress=progress), labels_of(rows))
            for rows in (parts.labelled, parts.validation)
        )
        found = tsv.fit(
            token_head(model),
            labelled,
            None,
            validation,
            seed=request.seed,
            settings=replace(request.settings, epochs=min(TRIAL_EPOCHS, request.settings.epochs)),
            constraints=replace(request.constraints, budget=None),
            progress=progress,
        )
        tried[layer] = float(found.auroc or 0.0)
    best = max(tried, key=tried.__getitem__)
    return best, {str(layer): a for layer, a in tried.items()}
