"""A Hugging Face model folder: its configuration and the headers of its safetensors files.

A safetensors file opens with eight bytes (the length n of the header, little endian), then n bytes
of JSON (`{name: {dtype, shape, data_offsets}}`), then the data. Reading the headers needs no torch
and touches no weight, so that every count is there in milliseconds.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmhead.errors import BadCheckpoint, UnsupportedModel

if TYPE_CHECKING:
    import torch

_HEADER_LIMIT = 100 * 2**20  # the format's own limit
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class TensorHeader:
    """Where one tensor lies and what it is; nothing of its data."""

    name: str
    dtype: str  # as safetensors spells it: F32, BF16, I8, ...
    shape: tuple[int, ...]
    nbytes: int
    file: Path

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class Checkpoint:
    """A folder with a config.json and, where there are weights, their headers."""

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorHeader]

    @cached_property
    def generation_config(self) -> Mapping[str, Any]:
        """The generation_config.json, or an empty mapping."""
        path = self.folder / "generation_config.json"
        return read_json(path) if path.is_file() else {}

    def read(self, name: str) -> "torch.Tensor":
        """Read one tensor, memory-mapped: nothing else of the file is loaded."""
        from safetensors import safe_open

        header = self.tensors[name]
        with safe_open(header.file, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, or say which file is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadCheckpoint(
            f"cannot read {path}: {error}; expected a JSON object; fetch the file again"
        ) from error
    if not isinstance(value, dict):
        raise BadCheckpoint(
            f"{path} holds a JSON {type(value).__name__}, expected an object; fetch it again"
        )
    return value


def open_checkpoint(folder: Path, *, weights: bool = True) -> Checkpoint:
    """Read a model folder's configuration and, with `weights`, all safetensors headers."""
    path = folder / "config.json"
    if not path.is_file():
        raise BadCheckpoint(
            f"{folder} has no config.json; expected a Hugging Face model folder "
            "(config.json, *.safetensors, tokenizer.json) or a .gguf file"
        )
    config = read_json(path)
    tensors = _all_headers(folder) if weights else {}
    return Checkpoint(folder, config, tensors)


def _all_headers(folder: Path) -> dict[str, TensorHeader]:
    tensors: dict[str, TensorHeader] = {}
    for file in weight_files(folder):
        tensors.update(read_header(file))
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """List the safetensors files of a folder, those of its index where it has one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise BadCheckpoint(f"{index} has no weight_map; fetch the file again")
        files = [folder / name for name in sorted(set(names.values()))]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise BadCheckpoint(
                f"{folder} lacks {len(missing)} of the {len(files)} files that its index names "
                f"({missing[0]}, ...); fetch them again"
            )
        return files
    single = folder / "model.safetensors"
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = sorted(p.name for pattern in _PICKLES for p in folder.glob(pattern))
        if pickles:
            raise UnsupportedModel(
                f"{folder} has only pickled weights ({pickles[0]}), which can run code when "
                "loaded; expected safetensors: convert it where you trust it, with transformers' "
                "`from_pretrained(...)` and then `save_pretrained(...)`"
            )
        raise BadCheckpoint(
            f"{folder} has a config.json but no weights; expected model.safetensors "
            "or an index with its shards"
        )
    return files


def read_header(file: Path) -> dict[str, TensorHeader]:
    """Read one safetensors file's header, and check that the file is as long as it says."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(_HEADER_LIMIT, size - 8):
            raise BadCheckpoint(
                f"{file} is truncated or no safetensors file: {size:,} bytes "
                "with no whole header; fetch it again"
            )
        try:
            entries = json.loads(stream.read(length))
        except ValueError as error:
            raise BadCheckpoint(
                f"the header of {file} is damaged ({error}); fetch the file again"
            ) from error
    entries.pop("__metadata__", None)
    headers: dict[str, TensorHeader] = {}
    end = 0
    try:
        for name, entry in entries.items():
            first, last = entry["data_offsets"]
            shape = tuple(entry["shape"])
            headers[name] = TensorHeader(name, entry["dtype"], shape, last - first, file)
            end = max(end, last)
    except (KeyError, TypeError, ValueError) as error:
        raise BadCheckpoint(
            f"the header of {file} is damaged ({error!r}); fetch the file again"
        ) from error
    if size != 8 + length + end:
        raise BadCheckpoint(
            f"{file} is truncated: {size:,} bytes, "
            f"but its header promises {8 + length + end:,}; fetch it again"
        )
    return headers
