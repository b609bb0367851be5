"""Folders and files that are either absent or whole.

A folder is built in `<cache>/staging`, under a lock of its own, and renamed into place at the
end. A process that dies leaves only staging, which the next holder of the lock sweeps; two
processes that want the same folder wait for each other, and the second finds it made.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from lmhead.errors import LMHeadError


def cache_root() -> Path:
    """Return `$LMHEAD_CACHE`, or `~/.cache/lmhead`."""
    given = os.environ.get("LMHEAD_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "lmhead"


def build_once(
    target: Path, build: Callable[[Path], None], ready: Callable[[Path], bool] = Path.is_dir
) -> Path:
    """Return `target`, a folder below the cache, built by `build(staging)` if it is not `ready`."""
    if ready(target):
        return target
    root = cache_root()
    staging_root = root / "staging"
    label = f"{target.parent.name}-{target.name}"
    try:
        for folder in (staging_root, root / "locks", target.parent):
            folder.mkdir(parents=True, exist_ok=True)
        with FileLock(root / "locks" / f"{label}.lock"):
            for stale in staging_root.glob(f"{label}.*"):
                shutil.rmtree(stale, ignore_errors=True)
            if ready(target):  # made by another process while we waited
                return target
            staging = Path(tempfile.mkdtemp(prefix=f"{label}.", dir=staging_root))
            try:
                staging.chmod(0o755)  # mkdtemp's 0700 would hide the result from other users
                build(staging)
                if target.exists():  # not ready: made by another version of lmhead
                    target.rename(staging_root / f"{label}.old")
                staging.rename(target)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
                shutil.rmtree(staging_root / f"{label}.old", ignore_errors=True)
    except OSError as error:
        raise LMHeadError(
            f"cannot write {target}: {error.strerror or error}; free space there, "
            "or point LMHEAD_CACHE at another folder"
        ) from error
    return target


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Give a file beside `path` to write to; it takes the place of `path` at the end."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(handle)
        staging = Path(name)
        try:
            yield staging
            staging.chmod(0o644)  # mkstemp's 0600 would hide it from other users
            staging.replace(path)
        finally:
            staging.unlink(missing_ok=True)
    except OSError as error:
        raise LMHeadError(
            f"cannot write {path}: {error}; free space there, or choose another place"
        ) from error


def sha256_of(path: Path) -> str:
    """Hash a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
