"""States that were computed once, kept in the cache: by body, by head, and by text.

One folder for each body and head, with one file of records of equal size: the number of the text,
a check sum, its figures and its states. Records are only ever added at the end, under a lock; one
that a killed process left unfinished, or that a disk has damaged, is as good as not there.
"""

import hashlib
import os
import warnings
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock, Timeout
from torch import Tensor

from lmhead.errors import LMHeadError, LMHeadWarning
from lmhead.files.cache import cache_root
from lmhead.files.contents import entries, remove, size_of
from lmhead.files.stamp import refuse_strangers
from lmhead.files.whole import written_whole

KIND = "states"
LIMIT = "LMHEAD_STATES"  # the variable that says how much may be kept; 0 keeps nothing
DEFAULT = "2GB"
_VERSION = b"1 "  # of what is computed; a change of it makes all that is kept unknown
_PATIENCE = 10.0  # seconds, then nothing is kept: whoever waits could have computed it


def limit() -> int:
    """Return how many bytes of states may be kept, of all models together."""
    return size_of(os.environ.get(LIMIT) or DEFAULT, LIMIT)


class StateCache:
    """The states of one body and head: `[L, d]` and F figures for each text."""

    def __init__(self, name: str, states: tuple[int, int], figures: int) -> None:
        self.folder = cache_root() / KIND / name
        self.path = self.folder / "records"
        self.type = np.dtype(
            [
                ("key", "V16"),
                ("sum", "<u4"),
                ("figures", "<f4", (figures,)),
                ("states", "<f4", states),
            ]
        )

    def find(self, keys: Sequence[bytes]) -> dict[int, tuple[Tensor, Tensor]]:
        """Return states and figures of the texts that are known, by their place in `keys`."""
        wanted: dict[bytes, list[int]] = {}
        for i, key in enumerate(keys):
            wanted.setdefault(key, []).append(i)
        found: dict[int, tuple[Tensor, Tensor]] = {}
        with suppress(OSError, LMHeadError):  # what another user wrote is not known here
            for record in self._records():
                places = wanted.get(record["key"].tobytes(), [])
                if places and not _damaged(record):
                    states = torch.from_numpy(record["states"].copy())
                    figures = torch.from_numpy(record["figures"].copy())
                    found |= dict.fromkeys(places, (states, figures))
            if found:
                os.utime(self.path)  # when it was last used
        return found

    def _records(self) -> "np.ndarray[tuple[int], np.dtype[np.void]]":
        try:
            refuse_strangers(self.folder)
            refuse_strangers(self.path)
            n = self.path.stat().st_size // self.type.itemsize
        except FileNotFoundError:
            n = 0
        if not n:
            return np.zeros(0, self.type)
        return np.memmap(self.path, self.type, mode="r", shape=(n,))

    def add(self, keys: Sequence[bytes], states: Tensor, figures: Tensor) -> None:
        """Keep states `[N, L, d]` and figures `[N, F]`, if the limit and the disk allow it."""
        most = limit()
        records = np.zeros(len(keys), self.type)
        records["states"], records["figures"] = states.numpy(), figures.numpy()
        for record, key in zip(records, keys, strict=True):
            record["key"] = np.void(key)
            record["sum"] = _sum(record)
        records = records[max(0, len(records) - most // self.type.itemsize) :]
        if not len(records):
            return
        lock = cache_root() / "locks" / f"{KIND}-{self.folder.name}.lock"
        try:
            for folder in (self.folder, lock.parent):
                folder.mkdir(parents=True, exist_ok=True)
            with FileLock(lock, timeout=_PATIENCE):
                self._append(records, most)
            _keep_below(most, self.folder)
        except Timeout:
            return
        except (OSError, LMHeadError) as error:
            message = f"states are not kept, and computed again next time: {error}"
            warnings.warn(LMHeadWarning(f"{message}; {LIMIT}=0 keeps none"), stacklevel=2)

    def _append(self, records: "np.ndarray[tuple[int], np.dtype[np.void]]", most: int) -> None:
        there = self._records()
        size = self.type.itemsize
        if (len(there) + len(records)) * size > most:  # the older ones go, to half of the limit
            keep = max(0, most // 2 // size - len(records))
            with written_whole(self.path, force=True) as staging, staging.open("wb") as file:
                for record in there[len(there) - keep :]:
                    file.write(record.tobytes())
                file.write(records.tobytes())
            return
        with self.path.open("ab") as file:
            file.truncate(len(there) * size)  # what a killed process left unfinished
            file.write(records.tobytes())


def key_of(ids: Sequence[int], first: int) -> bytes:
    """Name a text by its ids and by where its prompt ends."""
    about = _VERSION + f"{first} {list(ids)}".encode()
    return hashlib.sha256(about).digest()[:16]


def _sum(record: np.void) -> int:
    said = record["key"].tobytes() + record["figures"].tobytes()
    return zlib.crc32(record["states"].tobytes(), zlib.crc32(said))


def _damaged(record: np.void) -> bool:
    return bool(record["sum"] != _sum(record))


def _keep_below(most: int, mine: Path) -> None:
    """Remove the states of other models that were not used for longest, until all are within."""
    kept = sorted((e for e in entries() if e.kind == KIND), key=lambda e: e.used)
    total = sum(e.nbytes for e in kept)
    for entry in kept:
        if total > most and entry.folder != mine:
            remove(entry)
            total -= entry.nbytes
