"""`lmhead steer eval`: whether a vector does its job on rows it has not seen."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmhead.cli.options import Device, Dtype, Json, Model
from lmhead.cli.steer_train import DataFile
from lmhead.cli.steering import Alpha, Budget, Fit, KlCap
from lmhead.models.registry import DEFAULT_MODEL

if TYPE_CHECKING:
    from lmhead.steer.judge.evaluation import Detected, Steered
    from lmhead.steer.metrics import Interval


def eval_(
    vector: Annotated[Path, typer.Argument(metavar="VECTOR", help="A .safetensors vector.")],
    data: DataFile,
    model: Model = DEFAULT_MODEL,
    seed: Annotated[
        int | None,
        typer.Option(help="The seed of the split; by default the one on the vector's card."),
    ] = None,
    test: Annotated[
        float | None, typer.Option(help="The share to hold out; by default the one on the card.")
    ] = None,
    seen: Annotated[
        bool, typer.Option("--seen", help="Allow rows that the vector was trained on.")
    ] = False,
    alpha: Alpha = None,
    budget: Budget = None,
    kl_cap: KlCap = None,
    fit: Fit = None,
    controls: Annotated[
        bool,
        typer.Option(
            "--controls/--no-controls",
            help="For a steering vector: train it on shuffled labels, too, and draw another.",
        ),
    ] = True,
    device: Device = None,
    dtype: Dtype = None,
    json: Json = False,
) -> None:
    """Evaluate a vector on held-out rows, against simpler baselines and with its side effects.

    With --budget or --kl-cap, a steering vector is lowered and held back as in `lmhead generate`.
    """
    from lmhead.cli import render
    from lmhead.loading import load
    from lmhead.steer import SteeringVector
    from lmhead.steer.judge.evaluation import Detected, check_evaluation, evaluate
    from lmhead.steer.learn.reading import read_data

    loaded_vector, rows = SteeringVector.load(vector), read_data(data)
    limited = budget is not None or kl_cap is not None
    fit = (limited and loaded_vector.card.job == "steer") if fit is None else fit
    check_evaluation(loaded_vector, rows, alpha=alpha, kl_cap=kl_cap, budget=budget, fit=fit)
    loaded = load(model, device=device, dtype=dtype, progress=render.progress)
    result = evaluate(
        loaded_vector,
        rows,
        loaded,
        seed=seed,
        test=test,
        seen=seen,
        alpha=alpha,
        kl_cap=kl_cap,
        budget=budget,
        fit=fit,
        controls=controls,
        progress=render.progress,
    )
    if json:
        render.print_json(result.to_dict())
    elif isinstance(result, Detected):
        _show_detected(result, str(loaded_vector.card.method))
    else:
        _show_steered(result)


def _interval(found: "Interval") -> tuple[str, str]:
    return f"{found.value:.3f}", f"{found.low:.3f} to {found.high:.3f}"


def _show_detected(result: "Detected", method: str) -> None:
    from lmhead.cli import render

    title = f"{result.data}, {result.rows:,} test rows, seed {result.seed}"
    columns = ("detector", "labels", "layer", "AUROC", "95 %", "this one has more by")
    table = render.table(*columns, title=title)
    own = _interval(result.auroc)
    table.add_row(f"[bold]this vector ({method})[/bold]", f"{result.labels:,}", "", *own, "")
    table.add_section()
    controls = () if result.control is None else (result.control,)
    for b in (*result.baselines, *controls):
        layer = "" if b.layer is None else str(b.layer)
        gain = f"{b.gain.value:+.3f} ({b.gain.low:+.3f} to {b.gain.high:+.3f})"
        table.add_row(b.name, f"{b.labels:,}", layer, *_interval(b.auroc), gain)
    render.out().print(table)
    calibration = result.calibration
    facts = render.Facts(
        f"Probability: Brier {calibration.brier:.3f}, off by {calibration.error:.3f} on average"
    )
    for b in calibration.bins:
        facts(f"said {b.said:.2f}", f"{render.percent(b.true)} true of {b.rows:,}")
    facts.print()
    if result.group is None and result.offered:
        render.out().print(
            f"Values of {', '.join(result.offered)} repeat: name a column `group` to keep rows "
            "that share one together."
        )
    if result.surface_solves:
        render.out().print(
            "[yellow]The form of the texts alone does as well here: these data do not show that "
            "any detector knows more.[/yellow]"
        )


def _show_steered(result: "Steered") -> None:
    from lmhead.cli import render

    found = result.audit
    facts = render.Facts(f"{result.data}, {result.pairs:,} held-out pairs, seed {result.seed}")
    value, interval = _interval(result.gain)
    facts("alpha", f"{result.alpha:.4g}")
    facts("log-odds of true endings", f"{value} more than {result.log_odds:.3f} (95 %: {interval})")
    for c in result.controls:
        low, high = c.more.low, c.more.high
        gain = f"{c.gain.value:+.3f}; the vector has {c.more.value:+.3f} more"
        facts(f"control: {c.name}", f"{gain} (95 %: {low:+.3f} to {high:+.3f})")
    facts("true ending likelier", " -> ".join(render.percent(share) for share in result.right))
    facts("neutral text: range of delta", f"max {found.max_range:.3f} logits")
    facts("neutral text: KL", f"max {found.max_kl:.3f}, median {found.median_kl:.4f} nat")
    facts("best token changed", render.percent(found.flips))
    facts("perplexity", " -> ".join(f"{p:.2f}" for p in found.perplexity))
    facts("distinct-2", " -> ".join(f"{p:.3f}" for p in found.distinct_2))
    facts.print()
    if result.moves_truth is False:
        render.out().print(
            "[yellow]There is no evidence that this vector moves truth: control vectors do as "
            "much, or its own gain may be zero.[/yellow]"
        )
