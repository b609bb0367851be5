"""Speed of the llama.cpp body under our head: against transformers, and against llama.cpp itself.

    python benchmarks/llamacpp.py [--model MODEL] [--trimmed FILE.gguf] [--tokens 128] [--rounds 3]

One process, all turn by turn, so that a busy machine slows all; the ratios are those of the best
rounds. Greedy, one sequence, none may end early:

- transformers' own `generate`, in float32;
- llama.cpp itself: its own loop in C over the original file, the best token of its own logits;
- lmhead with the llama.cpp body, its head dense and screened;
- the same two on the trimmed file, where one is given (`lmhead trim --form gguf`).

For the trimmed file it also tells what it keeps: bytes, and whether llama.cpp itself gives the same
tokens and bit-equal logits for the tokens that both have.
"""

import argparse
import ctypes
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lmhead.body.llama.library import Loaded, library
from lmhead.generation import generate
from lmhead.generation.engines import engine
from lmhead.loading import Model, load
from lmhead.models.fetch import gguf_of

PROMPT = "The history of the city begins in the year"


class Plain:
    """llama.cpp by itself: a file, a context of its own, its own logits."""

    def __init__(self, path: Path, cells: int = 512) -> None:
        self.lib, self.model = library(), Loaded(path)
        params = self.lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = cells, 512, 512
        params.n_threads = params.n_threads_batch = torch.get_num_threads()
        params.no_perf = True
        self.context = self.lib.llama_init_from_model(self.model.pointer, params)
        vocab = self.lib.llama_model_get_vocab(self.model.pointer)
        self.V = int(self.lib.llama_vocab_n_tokens(vocab))

    def read(self, ids: Sequence[int]) -> Any:
        """Read ids behind what was read; return the logits `[V]` of the last."""
        held = (ctypes.c_int32 * len(ids))(*ids)
        if self.lib.llama_decode(self.context, self.lib.llama_batch_get_one(held, len(ids))):
            raise SystemExit("llama.cpp could not read the tokens")
        logits = self.lib.llama_get_logits_ith(self.context, -1)
        return np.ctypeslib.as_array(logits, (self.V,))

    def greedy(self, ids: Sequence[int], tokens: int, banned: Sequence[int]) -> list[int]:
        """Continue ids by the best token, `tokens` times."""
        threads = torch.get_num_threads()
        self.lib.llama_set_n_threads(self.context, threads, threads)
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        z, made = self.read(ids), []
        for _ in range(tokens):
            z[list(banned)] = -np.inf
            made.append(int(z.argmax()))
            z = self.read(made[-1:])
        return made


def best_of(rounds: int, runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Run all in turn, several times; return the shortest time of each."""
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - started)
    return best


def ours(model: Model, head: Any, ids: Sequence[int], tokens: int) -> Callable[[], list[int]]:
    def run() -> list[int]:
        made = generate(list(ids), model, max_tokens=tokens, min_tokens=tokens, head=head)
        return list(made[0].ids)

    return run


def compare(options: argparse.Namespace, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    file = Path(options.model)
    file = file if file.is_file() else gguf_of(options.model)
    reference, body = load(options.model, body="torch"), load(options.model, body="llama.cpp")
    ids, tokens, stops = body.encode(PROMPT), options.tokens, body.stop_ids
    screened = engine(body, "screened", note=lambda _: None)
    plain = Plain(file)

    def transformers() -> list[int]:
        made = reference.body.model.generate(
            torch.tensor([ids]), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
        return list(made[0, len(ids) :].tolist())

    runs: dict[str, Callable[[], object]] = {
        "transformers": transformers,
        "llama.cpp": lambda: plain.greedy(ids, tokens, stops),
        "lmhead, dense": ours(body, body.head, ids, tokens),
        "lmhead, screened": ours(body, screened, ids, tokens),
    }
    told: dict[str, Any] = {"model": options.model, "threads": threads, "tokens": tokens}
    if options.trimmed:
        small = load(options.trimmed, body="llama.cpp")
        cut, own = Plain(options.trimmed), small.encode(PROMPT)
        fewer = engine(small, "screened", note=lambda _: None)
        runs["llama.cpp, trimmed"] = lambda: cut.greedy(own, tokens, small.stop_ids)
        runs["lmhead, trimmed, screened"] = ours(small, fewer, own, tokens)
        told["trimmed"] = kept(plain, cut, body, small, tokens) | {
            "bytes": options.trimmed.stat().st_size,
            "of": file.stat().st_size,
        }
    made = {name: run() for name, run in runs.items()}  # warms all up
    told["own_head"] = body.body.own_head  # type: ignore[attr-defined]
    told["same_tokens_as_llama.cpp"] = {
        name: same(made["llama.cpp"], made[name]) for name in ("lmhead, dense", "lmhead, screened")
    }
    best = best_of(options.rounds, runs)
    told["tokens_per_second"] = {name: tokens / took for name, took in best.items()}
    told["of_transformers"] = {name: best["transformers"] / took for name, took in best.items()}
    told["of_llama.cpp"] = {name: best["llama.cpp"] / took for name, took in best.items()}
    return told


def same(a: Any, b: Any) -> int:
    """Return how many tokens two texts share from the beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def kept(plain: Plain, cut: Plain, body: Model, small: Model, tokens: int) -> dict[str, Any]:
    """Compare the two files in llama.cpp itself: greedy tokens, and logits of kept tokens."""
    names = {text: i for i, text in enumerate(small.tokenizer.convert_ids_to_tokens(range(cut.V)))}
    pieces = body.tokenizer.convert_ids_to_tokens(range(plain.V))
    pairs = [(i, names[piece]) for i, piece in enumerate(pieces) if piece in names]
    old, new = (list(column) for column in zip(*pairs, strict=True))
    ids, own = body.encode(PROMPT), small.encode(PROMPT)
    for one in (plain, cut):
        one.lib.llama_memory_clear(one.lib.llama_get_memory(one.context), True)
    z, y = plain.read(ids)[old], cut.read(own)[new]
    a = body.decode(plain.greedy(ids, tokens, body.stop_ids))
    b = small.decode(cut.greedy(own, tokens, small.stop_ids))
    return {
        "rows": cut.V, "of_rows": plain.V, "same_text": a == b,
        "logits_bit_equal": bool((z == y).all()), "largest_difference": float(abs(z - y).max()),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--trimmed", type=Path)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [compare(options, threads) for threads in options.threads]
    if options.json:
        print(json.dumps(rows))
        return
    for row in rows:
        print(f"{row['model']}, {row['tokens']} tokens, {row['threads']} threads, one sequence")
        print(f"{'':28}tokens/s   of transformers   of llama.cpp")
        for name, speed in row["tokens_per_second"].items():
            first, second = row["of_transformers"][name], row["of_llama.cpp"][name]
            print(f"{name:28}{speed:8.1f}{first:14.2f} x{second:13.2f} x")
        if cut := row.get("trimmed"):
            print(
                f"trimmed: {cut['rows']:,} of {cut['of_rows']:,} rows, {cut['bytes'] / 1e6:.0f} of "
                f"{cut['of'] / 1e6:.0f} MB; in llama.cpp itself the same text: {cut['same_text']}, "
                f"kept logits bit-equal: {cut['logits_bit_equal']}"
            )


if __name__ == "__main__":
    main()
