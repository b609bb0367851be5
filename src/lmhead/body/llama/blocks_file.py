"""The file that llama.cpp runs for us: the blocks of a GGUF file, checked against the file itself.

llama.cpp computes its own output layer at every token. So it is given a copy of the file with next
to no vocabulary, and the embeddings of the tokens in place of their ids. What a model does to an
embedding before its first block (Gemma multiplies it by the root of d) llama.cpp does to ids only;
no list of architectures says what that is, so it is tried: eight tokens are read by the file itself
and by the copy, and h must agree. Where it does not, the file is run as it is.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from lmhead.body.llama.library import Context, Floats, Loaded
from lmhead.errors import BadCheckpoint
from lmhead.files.cache import build_once, cache_root
from lmhead.files.stamp import check, read_stamp, write_stamp
from lmhead.models.fetch import content_sha256
from lmhead.models.gguf_body import write_body
from lmhead.progress import Progress, silent

FORMAT = 1  # raise it when the copy or its check is another: old ones are made anew
_FILE = "blocks.gguf"
_SAME = 1e-5  # relative difference of h that is rounding


@dataclass(frozen=True)
class Runs:
    """The file to run, and what an embedding is multiplied by; None: it is given ids."""

    path: Path
    scale: float | None


def blocks_file(gguf: Path, embedding: Tensor, progress: Progress = silent) -> Runs:
    """Return what llama.cpp is to run for a `.gguf` file with this embedding `[V, d]`."""
    sha256 = content_sha256(gguf, progress)
    folder = cache_root() / "bodies" / sha256[:32]

    def build(staging: Path) -> None:
        with progress(f"preparing {gguf.name} for llama.cpp", total=None):
            write_body(gguf, staging / _FILE)
            scale = _scale(gguf, staging / _FILE, embedding)
            if scale is None:
                (staging / _FILE).unlink()
            write_stamp(staging, {"blocks": FORMAT, "scale": scale, "source_sha256": sha256})

    build_once(folder, build, _is_current, progress)
    try:
        check(folder)
    except BadCheckpoint as error:
        again = f"`lmhead cache remove {folder.name}`, and it is made again"
        raise BadCheckpoint(f"{error}; {again}") from error
    scale = _stamp(folder)["scale"]
    return Runs(gguf, None) if scale is None else Runs(folder / _FILE, float(scale))


def _stamp(folder: Path) -> dict[str, Any]:
    return read_stamp(folder) or {}


def _is_current(folder: Path) -> bool:
    return _stamp(folder).get("blocks") == FORMAT


def _scale(gguf: Path, copy: Path, embedding: Tensor) -> float | None:
    """Find what makes the copy answer embeddings as the file answers ids; None: nothing does."""
    V, d = embedding.shape
    ids = [k * V // 9 for k in range(1, 9)]
    expected = _read(gguf, np.array(ids, np.int32))
    rows: Floats = embedding[ids].float().numpy()
    for scale in (1.0, math.sqrt(d)):
        h = _read(copy, rows * np.float32(scale))
        if np.linalg.norm(h - expected) <= _SAME * np.linalg.norm(expected):
            return scale
    return None


def _read(path: Path, given: Any) -> Floats:
    context = Context(Loaded(path), 256)
    h = context.read(given, range(len(given)), [0] * len(given))
    context.free()
    return h
