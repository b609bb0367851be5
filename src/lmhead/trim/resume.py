"""What a model said, kept in the cache: a trim that was stopped goes on from there.

One folder of `<cache>/observations` for each question, named by the hash of all that decides the
answer: the weights, the tokenizer, the texts, what is kept anyway, the limits, and the versions of
what computes. A stage is written when it is done, whole or not at all. The newest folders are kept,
as long as they are few and small.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmhead.errors import LMHeadError
from lmhead.files.cache import cache_root
from lmhead.files.checkpoint import weight_files
from lmhead.files.contents import Entry, entries, remove
from lmhead.files.stamp import read_stamp, refuse_strangers, sha256_of
from lmhead.files.whole import sweep, written_whole

KIND = "observations"
MOST, NBYTES = 16, 2**28  # folders and bytes that are kept


class Memory:
    """The stages of one observation that are done, by name; without a key nothing is kept."""

    def __init__(self, key: str | None) -> None:
        self.folder = None if key is None else cache_root() / KIND / key

    def once(self, name: str, make: Callable[[], Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        """Return what `make` gave when it was called first, now or in another process."""
        if self.folder is None:
            return make()
        path = self.folder / f"{name}.safetensors"
        if (found := _load(path)) is not None:
            return found
        made = make()
        self._save(path, made)
        return made

    def _save(self, path: Path, made: Mapping[str, Tensor]) -> None:
        """Write a stage; a cache that cannot be written costs the resuming, not the trim."""
        from safetensors.torch import save

        with suppress(LMHeadError, OSError):
            with written_whole(path, force=True) as staging:
                staging.write_bytes(save({k: v.contiguous() for k, v in made.items()}))
            _tidy(path.parent)


def _load(path: Path) -> dict[str, Tensor] | None:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        refuse_strangers(path)
        found: dict[str, Tensor] = load(path.read_bytes())
    except (OSError, SafetensorError, ValueError, KeyError):
        return None
    with suppress(OSError):
        path.touch()  # so that what is used stays
    return found


def _tidy(current: Path) -> None:
    """Remove what killed processes left, and the oldest folders where there are too many."""
    with suppress(OSError):
        sweep(current)
    kept: list[Entry] = []
    for entry in sorted(entries(), key=lambda entry: -entry.used):
        if entry.kind != KIND:
            continue
        kept.append(entry)
        full = len(kept) > MOST or sum(e.nbytes for e in kept) > NBYTES
        if full and entry.folder != current:
            kept.pop()
            remove(entry)


def key_of(folder: Path, settings: Mapping[str, Any], lists: Sequence[Sequence[Any]]) -> str:
    """Return the name of a question: a hash of the weights, of settings, and of lists of ids."""
    digest = hashlib.sha256()
    stamp = read_stamp(folder) or {"files": {}}  # of the cache, and compared with the files there
    for file in sorted(weight_files(folder)):
        known = stamp["files"].get(file.name) or {}
        digest.update(str(known.get("sha256") or sha256_of(file)).encode())
    settled = {**settings, "torch": torch.__version__}
    digest.update(json.dumps(settled, sort_keys=True).encode())
    for part in lists:
        digest.update(json.dumps(part).encode())
    return digest.hexdigest()[:32]


def packed(rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Give rows of several lengths as two tensors."""
    return {
        "ids": torch.tensor([i for row in rows for i in row], dtype=torch.long),
        "lengths": torch.tensor([len(row) for row in rows], dtype=torch.long),
    }


def unpacked(ids: Tensor, lengths: Tensor) -> list[list[int]]:
    """Give back what was packed."""
    return [part.tolist() for part in torch.split(ids, lengths.tolist())]
