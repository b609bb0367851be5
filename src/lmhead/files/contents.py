"""What the cache holds, how much of the disk it takes, and how to give that back."""

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lmhead.errors import BadInput, LMHeadError
from lmhead.files.cache import cache_root
from lmhead.files.stamp import STAMP
from lmhead.files.whole import staging_for, sweep

# The folders of the cache that hold one folder for each thing that was made.
KINDS = {
    "models": "built-in model",
    "gguf": "converted GGUF file",
    "heads": "head of a GGUF file",
    "bodies": "blocks of a GGUF file",
    "screens": "int8 copy of a head",
    "observations": "what a model said, for a trim",
    "listening": "the same, of an earlier version",
    "states": "states of texts, for steer and detect",
}


_UNITS = {"": 1.0, "B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


def size_of(text: str, name: str) -> int:
    """Return bytes from `5GB`, `800MB` or a plain number; `name` is what the text was given as."""
    found = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)\s*([KMGT]?B|)", text.strip().upper())
    if not found:
        raise BadInput(f"{name} is {text!r}; expected a number and a unit, such as 5GB or 800MB")
    return int(float(found[1]) * _UNITS[found[2]])


@dataclass(frozen=True)
class Entry:
    """One thing that was made: it is used, checked and removed as a whole."""

    kind: str  # a key of `KINDS`
    name: str
    folder: Path
    nbytes: int  # of all its files
    used: float  # when it was last used, in seconds since 1970; a day's precision


def entries() -> list[Entry]:
    """List all that is in the cache, by kind and name."""
    found = []
    for kind in KINDS:
        place = cache_root() / kind
        if place.is_dir():
            names = (p for p in place.iterdir() if p.is_dir() and not p.is_symlink())
            found += [_entry(kind, folder) for folder in sorted(names)]
    return found


def remove(entry: Entry) -> None:
    """Remove an entry: it is out of the way in one step, whatever happens after it."""
    staging = cache_root() / "staging"
    try:
        with staging_for(staging / f"{entry.kind}-{entry.name}", folder=True) as away:
            entry.folder.rename(away / entry.name)
        sweep(staging)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not entry.folder.exists():
            return  # another process was quicker
        raise LMHeadError(f"cannot remove {entry.folder}: {error.strerror}") from error


def keep_below(nbytes: int) -> list[Entry]:
    """Remove what was not used for longest until the cache takes at most `nbytes`; return that."""
    if (staging := cache_root() / "staging").is_dir():
        with suppress(OSError):
            sweep(staging)  # what a killed run moved away and did not remove
    kept = sorted(entries(), key=lambda entry: entry.used)
    total = sum(entry.nbytes for entry in kept)
    removed = []
    for entry in kept:
        if total <= nbytes:
            break
        remove(entry)
        removed.append(entry)
        total -= entry.nbytes
    return removed


def _entry(kind: str, folder: Path) -> Entry:
    nbytes, used = 0, 0.0
    for path in folder.rglob("*"):
        with suppress(OSError):  # gone between the two calls
            about = path.lstat()
            nbytes += about.st_size
            # A stamp is touched at a use; what has none shows when it was read.
            read = about.st_mtime if path.name == STAMP else about.st_atime
            used = max(used, about.st_mtime, read)
    return Entry(kind, folder.name, folder, nbytes, used)
