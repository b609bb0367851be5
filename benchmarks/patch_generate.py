"""Speed of a patched model's `generate` over the plain one, for the same tokens, in one run.

    python benchmarks/patch_generate.py [--model MODEL ...] [--tokens 128] [--rounds 3] [--json]

The plain model is a shallow copy of the patched one: the same modules and weights, without the
patch. Both generate in turn, so that a busy machine slows both; the ratio is that of the best
rounds. The ids must be the same, greedy and drawn (transformers' defaults, the same seed); else the
exit code is 1.
"""

import argparse
import copy
import json
import time
from typing import Any

import torch

import lmhead

PROMPT = "In the winter of 1912 a young engineer walked along the river to look for work, and"
MODELS = ("smollm2-135m", "gemma3-270m")


def compare(model: Any, ids: torch.Tensor, tokens: int, rounds: int, draws: bool) -> dict[str, Any]:
    """Return seconds of the best rounds, and whether the ids were the same."""
    plain = copy.copy(model)
    best, results = {"plain": float("inf"), "patched": float("inf")}, {}
    before = model.lmhead_stats
    for _ in range(rounds):
        for name, one in (("plain", plain), ("patched", model)):
            torch.manual_seed(1)
            started = time.perf_counter()
            results[name] = one.generate(ids, max_new_tokens=tokens, do_sample=draws)
            best[name] = min(best[name], time.perf_counter() - started)
    stats = model.lmhead_stats
    return {
        **best,
        "ratio": best["plain"] / best["patched"],
        "same": torch.equal(results["plain"], results["patched"]),
        "steps": stats.steps - before.steps,
        "dense_steps": stats.dense_steps - before.dense_steps,
    }


def main() -> int:
    """Compare on every model, greedy and drawn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=MODELS)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    for name in args.model:
        loaded = lmhead.load(name, dtype=torch.float32)
        model = loaded.body.model
        ids = torch.as_tensor(loaded.encode(PROMPT)).view(1, -1)
        model.generation_config.eos_token_id = None  # neither may end early
        model.generation_config.pad_token_id = 0
        started = time.perf_counter()
        lmhead.patch_generate(model)
        patching = time.perf_counter() - started
        model.generate(ids, max_new_tokens=2)
        for how, draws in (("greedy", False), ("drawn", True)):
            one = compare(model, ids, args.tokens, args.rounds, draws)
            found[f"{name} {how}"] = {**one, "patching": patching}
            if not args.json:
                print(
                    f"{name:14} {how:7} {one['ratio']:.2f} times as fast: "
                    f"plain {one['plain']:.2f} s, patched {one['patched']:.2f} s "
                    f"for {args.tokens} tokens; "
                    f"{one['dense_steps']} of {one['steps'] + one['dense_steps']} steps dense; "
                    f"ids {'the same' if one['same'] else 'DIFFERENT'}; patching {patching:.1f} s"
                )
    if args.json:
        print(json.dumps(found))
    return 0 if all(one["same"] for one in found.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
