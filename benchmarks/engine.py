"""Throughput of requests that run together over the same requests one after the other, in one run.

    python benchmarks/engine.py [--model MODEL] [--requests 8] [--tokens 64] [--rounds 5] [--json]

Each request has its own prompt, sampler and seed. Both ways take turns, so that a busy machine
slows both; the ratio is that of the best rounds. The ids must be the same. In the second row the
requests come one by one, at every fourth step, and join those that are running.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace

from lmhead.generation import Engine, Request
from lmhead.loading import Model, load
from lmhead.sampling import Sampler, SamplingParams

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
CONTROLS = (
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
)

Ids = list[tuple[int, ...]]


def requests_of(model: Model, count: int, tokens: int, kinds: int) -> list[Request]:
    """Make requests that all end after `tokens` tokens; `kinds` samplers take turns."""
    made = []
    for i in range(count):
        params = SamplingParams(**CONTROLS[i % kinds], min_tokens=tokens, seed=i)
        params = replace(params, stop_ids=model.stop_ids)
        sampler = Sampler.from_params(params, vocab_size=model.reachable, tokenizer=model.tokenizer)
        made.append(Request(model.encode(PROMPTS[i % len(PROMPTS)]), sampler, max_tokens=tokens))
    return made


def in_turn(model: Model, requests: list[Request]) -> Ids:
    return [one for request in requests for one in together(model, [request])]


def together(model: Model, requests: list[Request], apart: int = 0) -> Ids:
    """Run requests in one engine; one comes every `apart` steps, or all come at once."""
    engine = Engine(model, batch_size=len(requests))
    found: dict[int, tuple[int, ...]] = {}
    todo, steps = list(requests), 0
    while todo or engine.busy:
        while todo and (apart == 0 or steps % apart == 0):
            engine.submit(todo.pop(0))
            if apart:
                break
        steps += 1
        found |= {event.id: event.result.ids for event in engine.step() if event.result}
    return [found[i] for i in range(len(requests))]


def best_of(rounds: int, *runs: Callable[[], Ids]) -> list[float]:
    """Run all in turn, several times; return the shortest time of each."""
    answers = [run() for run in runs]  # this also warms them up
    if any(answer != answers[0] for answer in answers):
        raise SystemExit("the ids differ")
    best = [float("inf")] * len(runs)
    for _ in range(rounds):
        for i, run in enumerate(runs):
            started = time.perf_counter()
            run()
            best[i] = min(best[i], time.perf_counter() - started)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    model = load(options.model)
    rows = []
    for kinds, name in ((1, "all greedy"), (2, "greedy and sampled")):
        requests = requests_of(model, options.requests, options.tokens, kinds)
        alone, at_once, joining = best_of(
            options.rounds,
            lambda requests=requests: in_turn(model, requests),
            lambda requests=requests: together(model, requests),
            lambda requests=requests: together(model, requests, apart=4),
        )
        total = options.requests * options.tokens
        rows.append(
            {
                "requests": name,
                "tokens_per_second": total / at_once,
                "ratio": alone / at_once,
                "ratio_joining": alone / joining,
            }
        )
    if options.json:
        reported = {"model": options.model, "requests": options.requests, "tokens": options.tokens}
        print(json.dumps({**reported, "rows": rows}))
        return
    print(
        f"{options.model}, {options.requests} requests of {options.tokens} tokens, "
        f"best of {options.rounds} rounds"
    )
    print("requests            together  at once  one by one")
    for row in rows:
        print(
            f"{row['requests']:18}  {row['tokens_per_second']:6.0f}/s  {row['ratio']:5.2f} x"
            f"  {row['ratio_joining']:8.2f} x"
        )


if __name__ == "__main__":
    main()
