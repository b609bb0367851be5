"""What a screened head draws under top_p, min_p and top_n_sigma, held against float64.

    python benchmarks/nucleus.py [--models M ...] [--states 2000] [--draws 200000]
        [--parts decisions laws bfloat16] [--json]

1. Real hidden states, at T = 0.7, 1 and 1.5: a token that `sample` drew must be in the set that
   float64 logits of all rows give, and the tokens around the border of the nucleus must be in or
   out as there. Fall-backs are counted.
2. Draws of one context: chi-square against the softmax of what float64 leaves.
3. bfloat16: how often the best token by the exact scores (`exact`) and by exact scores rounded to
   bfloat16 (`as-model`) is another one than that of the dense layer in bfloat16.

Ends with an error where one token is in the wrong set, or a p-value is below 1e-5.
"""

import argparse
import json
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lmhead.head.screened import ScreenedHead
from lmhead.head.screening.known import Known
from lmhead.head.screening.rejection import pick
from lmhead.loading import load
from screened_exact import hidden_states, p_value

CUTS: dict[str, dict[str, float]] = {
    "top_p 0.9": {"top_p": 0.9},
    "min_p 0.05": {"min_p": 0.05},
    "top_n_sigma 1": {"top_n_sigma": 1.0},
}
PARTS = ("decisions", "laws", "bfloat16")
TEMPERATURES = (0.7, 1.0, 1.5)
SAMPLED = 1000  # draws besides, each of which reads the copy anew


def left(y: np.ndarray, order: np.ndarray, T: float, cut: dict[str, float]) -> np.ndarray:
    """Tell which tokens a cut leaves of float64 logits `[V]`, by their ids."""
    stays = np.ones(len(y), bool)
    best = y[order[0]]
    if "top_p" in cut:
        w = np.exp((y[order] - best) / T)
        stays[order] = np.cumsum(w) - w < cut["top_p"] * w.sum()
    if "min_p" in cut:
        stays &= y >= best + T * np.log(cut["min_p"])
    if "top_n_sigma" in cut:
        stays &= y >= best - cut["top_n_sigma"] * y.std()
    return stays


def decisions(head: ScreenedHead, states: Tensor) -> dict[str, Any]:
    """Count wrong draws, wrong decisions at the border, and fall-backs, for every cut and T."""
    weight = head.dense.weight.detach().double()[: head.vocab_size]
    found: dict[str, Any] = {
        f"{name} T {T}": {"states": 0, "wrong": 0, "fallbacks": 0, "rows": 0}
        for name in CUTS
        for T in TEMPERATURES
    }
    g = torch.Generator().manual_seed(0)
    for part in states.split(8):
        logits = (part.double() @ weight.T).numpy()
        for h, y in zip(part, logits, strict=True):
            order = np.lexsort((np.arange(len(y)), -y))
            for name, cut in CUTS.items():
                for T in TEMPERATURES:
                    one = found[f"{name} T {T}"]
                    head.stats.clear()
                    token = int(head.sample(h, T, generator=g, **cut))
                    one["states"] += 1
                    one["fallbacks"] += head.stats.fallbacks.total()
                    one["rows"] += head.stats.rescored
                    stays = left(y, order, T, cut)
                    one["wrong"] += not stays[token]
                    if "top_p" not in cut:
                        continue
                    border = int(stays.sum())
                    with head.rows(h[None]) as rows:
                        for row in rows:
                            known = Known(row.query, row.touched, row.transform, T)
                            for at in {max(border - 2, 0), border - 1, border, border + 1}:
                                score = float(row.query.score(order[at : at + 1]).z[0])
                                inside = known.holds(cut["top_p"], score, int(order[at]))
                                one["wrong"] += inside != bool(stays[order[at]])
    return found


def laws(head: ScreenedHead, h: Tensor, draws: int) -> dict[str, float]:
    """Give the p-values of draws from one context h `[d]`."""
    y = (head.dense.weight.detach().double()[: head.vocab_size] @ h.double()).numpy()
    order = np.lexsort((np.arange(len(y)), -y))
    reported = {}
    for name, cut in CUTS.items():
        for T in TEMPERATURES:
            g = torch.Generator().manual_seed(1)
            counts = np.zeros(len(y))
            with head.rows(h[None]) as rows:
                (row,) = rows
                if sigma := cut.get("top_n_sigma"):  # as in `sample`, but found once for all draws
                    near = row.near(sigma * row.deviation(head._scanner.moments)).ordered()
                    for _ in range(draws):
                        counts[near.ids[pick(near.z, T, g)]] += 1
                else:
                    for _ in range(draws):
                        one = row.draw_cut(T, cut.get("top_p"), cut.get("min_p"), g)
                        counts[one.id] += 1
            ids = head.sample(h.expand(SAMPLED, -1), T, generator=g, **cut)
            counts += np.bincount(ids.numpy(), minlength=len(y))
            p = np.where(left(y, order, T, cut), np.exp((y - y.max()) / T), 0)
            reported[f"{name} T {T}"] = p_value(counts, p / p.sum())
    return reported


def sixteen(head: ScreenedHead, states: Tensor) -> dict[str, int]:
    """Count the states whose best token in bfloat16 is another one than by either rounding."""
    weight = head.dense.weight.detach().bfloat16()[: head.vocab_size]
    wide = weight.double()
    reported = {"states": len(states), "exact": 0, "as-model": 0}
    for part in states.bfloat16().split(16):
        # one at a time, as a step of generate computes them
        own = torch.cat([F.linear(h[None], weight).float().argmax(-1) for h in part])
        z = part.double() @ wide.T
        reported["exact"] += int((z.argmax(-1) != own).sum())
        reported["as-model"] += int((z.bfloat16().float().argmax(-1) != own).sum())
    return reported


def show(name: str, part: str, found: dict[str, Any]) -> None:
    """Print what one part found of a model."""
    if part != "decisions":
        shown = {k: round(x, 4) for k, x in found.items()}
        print(name, {"laws": "p-values"}.get(part, part), shown, flush=True)
        return
    for about, one in found.items():
        n = one["states"]
        print(
            f"{name} {about:18} {n} states, {one['wrong']} wrong, {one['fallbacks'] / n:.2%} "
            f"fall-backs, {one['rows'] / n:.0f} rows scored",
            flush=True,
        )


def main() -> int:
    """Hold every cut against float64, on every model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["smollm2-135m", "gemma3-270m"])
    parser.add_argument("--states", type=int, default=2000)
    parser.add_argument("--draws", type=int, default=200_000)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    report: dict[str, Any] = {}
    good = True
    for name in args.models:
        model = load(name, dtype=torch.float32)
        head = ScreenedHead.from_head(model.head, model.folder)
        states = hidden_states(model, args.states)
        reported: dict[str, Any] = {}
        for part in args.parts:  # each is shown as soon as it is there: some take many minutes
            if part == "decisions":
                found = decisions(head, states)
                good &= not any(one["wrong"] for one in found.values())
            elif part == "laws":
                found = laws(head, states[len(states) // 2], args.draws) if args.draws else {}
                good &= all(p > 1e-5 for p in found.values())
            else:
                found = sixteen(head, states)
            reported[part] = found
            if not args.json:
                show(name, part, found)
        report[name] = reported
    if args.json:
        print(json.dumps(report))
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
