"""A Hugging Face model folder: its configuration and the headers of its safetensors files.

Nothing here needs torch or touches a weight, so that every count is there in milliseconds.
"""

import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmhead.errors import BadCheckpoint, UnsupportedModel
from lmhead.files import limits
from lmhead.files.jsons import read_json
from lmhead.files.safetensors import TensorHeader, read_header

if TYPE_CHECKING:
    import torch

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TEMPLATES = "additional_chat_templates"  # a folder
_MOST = dict.fromkeys((".json", ".txt", ".model"), limits.TOKENIZER_JSON)
_MOST |= {".jinja": limits.TEMPLATE, ".md": limits.CONFIG_JSON, "": limits.CONFIG_JSON}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


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

    def read_all(self, names: Iterable[str]) -> "dict[str, torch.Tensor]":
        """Read some tensors, memory-mapped; every file is opened once."""
        from safetensors import SafetensorError, safe_open

        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.tensors[name].file, []).append(name)
        found: dict[str, torch.Tensor] = {}
        for path, inside in by_file.items():
            try:
                with safe_open(path, framework="pt") as file:
                    found |= {name: file.get_tensor(name) for name in inside}
            except (SafetensorError, OSError) as error:
                raise BadCheckpoint(f"cannot read {path} ({error}); fetch it again") from error
        return found

    def read(self, name: str, rows: slice | None = None) -> "torch.Tensor":
        """Read one tensor, or some rows, memory-mapped: nothing else of the file is loaded."""
        from safetensors import SafetensorError, safe_open

        header = self.tensors[name]
        try:
            with safe_open(header.file, framework="pt") as file:
                part = file.get_tensor(name) if rows is None else file.get_slice(name)[rows]
                tensor: torch.Tensor = part
        except (SafetensorError, OSError) as error:
            raise BadCheckpoint(
                f"cannot read {name!r} of {header.file} ({error}); fetch the file again"
            ) from error
        return tensor


def open_checkpoint(folder: Path, *, weights: bool = True) -> Checkpoint:
    """Read a model folder's configuration and, with `weights`, all safetensors headers."""
    refuse_odd_files(folder)
    path = folder / "config.json"
    if (adapter := folder / "adapter_config.json").is_file():
        # transformers would apply it where peft is installed, and nothing else would
        raise UnsupportedModel(
            f"{adapter} belongs to an adapter, which would change the model wherever peft is "
            "installed; expected a whole model: merge it with peft (`merge_and_unload()`, then "
            "`save_pretrained(...)`), or remove the file to have the model without it"
        )
    if not path.is_file():
        if (folder / "head.json").is_file():
            raise BadCheckpoint(
                f"{folder} holds a head alone, as head.save_pretrained writes it; expected a whole "
                "model: LMHead.from_pretrained reads the head"
            )
        raise BadCheckpoint(
            f"{folder} has no config.json; expected a Hugging Face model folder "
            "(config.json, *.safetensors, tokenizer.json) or a .gguf file"
        )
    config = read_json(path)
    taken = SINGLE if (folder / SINGLE).is_file() else INDEX
    if (named := config.get("transformers_weights")) not in (None, taken):
        # transformers would load those, and nothing else would
        raise UnsupportedModel(
            f"{path} names other weights ({str(named)!r:.100}) than {taken}; expected the model's "
            "own: remove transformers_weights from it to have those"
        )
    tensors = _all_headers(folder) if weights else {}
    return Checkpoint(folder, config, tensors)


def refuse_odd_files(folder: Path) -> None:
    """Refuse a pipe, a device or a text without end among a model's files.

    Libraries that are given the folder open whichever of its files they know, and would wait for a
    pipe without end.
    """
    for place in (folder, folder / TEMPLATES):
        for path in place.iterdir() if place.is_dir() else ():
            try:
                about = path.stat()
            except OSError:  # a link to nowhere is as good as nothing
                continue
            if not stat.S_ISREG(about.st_mode) and not stat.S_ISDIR(about.st_mode):
                raise BadCheckpoint(f"{path} is not a regular file (a pipe or a device); remove it")
            if stat.S_ISREG(about.st_mode) and about.st_size > _most(path):
                raise BadCheckpoint(
                    f"{path} has {about.st_size:,} bytes, expected at most {_most(path):,}; "
                    "fetch it again"
                )


def _most(path: Path) -> int:
    return _MOST.get(path.suffix.lower(), limits.ELEMENTS)


def _all_headers(folder: Path) -> dict[str, TensorHeader]:
    tensors: dict[str, TensorHeader] = {}
    for file in weight_files(folder):
        found = read_header(file)
        if twice := tensors.keys() & found.keys():
            name = min(twice)
            raise BadCheckpoint(
                f"{name!r:.200} is in {tensors[name].file.name} and in {file.name} of {folder}; "
                "expected every tensor once: fetch the model again"
            )
        tensors.update(found)
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """List the safetensors files of a folder: the one that transformers would load, or the many."""
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file():
        return [single]
    if index.is_file():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise BadCheckpoint(f"{index} has no weight_map; fetch the file again")
        files = [folder / name for name in sorted(_inside(index, names.values()))]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise BadCheckpoint(
                f"{folder} lacks {len(missing)} of the {len(files)} files that its index names "
                f"({missing[0]}, ...); fetch them again"
            )
        return files
    files = sorted(folder.glob("*.safetensors"))
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


def _inside(index: Path, names: Iterable[Any]) -> set[str]:
    """Check that an index names files of its own folder; a path out of it is no shard."""
    found: set[str] = set()
    for name in names:
        if not isinstance(name, str) or "\0" in name or not 1 <= len(name) <= 200:
            raise BadCheckpoint(f"{index} names a shard that is not a file; fetch it again")
        found.add(name)
    for name in found:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise BadCheckpoint(
                f"{index} names {name!r}, which lies outside its folder; "
                "expected the shards beside it: fetch the model again"
            )
    return found


def resolves_inside(folder: Path, path: Path) -> bool:
    """Tell whether a file of a model folder is really there, and not a link to somewhere else.

    A snapshot in the Hugging Face cache holds links to the blobs beside it, and these count.
    """
    real, home = path.resolve(), folder.resolve()
    if real.is_relative_to(home):
        return True
    return home.parent.name == "snapshots" and real.parent == home.parent.parent / "blobs"
