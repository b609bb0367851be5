"""Speed of the screened head over torch's, in one run.

    python benchmarks/head.py [--models M ...] [--shapes VxD ...] [--batches 1 4 16] [--generate]

Six verbs (greedy, top-50, a draw from the full softmax, and from what top_p = 0.9, min_p = 0.05 or
top_n_sigma = 1 leave of it) against `F.linear` in float32 and bfloat16 with argmax, topk,
transformers' own cuts, softmax and multinomial, and against the time that the machine needs
merely to read the int8 copy. All run on the same number of threads, turn by turn, so that a busy
machine slows all of them; before each, other memory is read, so that none finds its weights in the
cache. Figures are the best of all turns. Real models are asked about real hidden states (of
Python's own documentation), the other shapes about random ones. `--generate` adds whole steps:
tokens per second of `lmhead.generate` with the dense and with the screened head, beside
transformers' own `generate`.
"""

import argparse
import gc
import itertools
import json
import pydoc
import time
from collections.abc import Callable

import numba
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import MinPLogitsWarper, TopPLogitsWarper

from lmhead.generation import generate
from lmhead.head import LMHead
from lmhead.head.screened import ScreenedHead
from lmhead.loading import Model, load

SHAPES = ("50257x768", "128256x2048", "256000x2048")
TEXTS = ("json", "argparse", "collections", "decimal", "email", "logging", "pathlib", "ssl")
PROMPT = "The three laws of motion are"
OTHER = 2**28  # bytes, more than any cache holds


@numba.njit(parallel=True)
def read(words: np.ndarray) -> int:
    """Read everything, and do next to nothing with it."""
    chunk = 1 << 12
    total = 0
    for c in numba.prange((len(words) + chunk - 1) // chunk):
        part = 0
        for i in range(c * chunk, min((c + 1) * chunk, len(words))):
            part ^= words[i]
        total += part
    return total


def turns(rounds: int, runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Run all in turn; return the shortest time of each in milliseconds."""
    best = dict.fromkeys(runs, float("inf"))
    other = np.ones(OTHER // 8, np.int64)  # zeros that nobody wrote are one page, over and over
    for _ in range(rounds + 1):  # the first turn warms up, and is never the best
        for name, run in runs.items():
            read(other)
            started = time.perf_counter()
            run()
            best[name] = min(best[name], (time.perf_counter() - started) * 1000)
    return best


def measure(
    head: LMHead, states: Tensor, batch: int, rounds: int, verbs: list[str] | None = None
) -> dict[str, dict[str, float]]:
    """Time the verbs on states `[n, d]` that enter the projection, `batch` at a time."""
    screened = ScreenedHead.from_head(head)
    weight, half = head.weight.detach(), head.weight.detach().bfloat16()
    words = screened.screen.q.view(torch.int64).flatten().numpy()
    numba.set_num_threads(torch.get_num_threads())
    given = itertools.cycle(states.split(batch)[: len(states) // batch])

    def some() -> Tensor:
        return next(given)

    def logits(W: Tensor) -> Tensor:
        return F.linear(some().to(W.dtype), W)

    def draw(z: Tensor) -> Tensor:
        return torch.multinomial(z.float().softmax(-1), 1)

    def draw_top_p(z: Tensor) -> Tensor:
        return draw(TopPLogitsWarper(0.9)(None, z.float()))

    def draw_min_p(z: Tensor) -> Tensor:
        return draw(MinPLogitsWarper(0.05)(None, z.float()))

    def draw_sigma(z: Tensor) -> Tensor:
        z = z.float()
        return draw(z.masked_fill(z < z.amax(-1, True) - z.std(-1, keepdim=True), -torch.inf))

    torch_verbs: dict[str, Callable[[Tensor], object]] = {
        "greedy": lambda z: z.argmax(-1),
        "top-50": lambda z: z.topk(50),
        "sample": draw,
        "top_p": draw_top_p,
        "min_p": draw_min_p,
        "sigma": draw_sigma,
    }
    our_verbs: dict[str, Callable[[], object]] = {
        "greedy": lambda: screened.topk(some(), 1),
        "top-50": lambda: screened.topk(some(), 50),
        "sample": lambda: screened.sample(some()),
        "top_p": lambda: screened.sample(some(), top_p=0.9),
        "min_p": lambda: screened.sample(some(), min_p=0.05),
        "sigma": lambda: screened.sample(some(), top_n_sigma=1.0),
    }
    result: dict[str, dict[str, float]] = {}
    for verb, ours in our_verbs.items():
        if verbs and verb not in verbs:
            continue
        ours()  # the first one may have to compile, or to make a table
        screened.stats.clear()
        after = torch_verbs[verb]
        best = turns(
            rounds,
            {
                "float32": lambda after=after: after(logits(weight)),
                "screened": ours,
                "bfloat16": lambda after=after: after(logits(half)),
                "read": lambda: read(words),
            },
        )
        result[verb] = {
            **best,
            "over_float32": best["float32"] / best["screened"],
            "over_bfloat16": best["bfloat16"] / best["screened"],
            "of_read_limit": best["read"] / best["screened"],
            "rows_rescored": screened.stats.rescored / screened.stats.states,
            "fallbacks": screened.stats.fallbacks.total() / screened.stats.states,
        }
    return result


def real_states(model: Model, wanted: int = 512) -> Tensor:
    """What enters the head on pages of Python's documentation, `[n, d]`."""
    found: list[Tensor] = []
    for name in TEXTS:
        text = pydoc.plain(pydoc.render_doc(name))[: 10 * wanted]
        ids = model.tokenizer(text)["input_ids"][: wanted // len(TEXTS)]
        with torch.inference_mode():
            found.append(model.body(torch.tensor([ids]), use_cache=False)[0][0])
    return torch.cat(found).clone()


def random_head(shape: str) -> tuple[LMHead, Tensor]:
    V, d = map(int, shape.split("x"))
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(V, d, generator=g)
    states = torch.randn(512, d, generator=g) * (3 / d**0.5)  # logits with deviation 3
    return LMHead(weight), states


def whole_steps(model: Model, tokens: int, rounds: int) -> dict[str, float]:
    """Tokens per second of greedy generation, from one prompt."""
    screened = ScreenedHead.from_head(model.head, model.folder)
    inputs = model.tokenizer(PROMPT, return_tensors="pt")

    def ours(head: LMHead | ScreenedHead) -> tuple[int, ...]:
        return tuple(generate([PROMPT], model, head=head, max_tokens=tokens)[0].ids)

    def theirs() -> object:
        return model.body.model.generate(**inputs, max_new_tokens=tokens, do_sample=False)

    ids = ours(model.head)
    if ids != ours(screened):
        raise SystemExit("the greedy tokens of the dense and the screened head differ")
    if not screened.stats.states:
        raise SystemExit("generate did not ask the screened head for its best token")
    best = turns(
        rounds,
        {
            "dense": lambda: ours(model.head),
            "screened": lambda: ours(screened),
            "transformers": theirs,
        },
    )
    speed = {name: len(ids) / ms * 1000 for name, ms in best.items()}
    return {**speed, "screened_over_dense": speed["screened"] / speed["dense"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=["smollm2-135m", "gemma3-270m"])
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--verbs", nargs="*", default=None, help="only these; all by default")
    parser.add_argument("--generate", action="store_true")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    report: dict[str, object] = {"threads": torch.get_num_threads()}
    if not options.json:
        print(f"{torch.get_num_threads()} threads; times in ms, best of {options.rounds}")

    def run(name: str, head: LMHead, states: Tensor) -> None:
        for batch in options.batches:
            verbs = measure(head, states, batch, options.rounds, options.verbs)
            report[f"{name} batch {batch}"] = verbs
            for verb, figures in verbs.items() if not options.json else ():
                print(
                    f"{name:14} batch {batch:2} {verb:7}"
                    f" float32 {figures['float32']:8.2f}  bfloat16 {figures['bfloat16']:8.2f}"
                    f"  screened {figures['screened']:7.2f}  read {figures['read']:6.2f}"
                    f"  | {figures['over_float32']:5.2f} x float32"
                    f"  {figures['over_bfloat16']:5.2f} x bfloat16"
                    f"  {figures['of_read_limit']:4.0%} of the read limit"
                    f"  {figures['rows_rescored']:6.0f} rows",
                    flush=True,
                )

    for name in options.models:
        model = load(name)
        label = model.folder.name
        run(label, model.head, real_states(model))
        if options.generate:
            steps = whole_steps(model, options.tokens, max(3, options.rounds // 10))
            report[f"{label} generate"] = steps
            if not options.json:
                print(f"{label:14} tokens/s", {k: round(v, 2) for k, v in steps.items()})
        del model
        gc.collect()
    for shape in options.shapes:
        run(shape, *random_head(shape))
        gc.collect()
    if options.json:
        print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
