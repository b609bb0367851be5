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
COLOURS = ("#c1272d", "#e28a1e", "#2a6f97", "#4a7c3a")


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
    vectors: list[SteeringVector] = []
    for name, constraints in TRAININGS.items():
        vector = trained(model, args, args.layer, constraints)
        score = tested(model, args, vector)
        vector = replace(vector, alpha=args.strength)
        found = audit(model, vector, continuations=0, progress=render.progress)
        cases.append(case(model, name, score, found, *written(steer_model(model, vector))))
        audits.append(found)
        vectors.append(vector)
    guarded = guard(model, vectors[0], kl_cap=args.kl_cap)
    held = written(guarded.model)
    free, bound = (trained(model, args, HEAD, Constraints(budget=b)) for b in (None, args.budget))
    result: dict[str, Any] = {
        "model": args.model,
        "layer": args.layer,
        "alpha": args.strength,
        "prompt": args.prompt,
        "unsteered": written(model)[0],
        "cases": [asdict(c) for c in cases],
        "guard": {
            "kl_cap": args.kl_cap,
            **guarded.log.to_dict(),
            "text": held[0],
            "distinct_2": held[1],
        },
        "head": {
            "free": at_head(model, args, free),
            "budget": {"kept": args.budget, **at_head(model, args, bound)},
            "text": written(steer_model(model, bound))[0],
        },
    }
    draw(args.out, result, audits)
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


def case(model: Model, name: str, score: float, found: Audit, text: str, distinct: float) -> Case:
    """Put together what is shown of one vector."""
    worst = found.worst.delta.topk(6).indices.tolist()
    return Case(
        name,
        score,
        found.max_delta,
        found.max_kl,
        found.median_kl,
        found.flips,
        tuple(model.token_text(i) for i in worst),
        text,
        distinct,
    )


def at_head(model: Model, args: argparse.Namespace, vector: SteeringVector) -> dict[str, Any]:
    """Return what is proved about a vector at the head's input."""
    proved = certify(model, vector)
    return {
        "auroc": tested(model, args, vector),
        "range": proved.range,
        "kl_bound": proved.kl_bound,
        "tv_bound": proved.tv_bound,
    }


def tell(result: dict[str, Any], out: Path) -> None:
    """Print the table, the texts and what is proved."""
    title = f"layer {result['layer']}, alpha {result['alpha']:g}, 24 plain sentences"
    table = render.table("training", "AUROC", "max |delta|", "max KL", "median KL", "flips",
                         title=title)  # fmt: skip
    for c in result["cases"]:
        table.add_row(
            c["name"],
            f"{c['auroc']:.3f}",
            *(f"{c[k]:.2f}" for k in ("max_delta", "max_kl", "median_kl")),
            render.percent(c["flips"]),
        )
    console = render.out()
    console.print(table)
    rows = [("unsteered", result["unsteered"])]
    rows += [(c["name"], c["text"]) for c in result["cases"]]
    rows += [
        ("guarded", result["guard"]["text"]),
        (f"head, budget {result['head']['budget']['kept']:g}", result["head"]["text"]),
    ]
    console.print(f"\n[bold]{result['prompt']}[/bold]")
    for name, text in rows:
        console.print(f"  {name:>18}  {text!r}", markup=False)
    raised = " ".join(repr(t) for t in result["cases"][0]["raised"])
    console.print(f"\nraised most without a constraint: {raised}", markup=False)
    held, head = result["guard"], result["head"]
    console.print(
        f"guard: {held['held_back']} of {held['tokens']} tokens held back, mean strength "
        f"{held['mean_strength']:.2f}, max KL {held['max_kl']:.3f} (cap {held['kl_cap']:g})"
    )
    for name in ("free", "budget"):
        h = head[name]
        console.print(
            f"head, {name}: range {h['range']:.2f}, AUROC {h['auroc']:.3f}; in every context "
            f"KL <= {h['kl_bound']:.3g}, total variation <= {h['tv_bound']:.3g}"
        )
    render.note(f"drawn: {out}")


def draw(out: Path, result: dict[str, Any], audits: list[Audit]) -> None:
    """Draw delta over the vocabulary, KL over the positions, and the texts."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    cases = result["cases"]
    figure, (over, along, said) = plt.subplots(
        1, 3, figsize=(15, 4.6), width_ratios=(1, 1, 1.45), layout="constrained"
    )
    for colour, c, found in zip(COLOURS, cases, audits, strict=False):
        delta = found.worst.delta
        ordered = (delta - delta.mean()).sort(descending=True).values
        over.plot(ordered, color=colour, label=f"{c['name']}: max {c['max_delta']:.0f}")
        kl = found.kl.sort(descending=True).values
        along.plot(kl, color=colour, label=f"{c['name']}: max {c['max_kl']:.1f}")
    over.set(title="delta at the worst position", xlabel="tokens, most raised first",
             ylabel="logits (mean taken off)")  # fmt: skip
    cap = result["guard"]["kl_cap"]
    along.axhline(cap, color=COLOURS[3], linestyle="--", label=f"guard: never above {cap:g}")
    along.set(title="KL at every position", xlabel="positions, worst first", ylabel="nat")
    for axes in (over, along):
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    said.axis("off")
    said.set_title(f"“{result['prompt']} …”", loc="left")
    rows = [("unsteered", result["unsteered"], "black")]
    rows += [(c["name"], c["text"], k) for c, k in zip(cases, COLOURS, strict=False)]
    rows += [(f"no constraint, guarded at {cap:g} nat", result["guard"]["text"], COLOURS[3])]
    y = 1.0
    for name, text, colour in rows:
        lines = textwrap.wrap(" ".join(text.split()) or repr(text), 72, max_lines=3)
        said.text(0, y, name, color=colour, weight="bold", va="top", transform=said.transAxes)
        said.text(0, y - 0.055, "\n".join(lines), va="top", transform=said.transAxes,
                  fontsize=9)  # fmt: skip
        y -= 0.2
    out.parent.mkdir(parents=True, exist_ok=True)
    warnings.filterwarnings("ignore", message="Glyph .* missing")  # drawn as a box
    figure.savefig(out, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
