"""Speed of a patched model's `generate` over the plain one, for the same tokens, in one run.

    python benchmarks/patch_generate.py [--model MODEL ...] [--dtypes float32 bfloat16]
        [--how greedy drawn top_p] [--tokens 128] [--rounds 3] [--json]

The plain model is a shallow copy of the patched one: the same modules and weights, without the
patch. Both generate in turn, so that a busy machine slows both; the ratio is that of the best
rounds. The ids must be the same, greedy, drawn (transformers' defaults) and drawn with top_p alone,
with the same seed; else the exit code is 1.
"""

import argparse
import copy
import itertools
import json
import time
from typing import Any

import torch

import lmhead

PROMPT = "In the winter of 1912 a young engineer walked along the river to look for work, and"
MODELS = ("smollm2-135m", "gemma3-270m")
HOW: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "drawn": {"do_sample": True},
    "top_p": {"do_sample": True, "top_k": 0, "top_p": 0.9},
}


def compare(
    model: Any, ids: torch.Tensor, tokens: int, rounds: int, how: dict[str, Any]
) -> dict[str, Any]:
    """Return seconds of the best rounds, and whether the ids were the same."""
    plain = copy.copy(model)
    best, results = dict.fromkeys(("plain", "patched"), float("inf")), {}
    busy = dict(best)  # of the processor: what a shared machine leaves of a comparison
    before = model.lmhead_stats
    for _ in range(rounds):
        for name, one in (("plain", plain), ("patched", model)):
            torch.manual_seed(1)
            started, work = time.perf_counter(), time.process_time()
            results[name] = one.generate(ids, max_new_tokens=tokens, **how)
            best[name] = min(best[name], time.perf_counter() - started)
            busy[name] = min(busy[name], time.process_time() - work)
    stats = model.lmhead_stats
    return {
        **best,
        "ratio": best["plain"] / best["patched"],
        "processor_ratio": busy["plain"] / busy["patched"],
        "same": torch.equal(results["plain"], results["patched"]),
        "steps": stats.steps - before.steps,
        "dense_steps": stats.dense_steps - before.dense_steps,
    }


def main() -> int:
    """Compare on every model, greedy and drawn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=MODELS)
    parser.add_argument("--dtypes", nargs="+", default=("float32", "bfloat16"))
    parser.add_argument("--how", nargs="+", choices=list(HOW), default=list(HOW))
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    for name, dtype in itertools.product(args.model, args.dtypes):
        loaded = lmhead.load(name, dtype=dtype)
        model = loaded.body.model
        ids = torch.as_tensor(loaded.encode(PROMPT)).view(1, -1)
        model.generation_config.eos_token_id = None  # neither may end early
        model.generation_config.pad_token_id = 0
        started = time.perf_counter()
        lmhead.patch_generate(model)
        patching = time.perf_counter() - started
        plain = copy.copy(model)
        first = []
        for one in (plain, model):
            started = time.perf_counter()
            one.generate(ids, max_new_tokens=8, do_sample=False)
            first.append(time.perf_counter() - started)
        for how in args.how:
            one = compare(model, ids, args.tokens, args.rounds, HOW[how])
            key = f"{name} {dtype} {how}"
            found[key] = {**one, "patching": patching, "first_calls": first}
            if not args.json:
                print(
                    f"{key:32} {one['ratio']:.2f} times as fast "
                    f"({one['processor_ratio']:.2f} by processor time): "
                    f"plain {one['plain']:.2f} s, patched {one['patched']:.2f} s "
                    f"for {args.tokens} tokens; "
                    f"{one['dense_steps']} of {one['steps'] + one['dense_steps']} steps dense; "
                    f"ids {'the same' if one['same'] else 'DIFFERENT'}; patching {patching:.1f} s; "
                    f"first call {first[0]:.2f} s plain, {first[1]:.2f} s patched",
                    flush=True,
                )
    if args.json:
        print(json.dumps(found))
    return 0 if all(one["same"] for one in found.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
