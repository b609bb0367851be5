"""Does a steering vector within a budget move truth, and does plain transformers say the same?

    python benchmarks/truth.py [DATA] [-m MODEL] [--methods gradient,mean-diff] [--seeds 3]
                               [--budget 2] [--layer 15] [--pairs 100] [--json FILE]

DATA holds pairs (prompt, true, false), `builtin` unless given; they are split by subject. For each
method and seed a vector is trained within the budget and evaluated on the pairs held out, with the
guard at work, so that no token's logits move by more: by how much the log-odds of true over false
endings rise, and how much more than with the same training on pairs of which half were swapped by
chance, and with a direction drawn at right angles. Beside it, what happens to plain sentences.

Then the log-odds of 100 pairs are computed again by transformers alone: a forward hook adds alpha v
to what the block puts out, one text at a time, in one pass without a cache; of the logits with and
without it, the guard's rule is written out once more.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmhead.body.adding import blocks_of
from lmhead.loading import Model, load
from lmhead.steer import SteeringVector, guard
from lmhead.steer.bound.constraints import Constraints
from lmhead.steer.bound.mixing import ROUNDING_RANGE
from lmhead.steer.judge.evaluation import Steered, evaluate
from lmhead.steer.learn.data import Pair
from lmhead.steer.learn.pairs import PairRuns
from lmhead.steer.learn.reading import read_data
from lmhead.steer.learn.request import Request
from lmhead.steer.learn.training import train
from lmhead.steer.measure import AIM, token_head
from lmhead.steer.vector import HEAD


@torch.no_grad()
def ending(model: Model, prompt: str, text: str, vector: SteeringVector, budget: float) -> Tensor:
    """Return log p of an ending without the vector, with it, and with it held to the budget."""
    net, ids = model.body.model, model.encode(prompt + text)
    first = len(model.encode(prompt))
    plain = net(torch.tensor([ids]), use_cache=False).logits[0, :, : model.reachable]

    def add(_block: Any, _args: Any, out: Any) -> Any:
        moved = (out[0] if isinstance(out, tuple) else out) + vector.alpha * vector.direction
        return (moved, *out[1:]) if isinstance(out, tuple) else moved

    hook = blocks_of(net)[int(vector.layer)].register_forward_hook(add)
    try:
        steered = net(torch.tensor([ids]), use_cache=False).logits[0, :, : model.reachable]
    finally:
        hook.remove()
    delta = (steered - plain).double()
    widest = delta.amax(-1) - delta.amin(-1)
    m = ((budget * AIM - ROUNDING_RANGE) / widest).clamp(max=1.0)
    held = plain.double() + m[:, None] * delta
    targets = torch.tensor(ids[first:])[:, None]
    return torch.stack(
        [
            z.double().log_softmax(-1)[first - 1 : -1].gather(-1, targets).sum()
            for z in (plain, steered, held)
        ]
    )


def recomputed(
    model: Model, pairs: Sequence[Pair], vector: SteeringVector, budget: float
) -> dict[str, float]:
    """Return the largest difference between lmhead's log-odds and those of the hook, each way."""
    theirs = torch.stack(
        [
            ending(model, p.prompt, p.true, vector, budget)
            - ending(model, p.prompt, p.false, vector, budget)
            for p in pairs
        ]
    )  # [N, 3]
    runs, head = PairRuns.read(model, pairs, vector.layer), token_head(model)
    ours = [
        runs.log_odds(head, None),
        runs.log_odds(head, vector.added),
        runs.log_odds(guard(model, vector, None, budget).head, vector.added),
    ]
    return {
        name: float((mine - theirs[:, k]).abs().max())
        for k, (name, mine) in enumerate(
            zip(("unsteered", "steered", "guarded"), ours, strict=True)
        )
    }


def main() -> None:
    """Read the options, run, and print one block of lines for every method and seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", nargs="?", default="builtin", metavar="DATA")
    parser.add_argument("-m", "--model", default="smollm2-135m")
    parser.add_argument("--methods", default="gradient,mean-diff")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=2.0)
    parser.add_argument("--layer", type=int, help="the middle one unless given")
    parser.add_argument("--test", type=float, default=0.25, help="the share that is held out")
    parser.add_argument("--pairs", type=int, default=100, help="that are computed again")
    parser.add_argument("--json", type=Path, help="a file for all figures")
    options = parser.parse_args()
    data, model, result = read_data(options.data), load(options.model), []
    for method in options.methods.split(","):
        for seed in range(options.seeds):
            request = Request(
                job="steer",
                method=method,
                layer="auto" if options.layer is None else options.layer,
                seed=seed,
                test=options.test,
                constraints=Constraints(budget=options.budget),
            )
            vector = train(data, model, request)
            assert vector.layer != HEAD
            found = evaluate(vector, data, model, budget=options.budget, controls=True)
            assert isinstance(found, Steered)
            again = recomputed(model, data.pairs[: options.pairs], vector, options.budget)
            row = found.to_dict() | {"method": method, "layer": vector.layer, "again": again}
            result.append(row)
            show(row)
            if options.json:
                options.json.write_text(json.dumps(result, indent=1))


def show(row: dict[str, Any]) -> None:
    """Print what one vector does."""

    def text(i: dict[str, float]) -> str:
        return f"{i['value']:+.3f} [{i['low']:+.3f}, {i['high']:+.3f}]"

    neutral = row["neutral"]
    ratio = {
        k: neutral[k]["steered"] / neutral[k]["unsteered"] for k in ("perplexity", "distinct_2")
    }
    print(
        f"{row['method']}, seed {row['seed']}, layer {row['layer']}, alpha {row['alpha']:.3f}, "
        f"{row['pairs']} pairs held out: gain {text(row['gain'])}"
    )
    for control in row["controls"]:
        print(f"  {control['name']}: {text(control['gain'])}; more by {text(control['more'])}")
    print(
        f"  moves truth: {row['moves_truth']}; plain sentences: perplexity x "
        f"{ratio['perplexity']:.4f}, distinct-2 x {ratio['distinct_2']:.3f}, range "
        f"{neutral['max_range']:.3f}"
    )
    parts = ", ".join(f"{name} {value:.1e}" for name, value in row["again"].items())
    print(f"  by a hook in transformers, the log-odds differ by at most: {parts}", flush=True)


if __name__ == "__main__":
    main()
