"""The header of a safetensors file, read without torch and without touching a weight, and written.

A file opens with eight bytes (the length n of the header, little endian), then n bytes of JSON
(`{name: {dtype, shape, data_offsets}}`, and texts under `__metadata__`), then the data. The tensors
lie one behind the other, without gaps and without overlap.

Format: https://github.com/huggingface/safetensors#format
"""

import json
import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from lmhead.errors import BadCheckpoint
from lmhead.files import limits
from lmhead.files.jsons import parse_object

_END = 2**63 - 1  # of any file

# bits per element
_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "C64": 64,
    "U64": 64,
    "I64": 64,
    "F64": 64,
}


@dataclass(frozen=True)
class TensorHeader:
    """Where one tensor lies and what it is; nothing of its data."""

    name: str
    dtype: str  # as safetensors spells it: F32, BF16, I8, ...
    shape: tuple[int, ...]
    nbytes: int
    file: Path
    offset: int = 0  # from the start of the file

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class SafetensorsHeader:
    """All that a file says before its data."""

    tensors: Mapping[str, TensorHeader]  # as the header lists them
    metadata: Mapping[str, str]


def read_header(file: Path) -> dict[str, TensorHeader]:
    """Read where the tensors of a file lie, and check that the file is as long as it says."""
    return dict(open_safetensors(file).tensors)


def open_safetensors(file: Path) -> SafetensorsHeader:
    """Read a file's header, tensors and metadata, and check it against the file's length."""
    try:
        handle = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        raise BadCheckpoint(
            f"cannot read {file}: {error.strerror}; expected a safetensors file"
        ) from error
    about = os.fstat(handle)
    if not stat.S_ISREG(about.st_mode):
        os.close(handle)
        raise BadCheckpoint(f"{file} is not a regular file; expected a safetensors file")
    size = about.st_size
    with os.fdopen(handle, "rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(limits.SAFETENSORS_HEADER, size - 8):
            raise BadCheckpoint(
                f"{file} is truncated or no safetensors file: {size:,} bytes "
                "with no whole header; fetch it again"
            )
        text = stream.read(length)
    try:
        entries = parse_object(text)
        metadata = _checked_metadata(entries.pop("__metadata__", {}))
        tensors, end = _placed(file, entries, 8 + length)
    except ValueError as error:
        raise BadCheckpoint(
            f"the header of {file} is damaged ({error}); fetch the file again"
        ) from error
    if size != end:
        raise BadCheckpoint(
            f"{file} is truncated: {size:,} bytes, but its header promises {end:,}; fetch it again"
        )
    return SafetensorsHeader(tensors, metadata)


def pack_header(tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> bytes:
    """Write a header: `tensors` gives name -> (dtype, shape, nbytes) in the order of the data.

    The same tensors and metadata give the same bytes.
    """
    header: dict[str, Any] = {}
    if metadata:
        header["__metadata__"] = dict(sorted(metadata.items()))
    end = 0
    for name, (dtype, shape, nbytes) in tensors.items():
        start, end = end, end + nbytes
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _checked_metadata(found: Any) -> dict[str, str]:
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise ValueError("its metadata is not an object of texts")
    return found


def _placed(
    file: Path, entries: Mapping[str, Any], start: int
) -> tuple[dict[str, TensorHeader], int]:
    """Check every tensor's place, and return them and where the data ends."""
    tensors = {name: _tensor(file, name, entry, start) for name, entry in entries.items()}
    end = start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.nbytes)):
        if tensor.offset != end:
            raise ValueError(
                f"{tensor.name!r} begins at byte {tensor.offset:,}, expected {end:,}: "
                "a gap or an overlap"
            )
        end = tensor.offset + tensor.nbytes
    return tensors, end


def _tensor(file: Path, name: str, entry: Any, start: int) -> TensorHeader:
    if not isinstance(entry, dict):
        raise ValueError(f"{name!r} is not an object")
    values: list[Any] = [entry.get(key) for key in ("dtype", "shape", "data_offsets")]
    dtype, shape, offsets = values
    if len(name) > limits.NAME or not isinstance(dtype, str):
        raise ValueError(f"{name[:60]!r} has the dtype {_short(dtype)}, or too long a name")
    if not _are_counts(shape) or len(shape) > limits.DIMENSIONS or prod(shape) > limits.ELEMENTS:
        raise ValueError(f"{name!r} has the shape {_short(shape)}")
    if not _are_counts(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= _END:
        raise ValueError(f"{name!r} has the offsets {_short(offsets)}")
    nbytes = offsets[1] - offsets[0]
    if dtype in _BITS and -(-prod(shape) * _BITS[dtype] // 8) != nbytes:
        raise ValueError(
            f"{name!r} has {nbytes:,} bytes, which is not what {dtype} {_short(shape)} takes"
        )
    return TensorHeader(name, dtype, tuple(shape), nbytes, file, start + offsets[0])


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)


def _short(value: Any) -> str:
    """Show what stands there, however long or deep it is."""
    if isinstance(value, list):
        shown = [str(v)[:20] if type(v) is int else type(v).__name__ for v in value[:6]]
        return f"[{', '.join(shown)}{', ...' if len(value) > 6 else ''}]"
    return repr(value)[:60] if isinstance(value, str | int | float) else type(value).__name__
