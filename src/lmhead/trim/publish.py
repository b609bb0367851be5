"""Output that is either absent or whole, and never in the place of what somebody else made.

A target is built beside itself under a hidden name and renamed at the end. A process that is
killed leaves the hidden name behind; the next one with the same target sweeps it.

What is there already: a file goes only by force, a folder only by force and if it is a trimmed
model of ours (`lmhead_trim.json` lies in it) or empty; a folder never gives way to a file.
"""

import errno
import glob
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lmhead.errors import BadInput, LMHeadError

MARKER = "lmhead_trim.json"  # in every folder that a trim wrote, and in no other


def refuse_existing(target: Path, force: bool, *, folder: bool = False) -> None:
    """Refuse to write over something that is there, unless asked to and it may go.

    `folder` tells whether a folder is to be written, not a file.
    """
    if target.is_symlink():  # only the link would go, never what it points to
        if not force:
            raise BadInput(f"{target} exists already; give another place, or --force to replace it")
    elif target.is_dir():
        if not folder:
            raise BadInput(
                f"{target} is a folder, but a file is to be written; give the name of a file"
            )
        empty = not any(target.iterdir())
        if not empty and not (target / MARKER).is_file():
            raise BadInput(
                f"{target} is a folder that no trim wrote (it has no {MARKER}), so it is not "
                "replaced, not even with --force; give another place, or remove it yourself"
            )
        if not force:
            raise BadInput(f"{target} exists already; give another place, or --force to replace it")
    elif target.is_file():
        if folder:
            raise BadInput(f"{target} is a file, but a folder is to be written; give another place")
        if not force:
            raise BadInput(f"{target} exists already; give another place, or --force to replace it")
    elif target.exists():
        raise BadInput(f"{target} is neither a file nor a folder; give another place")


@contextmanager
def staged(target: Path, *, force: bool = False, folder: bool = False) -> Iterator[Path]:
    """Give a path to build at; when all goes well it becomes `target`, else it is removed."""
    refuse_existing(target, force, folder=folder)
    target = target.absolute()
    host = socket.gethostname().replace(os.sep, "_")
    stem = f".{target.name}.trim-{host}-"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for left in target.parent.glob(f"{glob.escape(stem)}*"):
            if not _is_alive(left.name.removeprefix(stem)):
                _remove(left)
        # Nobody can know the name before, and put a link there.
        staging = target.parent / f"{stem}{os.getpid()}-{secrets.token_hex(6)}"
        try:
            yield staging
            refuse_existing(target, force, folder=folder)
            _replace(staging, target)
        finally:
            _remove(staging)
    except OSError as error:
        raise LMHeadError(
            f"cannot write {target}: {error.strerror or error}; {_hint(error)}; "
            "nothing was left there"
        ) from error


def _hint(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "free some space there"
    if error.errno == errno.ENOTDIR:
        return "a part of that path is a file, not a folder"
    return "check the place and its permissions"


def link_or_copy(source: Path, target: Path, *, link: bool = False) -> None:
    """Give `target` the content of `source`: a copy of its own, or with `link` the same file."""
    source = source.resolve()  # a Hugging Face cache holds links
    if link:
        try:
            os.link(source, target)
        except OSError:  # another disk, or one without hard links
            pass
        else:
            return
    shutil.copyfile(source, target)


def _replace(staging: Path, target: Path) -> None:
    """Rename, an old folder out of the way first: at no moment is half of either there."""
    if not target.is_dir() or target.is_symlink():
        if staging.is_dir():  # a folder does not take the place of a link by itself
            target.unlink(missing_ok=True)
        staging.replace(target)
        return
    old = staging.with_name(staging.name + "-old")
    target.rename(old)
    staging.rename(target)
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _is_alive(suffix: str) -> bool:
    pid = suffix.split("-")[0]  # what follows tells runs of one process apart
    if not pid.isdigit() or os.name != "posix":
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
