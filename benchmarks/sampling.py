"""How fast the filters are against transformers' processors, in the same run.

    python benchmarks/sampling.py [--json] [--rounds 15] [--threads 2]

Two claims at V = 262,144: top_p alone is at least 10 times faster than `TopPLogitsWarper`, and
temperature, top_k 50, top_p and a draw together are at least 5 times faster than transformers'
processors with softmax and `torch.multinomial`. The logits are Gaussian with three spreads:
"peaked" (sd 3 at temperature 0.7: top_p keeps a few hundred tokens), "wide" (sd 3: thousands) and
"flat" (sd 0.1: nine tokens of ten are kept, the worst case for a method that avoids sorting).

Both sides are timed in turn, round by round; the times are the best of all rounds, since other
work on the machine can only add to them.
"""

import argparse
import json
import time
from collections.abc import Callable

import torch
from transformers.generation import logits_process as hf

from lmhead.sampling import Sampler, SamplingParams

SPREADS = {"peaked": 3 / 0.7, "wide": 3.0, "flat": 0.1}
TOP_P, TOP_K, TEMPERATURE = 0.9, 50, 0.7


def best_ms(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Time each run in turn, and give the best of all rounds in milliseconds."""
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], 1000 * (time.perf_counter() - start))
    return best


def measure(V: int, B: int, spread: str, rounds: int) -> list[dict[str, object]]:
    g = torch.Generator().manual_seed(0)
    z = torch.randn(B, V, generator=g) * SPREADS[spread]
    ids = torch.zeros(B, 1, dtype=torch.long)
    theirs_p = hf.TopPLogitsWarper(TOP_P)
    theirs = hf.LogitsProcessorList(
        [hf.TemperatureLogitsWarper(TEMPERATURE), hf.TopKLogitsWarper(TOP_K), theirs_p]
    )
    ours_p = Sampler.from_params(SamplingParams(top_p=TOP_P))
    ours = Sampler.from_params(
        SamplingParams(temperature=TEMPERATURE, top_k=TOP_K, top_p=TOP_P, seed=0)
    )
    seqs = [ours.start(index=i) for i in range(B)]
    kept = ours_p.process(z).left().tolist()
    pairs = {
        "top_p": (lambda: ours_p.process(z, seqs), lambda: theirs_p(ids, z)),
        "chain and draw": (
            lambda: ours.step(z, seqs),
            lambda: torch.multinomial(theirs(ids, z).softmax(-1), 1),
        ),
    }
    rows = []
    for name, (our_run, their_run) in pairs.items():
        ms = best_ms({"lmhead": our_run, "transformers": their_run}, rounds)
        rows.append(
            {
                "what": name,
                "V": V,
                "batch": B,
                "logits": spread,
                "kept_by_top_p": kept[0],
                "lmhead_ms": round(ms["lmhead"], 3),
                "transformers_ms": round(ms["transformers"], 3),
                "ratio": round(ms["transformers"] / ms["lmhead"], 1),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = [
        row
        for V in (50_257, 262_144)
        for B in (1, 8)
        for spread in SPREADS
        for row in measure(V, B, spread, options.rounds)
    ]
    if options.json:
        print(json.dumps({"threads": options.threads, "torch": torch.__version__, "rows": rows}))
        return
    print(f"{'what':<15}{'V':>8}{'batch':>6}  {'logits':<7}{'kept':>8}", end="")
    print(f"{'lmhead ms':>11}{'transformers ms':>17}{'ratio':>8}")
    for r in sorted(rows, key=lambda r: (r["what"] != "top_p", r["V"], r["batch"])):
        print(
            f"{r['what']:<15}{r['V']:>8,}{r['batch']:>6}  {r['logits']:<7}{r['kept_by_top_p']:>8,}"
            f"{r['lmhead_ms']:>11.2f}{r['transformers_ms']:>17.2f}{r['ratio']:>8.1f}"
        )


if __name__ == "__main__":
    main()
