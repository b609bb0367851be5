"""A GGUF file: its metadata and where its tensors lie, read without torch and without weights.

The file opens with `GGUF`, a version and two counts; then key-value metadata, then one record per
tensor (name, dimensions innermost first, type, offset), then the data, aligned. The vocabulary sits
in the metadata as long arrays, so arrays are only measured when the file is opened and decoded when
first used: a quarter of a million tokens cost some milliseconds.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import os
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from lmhead.errors import BadCheckpoint, UnsupportedModel
from lmhead.files import limits

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# Stated here and not taken from the gguf package, whose import takes longer than the whole header.
# type number -> (name, elements per block, bytes per block)
TENSOR_TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}

# type number of a value -> its code in `struct`
SCALARS: Mapping[int, str] = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING, ARRAY = 8, 9
# types that gguf does not dequantise because numpy reads them
_PLAIN = {"F64": "<f8", "I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
_MAX_DIMS = 4  # ggml's own limit
_READ_BLOCK = 2**18  # elements dequantised at a time: what a core keeps in its cache


class GGUFArray(Sequence[Any]):
    """An array of the metadata: its length is known at once, its values when first asked for."""

    def __init__(self, source: "_Reader", kind: int, start: int, count: int) -> None:
        self._source, self._kind, self._start, self._count = source, kind, start, count

    @cached_property
    def _values(self) -> Sequence[Any]:
        reader = _Reader(self._source.path, self._source.data, self._start)
        if self._kind == STRING:
            return reader.strings(self._count)
        return reader.unpack(f"{self._count}{SCALARS[self._kind]}")

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self._values[index]

    def __repr__(self) -> str:
        return f"<GGUFArray of {self._count:,}>"


@dataclass(frozen=True)
class RawKey:
    """One key of the metadata as bytes: its type, and where its value lies in the file."""

    name: str
    kind: int
    start: int
    end: int


@dataclass(frozen=True)
class GGUFTensor:
    """Where one tensor lies and what it is; nothing of its data."""

    name: str
    shape: tuple[int, ...]  # as torch has it, outermost first: an embedding is (V, d)
    type: str  # as ggml spells it: F32, Q8_0, Q4_K, ...
    offset: int  # from the start of the file
    nbytes: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class GGUFFile:
    """An open GGUF file, memory-mapped."""

    path: Path
    version: int
    metadata: Mapping[str, Any]
    keys: Mapping[str, RawKey]  # the same keys, as they are stored
    tensors: Mapping[str, GGUFTensor]
    alignment: int
    _data: mmap.mmap = field(repr=False, compare=False)

    def raw(self, key: RawKey) -> bytes:
        """Return the bytes of a key's value."""
        return self._data[key.start : key.end]

    def read(self, name: str) -> "npt.NDArray[np.float32]":
        """Read one tensor as float32, dequantised, in its torch shape."""
        import numpy as np

        tensor = self.tensors[name]
        values = np.empty(tensor.size, np.float32)
        done = 0
        for part in self.stream(name):
            values[done : done + part.size] = part
            done += part.size
        return values.reshape(tensor.shape)

    def stream(self, name: str) -> "Iterator[npt.NDArray[np.float32]]":
        """Read one tensor in flat pieces, one after the other, for use without holding it all."""
        import numpy as np
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        _, block, block_bytes = next(t for t in TENSOR_TYPES.values() if t[0] == tensor.type)
        raw = np.frombuffer(self._data, np.uint8, tensor.nbytes, tensor.offset)
        step = _READ_BLOCK // block * block_bytes  # blocks stand alone, so rows need not be whole
        for first in range(0, tensor.nbytes, step):
            part = raw[first : first + step]
            if tensor.type in _PLAIN:
                yield part.view(_PLAIN[tensor.type]).astype(np.float32)
                continue
            try:
                yield dequantize(part.reshape(1, -1), GGMLQuantizationType[tensor.type]).ravel()
            except (KeyError, NotImplementedError) as error:
                raise UnsupportedModel(
                    f"{self.path}: the tensor {name} is stored as {tensor.type}, which the "
                    "installed gguf package cannot dequantise; upgrade gguf or take another "
                    "quantisation of the model"
                ) from error


def open_gguf(path: Path) -> GGUFFile:
    """Open a GGUF file (version 2 or 3, little endian) and check that it is whole."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(handle, "rb") as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise ValueError("it is not a regular file")
            data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise BadCheckpoint(f"cannot read {path} ({error}); expected a GGUF file") from error
    reader = _Reader(path, data, 0)
    version, tensor_count, key_count = _read_preamble(reader)

    metadata: dict[str, Any] = {}
    keys: dict[str, RawKey] = {}
    for _ in range(key_count):
        key = reader.string()
        if key in metadata:
            raise reader.damaged(f"the key {key!r} appears twice")
        kind, start = reader.kind(), reader.position
        metadata[key] = reader.value(kind)
        keys[key] = RawKey(key, kind, start, reader.position)
    if metadata.get("split.count", 1) not in (0, 1):
        raise UnsupportedModel(
            f"{path} is one part of {metadata['split.count']}; expected a whole model: "
            "join the parts with `llama-gguf-split --merge`"
        )

    records: list[tuple[str, tuple[int, ...], int, int]] = []
    for _ in range(tensor_count):
        name = reader.string()
        (dims,) = reader.unpack("I")
        if dims > _MAX_DIMS:
            raise reader.damaged(f"the tensor {name!r} has {dims} dimensions")
        shape = reader.unpack(f"{dims}Q")[::-1]
        if prod(max(1, size) for size in shape) > limits.ELEMENTS:
            raise reader.damaged(f"the tensor {name!r} has the shape {shape}")
        kind, offset = reader.unpack("IQ")
        records.append((name, shape, kind, offset))

    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise reader.damaged(f"its alignment is {alignment!r}")
    start = -(-reader.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in records:
        if name in tensors:
            raise reader.damaged(f"the tensor {name!r} appears twice")
        tensors[name] = _place(reader, name, shape, kind, start + offset)
    return GGUFFile(path, version, metadata, keys, tensors, alignment, data)


def pack_string(text: str) -> bytes:
    """Write a text as GGUF stores it."""
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _read_preamble(reader: "_Reader") -> tuple[int, int, int]:
    """Check magic and version, and return it and the counts of tensors and of keys."""
    magic = reader.data[:4]
    if magic != b"GGUF":
        raise BadCheckpoint(
            f"{reader.path} is not a GGUF file: it opens with {magic!r}, expected b'GGUF'"
        )
    reader.position = 4
    (version,) = reader.unpack("I")
    if version not in (2, 3):
        what = "big endian" if version & 0xFFFF == 0 and version else f"of GGUF version {version}"
        raise UnsupportedModel(
            f"{reader.path} is {what}; expected little endian, version 2 or 3: "
            "write it again with a current llama.cpp"
        )
    tensor_count, key_count = reader.unpack("QQ")
    if tensor_count > limits.TENSORS or key_count > limits.KEYS:
        raise reader.damaged(f"it claims {tensor_count:,} tensors and {key_count:,} keys")
    return version, tensor_count, key_count


def _place(
    reader: "_Reader", name: str, shape: tuple[int, ...], kind: int, offset: int
) -> GGUFTensor:
    """Check that a tensor lies inside the file."""
    if kind not in TENSOR_TYPES:
        raise UnsupportedModel(
            f"{reader.path}: the tensor {name!r} has the type number {kind}, which is not known; "
            "the file is damaged, or newer than this lmhead"
        )
    type_name, block, block_bytes = TENSOR_TYPES[kind]
    row = shape[-1] if shape else 1
    if row % block:
        raise reader.damaged(
            f"rows of {row} in {name!r} are not a multiple of {type_name}'s {block}"
        )
    nbytes = prod(shape) // block * block_bytes
    if offset + nbytes > len(reader.data):
        raise BadCheckpoint(
            f"{reader.path} is truncated: the tensor {name!r} ends at byte {offset + nbytes:,}, "
            f"the file at {len(reader.data):,}; fetch it again"
        )
    return GGUFTensor(name, shape, type_name, offset, nbytes)


class _Reader:
    """A position in the mapped file; whatever does not fit in is a damaged file."""

    def __init__(self, path: Path, data: mmap.mmap, position: int) -> None:
        self.path, self.data, self.position = path, data, position

    def damaged(self, why: str) -> BadCheckpoint:
        return BadCheckpoint(f"{self.path} is damaged: {why}; fetch it again")

    def claim(self, nbytes: int) -> int:
        """Step over `nbytes`, which must be there, and return where they start."""
        start = self.position
        if nbytes > len(self.data) - start:
            raise BadCheckpoint(
                f"{self.path} is truncated or damaged: {nbytes:,} bytes expected at byte "
                f"{start:,}, but the file has {len(self.data):,}; fetch it again"
            )
        self.position = start + nbytes
        return start

    def unpack(self, layout: str) -> tuple[Any, ...]:
        layout = "<" + layout
        return struct.unpack_from(layout, self.data, self.claim(struct.calcsize(layout)))

    def string(self) -> str:
        (length,) = self.unpack("Q")
        start = self.claim(length)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged(f"the text at byte {start:,} is not UTF-8") from error

    def strings(self, count: int) -> list[str]:
        """Read so many texts: `string` again and again, but a vocabulary has many."""
        start, found, at = self.position, [], 0
        self._skip_strings(count)
        data, length_at = self.data[start : self.position], struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                end = at + 8 + length_at(data, at)[0]
                found.append(data[at + 8 : end].decode("utf-8"))
                at = end
        except UnicodeDecodeError as error:
            raise self.damaged(f"the text at byte {start + at + 8:,} is not UTF-8") from error
        return found

    def kind(self) -> int:
        (kind,) = self.unpack("I")
        return int(kind)

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.array()
        if kind not in SCALARS:
            raise self.damaged(f"a value has the type number {kind}")
        return self.unpack(SCALARS[kind])[0]

    def array(self) -> GGUFArray:
        kind, count = self.unpack("IQ")
        start = self.position
        if kind == STRING:
            self._skip_strings(count)
        elif kind in SCALARS:
            self.claim(count * struct.calcsize("<" + SCALARS[kind]))
        else:
            raise self.damaged(f"an array has elements of the type number {kind}")
        return GGUFArray(self, kind, start, count)

    def _skip_strings(self, count: int) -> None:
        # Unrolled from `string`, because a vocabulary has hundreds of thousands.
        length_at = struct.Struct("<Q").unpack_from
        data, position, last = self.data, self.position, len(self.data) - 8
        for _ in range(count):
            if position > last:
                break
            position += 8 + length_at(data, position)[0]
        else:
            if position <= len(data):
                self.position = position
                return
        raise self.damaged(f"an array of {count:,} texts at byte {self.position:,} does not fit")
