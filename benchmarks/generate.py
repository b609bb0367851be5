"""Speed of `lmhead.generate` over transformers' `generate` for the same tokens, in one run.

    python benchmarks/generate.py [--model MODEL] [--tokens 64] [--rounds 5] [--json]

Both run the same model in the same process, turn by turn, so that a busy machine slows both; the
ratio is that of the best rounds. Greedy must give the same ids. Sampled is top-k 50, top-p 0.9,
temperature 0.7: the draws differ (each has its own generator), the number of tokens does not, for
neither may end early.
"""

import argparse
import json
import time
from collections.abc import Callable

import torch

from lmhead.generation import generate
from lmhead.loading import Model, load

PROMPTS = (
    "The capital of France is",
    "Once upon a time, there was",
    "The three laws of motion are",
    "In the beginning there was a",
    "To bake a good bread you",
    "The city lies on a river",
    "Every morning the old man went",
    "A compiler is a program that",
)


def best_of(rounds: int, *runs: Callable[[], object]) -> list[float]:
    """Run all in turn, several times; return the shortest time of each."""
    best = [float("inf")] * len(runs)
    for _ in range(rounds):
        for i, run in enumerate(runs):
            started = time.perf_counter()
            run()
            best[i] = min(best[i], time.perf_counter() - started)
    return best


def compare(model: Model, batch: int, sampled: bool, tokens: int, rounds: int) -> float:
    """Return how many times as long transformers takes for the same number of tokens."""
    prompts, tokenizer = PROMPTS[:batch], model.tokenizer
    inputs = tokenizer(list(prompts), return_tensors="pt", padding=True)
    sampling = {"temperature": 0.7, "top_k": 50, "top_p": 0.9} if sampled else {}
    seed = {"seed": 1} if sampled else {}
    limits = {"max_tokens": tokens, "min_tokens": tokens, "batch_size": batch}

    def ours() -> list[list[int]]:
        results = generate(prompts, model, **limits, **sampling, **seed)
        return [list(r.ids) for r in results]

    def theirs() -> list[list[int]]:
        torch.manual_seed(1)
        out = model.body.model.generate(
            **inputs,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            pad_token_id=tokenizer.pad_token_id,
            do_sample=sampled,
            **sampling,
        )
        ids: list[list[int]] = out[:, inputs["input_ids"].shape[1] :].tolist()
        return ids

    if ours() != theirs() and not sampled:  # this also warms both up
        raise SystemExit(f"greedy ids differ at batch {batch}")
    our_time, their_time = best_of(rounds, ours, theirs)
    return their_time / our_time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    model = load(options.model)
    model.tokenizer.padding_side = "left"
    if model.tokenizer.pad_token_id is None:
        model.tokenizer.pad_token = model.tokenizer.eos_token
    rows = [
        {
            "batch": batch,
            "mode": "sampled" if sampled else "greedy",
            "ratio": compare(model, batch, sampled, options.tokens, options.rounds),
        }
        for batch in (1, 8)
        for sampled in (False, True)
    ]
    if options.json:
        print(json.dumps({"model": options.model, "tokens": options.tokens, "rows": rows}))
        return
    print(f"{options.model}, {options.tokens} tokens, best of {options.rounds} rounds")
    print("batch  mode     lmhead is faster by")
    for row in rows:
        print(f"{row['batch']:5}  {row['mode']:7}  {row['ratio']:.2f} x")


if __name__ == "__main__":
    main()
