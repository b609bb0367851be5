"""The server under load: `lmhead serve` in a process of its own, asked over HTTP on this machine.

1. mixed: 400 requests from 20 clients at once, a quarter steered with different vectors, with
   cancels, bad bodies, slow readers and disconnects among them; every good one must equal its solo
   run, and memory stay flat over three rounds.
2. clients: tokens per second of 8 clients, and of one; at least 2.5 times.
3. first: the time to the first token of a short request while seven long ones run, in steps of
   theirs; at most 3.
4. guarded: the KL of 1,000 guarded tokens in mixed batches, recomputed by plain transformers.

    python benchmarks/serve.py                     # all four
    python benchmarks/serve.py mixed --requests 60 --rounds 1
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import torch

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):",
    "The three laws of thermodynamics are",
    "Dear Sir or Madam,",
    "In 1969, for the first time,",
)
BAD: tuple[bytes, ...] = (
    b"",
    b"{",
    b"[]",
    b'{"prompt": 7}',
    b'{"prompt": "x", "temperature": -3}',
    b'{"prompt": "x", "max_tokens": 1e99}',
    b'{"prompt": "x", "steering": [{"name": "nobody"}]}',
    b'{"prompt": "x", "model": "another"}',
    b"\xff\xfe\x00",
    b'{"prompt": ' + b"[" * 5000,
)
JSON = {"Content-Type": "application/json"}


def good_bodies(vectors: Sequence[str], count: int, max_tokens: int) -> list[dict[str, Any]]:
    """Make requests that must give what each gives alone; a third of them steered."""
    bodies = []
    for i in range(count):
        rng = random.Random(i)
        body: dict[str, Any] = {
            "prompt": PROMPTS[i % len(PROMPTS)],
            "max_tokens": rng.randint(max_tokens // 2, max_tokens),
            "seed": i,
            "temperature": (0.0, 0.7, 1.0)[i % 3],
        }
        if i % 3 == 1:
            body["steering"] = [
                {"name": vectors[i % len(vectors)], "alpha": 1.0 + i % 5, "kl_cap": 0.2}
            ]
        if i % 5 == 2:
            body |= {"top_p": 0.9, "repetition_penalty": 1.1}
        if i % 7 == 3:
            body["logprobs"] = 2
        bodies.append(body)
    return bodies


async def complete(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
    while True:
        reply = await client.post("/v1/completions", json=body)
        if reply.status_code != 429:
            break
        await asyncio.sleep(float(reply.headers["retry-after"]) * random.random())
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["text"]
    return text


async def read_slowly(client: httpx.AsyncClient, body: dict[str, Any], pause: float) -> str:
    while True:
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply:
            if reply.status_code == 429:
                await reply.aread()
                await asyncio.sleep(random.random())
                continue
            text = ""
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                    await asyncio.sleep(pause)
            return text


async def leave_early(client: httpx.AsyncClient, body: dict[str, Any], after: int) -> None:
    long = {**body, "max_tokens": 200, "min_tokens": 200, "stream": True}
    async with client.stream("POST", "/v1/completions", json=long) as reply:
        async for line in reply.aiter_lines():
            after -= line.startswith("data:")
            if after <= 0:
                return


async def give_up(client: httpx.AsyncClient, body: dict[str, Any], after: float) -> None:
    """Wait for a whole answer, but not long enough."""
    long = {**body, "max_tokens": 200, "min_tokens": 200}
    with suppress(httpx.TimeoutException):
        await client.post("/v1/completions", json=long, timeout=after)


async def hang_up(url: str) -> None:
    """Send half a body, and go."""
    host, port = url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: 99\r\n\r\n"
    writer.write(head.encode() + b'{"prompt": "x')
    await writer.drain()
    writer.close()


async def mixed(
    url: str,
    vectors: Sequence[str],
    requests: int,
    clients: int,
    rounds: int,
    pid: int | None,
    max_tokens: int = 16,
    distinct: int = 40,
) -> dict[str, Any]:
    """Ask as many would, good and bad; return what became of it."""
    bodies = good_bodies(vectors, distinct, max_tokens)
    limits = httpx.Limits(max_connections=clients * 2)
    reported: dict[str, Any] = {
        "requests": requests,
        "clients": clients,
        "good": 0,
        "steered": 0,
        "left": 0,
        "bad": 0,
        "slow": 0,
        "different": [],
        "memory_mb": [],
    }
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        alone = [await complete(client, body) for body in bodies]

        async def one(i: int) -> None:
            body, expected = bodies[i % distinct], alone[i % distinct]
            kind = i % 10
            if kind == 3:
                if i // 10 % 4 == 1:
                    await give_up(client, body, 0.5)
                elif i // 10 % 4 == 3:
                    await hang_up(url)
                else:
                    await leave_early(client, body, 1 + i % 3)
                reported["left"] += 1
                return
            if kind == 7:
                reply = await client.post(
                    "/v1/completions", content=BAD[i // 10 % len(BAD)], headers=JSON
                )
                assert 400 <= reply.status_code < 500, reply.text
                assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
                reported["bad"] += 1
                return
            if kind == 5:
                found = await read_slowly(client, body, 0.05)
                reported["slow"] += 1
            else:
                found = await complete(client, body)
            reported["good"] += 1
            reported["steered"] += "steering" in body
            if found != expected:
                reported["different"].append(i)

        async def work(todo: Iterator[int]) -> None:
            for i in todo:
                await one(i)

        for _ in range(rounds):
            todo = iter(range(requests))
            await asyncio.gather(*(work(todo) for _ in range(clients)))
            assert (await client.get("/healthz")).status_code == 200
            if pid is not None:
                reported["memory_mb"].append(_memory(pid))
            print(json.dumps(reported), file=sys.stderr, flush=True)
    return reported


async def tokens_per_second(url: str, clients: int, each: int, max_tokens: int) -> float:
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def work(k: int) -> None:
            for i in range(each):
                body = {
                    "prompt": PROMPTS[(k + i) % len(PROMPTS)],
                    "max_tokens": max_tokens,
                    "min_tokens": max_tokens,
                    "temperature": 0,
                }
                await complete(client, body)

        began = time.perf_counter()
        await asyncio.gather(*(work(k) for k in range(clients)))
        return clients * each * max_tokens / (time.perf_counter() - began)


async def throughput(url: str, rounds: int = 3) -> dict[str, Any]:
    """Measure one client and eight in turn, so that noise meets both alike."""
    await tokens_per_second(url, 8, 1, 8)
    one, eight = [], []
    for _ in range(rounds):
        one.append(await tokens_per_second(url, 1, 1, 24))
        eight.append(await tokens_per_second(url, 8, 1, 24))
    ratio = statistics.median(b / a for a, b in zip(one, eight, strict=True))
    return {"one": statistics.median(one), "eight": statistics.median(eight), "ratio": ratio}


async def first_token(url: str, tries: int = 5) -> dict[str, Any]:
    """Time a short request while seven long ones run, in steps of theirs."""
    stamps: list[float] = []
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def long(k: int) -> None:
            body = {
                "prompt": PROMPTS[k % len(PROMPTS)] * 8,
                "max_tokens": 600,
                "min_tokens": 600,
                "stream": True,
                "seed": k,
            }
            async with client.stream("POST", "/v1/completions", json=body) as reply:
                async for line in reply.aiter_lines():
                    if line.startswith("data:") and k == 0:
                        stamps.append(time.perf_counter())

        running = [asyncio.create_task(long(k)) for k in range(7)]
        while len(stamps) < 10:
            await asyncio.sleep(0.05)
        waits, steps = [], []
        for i in range(tries):
            start = len(stamps)
            body = {"prompt": "Hello", "max_tokens": 4, "stream": True, "seed": i}
            began = time.perf_counter()
            async with client.stream("POST", "/v1/completions", json=body) as reply:
                async for line in reply.aiter_lines():
                    if line.startswith("data:"):
                        waits.append(time.perf_counter() - began)
                        break
            while len(stamps) < start + 8:
                await asyncio.sleep(0.02)
            steps.append((stamps[start + 7] - stamps[start]) / 7)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    ratios = [wait / step for wait, step in zip(waits, steps, strict=True)]
    return {
        "steps": statistics.median(ratios),
        "each": ratios,
        "step_ms": 1000 * statistics.median(steps),
    }


async def guarded(
    url: str, vectors: Sequence[str], tokens: int, each: int = 50, kl_cap: float = 0.25
) -> list[dict[str, Any]]:
    """Draw guarded tokens beside others; return what the server says of each sequence."""
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def one(i: int) -> dict[str, Any]:
            body: dict[str, Any] = {
                "prompt": PROMPTS[i % len(PROMPTS)],
                "max_tokens": each,
                "min_tokens": each,
                "temperature": 1.0,
                "seed": i,
                "logprobs": 1,
                "echo": True,
                "return_tokens_as_token_ids": True,
            }
            if i % 4:
                body["steering"] = [
                    {"name": vectors[i % len(vectors)], "alpha": 2.0 + i % 4, "kl_cap": kl_cap}
                ]
            reply = await client.post("/v1/completions", json=body)
            assert reply.status_code == 200, reply.text
            return {"body": body, **reply.json()["choices"][0]}

        count = -(-tokens // each) * 4 // 3 + 1
        gate = asyncio.Semaphore(12)

        async def gated(i: int) -> dict[str, Any]:
            async with gate:
                return await one(i)

        return [one for one in await asyncio.gather(*map(gated, range(count))) if "steering" in one]


@torch.inference_mode()
def recompute(
    network: Any,
    reported: Sequence[dict[str, Any]],
    added: dict[str, tuple[int | str, torch.Tensor]],
) -> dict[str, Any]:
    """Run plain transformers on every sequence, with and without the vector; compare.

    `added`: of each vector the layer and what alpha 1 adds.
    """
    worst, off_kl, off_logprob, tokens, held = 0.0, 0.0, 0.0, 0, 0
    blocks = network.get_decoder().layers
    for one in reported:
        ids = [int(name.split(":")[1]) for name in one["logprobs"]["tokens"]]
        report, asked = one["steering"], one["body"]["steering"][0]
        n = report["tokens"]
        layer, v = added[asked["name"]]
        x = torch.tensor([ids])
        plain = network(x).logits[0, -n - 1 : -1].double()  # [n, V]

        def add(_m: Any, _i: Any, out: Any, v: torch.Tensor = v, a: float = asked["alpha"]) -> Any:
            moved = a * v
            return (out[0] + moved, *out[1:]) if isinstance(out, tuple) else out + moved

        def before(_m: Any, args: Any, v: torch.Tensor = v, a: float = asked["alpha"]) -> Any:
            return (args[0] + a * v,)

        if layer == "head":
            handle = network.get_output_embeddings().register_forward_pre_hook(before)
        else:
            handle = blocks[int(layer)].register_forward_hook(add)
        steered = network(x).logits[0, -n - 1 : -1].double()
        handle.remove()
        m = torch.tensor(report["strength"], dtype=torch.float64).unsqueeze(-1)
        p = torch.log_softmax(plain, -1)
        q = torch.log_softmax(plain + m * (steered - plain), -1)
        kl = (p.exp() * (p - q)).sum(-1)
        worst = max(worst, float((kl / asked["kl_cap"]).max()))
        off_kl = max(off_kl, float((kl - torch.tensor(report["kl"])).abs().max()))
        drawn = q.gather(-1, torch.tensor(ids[-n:]).unsqueeze(-1)).squeeze(-1)
        served = torch.tensor(one["logprobs"]["token_logprobs"][-n:], dtype=torch.float64)
        off_logprob = max(off_logprob, float((drawn - served).abs().max()))
        tokens += n
        held += report["held_back"]
    return {
        "tokens": tokens,
        "held_back": held,
        "largest_share_of_cap": worst,
        "kl_differs_by": off_kl,
        "logprob_differs_by": off_logprob,
    }


def _memory(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmRSS")


def make_vectors(folder: Path, d: int) -> dict[str, tuple[int | str, torch.Tensor]]:
    """Write four vectors, at the head and at blocks; return what each adds, and where."""
    from lmhead.steer import SteeringVector

    added: dict[str, tuple[int | str, torch.Tensor]] = {}
    for i, layer in enumerate(("head", 10, 20, 15)):
        v = torch.randn(d, generator=torch.Generator().manual_seed(i))
        v *= (0.2 if layer == "head" else 2.0) / v.norm() * (d**0.5 / 4)
        SteeringVector(v, layer, 1.0).save(folder / f"v{i}.safetensors")
        added[f"v{i}"] = (layer, v)
    return added


@contextmanager
def served(model: str, *options: str) -> Iterator[tuple[str, int]]:
    """Start `lmhead serve` on a free port; end it afterwards."""
    command = [
        sys.executable,
        "-m",
        "lmhead",
        "serve",
        "-m",
        model,
        "--port",
        "0",
        "--json",
        *options,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    try:
        text = ""
        while not text.rstrip().endswith("}"):
            line = process.stdout.readline().decode()
            assert line, "the server did not start"
            text += line
        url = json.loads(text)["url"]
        for _ in range(600):
            try:
                if httpx.get(url + "/healthz", timeout=5).status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.1)
        yield url, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = ("mixed", "clients", "first", "guarded")
    parser.add_argument("parts", nargs="*", default=parts, help=", ".join(parts))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--engine", default="auto", help="The engine of the server's head.")
    parser.add_argument("--url", help="A server that runs already; else one is started.")
    parser.add_argument("--pid", type=int, help="Its process, for its memory.")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=1000)
    given = parser.parse_args()
    from lmhead.loading import load

    loaded = load(given.model)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        added = make_vectors(Path(folder), loaded.head.hidden_size)
        if given.url:
            run(given, given.url, given.pid, loaded.body.model, added, Path(folder))
            return
        with served(given.model, "--engine", given.engine) as (url, pid):
            run(given, url, pid, loaded.body.model, added, Path(folder))


def run(
    given: Any,
    url: str,
    pid: int | None,
    network: Any,
    added: dict[str, tuple[int | str, torch.Tensor]],
    folder: Path,
) -> None:
    """Upload the vectors, and measure what was asked for."""
    for name in added:
        httpx.delete(f"{url}/v1/steering/{name}", timeout=60)
        content = (folder / f"{name}.safetensors").read_bytes()
        reply = httpx.put(f"{url}/v1/steering/{name}", content=content, timeout=60)
        assert reply.status_code == 201, reply.text
    names = list(added)
    if "clients" in given.parts:
        found = asyncio.run(throughput(url))
        reported = f"one client {found['one']:.1f}, eight {found['eight']:.1f}"
        print(f"tokens/s: {reported}: {found['ratio']:.2f} times", flush=True)
    if "first" in given.parts:
        found = asyncio.run(first_token(url))
        each = ", ".join(f"{ratio:.2f}" for ratio in found["each"])
        reported = f"{found['steps']:.2f} steps of {found['step_ms']:.0f} ms (each: {each})"
        print(f"first token beside seven long requests: {reported}", flush=True)
    if "mixed" in given.parts:
        found = asyncio.run(mixed(url, names, given.requests, 20, given.rounds, pid))
        print(json.dumps(found), flush=True)
    if "guarded" in given.parts:
        sequences = asyncio.run(guarded(url, names, given.tokens))
        print(json.dumps(recompute(network, sequences, added)), flush=True)


if __name__ == "__main__":
    main()
