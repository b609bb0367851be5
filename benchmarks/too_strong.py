"""Twenty vectors, each 20 times too strong: does the guard, with its defaults, keep the text whole?

    python benchmarks/too_strong.py [-m MODEL] [--times 20] [--kl-cap 0.5] [--budget B]
                                    [--tokens 64] [--layers 5,10,15,20,25] [--no-fit] [--json FILE]

At each of five layers four directions, learned from the built-in statements (mean difference,
probe, principal component) or drawn by chance; their strength is 20 times what keeps a budget of 2
on plain sentences. Ten prompts are continued greedily, as `lmhead generate` does unless told
otherwise: without a vector, with it as it is, and with `--kl-cap 0.5` alone, which lowers the
vector to plain sentences first and then holds it back at every token.

A text counts as broken if the share of different pairs of neighbours among its tokens (distinct-2)
is below 0.8 of that of the text without a vector.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from guard import PROMPTS
from lmhead import SteeringVector, generate, load
from lmhead.loading import Model
from lmhead.steer import fitted, guard, steer_model
from lmhead.steer.bound.auditing import distinct_2
from lmhead.steer.bound.strength import alpha_within
from lmhead.steer.learn.builtin import builtin_data
from lmhead.steer.learn.select import METHODS
from lmhead.steer.measure import token_head
from lmhead.steer.prompts import NEUTRAL
from lmhead.steer.runs import Runs
from lmhead.steer.states import read_states

BUDGET = 2.0  # what a vector that is not too strong would keep
LEAST = 0.8  # of the plain text's distinct-2


def vectors(model: Model, layers: Sequence[int], times: float) -> dict[str, SteeringVector]:
    """Return the vectors by name, each `times` as strong as the budget allows."""
    rows = builtin_data().rows
    states = read_states(model, rows)
    y = torch.tensor([row.label for row in rows])
    head, made = token_head(model), {}
    for layer in layers:
        x = states.at(layer)
        drawn = torch.randn(x.shape[1], generator=torch.Generator().manual_seed(layer))
        directions = {name: METHODS[name](x, y, x).direction for name in METHODS} | {"drawn": drawn}
        neutral = Runs.read(model, NEUTRAL, layer)
        for name, v in directions.items():
            v = F.normalize(v, dim=0)
            alpha = times * alpha_within(head, neutral, v, BUDGET)
            made[f"{name} at {layer}"] = SteeringVector(v, layer, alpha)
    return made


def written(model: Model, tokens: int) -> list[tuple[float, str]]:
    """Continue the prompts; return distinct-2 and the text of each."""
    found = generate(list(PROMPTS), model, max_tokens=tokens)
    return [(distinct_2(r.ids), r.text) for r in found]


def main() -> None:
    """Read the options, run, and print one line for each vector and the sum."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", default="smollm2-135m")
    parser.add_argument("--times", type=float, default=20.0)
    parser.add_argument("--kl-cap", type=float, default=0.5, help="in nat")
    parser.add_argument("--budget", type=float, help="in logits, instead of the KL cap")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--layers", default="5,10,15,20,25")
    parser.add_argument("--no-fit", dest="fit", action="store_false", help="the guard alone")
    parser.add_argument("--json", type=Path, help="a file for all texts")
    options = parser.parse_args()
    limits = (None, options.budget) if options.budget else (options.kl_cap, None)
    model = load(options.model)
    plain = written(model, options.tokens)
    rows: list[dict[str, Any]] = []
    made = vectors(model, [int(i) for i in options.layers.split(",")], options.times)
    for name, vector in made.items():
        wild = written(steer_model(model, vector), options.tokens)
        [lowered] = fitted(model, vector, limits[1], limits[0]) if options.fit else [vector]
        held = written(guard(model, lowered, *limits).model, options.tokens)
        row: dict[str, Any] = {"vector": name, "share": lowered.alpha / vector.alpha}
        for way, texts in (("unguarded", wild), ("guarded", held)):
            ratios = [d / p for (d, _), (p, _) in zip(texts, plain, strict=True)]
            below = sum(ratio < LEAST for ratio in ratios)
            row[way] = {"mean": sum(ratios) / len(ratios), "least": min(ratios), "broken": below}
            row[way]["texts"] = [text for _, text in texts]
            row[way]["changed"] = sum(a != b for (_, a), (_, b) in zip(texts, plain, strict=True))
        rows.append(row)
        print(
            f"{name:18} {row['share']:.4f} of alpha; distinct-2 over that of plain text: "
            + "; ".join(
                "{way} {mean:.2f}, least {least:.2f}, {broken} broken, {changed} changed".format(
                    way=way, **row[way]
                )
                for way in ("unguarded", "guarded")
            ),
            flush=True,
        )
    for way in ("unguarded", "guarded"):
        broken, least = sum(r[way]["broken"] for r in rows), min(r[way]["least"] for r in rows)
        total = len(rows) * len(PROMPTS)
        print(
            f"{way}: {broken} of {total} texts below {LEAST} of plain text; the least {least:.3f}"
        )
    distinct = [d for d, _ in plain]
    print(f"plain texts: distinct-2 {min(distinct):.2f} to {max(distinct):.2f}")
    if options.json:
        shown = {"plain": plain, "vectors": rows, "options": vars(options) | {"json": ""}}
        options.json.write_text(json.dumps(shown, indent=1, default=str))


if __name__ == "__main__":
    main()
