"""The int8 copy on disk: one safetensors file, memory-mapped, tied to the head it was made of.

Its metadata holds the version of the layout and the head's SHA-256. A file that belongs to another
head, or to another layout, is not this head's copy and is made anew.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from lmhead.errors import BadCheckpoint, LMHeadError
from lmhead.files.cache import cache_root
from lmhead.files.jsons import open_file
from lmhead.files.whole import written_whole
from lmhead.head.screening.bounds import BLOCK, LANES, Screen, padded

FILE_NAME = "lmhead.screen"
_FORMAT = "lmhead-screen-1"
_TENSORS = ("q", "scale", "residual", "norm")


def screen_paths(folder: Path | None, sha256: str) -> list[Path]:
    """List where a head's copy may lie: beside the model, then in the cache."""
    beside = [] if folder is None else [folder / FILE_NAME]
    return [*beside, cache_root() / "screens" / sha256 / FILE_NAME]


def has_screen(folder: Path | None, sha256: str) -> bool:
    """Tell whether a copy of the head with this SHA-256 lies beside the model or in the cache."""
    return any(_about(path).get("sha256") == sha256 for path in screen_paths(folder, sha256))


def may_have_screen(vocab_size: int, hidden_size: int) -> bool:
    """Tell whether the cache holds a copy of some head of this shape."""
    shape = str(vocab_size), str(hidden_size)
    found = (_about(path) for path in (cache_root() / "screens").glob(f"*/{FILE_NAME}"))
    return any((about.get("vocab_size"), about.get("hidden_size")) == shape for about in found)


def _about(path: Path) -> dict[str, str]:
    """Read what a file says of itself; nothing where it is absent, damaged or of another format."""
    try:
        open_file(path).close()  # no pipe that would keep us waiting
        with safe_open(path, framework="pt") as file:
            about: dict[str, str] = file.metadata() or {}
    except (OSError, ValueError, SafetensorError):
        return {}
    return about if about.get("format") == _FORMAT else {}


def save_screen(screen: Screen, path: Path, sha256: str) -> Path:
    """Write the copy: the file is either whole or not there at all."""
    about = {
        "format": _FORMAT,
        "sha256": sha256,
        "vocab_size": str(screen.vocab_size),
        "hidden_size": str(screen.hidden_size),
    }
    with written_whole(path, force=True) as staging:
        mode = staging.stat().st_mode
        try:
            save_file({name: getattr(screen, name) for name in _TENSORS}, staging, about)
            staging.chmod(mode)  # the library puts a file of its own there, for the owner alone
        except SafetensorError as error:  # a full disk, as that library tells it
            raise OSError(str(error)) from error
    return path


def load_screen(path: Path, sha256: str) -> Screen | None:
    """Map the copy of the head with this SHA-256; None where the file is absent or of another head.

    A damaged file is an error, for something is wrong with the disk or with whoever wrote it.
    """
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            if about.get("format") != _FORMAT or about.get("sha256") != sha256:
                return None
            tensors = {name: file.get_tensor(name) for name in _TENSORS}
            screen = Screen(
                **tensors,
                vocab_size=int(about["vocab_size"]),
                hidden_size=int(about["hidden_size"]),
            )
    except (SafetensorError, KeyError, ValueError) as error:
        raise BadCheckpoint(
            f"{path} is damaged ({error}); remove it and run `lmhead screen` again"
        ) from error
    rows, columns = padded(screen.vocab_size, BLOCK), padded(screen.hidden_size, LANES)
    shapes = [(rows, columns), *[(rows,)] * 3]
    kinds = [torch.int8, *[torch.float32] * 3]
    for name, shape, kind in zip(_TENSORS, shapes, kinds, strict=True):
        if tensors[name].shape != shape or tensors[name].dtype != kind:
            raise BadCheckpoint(
                f"{path} is damaged: {name} is {tensors[name].dtype} {list(tensors[name].shape)}, "
                f"expected {kind} {list(shape)}; remove it and run `lmhead screen` again"
            )
    return screen


def save_first(screen: Screen, paths: Sequence[Path], sha256: str) -> Path:
    """Write to the first of the places that can be written."""
    *others, last = paths
    for path in others:
        try:
            return save_screen(screen, path, sha256)
        except LMHeadError:
            continue  # a model folder that cannot be written is nothing unusual
    return save_screen(screen, last, sha256)
