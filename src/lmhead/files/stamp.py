"""What a folder in the cache is made of, so that a change is noticed when it is used again.

`lmhead.json` in the folder lists every file with its size and SHA-256, and the times that the file
had when it was hashed. A file with the same size and times has not been written to: the system sets
the second of them, and no program can. Any other is hashed again. So a load costs a few
microseconds a file, and a changed byte is still found; what a disk loses by itself, without a
write, only `verify` finds.
"""

import hashlib
import json
import os
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lmhead.errors import BadCheckpoint, LMHeadError
from lmhead.files import limits
from lmhead.files.jsons import read_json
from lmhead.files.whole import written_whole
from lmhead.progress import Progress, silent

STAMP = "lmhead.json"
_USED = 3600  # seconds after which a use is worth noting


def sha256_of(path: Path) -> str:
    """Hash a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_stamp(folder: Path, about: Mapping[str, Any]) -> None:
    """Write the stamp of a folder that is ready: `about` it, and every file that is in it."""
    files = {
        path.name: {"sha256": sha256_of(path), **_seen(path.lstat())}
        for path in sorted(folder.iterdir())
        if path.name != STAMP and path.is_file()
    }
    _write(folder, {**about, "files": files})


def read_stamp(folder: Path) -> dict[str, Any] | None:
    """Return the stamp of a folder in the cache, None where there is none that lists its files."""
    path = folder / STAMP
    if not path.is_file():
        return None
    try:
        stamp = read_json(path, limits.CONFIG_JSON)
    except BadCheckpoint:
        return None
    return stamp if isinstance(stamp.get("files"), dict) else None


def refuse_strangers(path: Path) -> None:
    """Refuse what another user owns: they could change it, or have made it to be found here."""
    if os.name != "posix":
        return
    owner = path.lstat().st_uid
    if owner not in (os.geteuid(), 0):
        raise LMHeadError(
            f"{path} in the cache belongs to another user (id {owner}), who may have put anything "
            "in it; set LMHEAD_CACHE to a folder of your own, or take it over with chown"
        )


def private_folder(path: Path) -> None:
    """Make a folder for what runs when it is read back; refuse one that others can write to."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    if os.name != "posix":
        return
    above = path.resolve().parent
    refuse_strangers(path)
    refuse_strangers(above)
    # others may put another folder in its place, unless the one above is sticky
    replaceable = _others_write(above) and not above.stat().st_mode & stat.S_ISVTX
    if path.is_symlink() or _others_write(path) or replaceable:
        raise LMHeadError(
            f"others may write to {path}, or put something in its place; set LMHEAD_CACHE to a "
            f"folder of your own, or run `chmod go-w {above} {path}`"
        )


def _others_write(path: Path) -> bool:
    """Tell whether others may write there; our own group is ours, as a umask of 002 has it."""
    about = path.stat()
    theirs = 0o002 if about.st_gid == os.getegid() else 0o022
    return bool(about.st_mode & theirs)


def check(folder: Path) -> None:
    """Refuse a folder of the cache of which a file is gone or is not as it was made."""
    stamp = read_stamp(folder)
    if stamp is None:
        raise BadCheckpoint(f"{folder} has no {STAMP} that lists its files; make it again")
    refuse_strangers(folder)
    refuse_strangers(folder / STAMP)
    again = False
    for name, known in stamp["files"].items():
        found = _compared(folder, name, known)
        if found is None:
            continue
        if not _hashes_to(folder / name, known):
            raise BadCheckpoint(f"{name} in {folder} was changed or damaged since it was made")
        known.update(found)
        again = True
    with suppress(LMHeadError, OSError):  # a cache that we may only read
        if again:
            _write(folder, stamp)
        elif time.time() - (folder / STAMP).stat().st_mtime > _USED:
            os.utime(folder / STAMP)


def verify(folder: Path, progress: Progress = silent) -> list[str]:
    """Hash every file of a folder of the cache; return the names of those that are not as made."""
    stamp = read_stamp(folder)
    if stamp is None:
        return [STAMP]
    refuse_strangers(folder)
    wrong = []
    total = sum(int(known["bytes"]) for known in stamp["files"].values() if _is_known(known))
    with progress(f"checking {folder.name}", total=total) as advance:
        for name, known in stamp["files"].items():
            if not _is_name(name) or not _hashes_to(folder / name, known):
                wrong.append(name)
            if _is_known(known):
                advance(int(known["bytes"]))
    return wrong


def _compared(folder: Path, name: str, known: Any) -> dict[str, int] | None:
    """Return None for a file with the size and times of the stamp, else those that it has now."""
    if not _is_name(name):
        raise BadCheckpoint(f"{folder / STAMP} names {name!r}, which is not a file of that folder")
    path = folder / name
    try:
        about = path.lstat()
    except OSError as error:
        raise BadCheckpoint(f"{path} is gone ({error.strerror})") from error
    if not stat.S_ISREG(about.st_mode):
        raise BadCheckpoint(f"{path} is not a regular file")
    refuse_strangers(path)
    if not _is_known(known):
        raise BadCheckpoint(f"{folder / STAMP} does not say what {name} is")
    found = _seen(about)
    if found["bytes"] != known["bytes"]:
        raise BadCheckpoint(f"{path} has {found['bytes']:,} bytes, expected {known['bytes']:,}")
    return None if all(known.get(key) == value for key, value in found.items()) else found


def _is_name(name: str) -> bool:
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


def _is_known(known: Any) -> bool:
    return isinstance(known, dict) and type(known.get("bytes")) is int


def _hashes_to(path: Path, known: Any) -> bool:
    try:
        about = path.lstat()
        return (
            stat.S_ISREG(about.st_mode)
            and _is_known(known)
            and about.st_size == known["bytes"]
            and sha256_of(path) == known.get("sha256")
        )
    except OSError:
        return False


def _seen(about: os.stat_result) -> dict[str, int]:
    times = {"mtime_ns": about.st_mtime_ns, "ctime_ns": about.st_ctime_ns}
    return {"bytes": about.st_size, **times}


def _write(folder: Path, stamp: Mapping[str, Any]) -> None:
    with written_whole(folder / STAMP, force=True) as staging:
        staging.write_text(json.dumps(stamp, indent=2) + "\n")
