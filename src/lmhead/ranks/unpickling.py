"""Reads a folder of torch.distributed.checkpoint without running anything that is in it.

That library pickles its list of what is where and every value that is not a tensor. A pickle names
functions and calls them, so a folder that somebody else wrote could run anything. Here the list may
be made of the library's own records alone, and values of what `torch.load` takes for weights:
tensors, numbers, texts, lists and dictionaries of them. A pickle also claims lengths and places of
which a few bytes can take gigabytes: no more is believed than its file could hold.
"""

import io
import pickle
import pickletools
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from lmhead.files import limits
from lmhead.files.jsons import read_bytes

METADATA = ".metadata"
_PLACES = ("PUT", "BINPUT", "LONG_BINPUT")
_RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
}


class Reader(FileSystemReader):
    """The library's own reader, with a list that is read safely."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder
        self._listed: bytes | None = None  # torch asks for the list several times

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the list of what is where; anything but a list is an UnpicklingError."""
        if self._listed is None:
            data = read_bytes(self.folder / METADATA, limits.RANKS_METADATA)
            _refuse_claims(data)
            self._listed = data
        metadata = _Records(io.BytesIO(self._listed)).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise pickle.UnpicklingError(f"{METADATA} holds no list of tensors")
        for place in metadata.storage_data.values():
            path = PurePath(str(getattr(place, "relative_path", "..")))
            if path.is_absolute() or ".." in path.parts:
                raise pickle.UnpicklingError(f"{METADATA} names {path}, outside of the folder")
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        assert metadata.storage_meta is not None  # for the type checker
        metadata.storage_meta.load_id = self.load_id
        return metadata


class Planner(DefaultLoadPlanner):
    """The library's own planner, with values that are read safely."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value that is not a tensor to its place in the state."""
        found = torch.load(value, weights_only=True)
        name = read_item.dest_index.fqn
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], found)
        else:
            self.state_dict[name] = found


def _refuse_claims(data: bytes) -> None:
    """Refuse lengths and places beyond the file: Python reserves memory for them at once."""
    for code, argument, _ in pickletools.genops(io.BytesIO(data)):  # checks the lengths itself
        if code.name in _PLACES and not 0 <= int(argument or 0) <= len(data):
            raise pickle.UnpicklingError(
                f"{METADATA} puts a value at place {argument:,}, but has {len(data):,} bytes"
            )


class _Records(pickle.Unpickler):  # what it may call is listed above
    def find_class(self, module: str, name: str) -> Any:
        if name in _RECORDS.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{METADATA} names {module}.{name}, which is not a part of it")
