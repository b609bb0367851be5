"""Four real ranks of torch.distributed (gloo, 127.0.0.1), started once and asked many times.

`World.run("checks.name", ..., size=3)` calls `name(group, ...)` of the module `checks` on ranks 0,
1 and 2, with their process group, and gives what each of them returned. What one of them raises is
raised here, with its traceback. To start torch takes most of the time: a server imports it once,
and the ranks are forked from there.
"""

import os
import socket
import traceback
from datetime import timedelta
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

SIZES = (1, 2, 3, 4)
PRELOAD = ["torch", "torch.distributed.tensor", "lmhead.head.sharded", "lmhead.head.screened"]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def serve(rank: int, size: int, port: int, asked: Connection, sizes: tuple[int, ...]) -> None:
    """Be a rank: answer what is asked, until nobody asks any more."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=120),
    )
    groups = {n: dist.new_group(list(range(n))) for n in sizes}
    while True:
        try:
            where, arguments, n = asked.recv()
        except EOFError:
            os._exit(0)
        module, _, name = where.rpartition(".")
        try:
            asked.send((True, getattr(import_module(module), name)(groups[n], *arguments)))
        except BaseException as error:
            asked.send((False, (f"{type(error).__name__}: {error}", traceback.format_exc())))


class World:
    """The ranks, as long as it is open."""

    def __init__(self, size: int = 4, preload: list[str] | None = None) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(PRELOAD + (preload or []))
        port = free_port()
        sizes = tuple(n for n in SIZES if n <= size)
        self.asked, self.ranks = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, size, port, theirs, sizes))
            process.daemon = True
            process.start()
            theirs.close()
            self.asked.append(ours)
            self.ranks.append(process)

    def ask(self, where: str, *arguments: Any, size: int = 4) -> None:
        for rank in range(size):
            self.asked[rank].send((where, arguments, size))

    def answers(self, ranks: list[int], timeout: float = 300.0) -> list[tuple[bool, Any]]:
        """Give what some ranks returned, (True, ...), or raised, (False, (line, traceback))."""
        waiting = {self.asked[rank]: rank for rank in ranks}
        found: dict[int, tuple[bool, Any]] = {}
        while waiting:
            ready = wait(list(waiting), timeout)
            assert ready, f"ranks {sorted(waiting.values())} did not answer within {timeout} s"
            for connection in ready:
                found[waiting.pop(connection)] = connection.recv()
        return [found[rank] for rank in ranks]

    def run(self, where: str, *arguments: Any, size: int = 4) -> list[Any]:
        self.ask(where, *arguments, size=size)
        results = self.answers(list(range(size)))
        wrong = [reported for good, reported in results if not good]
        # who was left waiting says so too; the cause is what is not that
        wrong.sort(key=lambda reported: "LostRank" in reported[0])
        assert not wrong, wrong[0][1]
        return [value for _, value in results]

    def close(self) -> None:
        for connection in self.asked:
            connection.close()
        for process in self.ranks:
            process.join(1)
            if process.is_alive():
                process.kill()
                process.join()
