"""The loss through the head: time and memory of ours, of plain torch and of others, in one run.

    python benchmarks/loss.py            # a table, and whether our claims hold: exit code 1 if not
    python benchmarks/loss.py --json     # the same as one JSON object
    python benchmarks/loss.py --case 4096,576,49152 --rounds 9

A case is N,d,V: tokens, hidden size, rows of the head. Forward and backward, float32. Times are
taken in turns within one process, so that whatever else the machine does hits all variants alike;
the ratio is the median, over the rounds, of a variant's time to naive's in that round. Memory is
the peak of resident memory over what stood before the loss, each variant in a process of its own;
"beyond the gradients" leaves out the gradients of h and W, which every variant must return.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lmhead.loss import linear_cross_entropy

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
Case = tuple[int, int, int]  # N, d, V
MAIN: Case = (2048, 576, 49_152)
CASES: list[Case] = [(1024, 576, 49_152), MAIN, (512, 640, 262_144)]
FLAT = [1024, 2048, 4096, 8192]  # tokens over which our memory must not grow
NAIVE, OURS = "naive", "lmhead"


def variants() -> dict[str, Loss]:
    """Give every loss that can run here; the first is what the others are compared with."""
    found: dict[str, Loss] = {
        NAIVE: lambda h, W, t: F.cross_entropy(h @ W.T, t),
        OURS: linear_cross_entropy,
    }
    if hasattr(F, "linear_cross_entropy"):
        options = torch.nn.LinearCrossEntropyOptions
        found["torch, whole"] = F.linear_cross_entropy
        found["torch, own chunks"] = partial(F.linear_cross_entropy, options=options())
        for size in (128, 256, 512):
            found[f"torch, chunks of {size}"] = partial(
                F.linear_cross_entropy, options=options(batch_chunk_size=size)
            )
    if find_spec("cut_cross_entropy") and find_spec("triton"):  # it imports triton even here
        from cut_cross_entropy import linear_cross_entropy as cut

        found["cut-cross-entropy"] = partial(cut, impl="torch_compile")
    return found


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    N, d, V = case
    draw = torch.Generator().manual_seed(0)
    h = torch.randn(N, d, generator=draw)
    W = torch.randn(V, d, generator=draw).mul_(0.04)
    return h.requires_grad_(), W.requires_grad_(), torch.randint(V, (N,), generator=draw)


def once(loss: Loss, given: tuple[Tensor, Tensor, Tensor]) -> float:
    """Run forward and backward; return the seconds."""
    h, W, t = given
    h.grad = W.grad = None
    start = time.perf_counter()
    loss(h, W, t).backward()
    return time.perf_counter() - start


def times(case: Case, rounds: int) -> dict[str, list[float]]:
    """Return each variant's seconds, round by round."""
    given, losses = inputs(case), variants()
    names = list(losses)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-1, rounds):  # the first round only warms up
        for name in names[turn:] + names[:turn]:  # nobody always comes after the same one
            taken = once(losses[name], given)
            if turn >= 0:
                seconds[name].append(taken)
    return seconds


def status(key: str) -> int:
    """Read one line of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {key}: memory is measured on Linux only")


def peak(name: str, case: Case) -> int:
    """Return the extra bytes at the peak of one forward and backward, in this process."""
    loss = variants()[name]
    once(loss, inputs((8, 16, 64)))  # threads and libraries take their memory now
    given = inputs(case)
    Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark to what is used now
    before = status("VmRSS")
    once(loss, given)
    return status("VmHWM") - before


def peak_elsewhere(name: str, case: Case, threads: int) -> int:
    """Return `peak` of a fresh process."""
    command = [sys.executable, __file__, "--threads", str(threads), "--peak", name]
    done = subprocess.run(
        [*command, "--case", ",".join(map(str, case))], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return int(done.stdout)


def gradients(case: Case) -> int:
    N, d, V = case
    return 4 * d * (N + V)


def measure(cases: list[Case], rounds: int, threads: int) -> dict[str, Any]:
    rows = []
    for case in cases:
        seconds = times(case, rounds)
        for name in seconds:
            extra = peak_elsewhere(name, case, threads)
            rows.append(
                {
                    "tokens": case[0],
                    "hidden_size": case[1],
                    "vocab_size": case[2],
                    "variant": name,
                    "seconds": median(seconds[name]),
                    "time_ratio": median(map(truediv, seconds[name], seconds[NAIVE])),
                    "peak_bytes": extra,
                    "beyond_gradients_bytes": extra - gradients(case),
                }
            )
            show(rows[-1])
    flat = {}
    for N in FLAT:
        case = (N, *MAIN[1:])
        flat[N] = peak_elsewhere(OURS, case, threads) - gradients(case)
    return {"threads": threads, "rounds": rounds, "rows": rows, "ours_by_tokens": flat}


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['tokens']:6,} {row['hidden_size']:5,} {row['vocab_size']:8,}  "
        f"{row['variant']:22} {row['seconds']:8.3f} s {row['time_ratio']:6.2f} "
        f"{row['peak_bytes'] / 1e6:9.0f} MB {row['beyond_gradients_bytes'] / 1e6:9.0f} MB",
        file=sys.stderr,
        flush=True,
    )


def claims(result: dict[str, Any]) -> dict[str, bool]:
    """Say which claims hold, from the case that they are made for."""
    rows = {
        row["variant"]: row
        for row in result["rows"]
        if (row["tokens"], row["hidden_size"], row["vocab_size"]) == MAIN
    }
    reported: dict[str, bool] = {}
    if rows:
        ours, naive = rows[OURS], rows[NAIVE]
        reported["time at most 0.90 of naive"] = ours["time_ratio"] <= 0.90
        reported["time not above torch's fastest"] = all(
            ours["time_ratio"] <= row["time_ratio"]
            for name, row in rows.items()
            if name.startswith("torch")
        )
        reported["memory beyond the gradients at most 12 % of naive's"] = (
            ours["beyond_gradients_bytes"] <= 0.12 * naive["beyond_gradients_bytes"]
        )
    flat = result["ours_by_tokens"].values()
    reported[f"memory flat from {FLAT[0]:,} to {FLAT[-1]:,} tokens"] = max(flat) <= 1.1 * min(flat)
    return reported


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--case", action="append", metavar="N,d,V", help="may be repeated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--peak", metavar="VARIANT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    cases: list[Case] = [tuple(map(int, c.split(","))) for c in args.case or []] or CASES  # type: ignore[misc]
    if args.peak:
        print(peak(args.peak, cases[0]))
        return 0
    print(
        f"{'N':>6} {'d':>5} {'V':>8}  {'variant':22} {'time':>10} {'ratio':>6} "
        f"{'peak':>12} {'beyond grads':>12}",
        file=sys.stderr,
    )
    result = measure(cases, args.rounds, args.threads)
    result["claims"] = claims(result)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        by_tokens = (f"{N:,}: {b / 1e6:.0f} MB" for N, b in result["ours_by_tokens"].items())
        print("ours beyond the gradients, by tokens:", ", ".join(by_tokens))
        for claim, holds in result["claims"].items():
            print("holds " if holds else "FAILS ", claim)
    return 0 if all(result["claims"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
