"""`lmhead steer frontier`: what safety costs, over constraints and budgets."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmhead.cli.options import Device, Json, Model, renamed
from lmhead.cli.steer_train import (
    DataFile,
    Job,
    JobOption,
    Labels,
    Layer,
    OldFor,
    TestShare,
    Unlabelled,
    Validation,
    parse_layer,
)
from lmhead.cli.steering import Force
from lmhead.models.registry import DEFAULT_MODEL

if TYPE_CHECKING:
    from lmhead.steer.judge.frontier import Frontier


def frontier(
    data: DataFile,
    model: Model = DEFAULT_MODEL,
    job: JobOption = Job.detect,
    layer: Layer = "auto",
    labels: Labels = 132,
    unlabelled: Unlabelled = 0,
    validation: Validation = None,
    test: TestShare = 0.25,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds to average over.")] = 3,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs in each stage of a detector.")] = 20,
    on_test: Annotated[
        bool,
        typer.Option(
            "--on-test", help="Measure on the test rows, once everything has been chosen."
        ),
    ] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw effect against harm into a .png.")
    ] = None,
    force: Force = False,
    device: Device = None,
    json: Json = False,
    old_for: OldFor = None,
) -> None:
    """Train under a range of constraints and budgets; show effect against harm."""
    chosen = parse_layer(layer)
    job = renamed("--for", old_for, "--job", job)
    from lmhead.cli import render
    from lmhead.cli.plots import check_plot, draw_frontier
    from lmhead.loading import load
    from lmhead.steer.judge.frontier import SETTINGS, STEERING, find_frontier
    from lmhead.steer.learn.reading import read_data
    from lmhead.steer.learn.request import Request
    from lmhead.steer.learn.tsv import Settings

    if plot is not None:
        check_plot(plot, force)
    request = Request(
        job=job.value,
        method="tsv" if job is Job.detect else "auto",
        layer=chosen,
        labels=labels,
        unlabelled=unlabelled,
        validation=validation,
        test=test,
        settings=Settings(epochs=epochs),
    )
    rows = read_data(data)
    request.check(rows)
    loaded = load(model, device=device, progress=render.progress)
    result = find_frontier(
        rows,
        loaded,
        request,
        settings=SETTINGS if job is Job.detect else STEERING,
        seeds=range(seeds),
        on_test=on_test,
        progress=render.progress,
    )
    if plot is not None:
        draw_frontier(result, plot)
    if json:
        render.print_json(result.to_dict())
    else:
        _show(result)


def _show(result: "Frontier") -> None:
    from lmhead.cli import render

    effect = result.measure
    table = render.table(
        "constraint",
        effect,
        "max delta",
        "max KL",
        "median KL",
        "flips",
        title=f"layer {result.layer}",
    )
    for p in result.means():
        table.add_row(
            p.name,
            f"{p.effect:.3f}",
            f"{p.max_delta:.2f}",
            f"{p.max_kl:.3f}",
            f"{p.median_kl:.4f}",
            render.percent(p.flips),
        )
    render.out().print(table)
    for p in result.means():
        render.out().print(f"{p.name}: {p.text!r}", markup=False)
    if best := result.best_within(0.5):
        render.out().print(
            f"most effect with max KL within 0.5 nat: {best.name}, {best.effect:.3f}"
        )
