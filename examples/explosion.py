"""How a steering vector explodes in the vocabulary, what does not stop it, and what does.

    python examples/explosion.py
    python examples/explosion.py --strength 20 --out stronger.png

A detector is trained to part true from false statements: alpha v is added after a block while they
are read. Nothing in that training knows of the vocabulary. Then somebody turns it up and generates
with it.

The same training is run again with a penalty that looks right (the mean over the vocabulary of how
far |alpha W v| exceeds 2) and with the KL divergence at the model's true output. Then the first
vector is used as it is, but guarded: held back at every token just enough to keep a KL cap. Last, a
vector at the head's input, where a budget is kept by construction and its effect is proved.

All figures are of 24 plain sentences that the training has not seen.
"""

import argparse
import sys
import textwrap
import warnings
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from lmhead import generate, load
from lmhead.cli import render
from lmhead.errors import LMHeadError, MissingExtra, how_to_install
from lmhead.loading import Model
from lmhead.steer import HEAD, SteeringVector, SteeringWarning, audit, certify, guard, steer_model
from lmhead.steer.bound.auditing import Audit, distinct_2
from lmhead.steer.bound.constraints import Constraints
from lmhead.steer.judge.detector import detect
from lmhead.steer.learn.builtin import builtin_data
from lmhead.steer.learn.request import Request
from lmhead.steer.learn.training import train
from lmhead.steer.learn.tsv import Settings
from lmhead.steer.metrics import auroc

TRAININGS = {
    "no constraint": Constraints(),
    "mean penalty": Constraints(mean=0.2),
    "KL at the output": Constraints(kl=0.1),
}
LABELS = 32
PROMPT = "The best thing about a long walk in the mountains is"
COLOURS = ("#c1272d", "#d97f12", "#2a6f97", "#3d7a2e", "#8e6bb0", "#5b3a8c")


@dataclass(frozen=True)
class Case:
    """One way to steer: what it is worth as a detector, and what it does to the output."""

    name: str
    auroc: float  # on test rows, at the strength of the training
    max_delta: float  # centred: the mean over the vocabulary taken off
    max_kl: float
    median_kl: float
    flips: float
    raised: tuple[str, ...]  # the tokens raised most, at the worst position
    text: str
    distinct_2: float  # of the text
    kl_bound: float | None = None  # proved for every text; at the head only


def main() -> None:
    """Read the options, and turn errors into one line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", "-m", default="smollm2-135m")
    parser.add_argument("--layer", type=int, default=10, help="the block to steer after")
    parser.add_argument("--alpha", type=float, default=5.0, help="strength in training")
    parser.add_argument("--strength", type=float, default=12.0, help="alpha in use")
    parser.add_argument("--kl-cap", type=float, default=0.5, help="what the guard keeps, in nat")
    parser.add_argument("--budget", type=float, default=2.0, help="at the head, in logits")
    parser.add_argument("--epochs", type=int, default=60, help="of training, on 32 labels")
    parser.add_argument("--tokens", type=int, default=40, help="to generate")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("explosion.png"))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    # that a detector should not be generated with is what this is about
    warnings.simplefilter("ignore", SteeringWarning)
    try:
        if not find_spec("matplotlib"):  # told now, not after minutes of training
            raise MissingExtra(f"the picture needs matplotlib: {how_to_install('plot')}")
        run(args)
    except LMHeadError as error:
        sys.exit(f"error: {error}")


def run(args: argparse.Namespace) -> None:
    """Train, measure, generate, show."""
    model = load(args.model, progress=render.progress)

    def written(which: Model) -> tuple[str, float]:
        result = generate(args.prompt, which, max_tokens=args.tokens)[0]
        return result.text, distinct_2(result.ids)

    cases: list[Case] = []
    audits: list[Audit] = []

    def measure(name: str, score: float, vector: SteeringVector, kl_cap: float | None) -> None:
        found = audit(model, vector, kl_cap=kl_cap, continuations=0, progress=render.progress)
        if kl_cap is None:
            made = written(steer_model(model, vector))
        else:
            made = written(guard(model, vector, kl_cap=kl_cap).model)
        proved = certify(model, vector).kl_bound if vector.layer == HEAD else None
        cases.append(case(model, name, score, found, made, proved))
        audits.append(found)

    first: tuple[float, SteeringVector] | None = None
    for name, constraints in TRAININGS.items():
        vector = trained(model, args, args.layer, constraints)
        score = tested(model, args, vector)
        vector = replace(vector, alpha=args.strength)
        first = first or (score, vector)
        measure(name, score, vector, None)
    assert first is not None
    measure(f"no constraint, guarded at {args.kl_cap:g} nat", *first, args.kl_cap)
    for name, budget in (("no budget", None), (f"budget {args.budget:g}", args.budget)):
        vector = trained(model, args, HEAD, Constraints(budget=budget))
        measure(f"at the head, {name}", tested(model, args, vector), vector, None)
    result: dict[str, Any] = {
        "model": args.model,
        "layer": args.layer,
        "alpha": args.strength,
        "prompt": args.prompt,
        "kl_cap": args.kl_cap,
        "unsteered": written(model)[0],
        "cases": [asdict(c) for c in cases],
    }
    draw(args.out, result, [a.kl.sort(descending=True).values.tolist() for a in audits])
    if args.json:
        render.print_json(result)
    else:
        tell(result, args.out)


def trained(
    model: Model, args: argparse.Namespace, layer: int | str, constraints: Constraints
) -> SteeringVector:
    """Train a detector at a layer."""
    return train(
        builtin_data(),
        model,
        method="tsv",
        layer=layer,
        unlabelled=0,  # the second stage, on unlabelled rows, takes minutes and explodes no less
        labels=LABELS,
        validation=0,  # so it is the last epoch: nothing is chosen
        seed=args.seed,
        settings=Settings(alpha=args.alpha, epochs=args.epochs),
        constraints=constraints,
        progress=render.progress,
    )


def tested(model: Model, args: argparse.Namespace, vector: SteeringVector) -> float:
    """Return the AUROC on the test rows of the split that it was trained on."""
    rows = Request(labels=LABELS, unlabelled=0, seed=args.seed).split(builtin_data()).test
    scores = detect(vector, [row.text for row in rows], model, progress=render.progress)
    return auroc(torch.tensor([s.score for s in scores]), torch.tensor([r.label for r in rows]))


def case(
    model: Model,
    name: str,
    score: float,
    found: Audit,
    made: tuple[str, float],
    kl_bound: float | None,
) -> Case:
    """Put together what is shown of one way to steer."""
    worst = found.worst.delta.topk(6).indices.tolist()
    return Case(
        name,
        score,
        found.max_delta,
        found.max_kl,
        found.median_kl,
        found.flips,
        tuple(model.token_text(i) for i in worst),
        *made,
        kl_bound,
    )


def tell(result: dict[str, Any], out: Path) -> None:
    """Print the table and the texts."""
    title = f"layer {result['layer']}, alpha {result['alpha']:g}, 24 plain sentences"
    table = render.table("vector", "AUROC", "max |delta|", "max KL", "median KL", "flips",
                         "proved KL", title=title)  # fmt: skip
    for c in result["cases"]:
        table.add_row(
            c["name"],
            f"{c['auroc']:.3f}",
            *(f"{c[k]:.2f}" for k in ("max_delta", "max_kl", "median_kl")),
            render.percent(c["flips"]),
            "" if c["kl_bound"] is None else f"{c['kl_bound']:.3g}",
        )
    console = render.out()
    console.print(table)
    console.print(f"\n[bold]{result['prompt']}[/bold]")
    for name, text in [("unsteered", result["unsteered"])] + [
        (c["name"], c["text"]) for c in result["cases"]
    ]:
        console.print(f"  {name:>34}  {text!r}", markup=False)
    raised = " ".join(repr(t) for t in result["cases"][0]["raised"])
    console.print(f"\nraised most without a constraint: {raised}", markup=False)
    render.note(f"drawn: {out}")


def draw(out: Path, result: dict[str, Any], kl: list[list[float]]) -> None:
    """Draw what each vector detects against the harm it does, KL over positions, and the texts.

    `kl` has, of each case, the KL at all positions of the plain sentences, the worst first.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    cases = result["cases"]
    figure, (worth, along, said) = plt.subplots(
        1, 3, figsize=(16, 6), width_ratios=(1.05, 1, 1.5), layout="constrained"
    )
    for colour, c, values in zip(COLOURS, cases, kl, strict=True):
        marker = "s" if c["kl_bound"] is not None else "o"
        worth.scatter(c["auroc"], c["max_kl"], s=90, color=colour, marker=marker, zorder=3)
        along.plot([max(x, 1e-6) for x in values], color=colour, linewidth=1.8)
    scores = [c["auroc"] for c in cases]
    room = max(max(scores) - min(scores), 0.02)
    worth.set(title="what it knows against the harm it does", yscale="log",
              xlabel="AUROC as a detector, on statements it has not seen",
              ylabel="largest KL on plain sentences, nat",
              xlim=(min(scores) - 0.25 * room, max(scores) + 0.25 * room))  # fmt: skip
    for colour, c in zip(COLOURS, cases, strict=True):
        side = "left" if c["auroc"] < max(scores) - 0.35 * room else "right"
        worth.annotate(
            c["name"], (c["auroc"], c["max_kl"]), xytext=(0, 9), textcoords="offset points",
            ha=side, va="bottom", color=colour,
        )  # fmt: skip
    worth.text(0.98, 0.1, "good: to the right, and low", transform=worth.transAxes, ha="right",
               color="#555555")  # fmt: skip
    cap = result["kl_cap"]
    for axes in (worth, along):
        axes.axhline(cap, color=COLOURS[3], linestyle="--", linewidth=1, zorder=1)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
    along.set(title="KL at every position", xlabel="positions of 24 plain sentences, worst first",
              ylabel="nat", yscale="log", ylim=(1e-4, 2 * max(max(v) for v in kl)))  # fmt: skip
    along.text(0.03, cap * 0.88, f"the guard's cap, {cap:g} nat", color=COLOURS[3], va="top",
               transform=along.get_yaxis_transform())  # fmt: skip
    said.axis("off")
    said.set_title(f"“{result['prompt']} …”", loc="left")
    rows = [("unsteered", result["unsteered"], "black")]
    rows += [
        (
            f"{c['name']}: AUROC {c['auroc']:.2f}, largest KL {c['max_kl']:.2g}"
            + ("" if c["kl_bound"] is None else f" (proved: {c['kl_bound']:.2g})"),
            c["text"],
            k,
        )
        for c, k in zip(cases, COLOURS, strict=True)
    ]
    step = 1 / len(rows)
    for place, (name, text, colour) in enumerate(rows):
        y = 1 - place * step
        lines = textwrap.wrap(drawable(" ".join(text.split()) or repr(text)), 78, max_lines=2)
        said.text(0, y, name, color=colour, weight="bold", va="top", transform=said.transAxes)
        said.text(0, y - 0.045, "\n".join(lines), va="top", transform=said.transAxes,
                  fontsize=9, parse_math=False)  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)
    plt.close(figure)


def drawable(text: str) -> str:
    """Name the letters that the font has no picture of, which would be empty boxes."""
    from matplotlib.font_manager import FontProperties, findfont
    from matplotlib.ft2font import FT2Font

    known = FT2Font(findfont(FontProperties())).get_charmap()
    return "".join(c if ord(c) in known else f"<U+{ord(c):04X}>" for c in text)


if __name__ == "__main__":
    main()
