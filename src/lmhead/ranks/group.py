"""What the ranks of a process group tell each other, and how much that is.

    ranks = ranks_of(group)          # a process group, a DeviceMesh of one dimension, or None
    parts, = ranks.gather(tensor)    # [R, ...], the same on all of them
    ranks.sum_(tensor)               # in place

One rank alone exchanges nothing. Symbols: R ranks.
"""

import math
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lmhead.errors import BadInput
from lmhead.ranks.watch import BEAT, TIMEOUT, Watch

Group = Any  # a ProcessGroup, a DeviceMesh, a pair (DeviceMesh, dimension), or None

_known: dict[str, "Ranks"] = {}


class Ranks:
    """The ranks that share something, with what they have exchanged so far.

    `received` counts bytes that came to this rank from others, `exchanges` how often it waited.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: float = TIMEOUT) -> None:
        self.group = group
        self.size = 1 if group is None else group.size()
        self.rank = 0 if group is None else group.rank()
        self.members = (0,) if group is None else tuple(dist.get_process_group_ranks(group))
        self.received = 0
        self.exchanges = 0
        self._watch: Watch | None = None
        if group is not None and self.size > 1:
            self._watch = Watch(group, self.members, timeout)

    def gather(self, *tensors: Tensor, what: str = "an exchange") -> list[Tensor]:
        """Give the tensors of all ranks, `[R, ...]` each, in one exchange; shapes must agree."""
        if self.size == 1:
            return [t.unsqueeze(0) for t in tensors]
        flat = [_bytes(t.detach()) for t in tensors]
        mine = flat[0] if len(flat) == 1 else torch.cat(flat)
        every = mine.new_empty(self.size, mine.numel())
        if mine.numel():
            self._run(what, dist.all_gather, list(every.unbind(0)), mine)
            self.received += (self.size - 1) * mine.numel()
        found, start = [], 0
        for tensor, part in zip(tensors, flat, strict=True):
            columns = every[:, start : start + part.numel()].contiguous()
            start += part.numel()
            room = columns.view(tensor.dtype) if tensor.numel() else columns.to(tensor.dtype)
            found.append(room.view(self.size, *tensor.shape))
        return found

    def gather_rows(
        self, tensor: Tensor, counts: Sequence[int], what: str = "an exchange"
    ) -> Tensor:
        """Put together the rows of all ranks, `[sum(counts), ...]`, a number of its own each."""
        if self.size == 1:
            return tensor
        most = max(counts)
        mine = tensor.detach()
        if len(mine) < most:
            mine = torch.cat([mine, mine.new_zeros(most - len(mine), *mine.shape[1:])])
        (every,) = self.gather(mine, what=what)
        if min(counts) == most:
            return every.flatten(0, 1)
        return torch.cat([rows[:n] for rows, n in zip(every, counts, strict=True)])

    def sum_(self, tensor: Tensor, what: str = "an exchange") -> Tensor:
        """Add up a tensor over the ranks, in place; every rank gets the same bits."""
        if self.size > 1 and tensor.numel():
            whole = tensor if tensor.is_contiguous() else tensor.contiguous()
            self._run(what, dist.all_reduce, whole)
            self.received += math.ceil(2 * (self.size - 1) / self.size * whole.nbytes)
            if whole is not tensor:
                tensor.copy_(whole)
        return tensor

    def sum_rows(self, tensor: Tensor, counts: Sequence[int], what: str = "an exchange") -> Tensor:
        """Add up a tensor `[sum(counts), ...]` over the ranks; give this rank's rows alone."""
        if self.size == 1:
            return tensor
        most = max(counts)
        rows = [
            part if n == most else torch.cat([part, part.new_zeros(most - n, *part.shape[1:])])
            for part, n in zip(torch.split(tensor, list(counts)), counts, strict=True)
        ]
        mine = tensor.new_empty(most, *tensor.shape[1:])
        if mine.numel():
            self._run(what, dist.reduce_scatter, mine, [part.contiguous() for part in rows])
            self.received += (self.size - 1) * mine.nbytes
        return mine[: counts[self.rank]]

    def from_rank(self, rank: int, tensor: Tensor, what: str = "an exchange") -> Tensor:
        """Give the tensor of one rank to all, in the room of `tensor`, which is of its shape."""
        if self.size > 1 and tensor.numel():
            self._run(what, dist.broadcast, tensor, self.members[rank])
            self.received += 0 if rank == self.rank else tensor.nbytes
        return tensor

    def agree(self, number: int, what: str = "an exchange") -> int:
        """Give the first rank's number to all."""
        (every,) = self.gather(torch.tensor(number), what=what)
        return int(every[0])

    def meet(self, what: str = "a meeting") -> None:
        """Wait until all ranks are here."""
        self.gather(torch.zeros(1, dtype=torch.uint8), what=what)

    def wait_for(self, is_done: Any, what: str) -> None:
        """Wait for what another thread does together with other ranks, with an eye on them."""
        started, last = time.monotonic(), 0.0
        while not is_done(BEAT / 10):
            waited = time.monotonic() - started
            if self._watch is not None and waited - last > BEAT:
                last = waited
                self._watch.look(waited, what)

    def look_around(self, what: str, seconds: float = 3 * BEAT) -> None:
        """Raise LostRank if a rank turns out to be gone within some seconds."""
        until = time.monotonic() + seconds
        while self._watch is not None and time.monotonic() < until:
            self._watch.look(0.0, what)
            time.sleep(BEAT / 4)

    def leave(self) -> None:
        """Say that this rank ends as it should."""
        if self._watch is not None:
            self._watch.stop()

    def end(self) -> None:
        """Meet a last time, leave, and take the process group apart: the end of every rank.

        Python may end only when the threads of the group are gone. One that then still holds the
        tensors of the last exchange cannot give them back, and aborts the process.
        """
        if self.group is None:
            return
        self.meet("the end")
        self.leave()
        group, self.group, self._watch = self.group, None, None
        _known.pop(group.group_name, None)
        dist.destroy_process_group(group)

    def _run(self, what: str, exchange: Any, *tensors: Any) -> None:
        watch = self._watch
        assert watch is not None
        self.exchanges += 1
        watch.begun += 1
        started = time.monotonic()
        try:
            work = exchange(*tensors, group=self.group, async_op=True)
        except RuntimeError as error:
            raise watch.blame(error, what) from error
        if dist.get_backend(self.group) != "gloo":
            work.wait()  # the backend has a watchdog of its own
            return
        while True:
            try:
                work.wait(timedelta(seconds=BEAT))
                return
            except RuntimeError as error:
                if work.is_completed():
                    raise watch.blame(error, what) from error
                watch.look(time.monotonic() - started, what)


def _bytes(tensor: Tensor) -> Tensor:
    """Give a tensor as bytes in a row."""
    # one number alone counts as contiguous whatever its stride is, and is no row of bytes then
    flat = tensor.contiguous().reshape(-1)
    if flat.numel() == 1 and flat.stride(0) != 1:
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def ranks_of(group: Group = None, *, timeout: float | None = None) -> Ranks:
    """Give the ranks of a process group, of a mesh's dimension, or, for None, of the whole world.

    Where torch.distributed was not set up, there is one rank. `timeout` is how long a rank that is
    alive may keep the others waiting, in seconds.
    """
    found = _group(group)
    if found is None:
        return Ranks(None)
    name = found.group_name
    known = _known.get(name)
    if known is None or known.group is not found:
        known = _known[name] = Ranks(found, timeout or TIMEOUT)
    elif timeout is not None and known._watch is not None:
        known._watch.timeout = timeout
    return known


def _group(group: Group) -> dist.ProcessGroup | None:
    if group is None:
        return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if isinstance(group, dist.ProcessGroup):
        return group
    mesh, dimension = group if isinstance(group, tuple) and len(group) == 2 else (group, None)
    if not hasattr(mesh, "get_group") or not hasattr(mesh, "ndim"):
        raise BadInput(
            f"the group is a {type(group).__name__}; expected a process group of "
            "torch.distributed that this rank is in, a DeviceMesh, or (mesh, dimension)"
        )
    if dimension is None and mesh.ndim != 1:
        raise BadInput(
            f"the mesh has {mesh.ndim} dimensions; expected one: give (mesh, dimension), or "
            "mesh[name]"
        )
    found: dist.ProcessGroup = mesh.get_group(0 if dimension is None else dimension)
    return found
