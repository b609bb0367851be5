"""JSON files that others wrote: an object, of a stated size, or an error that says which is not."""

import json
import os
import stat
from pathlib import Path
from typing import Any

from lmhead.errors import BadCheckpoint
from lmhead.files import limits


def read_bytes(path: Path, limit: int) -> bytes:
    """Read a whole ordinary file of at most `limit` bytes; a pipe or a device is refused at once.

    Raises OSError for what the system refuses, and ValueError for the rest.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    about = os.fstat(handle)
    if not stat.S_ISREG(about.st_mode):
        os.close(handle)
        raise ValueError("it is no ordinary file")
    with os.fdopen(handle, "rb") as stream:
        if about.st_size > limit:
            raise ValueError(f"it has {about.st_size:,} bytes, expected at most {limit:,}")
        return stream.read(about.st_size)  # memory for what is there, not for what is allowed


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
    try:
        return parse_object(read_bytes(path, limit))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadCheckpoint(
            f"cannot read {path}: {reason}; expected a JSON object; fetch the file again"
        ) from error
