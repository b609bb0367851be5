"""Twenty vectors, each 20 times too strong: does the guard, with its defaults, keep the text whole?

    python benchmarks/too_strong.py [-m MODEL] [--times 20] [--kl-cap 0.5] [--tokens 64]
                                    [--layers 5,10,15,20,25] [--alone] [--json FILE]

At each of five layers four directions, learned from the built-in statements (mean difference,
probe, principal component) or drawn by chance; their strength is 20 times what keeps a budget of 2
on plain sentences. Ten prompts are continued greedily, as `lmhead generate --kl-cap 0.5` does: the
vector is lowered to plain sentences first, held back at every token, and a text that repeats itself
more than the unsteered one is written again with less of it. With `--alone`, the guard without
either is measured as well (`--no-fit`).

A text counts as broken if the share of different pairs of neighbours among its tokens (distinct-2)
is below 0.8 of that of the text without a vector. The figures are taken from the texts, anew.
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
from lmhead.generation.api import requests
from lmhead.loading import Model
from lmhead.sampling import SamplingParams
from lmhead.steer import fitted, guard
from lmhead.steer.bound.keeping import kept
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


def distinct(ids: Sequence[int]) -> float:
    """Return the share of different pairs of neighbours."""
    pairs = {(ids[i], ids[i + 1]) for i in range(len(ids) - 1)}
    return len(pairs) / max(1, len(ids) - 1)


def main() -> None:
    """Read the options, run, and print one line for each vector and the sum."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", default="smollm2-135m")
    parser.add_argument("--times", type=float, default=20.0)
    parser.add_argument("--kl-cap", type=float, default=0.5, help="in nats")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--layers", default="5,10,15,20,25")
    parser.add_argument("--alone", action="store_true", help="also the guard with --no-fit")
    parser.add_argument("--json", type=Path, help="a file for all texts")
    options = parser.parse_args()
    model, cap = load(options.model), options.kl_cap
    params = SamplingParams.asked({})
    asked = requests(PROMPTS, model, params=params, max_tokens=options.tokens)
    plain = generate(list(PROMPTS), model, max_tokens=options.tokens, batch_size=10)
    rows: list[dict[str, Any]] = []
    made = vectors(model, [int(i) for i in options.layers.split(",")], options.times)
    for name, vector in made.items():
        [lowered] = fitted(model, vector, None, cap)
        found = dict(kept(model, asked, guard(model, lowered, cap).steering, batch_size=20))
        texts = {"defaults": [found[i].generation for i in range(len(PROMPTS))]}
        if options.alone:
            only = guard(model, vector, cap).model
            texts["guard alone"] = generate(
                list(PROMPTS), only, max_tokens=options.tokens, batch_size=10
            )
        row: dict[str, Any] = {
            "vector": name,
            "lowered": lowered.alpha / vector.alpha,
            "share": [found[i].share for i in range(len(PROMPTS))],
            "max_kl": max(found[i].log.max_kl for i in range(len(PROMPTS))),
        }
        for way, written in texts.items():
            ratios = [
                distinct(a.ids) / max(distinct(b.ids), 1e-9)
                for a, b in zip(written, plain, strict=True)
            ]
            row[way] = {
                "mean": sum(ratios) / len(ratios),
                "least": min(ratios),
                "broken": sum(ratio < LEAST for ratio in ratios),
                "changed": sum(a.ids != b.ids for a, b in zip(written, plain, strict=True)),
                "texts": [one.text for one in written],
            }
        rows.append(row)
        again = [share for share in row["share"] if share < 1]
        print(
            f"{name:16} {row['lowered']:.4f} of alpha, {len(again)} written again "
            f"{again or ''}; largest KL {row['max_kl']:.3f}; distinct-2 over the plain text's: "
            + "; ".join(
                "{way} mean {mean:.2f}, least {least:.2f}, {broken} broken, {changed} of 10 texts "
                "changed".format(way=way, **row[way])
                for way in texts
            ),
            flush=True,
        )
        if options.json:
            shown = {"plain": [one.text for one in plain], "vectors": rows}
            options.json.write_text(json.dumps(shown, indent=1))
    for way in texts:
        broken, least = sum(r[way]["broken"] for r in rows), min(r[way]["least"] for r in rows)
        print(
            f"{way}: {broken} of {len(rows) * len(PROMPTS)} texts below {LEAST} of plain text's "
            f"distinct-2; the least {least:.3f}"
        )


if __name__ == "__main__":
    main()
