"""Output that is either absent or whole.

A target is built beside itself under a hidden name and renamed at the end. A process that is
killed leaves the hidden name behind; the next one with the same target sweeps it.
"""

import errno
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lmhead.errors import BadInput, LMHeadError


def refuse_existing(target: Path, force: bool) -> None:
    """Refuse to write over something that is there, unless asked to."""
    if not force and (target.is_symlink() or target.exists()):
        raise BadInput(f"{target} exists already; give another place, or --force to replace it")


@contextmanager
def staged(target: Path, *, force: bool = False) -> Iterator[Path]:
    """Give a path to build at; when all goes well it becomes `target`, else it is removed."""
    refuse_existing(target, force)
    target = target.absolute()
    host = socket.gethostname().replace(os.sep, "_")
    stem = f".{target.name}.trim-{host}-"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for left in target.parent.glob(f"{stem}*"):
            if not _is_alive(left.name.removeprefix(stem)):
                _remove(left)
        staging = target.parent / f"{stem}{os.getpid()}"
        try:
            yield staging
            refuse_existing(target, force)
            _replace(staging, target)
        finally:
            _remove(staging)
    except OSError as error:
        hint = (
            "free some space there"
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            else "check the place and its permissions"
        )
        raise LMHeadError(
            f"cannot write {target}: {error.strerror or error}; {hint}; nothing was left there"
        ) from error


def link_or_copy(source: Path, target: Path) -> None:
    """Give `target` the content of `source`, without a second copy where the disk allows it."""
    source = source.resolve()  # a Hugging Face cache holds links
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _replace(staging: Path, target: Path) -> None:
    """Rename, an old target out of the way first: at no moment is half of either there."""
    old = None
    if target.is_symlink() or target.exists():
        old = staging.with_name(staging.name + "-old")
        _remove(old)
        target.rename(old)
    staging.rename(target)
    if old is not None:
        _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _is_alive(suffix: str) -> bool:
    pid = suffix.split("-")[0]  # -old and -proof are of the same process
    if not pid.isdigit() or os.name != "posix":
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
