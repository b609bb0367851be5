"""Speed of the llama.cpp body under our head: against transformers, and against llama.cpp itself.

    python benchmarks/llamacpp.py [--model MODEL] [--trimmed FILE.gguf [--texts FILE.jsonl]]
                                  [--tokens 128] [--rounds 3]

One process, all turn by turn, so that a busy machine slows all; the ratios are those of the best
rounds. Greedy, one sequence, none may end early:

- transformers' own `generate`, in float32;
- llama.cpp itself: its own loop in C over the original file, the best token of its own logits;
- lmhead with the llama.cpp body, its head dense and screened;
- the same two on the trimmed file, where one is given (`lmhead trim --form gguf`).

For the trimmed file it also tells what it keeps: bytes, how many texts llama.cpp's own tokenizer
splits alike in both files, and along greedy texts of the original, whether the best token is the
same and the logits of all kept tokens are bit-equal, all of it in llama.cpp itself.
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

from lmhead.body.llama.library import Loaded, is_installed, library
from lmhead.generation import generate
from lmhead.generation.engines import engine
from lmhead.loading import Model, load
from lmhead.models.fetch import gguf_of

PROMPT = "The history of the city begins in the year"
PROMPTS = (
    PROMPT, "The capital of France is", "Return the number of bytes that", "Once upon a time",
    "Permission is hereby granted, free of charge,", "def read(self, size=-1):", "Water boils at",
    "Raise an error if the file", "The first computer was", "Redistribution and use in source",
)  # fmt: skip


class Plain:
    """llama.cpp by itself: a file, a context of its own, its own logits."""

    def __init__(self, path: Path, cells: int = 512) -> None:
        self.lib, self.model = library(), Loaded(path)
        params = self.lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = cells, 512, 512
        params.n_threads = params.n_threads_batch = torch.get_num_threads()
        params.no_perf = True
        self.context = self.lib.llama_init_from_model(self.model.pointer, params)
        self.vocab = self.lib.llama_model_get_vocab(self.model.pointer)
        self.V = int(self.lib.llama_vocab_n_tokens(self.vocab))

    def read(self, ids: Sequence[int]) -> Any:
        """Read ids behind what was read; return the logits `[V]` of the last."""
        held = (ctypes.c_int32 * len(ids))(*ids)
        if self.lib.llama_decode(self.context, self.lib.llama_batch_get_one(held, len(ids))):
            raise SystemExit("llama.cpp could not read the tokens")
        logits = self.lib.llama_get_logits_ith(self.context, -1)
        return np.ctypeslib.as_array(logits, (self.V,))

    def tokens(self, text: str) -> list[int]:
        """Split a text by llama.cpp's own tokenizer, with what the model puts before it."""
        data = text.encode()
        held = (ctypes.c_int32 * (len(data) + 8))()
        n = self.lib.llama_tokenize(self.vocab, data, len(data), held, len(held), True, False)
        return list(held[:n])

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
    reported: dict[str, Any] = {"model": options.model, "threads": threads, "tokens": tokens}
    if options.trimmed:
        small = load(options.trimmed, body="llama.cpp")
        cut, own = Plain(options.trimmed), small.encode(PROMPT)
        fewer = engine(small, "screened", note=lambda _: None)
        runs["llama.cpp, trimmed"] = lambda: cut.greedy(own, tokens, small.stop_ids)
        runs["lmhead, trimmed, screened"] = ours(small, fewer, own, tokens)
        reported["trimmed"] = kept(plain, cut, body, small, options.texts) | {
            "bytes": options.trimmed.stat().st_size,
            "of": file.stat().st_size,
        }
    made = {name: run() for name, run in runs.items()}  # warms all up
    reported["own_head"] = body.body.own_head  # type: ignore[attr-defined]
    reported["same_tokens_as_llama.cpp"] = {
        name: same(made["llama.cpp"], made[name]) for name in ("lmhead, dense", "lmhead, screened")
    }
    best = best_of(options.rounds, runs)
    reported["tokens_per_second"] = {name: tokens / took for name, took in best.items()}
    reported["of_transformers"] = {name: best["transformers"] / took for name, took in best.items()}
    reported["of_llama.cpp"] = {name: best["llama.cpp"] / took for name, took in best.items()}
    return reported


def same(a: Any, b: Any) -> int:
    """Return how many tokens two texts share from the beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def kept(plain: Plain, cut: Plain, body: Model, small: Model, texts: Path | None) -> dict[str, Any]:
    """Compare the two files in llama.cpp itself: tokens of texts, logits along greedy texts."""
    names = {text: i for i, text in enumerate(small.tokenizer.convert_ids_to_tokens(range(cut.V)))}
    pieces = body.tokenizer.convert_ids_to_tokens(range(plain.V))
    new_of = {i: names[piece] for i, piece in enumerate(pieces) if piece in names}
    old, new = list(new_of), list(new_of.values())
    steps, other, unequal, largest = 0, 0, 0, 0.0
    prompts = [ids for text in PROMPTS if set(ids := plain.tokens(text)) <= set(new_of)]
    for ids in prompts:
        for one in (plain, cut):
            one.lib.llama_memory_clear(one.lib.llama_get_memory(one.context), True)
        z, y = plain.read(ids), cut.read([new_of[i] for i in ids])
        for _ in range(32):
            best = int(z.argmax())
            steps += 1
            other += new_of.get(best) != int(y.argmax())
            unequal += not np.array_equal(z[old], y[new])
            largest = max(largest, float(abs(z[old] - y[new]).max()))
            if best not in new_of or best in body.stop_ids:
                break  # from here on the two read different texts, or it is at its end
            z, y = plain.read([best]), cut.read([new_of[best]])
    reported = {
        "rows": cut.V, "of_rows": plain.V, "prompts": len(prompts), "steps": steps,
        "other_best_token": other, "steps_with_other_logits": unequal,
        "largest_difference": largest,
    }  # fmt: skip
    if texts is not None:
        lines = [json.loads(line)["text"] for line in texts.read_text("utf-8").splitlines()]
        alike = sum(
            [new_of.get(i) for i in plain.tokens(line)] == cut.tokens(line) for line in lines
        )
        reported |= {"texts": len(lines), "texts_with_the_same_tokens": alike}
    return reported


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--trimmed", type=Path)
    parser.add_argument("--texts", type=Path, help="texts to split into tokens with both files")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not is_installed():
        print("skipped: llama-cpp-python is not installed (extra llamacpp)")
        return
    for threads in options.threads:
        row = compare(options, threads)
        if options.json:
            print(json.dumps(row), flush=True)
            continue
        print(f"{row['model']}, {row['tokens']} tokens, {row['threads']} threads, one sequence")
        print(f"{'':28}tokens/s   of transformers   of llama.cpp")
        for name, speed in row["tokens_per_second"].items():
            first, second = row["of_transformers"][name], row["of_llama.cpp"][name]
            print(f"{name:28}{speed:8.1f}{first:14.2f} x{second:13.2f} x")
        if cut := row.get("trimmed"):
            print(
                f"trimmed: {cut['rows']:,} of {cut['of_rows']:,} rows, {cut['bytes'] / 1e6:.0f} of "
                f"{cut['of'] / 1e6:.0f} MB; in llama.cpp itself, {cut['steps']} steps: "
                f"{cut['other_best_token']} with another best token, "
                f"{cut['steps_with_other_logits']} with other logits of kept tokens"
                f" (by at most {cut['largest_difference']:.2g})"
            )
            if "texts" in cut:
                alike = cut["texts_with_the_same_tokens"]
                print(f"{alike:,} of {cut['texts']:,} texts have the same tokens", flush=True)


if __name__ == "__main__":
    main()
