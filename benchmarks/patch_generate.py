"""Speed of a patched model's `generate` over the plain one, for the same tokens, in one run.

    python benchmarks/patch_generate.py [--model MODEL ...] [--dtypes float32 bfloat16]
        [--how greedy drawn top_p] [--tokens 128] [--rounds 3] [--first 5] [--json]

The plain model is a shallow copy of the patched one: the same modules and weights, without the
patch. Both generate in turn, so that a busy machine slows both; the ratio is that of the best
rounds. The ids must be the same, greedy, drawn (transformers' defaults) and drawn with top_p alone,
with the same seed; else the exit code is 1.

`--first N` compares first calls instead, greedy: N new processes of each kind in turn, medians.
`lmhead screen` must have run, so that the copy and the compiled loops are on disk.
"""

import argparse
import copy
import itertools
import json
import statistics
import subprocess
import sys
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


def loaded(name: str, dtype: str) -> tuple[Any, torch.Tensor]:
    """Load a model that never ends early, and the prompt's ids."""
    one = lmhead.load(name, dtype=dtype)
    model = one.body.model
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model, torch.as_tensor(one.encode(PROMPT)).view(1, -1)


def first_call(name: str, dtype: str, tokens: int, patched: bool) -> dict[str, Any]:
    """Time what a new process does before its first text is there, once the model is loaded."""
    model, ids = loaded(name, dtype)
    started = time.perf_counter()
    if patched:
        lmhead.patch_generate(model)
    ready = time.perf_counter()
    text = model.generate(ids, max_new_tokens=tokens, do_sample=False)
    return {
        "patching": ready - started,
        "call": time.perf_counter() - ready,
        "ids": text[0].tolist(),
    }


def first_calls(name: str, dtype: str, tokens: int, turns: int) -> dict[str, Any]:
    """Run new processes in turn; return the medians of their first calls."""
    found: dict[str, list[dict[str, Any]]] = {"plain": [], "patched": []}
    for _, kind in itertools.product(range(turns), found):
        asked = ["--model", name, "--dtypes", dtype, "--tokens", str(tokens), "--once", kind]
        output = subprocess.run(
            [sys.executable, __file__, *asked], check=True, capture_output=True, text=True
        )
        found[kind].append(json.loads(output.stdout.splitlines()[-1]))
    plain, patched = (statistics.median(one["call"] for one in runs) for runs in found.values())
    return {
        "plain": plain,
        "patched": patched,
        "ratio": plain / patched,
        "patching": statistics.median(one["patching"] for one in found["patched"]),
        "same": len({tuple(one["ids"]) for runs in found.values() for one in runs}) == 1,
    }


def main() -> int:
    """Compare on every model, greedy and drawn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=MODELS)
    parser.add_argument("--dtypes", nargs="+", default=("float32", "bfloat16"))
    parser.add_argument("--how", nargs="+", choices=list(HOW), default=list(HOW))
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="first calls only, of N processes")
    parser.add_argument("--once", choices=("plain", "patched"), help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.once:
        one = first_call(args.model[0], args.dtypes[0], args.tokens, args.once == "patched")
        print(json.dumps(one))
        return 0
    found: dict[str, Any] = {}
    for name, dtype in itertools.product(args.model, args.dtypes):
        if args.first:
            one = found[f"{name} {dtype}"] = first_calls(name, dtype, args.tokens, args.first)
            if not args.json:
                print(
                    f"{name} {dtype:9} first call {one['plain']:.2f} s plain, "
                    f"{one['patched']:.2f} s patched ({one['ratio']:.2f} times as fast) "
                    f"for {args.tokens} tokens; ids {'the same' if one['same'] else 'DIFFERENT'}; "
                    f"patching {one['patching']:.2f} s",
                    flush=True,
                )
            continue
        model, ids = loaded(name, dtype)
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
