"""Files and folders that are either absent or whole, and never in the place of somebody else's.

What is written is built beside its target under a hidden, random name that did not exist before,
synced to the disk, and takes the target's place in one step. Whoever builds holds a lock on it, so
that what a killed process left behind can be told from what another one is working on: the next
writer to that place removes the former.

A folder of ours holds one of the files of `MARKERS`. A folder without one was made by somebody
else, and nothing here ever replaces it, forced or not.
"""

import errno
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from lmhead.errors import BadInput, LMHeadError

fcntl: Any = None
with suppress(ImportError):  # on Windows nothing can be locked so, and nothing is swept
    fcntl = import_module("fcntl")

MARKERS = ("lmhead.json", "lmhead_trim.json")
_TAG = ".lmhead-"  # .<name>.lmhead-<16 hexadecimal digits>
_OLD = "-old"  # behind it: what was there before, on systems that cannot exchange two folders
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)


def is_ours(folder: Path) -> bool:
    """Tell whether lmhead wrote this folder: it holds a marker, or nothing at all."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    if any((folder / name).is_file() for name in MARKERS):
        return True
    return next(folder.iterdir(), None) is None


def refuse_existing(target: Path, *, force: bool, folder: bool) -> None:
    """Refuse to write a file, or a folder, where something is that it must not replace."""
    try:
        target.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise cannot_write(target, error) from error
    except ValueError as error:
        raise BadInput(f"{str(target)!r} is not a valid file name ({error})") from error
    if folder and target.is_symlink():
        raise BadInput(f"{target} is a link; give the folder itself, or another path")
    if target.is_dir() and not target.is_symlink():
        if not folder:
            raise BadInput(f"{target} is a folder, but a file is to be written; give a file name")
        if not is_ours(target):
            raise BadInput(
                f"{target} is a folder that lmhead did not write, so it is not replaced; "
                "give another path, or remove it yourself"
            )
    elif folder:
        raise BadInput(f"{target} is a file, but a folder is to be written; give another path")
    elif not target.is_symlink() and not target.is_file():
        raise BadInput(f"{target} is not a regular file (a device or a pipe); give a file name")
    if not force:
        raise BadInput(f"{target} already exists; give another path, or --force to replace it")


@contextmanager
def written_whole(path: Path, *, force: bool = False) -> Iterator[Path]:
    """Give an empty file beside `path` to write to; at the end it takes the place of `path`."""
    refuse_existing(path, force=force, folder=False)
    path = path.absolute()
    try:
        with staging_for(path, folder=False) as staging:
            yield staging
            refuse_existing(path, force=force, folder=False)
            _sync(staging)
            staging.replace(path)
            _sync(path.parent)
    except OSError as error:
        raise cannot_write(path, error) from error


@contextmanager
def folder_whole(path: Path, *, force: bool = False) -> Iterator[Path]:
    """Give an empty folder beside `path` to fill; at the end it takes the place of `path`."""
    refuse_existing(path, force=force, folder=True)
    path = path.absolute()
    try:
        with staging_for(path, folder=True) as staging:
            yield staging
            refuse_existing(path, force=force, folder=True)
            publish(staging, path)
    except OSError as error:
        raise cannot_write(path, error) from error


@contextmanager
def scratch(beside: Path) -> Iterator[Path]:
    """Give an empty folder on the disk of `beside`, removed at the end and swept after a kill."""
    with staging_for(beside.absolute(), folder=True) as staging:
        yield staging


def publish(staging: Path, target: Path, *, mark: bool = True) -> None:
    """Give a finished folder the place of `target`; `mark` it as ours where it is not yet."""
    if mark and not any((staging / name).is_file() for name in MARKERS):
        (staging / MARKERS[0]).write_text('{"written_by": "lmhead"}\n')
    for place, _, names in os.walk(staging):
        for path in (Path(place, name) for name in names):
            if not path.is_symlink():
                _sync(path)
        _sync(Path(place))
    if target.exists() and not _exchanged(staging, target):
        # No exchange on this system: for a moment there is no target, and a kill in that moment
        # leaves the old one under a hidden name, from where `sweep` brings it back.
        old = staging.with_name(staging.name + _OLD)
        target.rename(old)
        staging.rename(target)
        _remove(old)
    elif not target.exists():
        staging.rename(target)
    _sync(target.parent)


def sweep(folder: Path, name: str | None = None) -> None:
    """Remove what killed processes left in `folder`, for the target `name` or for any."""
    start = "." if name is None else f".{name}{_TAG}"
    for left in folder.iterdir():
        if left.name.startswith(start) and _TAG in left.name:
            _sweep_one(left)


def cannot_write(path: Path, error: OSError) -> LMHeadError:
    """Say why `path` could not be written, and what would help."""
    reason = error.strerror or str(error)
    if error.errno in _FULL or "No space left" in reason:
        hint = "the disk is full: free some space there, or choose another place"
    elif error.errno in (errno.ENOTDIR, errno.EEXIST) and (file := _file_on_the_way(path)):
        reason, hint = f"{file} is a file and no folder", "choose another place"
    elif error.errno in _DENIED:
        hint = "you may not write there; choose another place, or change its permissions"
    elif error.errno == errno.ENAMETOOLONG:
        hint = "choose a shorter name"
    else:
        hint = "choose another place"
    return LMHeadError(f"cannot write {path}: {reason}; {hint}; nothing was left there")


def _file_on_the_way(path: Path) -> Path | None:
    return next((part for part in path.parents if part.exists() and not part.is_dir()), None)


@contextmanager
def staging_for(target: Path, *, folder: bool) -> Iterator[Path]:
    """Make a locked file or folder beside `target`, and remove it at the end if it is still there.

    The kernel applies the umask to both, and neither may exist before: a link that somebody put
    there in the hope of being followed is an error and not a way out.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    sweep(target.parent, target.name)
    while True:
        staging = target.with_name(f".{target.name}{_TAG}{secrets.token_hex(8)}")
        if folder:
            staging.mkdir()
        else:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
            os.close(os.open(staging, flags, 0o666))
        try:
            lock = _locked(staging)
        except _InUse:  # swept between the two lines above, by somebody who began just now
            continue
        break
    try:
        yield staging
    finally:
        _remove(staging)
        if lock is not None:
            os.close(lock)


class _InUse(Exception):
    """Another process holds the lock, or the file is gone."""


def _locked(path: Path) -> int | None:
    """Lock what we make or sweep; None where the system cannot lock."""
    if fcntl is None:
        return None
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise _InUse from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        now = path.lstat()
        mine = os.fstat(handle)
        if (now.st_ino, now.st_dev) != (mine.st_ino, mine.st_dev):
            raise FileNotFoundError
    except (BlockingIOError, FileNotFoundError) as error:
        os.close(handle)
        raise _InUse from error
    except OSError:  # a disk without locks
        os.close(handle)
        return None
    return handle


def _sweep_one(left: Path) -> None:
    """Remove a leftover of ours, or bring an old target back whose new one never came."""
    try:
        about = left.lstat()
        if stat.S_ISLNK(about.st_mode) or (fcntl is not None and about.st_uid != os.geteuid()):
            return
        lock = _locked(left)
    except (_InUse, OSError):
        return
    if lock is None:
        return
    try:
        if left.name.endswith(_OLD):
            target = left.with_name(left.name.rpartition(_TAG)[0][1:])
            if not target.exists():
                left.rename(target)
                return
        _remove(left)
    except OSError:
        return  # somebody else's turn, or not ours to remove
    finally:
        os.close(lock)


def _exchanged(one: Path, other: Path) -> bool:
    """Exchange two folders in one step, where the system can; what was `other` is then at `one`."""
    import ctypes

    names = (os.fsencode(one), os.fsencode(other))
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if sys.platform == "darwin":
            return bool(libc.renamex_np(*names, 2) == 0)
        return bool(libc.renameat2(-100, names[0], -100, names[1], 2) == 0)
    except (OSError, AttributeError, TypeError):
        return False


def _sync(path: Path) -> None:
    """Bring a file or a folder's list of names to the disk itself."""
    if os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a disk that cannot
            raise
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
