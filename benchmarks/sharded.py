"""A head over ranks: what is exchanged, how long it takes and what it holds, on 1, 2 and 4 of them.

    python benchmarks/sharded.py          # a table, and whether our claims hold: exit code 1 if not
    python benchmarks/sharded.py --json    # the same as one JSON object
    python benchmarks/sharded.py --exact STATES.safetensors --model smollm2-135m   # answers

All ranks are processes of this machine (gloo, 127.0.0.1), one thread each. Variants take turns
within one run: ours, torch's own `loss_parallel` on the same rows, and gathering logits. Memory is
the peak of a rank's resident memory over what stood before. Bytes are those that a rank receives,
counted where ours are sent; those of the others follow from their shapes.

`--exact` compares every answer with LMHead's on the states `h [n, d]` of a file, in float32 and
bfloat16, on 1 to 4 ranks.
"""

import argparse
import ctypes
import gc
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lmhead.head import LMHead
from lmhead.head.sharded import ShardedHead
from lmhead.loss import linear_cross_entropy
from lmhead.ranks import ranks_of

N, D, V = 512, 256, 16_384
LARGE = 131_072  # rows where memory is measured: what does not shrink is little beside them
SIZES = (1, 2, 4)
# bytes that a rank sends, to learn what a link costs
LINKS = (64, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
TURNS = 100
OFF = 0.2  # how far off the model of the costs may be, at every point
K = 50


def status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {key}: memory is measured on Linux only")


def peak(run: Callable[[], object]) -> int:
    """Return the bytes at the peak of a call over what stood before it."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what earlier calls freed is not there to be reused
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    run()
    return status("VmHWM") - before


def inputs(rank: int, size: int, V: int = V) -> tuple[Tensor, Tensor, Tensor]:
    """Give h and targets, alike on all ranks, and this rank's rows."""
    draw = torch.Generator().manual_seed(0)
    h = torch.randn(N, D, generator=draw)
    t = torch.randint(V, (N,), generator=draw)
    own = torch.Generator().manual_seed(1 + rank)
    W = torch.randn(V // size, D, generator=own).mul_(0.04)
    return h.requires_grad_(), W.requires_grad_(), t


def variants(size: int) -> dict[str, Callable[[Tensor, Tensor, Tensor], object]]:
    """Give every loss, forward and backward, by name."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import loss_parallel

    mesh = init_device_mesh("cpu", (size,))

    def ours(h: Tensor, W: Tensor, t: Tensor) -> None:
        linear_cross_entropy(h, W, t, group=dist.group.WORLD).backward()

    def theirs(h: Tensor, W: Tensor, t: Tensor) -> None:
        states = DTensor.from_local(h, mesh, [Replicate()], run_check=False)
        weight = DTensor.from_local(W, mesh, [Shard(0)], run_check=False)
        with loss_parallel():
            z = states @ weight.T
            F.cross_entropy(
                z, DTensor.from_local(t, mesh, [Replicate()], run_check=False)
            ).backward()

    def gathered(h: Tensor, W: Tensor, t: Tensor) -> None:
        head = ShardedHead(LMHead(W), None)
        F.cross_entropy(head(h), t).backward()

    return {"lmhead": ours, "loss_parallel": theirs, "gather logits": gathered}


def of_rank(rank: int, size: int, port: int, rounds: int, reported: Any) -> None:
    """Measure on one rank."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size
    )
    ranks = ranks_of(dist.group.WORLD)
    h, W, t = inputs(rank, size)
    losses = variants(size)
    rows: dict[str, Any] = {name: {"seconds": []} for name in losses}
    for turn in range(-1, rounds):
        for name, loss in losses.items():
            h.grad = W.grad = None
            ranks.meet()
            before, exchanges = ranks.received, ranks.exchanges
            start = time.perf_counter()
            loss(h, W, t)
            taken = time.perf_counter() - start
            if turn >= 0:
                rows[name]["seconds"].append(taken)
                rows[name]["bytes"] = ranks.received - before
                rows[name]["exchanges"] = ranks.exchanges - exchanges
    for name, loss in losses.items():
        h.grad = W.grad = None
        ranks.meet()
        rows[name]["peak"] = peak(lambda loss=loss: loss(h, W, t))  # type: ignore[misc]
    large = large_peaks(rank, size, losses)
    head, verbs = ShardedHead(LMHead(W.detach()), None), {}
    one = h[:1].detach()
    for name, ask in {
        "topk": lambda: head.topk(one, K),
        "sample": lambda: head.sample(one, 0.8, generator=torch.Generator().manual_seed(1)),
        "sample top_k": lambda: head.sample(one, 0.8, K),
        "logits": lambda: head(one),
    }.items():
        seconds = []
        for turn in range(-3, 20):
            ranks.meet()
            before = ranks.received
            start = time.perf_counter()
            ask()
            if turn >= 0:
                seconds.append(time.perf_counter() - start)
        verbs[name] = {"seconds": median(seconds), "bytes": ranks.received - before}
    links = link_seconds()
    ranks.meet()
    reported.put({"rank": rank, "losses": rows, "verbs": verbs, "links": links, "large": large})
    ranks.end()


def link_seconds() -> dict[int, list[float]]:
    """Time exchanges of some sizes, in turns: what they cost here is a latency and a bandwidth."""
    ranks = ranks_of(dist.group.WORLD)
    data = {count: torch.zeros(count, dtype=torch.uint8) for count in LINKS}
    found: dict[int, list[float]] = {count: [] for count in LINKS}
    for _ in range(TURNS):
        for count in LINKS:
            ranks.meet()
            start = time.perf_counter()
            ranks.gather(data[count])
            found[count].append(time.perf_counter() - start)
    return found


def undisturbed(every: list[dict[int, list[float]]]) -> dict[int, float]:
    """Give the time of the slowest rank for each size, in the best tenth of the turns."""
    found = {}
    for count in LINKS:
        turns = sorted(max(each) for each in zip(*(one[count] for one in every), strict=True))
        found[count] = median(turns[: TURNS // 10])
    return found


def links_of_rank(rank: int, size: int, port: int, reported: Any) -> None:
    """Time exchanges alone."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size
    )
    reported.put({"rank": rank, "links": link_seconds()})
    ranks_of(dist.group.WORLD).end()


def large_peaks(rank: int, size: int, losses: dict[str, Any]) -> dict[str, int]:
    """Give the peaks of a loss, and of a head's making and its best tokens, with many rows."""
    ranks = ranks_of(dist.group.WORLD)
    h, W, t = inputs(rank, size, LARGE)
    found = {}
    for name in ("lmhead", "loss_parallel"):
        h.grad = W.grad = None
        ranks.meet()
        found[name] = peak(lambda name=name: losses[name](h, W, t))  # type: ignore[misc]
    W.grad, h = None, h.detach()[:16]
    W.detach_().resize_(0)
    ranks.meet()

    def whole() -> None:
        _, rows, _ = inputs(rank, size, LARGE)
        ShardedHead(LMHead(rows.detach()), None).topk(h, K)

    found["head and topk"] = peak(whole)
    return found


def on(size: int, function: Callable[..., None], *arguments: Any) -> list[dict[str, Any]]:
    """Run a function on ranks of their own; give what each told, in their order."""
    context = get_context("forkserver")  # imports torch once for all ranks
    context.set_forkserver_preload(["torch.distributed.tensor.parallel", "lmhead.head.sharded"])
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    reported = context.Queue()
    started = [
        context.Process(target=function, args=(rank, size, port, *arguments, reported))
        for rank in range(size)
    ]
    for process in started:
        process.start()
    results = [reported.get(timeout=900) for _ in started]
    for process in started:
        process.join()
    return sorted(results, key=lambda result: result["rank"])


def exact_rank(
    rank: int, size: int, port: int, model: str, path: str, dtypes: list[str], reported: Any
) -> None:
    """Compare with LMHead on one rank."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    from sharded_checks import real_states

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size
    )
    found = {dtype: real_states(dist.group.WORLD, model, path, dtype) for dtype in dtypes}
    reported.put({"rank": rank, **found})
    ranks_of(dist.group.WORLD).end()


def measure(rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {"tokens": N, "hidden_size": D, "vocab_size": V, "sizes": {}}
    for size in SIZES:
        every = on(size, of_rank, rounds)
        first = every[0]
        losses = {}
        for name, row in first["losses"].items():
            ours = first["losses"]["lmhead"]["seconds"]
            losses[name] = {
                "seconds": median(row["seconds"]),
                "ratio": median(b / a for a, b in zip(ours, row["seconds"], strict=True)),
                "peak_bytes": max(one["losses"][name]["peak"] for one in every),
                "received_bytes": row["bytes"],
                "exchanges": row["exchanges"],
            }
            r = size
            shard = V // r
            if name == "loss_parallel":  # a maximum, a sum and the target's, then the gradient of h
                losses[name]["received_bytes"] = int(2 * (r - 1) / r * (3 * N * 4 + N * D * 4))
            print(
                f"{size} ranks  {name:14} {losses[name]['seconds']:7.3f} s  "
                f"{losses[name]['ratio']:5.2f}  {losses[name]['peak_bytes'] / 1e6:7.0f} MB  "
                f"{losses[name]['received_bytes']:>12,} bytes  ({shard:,} rows each)",
                file=sys.stderr,
                flush=True,
            )
        for name, row in first["verbs"].items():
            print(
                f"{size} ranks  {name:14} {row['seconds'] * 1e3:7.2f} ms"
                f"{'':16}{row['bytes']:>12,} bytes per token",
                file=sys.stderr,
                flush=True,
            )
        found["sizes"][size] = {
            "losses": losses,
            "verbs": first["verbs"],
            "large_peak_bytes": {
                name: max(one["large"][name] for one in every) for name in first["large"]
            },
            "link": fitted(undisturbed([one["links"] for one in every]), size),
        }
        for name, nbytes in found["sizes"][size]["large_peak_bytes"].items():
            print(f"{size} ranks  {LARGE:,} rows, {name}: {nbytes / 1e6:.0f} MB", file=sys.stderr)
        if size > 1:
            print(f"{size} ranks  {found['sizes'][size]['link']}", file=sys.stderr, flush=True)
    return found


def gather_seconds(R: int, sent: float, latency: float, bandwidth: float) -> float:
    """The model: R - 1 steps around a ring, each a latency and what one rank sends."""
    return (R - 1) * (latency + sent / bandwidth)


def sum_seconds(R: int, size: float, latency: float, bandwidth: float) -> float:
    """Adding up over a ring: 2 (R - 1) steps, each a latency and an R-th part."""
    return 2 * (R - 1) * (latency + size / R / bandwidth)


def fitted(links: dict[int, float], R: int) -> dict[str, Any]:
    """Find the latency and the bandwidth with which the model is off by the least, at its worst."""
    if R == 1:
        return {}

    def off(latency: float, bandwidth: float) -> dict[int, float]:
        return {n: gather_seconds(R, n, latency, bandwidth) / links[n] - 1 for n in LINKS}

    pairs = (
        (latency, bandwidth)
        for latency in torch.logspace(-6, -2, 200).tolist()
        for bandwidth in torch.logspace(7, 11, 200).tolist()
    )
    best = min(pairs, key=lambda pair: max(map(abs, off(*pair).values())))
    return {
        "latency_seconds": best[0],
        "bytes_per_second": best[1],
        "seconds": links,
        "off": off(*best),
    }


def costs() -> None:
    """Print what the model says of large heads on many ranks; docs/scaling.md shows it."""
    V, N = 262_144, 8192
    latency, bandwidth, memory, flops = 5e-6, 50e9, 2e12, 400e12
    print(f"{'d':>7} {'R':>5} {'rows, GB':>9} {'token: read':>12} {'topk':>9} {'logits':>9}"
          f" {'loss: products':>15} {'numbers':>9} {'grad of h':>10}")  # fmt: skip
    for d in (4096, 16_384):
        for R in (8, 64, 256, 1024):
            own = V * d * 2 / R
            chunks = -(-N // 512)
            row = (
                own / memory,
                gather_seconds(R, K * 6, latency, bandwidth),
                gather_seconds(R, V * 2 / R, latency, bandwidth),
                3 * 2 * N * V * d / R / flops,
                chunks * gather_seconds(R, 512 * 16, latency, bandwidth),
                sum_seconds(R, N * d * 2, latency, bandwidth),
            )
            ms = [f"{1e3 * x:.3g} ms" for x in row]
            print(f"{d:7,} {R:5,} {own / 1e9:9.3f} {ms[0]:>12} {ms[1]:>9} {ms[2]:>9}"
                  f" {ms[3]:>15} {ms[4]:>9} {ms[5]:>10}")  # fmt: skip


def claims(found: dict[str, Any]) -> dict[str, bool]:
    sizes = found["sizes"]
    reported = {}
    one = sizes[1]["large_peak_bytes"]
    for size in (2, 4):
        losses, verbs = sizes[size]["losses"], sizes[size]["verbs"]
        ours, torchs = losses["lmhead"], losses["loss_parallel"]
        reported[f"{size} ranks: not slower than loss_parallel"] = torchs["ratio"] >= 1.0
        reported[f"{size} ranks: less peak memory than loss_parallel"] = (
            ours["peak_bytes"] < torchs["peak_bytes"]
        )
        large = sizes[size]["large_peak_bytes"]
        for name in ("lmhead", "head and topk"):  # h, its gradient and buffers of gloo stay
            reported[f"{size} ranks: peak memory of {name} falls as 1 / ranks"] = (
                large[name] <= 1.1 * one[name] / size + 4 * 2**20
            )
        reported[f"{size} ranks: the model of the costs is off by at most {OFF:.0%}"] = all(
            abs(off) <= OFF for off in sizes[size]["link"]["off"].values()
        )
        reported[f"{size} ranks: topk receives less than 3 % of the logits"] = (
            verbs["topk"]["bytes"] < 0.03 * verbs["logits"]["bytes"]
        )
    return reported


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--costs", action="store_true", help="what the model says of large heads")
    parser.add_argument("--links", action="store_true", help="fit the model of exchanges alone")
    parser.add_argument("--exact", metavar="STATES", help="compare answers on these states")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", action="append", help="of --exact; may be repeated")
    parser.add_argument("--ranks", type=int, action="append", help="of --exact; may be repeated")
    args = parser.parse_args()
    if args.costs:
        costs()
        return 0
    if args.links:
        held = True
        for size in SIZES[1:]:
            reported = on(size, links_of_rank)
            found = fitted(undisturbed([one["links"] for one in reported]), size)
            print(json.dumps({"ranks": size, **found}), flush=True)
            held = held and max(map(abs, found["off"].values())) <= OFF
        return 0 if held else 1
    if args.exact:
        for size in args.ranks or (1, 2, 3, 4):
            reported = on(
                size, exact_rank, args.model, args.exact, args.dtype or ["float32", "bfloat16"]
            )
            print(json.dumps({"ranks": size, **reported[0]}), flush=True)
        return 0
    found = measure(args.rounds)
    found["claims"] = claims(found)
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        for claim, holds in found["claims"].items():
            print("holds " if holds else "FAILS ", claim)
    return 0 if all(found["claims"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
