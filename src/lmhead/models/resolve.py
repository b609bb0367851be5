"""What MODEL means, in this order: a folder or `.gguf` file, a built-in name, a Hugging Face id."""

import errno
import os
import re
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

from lmhead.errors import BadInput, LMHeadError, ModelNotFound, UnsupportedModel
from lmhead.files.cache import with_home
from lmhead.models.fetch import converted, pull
from lmhead.models.registry import BUILT_IN
from lmhead.progress import Progress, silent

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
# Everything that a model folder needs, and no pickle.
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def resolve(model: str | Path, progress: Progress = silent) -> Path:
    """Return the local Hugging Face folder of MODEL, fetched or converted if need be."""
    if local := local_source(as_path(model)):
        return converted(local, progress) if local.is_file() else local
    name = str(model)
    if name in BUILT_IN:
        return pull(name, progress=progress)
    return _from_hub(name, progress)


def as_path(model: str | Path) -> Path:
    """Return MODEL as the path that it may be; refuse what is neither a path nor a name."""
    if not isinstance(model, str | Path):
        raise BadInput(
            f"the model is a {type(model).__name__}; expected a path or a name, as text or Path"
        )
    try:
        return Path(model).expanduser()
    except RuntimeError:  # ~nobody: there is no such user
        return Path(model)


def local_source(path: Path) -> Path | None:
    """Return an existing folder or `.gguf` file, None if there is no such path."""
    try:
        if path.is_dir():
            return path
        is_file = path.is_file()
    except OSError:  # a name that no file system takes
        return None
    if is_file:
        if path.suffix.lower() == ".gguf":
            return path
        raise UnsupportedModel(
            f"{path} is a file, but not a .gguf file; expected a Hugging Face folder, a .gguf "
            "file, a built-in name (see `lmhead models`) or a Hugging Face id"
        )
    return None


def _from_hub(name: str, progress: Progress) -> Path:
    if not name.strip():
        raise BadInput(
            "the model name is empty; expected a folder, a .gguf file, a built-in name "
            "(see `lmhead models`) or a Hugging Face id"
        )
    if not _HUB_ID.fullmatch(name):
        raise ModelNotFound(
            f"there is no folder or file {name!r}, and it is neither a built-in name "
            "(see `lmhead models`) nor a Hugging Face id (owner/name)"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES, local_files_only=True))
    except (OSError, ValueError):  # its own errors are of these kinds
        pass  # not in the Hugging Face cache: a typing error, or a model to fetch
    if near := suggestion(name, BUILT_IN):
        raise ModelNotFound(f"there is no model {name!r}; {near}")
    try:
        with progress(f"fetching {name}", total=None):
            return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:
        raise _hub_error(name, error) from error


def hub_snapshot(name: str) -> bool:
    """Tell whether the Hugging Face cache holds a model, without importing its library."""
    home = with_home(os.environ.get("HF_HOME") or "~/.cache/huggingface", "HF_HOME")
    hub = with_home(os.environ.get("HF_HUB_CACHE") or home / "hub", "HF_HUB_CACHE")
    return (hub / f"models--{name.replace('/', '--')}" / "snapshots").is_dir()


def _hub_error(name: str, error: Exception) -> LMHeadError:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return LMHeadError(
            f"cannot keep {name}: the disk is full; free some space, or set HF_HOME to another one"
        )
    built_in = ", ".join(BUILT_IN)
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return ModelNotFound(
        f"cannot find the model {name!r}: no such folder, file or built-in name ({built_in}), and "
        f"the Hugging Face hub gave no such id ({reason}); check the spelling or the network"
    )


def suggestion(name: str, names: Iterable[str]) -> str:
    """Return "did you mean ...?" for a name that is nearly one of `names`, or nothing."""
    near = get_close_matches(name.lower(), list(names), n=1, cutoff=0.7)
    return f"did you mean {near[0]!r}?" if near else ""
