"""JSON files that others wrote: an object, of a stated size, or an error that says which is not."""

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from lmhead.errors import BadCheckpoint
from lmhead.files import limits


def open_file(path: Path) -> BinaryIO:
    """Open an ordinary file; a pipe or a device, which could keep us waiting, is a ValueError."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ValueError("it is not a regular file")
    return os.fdopen(handle, "rb")


def read_bytes(path: Path, limit: int) -> bytes:
    """Read a whole ordinary file of at most `limit` bytes; a pipe or a device is refused at once.

    Raises OSError for what the system refuses, and ValueError for the rest.
    """
    with open_file(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > limit:
            raise ValueError(f"it has {size:,} bytes, expected at most {limit:,}")
        return stream.read(size)  # memory for what is there, not for what is allowed


def is_unicode(text: str) -> bool:
    """Tell whether a text is made of whole characters: JSON can name half of a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def parse_object(data: bytes | str) -> dict[str, Any]:
    """Parse a JSON object, whatever is wrong with it a ValueError."""
    text = data if isinstance(data, str) else data.decode("utf-8")
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"it holds a JSON {_KINDS[type(value)]}, expected an object")
    if "\\ud" in text or "\\uD" in text:  # a half of a pair stands for no character
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError("a text in it holds half a surrogate pair") from error
    return value


_KINDS = {
    list: "list",
    str: "string",
    int: "number",
    float: "number",
    bool: "truth value",
    type(None): "null",
}


def read_json(path: Path, limit: int = limits.CONFIG_JSON) -> dict[str, Any]:
    """Read a JSON object, or say which file is none."""
    return read_both(path, limit)[1]


def read_both(path: Path, limit: int) -> tuple[str, dict[str, Any]]:
    """Read the text of a JSON object and the object, or say which file is none."""
    try:
        text = read_bytes(path, limit).decode("utf-8")
        return text, parse_object(text)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadCheckpoint(
            f"cannot read {path}: {reason}; expected a JSON object; fetch the file again"
        ) from error
