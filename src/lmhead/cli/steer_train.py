"""`lmhead steer train`: a vector from data, to detect or to steer."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmhead.cli.options import Device, Json, Model, renamed
from lmhead.cli.steering import Force
from lmhead.errors import BadInput
from lmhead.models.registry import DEFAULT_MODEL

if TYPE_CHECKING:
    from lmhead.steer import SteeringVector


class Job(StrEnum):
    """What a vector is for."""

    detect = "detect"
    steer = "steer"


DataFile = Annotated[
    str,
    typer.Argument(
        metavar="DATA",
        help="A .csv or .jsonl file (statement and label; question, answer and label; prompt, "
        "true and false; TruthfulQA's own), or builtin.",
    ),
]
JobOption = Annotated[
    Job,
    typer.Option(
        "--job", help="What the vector is for: to tell true from false, or to steer generated text."
    ),
]
OldFor = Annotated[Job | None, typer.Option("--for", hidden=True)]
Layer = Annotated[
    str, typer.Option("--layer", help="A block's index from 0, head, or auto.", metavar="LAYER")
]
Labels = Annotated[int, typer.Option("--labels", help="How many labels to use in all.")]
Unlabelled = Annotated[
    int,
    typer.Option("--unlabelled", min=0, help="The most rows to use without their labels."),
]
Validation = Annotated[
    int | None,
    typer.Option(
        "--validation",
        min=0,
        help="For tsv: how many of the labels to set aside for choosing layer and "
        "epoch; all but 32 by default.",
    ),
]
TestShare = Annotated[
    float, typer.Option("--test", help="The share of the data to hold out for testing.")
]
Seed = Annotated[int, typer.Option("--seed", help="The seed of the split and the training.")]


def parse_layer(layer: str) -> int | str:
    """Return a block's index, or `head` or `auto`."""
    if layer in ("head", "auto"):
        return layer
    try:
        return int(layer)
    except ValueError:
        raise BadInput(
            f"the layer is {layer!r}; expected a block's index, 'head' or 'auto'"
        ) from None


def train(
    data: DataFile,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="VECTOR", help="The .safetensors file to write.")
    ],
    model: Model = DEFAULT_MODEL,
    job: JobOption = Job.detect,
    method: Annotated[
        str,
        typer.Option(
            help="tsv, mean-diff, pca, probe or auto to detect; gradient, mean-diff, pca, probe "
            "or auto to steer."
        ),
    ] = "auto",
    layer: Layer = "auto",
    labels: Labels = 132,
    unlabelled: Unlabelled = 500,
    validation: Validation = None,
    test: TestShare = 0.25,
    seed: Seed = 0,
    alpha: Annotated[
        float | None, typer.Option(help="For tsv: the strength it is trained with; 5 by default.")
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(min=1, help="For tsv: epochs of each of its two stages; 20 by default."),
    ] = None,
    kl: Annotated[
        float,
        typer.Option(
            help="Weight of the KL at the model's true output.", rich_help_panel="Constraints"
        ),
    ] = 0.0,
    excess: Annotated[
        float,
        typer.Option(
            help="Weight of the largest logit changes beyond the threshold.",
            rich_help_panel="Constraints",
        ),
    ] = 0.0,
    mean: Annotated[
        float,
        typer.Option(
            help="Weight of the mean of alpha * W v beyond the threshold, for comparison.",
            rich_help_panel="Constraints",
        ),
    ] = 0.0,
    threshold: Annotated[
        float,
        typer.Option(
            help="The change, in logits, that --excess and --mean leave unpenalised.",
            rich_help_panel="Constraints",
        ),
    ] = 2.0,
    budget: Annotated[
        float | None,
        typer.Option(
            help="The largest allowed range of delta: certified at the layer head, "
            "measured elsewhere.",
            rich_help_panel="Constraints",
        ),
    ] = None,
    force: Force = False,
    device: Device = None,
    json: Json = False,
    old_for: OldFor = None,
) -> None:
    """Train a vector without ever looking at test rows, and write it with its card.

    If a `tsv` training was interrupted, repeating the command resumes it.
    """
    if out.suffix != ".safetensors":  # before minutes of work, not after
        raise BadInput(
            f"the vector's file is {out.name}; expected a name that ends in .safetensors"
        )
    chosen = parse_layer(layer)
    job = renamed("--for", old_for, "--job", job)
    from lmhead.cli import render
    from lmhead.files.whole import refuse_existing
    from lmhead.loading import load
    from lmhead.steer.bound.constraints import Constraints
    from lmhead.steer.learn.reading import read_data
    from lmhead.steer.learn.request import Request
    from lmhead.steer.learn.training import train as run
    from lmhead.steer.learn.tsv import PAPER, Settings

    request = Request(
        job=job.value,
        method=method,
        layer=chosen,
        labels=labels,
        unlabelled=unlabelled,
        validation=validation,
        test=test,
        seed=seed,
        settings=Settings(
            alpha=PAPER.alpha if alpha is None else alpha,
            epochs=PAPER.epochs if epochs is None else epochs,
        ),
        constraints=Constraints(
            kl=kl, excess=excess, mean=mean, threshold=threshold, budget=budget
        ),
    )
    for name, value in (("alpha", alpha), ("epochs", epochs)):
        if value is not None and method != "tsv":
            raise BadInput(f"--{name} is for --method tsv, but the method is {method}")
    refuse_existing(out, force=force, folder=False)
    rows = read_data(data)
    request.check(rows)  # what is wrong with the data is said before the model is loaded
    loaded = load(model, device=device, progress=render.progress)
    checkpoint = out.with_name(f".{out.name}.training") if method == "tsv" else None
    vector = run(
        rows,
        loaded,
        request,
        checkpoint=checkpoint,
        progress=render.progress,
        report=lambda figures: render.note(_line(figures)),
    )
    vector.save(out)
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)
    if json:
        about = vector.to_dict()
        about["data"] = {k: v for k, v in about["data"].items() if k != "sha256"}
        render.print_json({"out": str(out), **{k: about[k] for k in _SHOWN}})
    else:
        _show(vector, out)


_SHOWN = (
    "layer",
    "alpha",
    "job",
    "model",
    "method",
    "budget",
    "certificate",
    "data",
    "seed",
    "metrics",
)


def _line(figures: dict[str, float]) -> str:
    """Write what a training tells after an epoch."""
    names = {"loss": "loss", "auroc": "validation AUROC", "max_delta": "max delta", "max_kl": "KL"}
    parts = [f"{names[k]} {figures[k]:.3f}" for k in names if k in figures]
    return f"epoch {figures['epoch']:.0f}: {', '.join(parts)}"


def _show(vector: "SteeringVector", out: Path) -> None:
    from lmhead.cli import render

    card = vector.card
    facts = render.Facts(f"{card.method}, to {card.job}")
    facts("layer", str(vector.layer))
    facts("alpha", f"{vector.alpha:.4g}")
    if card.budget is not None:
        kind = "certified" if vector.layer == "head" else "measured on neutral prompts"
        facts("budget", f"{card.budget:g} logits, {kind}")
    if card.certificate is not None:
        facts("range", f"{card.certificate['range']:.4g} logits in every context")
    if (found := card.metrics.get("validation_auroc")) is not None:
        facts("AUROC", f"{found:.3f} on what it was chosen by ({card.metrics['chosen_on']})")
    if (alone := card.metrics.get("alone")) is not None:
        facts("of which", ", ".join(f"{name} {a:.3f}" for name, a in alone.items()))
    if (gain := card.metrics.get("training_log_odds_gain")) is not None:
        facts("log-odds", f"{gain:+.3f} on the training pairs")
    facts("data", f"{card.data['source']}, seed {card.seed}: {_counts(card.data['split'])}")
    facts("written", str(out))
    facts.print()


def _counts(split: dict[str, int]) -> str:
    hidden = ("seed", "labelled") if "labels" in split else ("seed",)
    shown = ((name, n) for name, n in split.items() if name not in hidden and n)
    return ", ".join(f"{n:,} {name}" for name, n in shown)
