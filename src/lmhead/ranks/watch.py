"""Who is still there: every rank says so once a second, and who waits too long looks around.

Beats go to the store that torch.distributed met at, over a connection of their own. A beat is a
number that grows, together with how many exchanges this rank has begun: clocks are not compared,
each rank measures silence by its own. Nobody reads beats unless an exchange has kept it waiting, so
that R ranks write R small values a second and read nothing.

A rank is lost when its process is gone (seen at once on the same machine), when its beat has not
changed for SILENCE seconds, or when it is alive but has not come to an exchange that others have
waited in for `timeout` seconds. Who finds out leaves a note for the others.
"""

import atexit
import ctypes
import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from lmhead.errors import LostRank

BEAT = 1.0  # seconds between two beats
SILENCE = 10.0  # seconds without a beat after which a rank counts as lost
TIMEOUT = 300.0  # seconds that the others wait for a rank that is alive but does not come
_NOTE = "lost"


class Watch:
    """The beats of one process group. `members` are its ranks as the whole world numbers them."""

    def __init__(self, group: dist.ProcessGroup, members: Sequence[int], timeout: float) -> None:
        self.members = tuple(members)
        self.timeout = timeout
        self.begun = 0  # exchanges
        self._rank = group.rank()
        self._group = group
        self._store = PrefixStore("lmhead", _own_connection(group.get_group_store()))
        self._store.set_timeout(timedelta(seconds=SILENCE))
        self._deaf: Exception | None = None  # why the store no longer answers
        self._over = threading.Event()
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._store.set(f"who/{self._rank}", f"{socket.gethostname()} {os.getpid()}")
        self._beat(0)
        self._thread = threading.Thread(target=self._go_on, name="lmhead-beat", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """Beat no more: this rank leaves as it should.

        A thread that is still inside the store when Python ends is torn out of it, and the process
        aborts. A beat that the store does not answer gives up by itself, after SILENCE.
        """
        self._over.set()
        self._thread.join(SILENCE + BEAT)
        atexit.unregister(self.stop)  # which keeps the group

    def look(self, waited: float, what: str) -> None:
        """Raise LostRank if a rank is lost, after waiting for it for so many seconds."""
        self._report_lost()
        if gone := [r for r in range(len(self.members)) if self._is_gone(r)]:
            raise self._lost(gone, f"is gone, in the middle of {what}")
        if quiet := self._silent():
            why = f"has given no sign of life for {SILENCE:.0f} s, in the middle of {what}"
            raise self._lost(quiet, why)
        if waited > self.timeout:
            late = self._behind() or [r for r in range(len(self.members)) if r != self._rank]
            raise self._lost(late, f"has not come to {what} for {self.timeout:.0f} s")

    def blame(self, error: Exception, what: str) -> LostRank:
        """Find out who is lost after an exchange broke off."""
        until = time.monotonic() + SILENCE + 2 * BEAT
        while time.monotonic() < until:
            try:
                self.look(0.0, what)
            except LostRank as lost:
                return lost
            time.sleep(BEAT / 4)
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return LostRank(
            f"{what} between {len(self.members)} ranks broke off ({reason}), and all of them seem "
            "to be alive; check the network between them, then start them again"
        )

    def _go_on(self) -> None:
        count = 0
        while not self._over.wait(BEAT):
            count += 1
            try:
                self._beat(count)
            except Exception as error:  # the store went with whoever kept it
                self._deaf = error
                return

    def _beat(self, count: int) -> None:
        self._store.set(f"beat/{self._rank}", f"{count} {self.begun}")

    def _report_lost(self) -> None:
        """Raise what another rank has found out."""
        try:
            note = self._store.get(_NOTE).decode() if self._store.check([_NOTE]) else None
        except Exception as error:
            self._deaf = self._deaf or error
        else:
            if note is not None:
                numbers, _, why = note.partition(" ")
                raise self._lost([int(n) for n in numbers.split(",")], why, note=False)
        if self._deaf is not None:
            # Without torchrun the first rank of the world keeps the store.
            kept_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            if kept_by_agent or 0 not in self.members or self.members[self._rank] == 0:
                raise LostRank(
                    "the store that the ranks met at no longer answers "
                    f"({(str(self._deaf).splitlines() or ['?'])[0]}); start all ranks again"
                )
            why = "is gone, and the store that it kept with it"
            raise self._lost([self.members.index(0)], why, note=False)

    def _is_gone(self, rank: int) -> bool:
        """Tell whether a process of this machine is no more."""
        stat = Path("/proc/self/stat")
        if rank == self._rank or not stat.exists():
            return False
        try:
            if not self._store.check([f"who/{rank}"]):
                return False
            host, pid = self._store.get(f"who/{rank}").decode().split()
        except Exception:  # `_report_lost` raises it at the next look
            return False
        if host != socket.gethostname():
            return False
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return _sees_its_own_processes()
        return state in "ZX"

    def _silent(self) -> list[int]:
        """List the ranks whose beat has not changed for too long."""
        quiet, now = [], time.monotonic()
        for rank in range(len(self.members)):
            if rank == self._rank:
                continue
            beat = self._read(f"beat/{rank}")
            known = self._seen.get(rank)
            if known is None or known[0] != beat:
                self._seen[rank] = (beat, now)
            elif now - known[1] > SILENCE:
                quiet.append(rank)
        return quiet

    def _behind(self) -> list[int]:
        """List the ranks that have begun fewer exchanges than this one."""
        beats = {r: self._read(f"beat/{r}").split() for r in range(len(self.members))}
        return [r for r, b in beats.items() if len(b) == 2 and int(b[1]) < self.begun]

    def _read(self, key: str) -> bytes:
        try:
            return bytes(self._store.get(key)) if self._store.check([key]) else b""
        except Exception as error:
            self._deaf = self._deaf or error
            return b""

    def _lost(self, places: Sequence[int], why: str, *, note: bool = True) -> LostRank:
        """Make the error, and leave a note for the others."""
        if note:
            with suppress(Exception):
                self._store.set(_NOTE, f"{','.join(map(str, places))} {why}")
        # What waits in the group's threads may wait for ever, and at exit torch would wait for
        # them: with one reference too many the group is never taken apart.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
        ranks = [self.members[place] for place in places]
        named = "rank " + ", ".join(map(str, ranks)) if ranks else "a rank"
        return LostRank(
            f"{named} {why}; the other ranks have stopped: see what it said last, and start all "
            "ranks again",
            ranks=ranks,
        )


def _own_connection(store: Store) -> Store:
    """Give a store that a thread can wait for while others use the first one."""
    clone = getattr(store, "clone", None)  # before torch 2.8 there was none
    return store if clone is None else clone()


def _sees_its_own_processes() -> bool:
    """Tell whether /proc here lists processes at all."""
    return Path(f"/proc/{os.getpid()}").exists()
