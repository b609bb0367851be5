"""The cache: folders that are built once, under a lock of their own, and are absent or whole.

A folder is built in `<cache>/staging` and renamed into place at the end. A process that dies leaves
only staging, which the next one that builds sweeps; two processes that want the same folder wait
for each other, and the second finds it made.
"""

import os
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from lmhead.errors import BadInput, LMHeadError
from lmhead.files.whole import cannot_write, publish, staging_for, sweep
from lmhead.progress import Progress, silent

_PATIENCE = 0.5  # seconds before a wait is told


def cache_root() -> Path:
    """Return `$LMHEAD_CACHE`, or `~/.cache/lmhead`."""
    return with_home(os.environ.get("LMHEAD_CACHE") or "~/.cache/lmhead", "LMHEAD_CACHE")


def with_home(path: str | Path, name: str) -> Path:
    """Return a path with `~` or `~user` replaced by that folder; `name` is what says the path."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # no such user, or one without a home
        raise BadInput(
            f"{name} is {path}, but there is no such home folder; give the full path"
        ) from error


def build_once(
    target: Path,
    build: Callable[[Path], None],
    ready: Callable[[Path], bool] = Path.is_dir,
    progress: Progress = silent,
) -> Path:
    """Return `target`, a folder below the cache, built by `build(staging)` if it is not `ready`."""
    if ready(target):
        return target
    root = cache_root()
    label = f"{target.parent.name}-{target.name}"
    try:
        for folder in (root / "staging", root / "locks", target.parent):
            folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(root / "locks" / f"{label}.lock")
        try:
            lock.acquire(timeout=_PATIENCE)
        except Timeout:
            with progress(f"waiting for another process that is making {target.name}"):
                lock.acquire()
        try:
            if ready(target):  # made by another process while we waited
                return target
            sweep(root / "staging")
            with staging_for(root / "staging" / label, folder=True) as staging:
                build(staging)
                publish(staging, target, mark=False)
        finally:
            lock.release()
    except OSError as error:
        raise _cannot_cache(target, error) from error
    return target


def _cannot_cache(target: Path, error: OSError) -> LMHeadError:
    return LMHeadError(f"{cannot_write(target, error)}; LMHEAD_CACHE chooses where the cache is")
