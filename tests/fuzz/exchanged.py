"""The readers of files that people exchange: vectors, keep-sets, counts, screens, trim reports."""

import json
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

Reader = Callable[[bytes, Path], None]


def _written(name: str, write: Callable[[Path], object]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / name)
        return (Path(folder) / name).read_bytes()


def _vector() -> Any:
    import torch

    from lmhead.steer.vector import Card, SteeringVector

    return SteeringVector(torch.arange(1.0, 9.0), 1, 0.5, Card(model="tiny"))


def vector_seed() -> bytes:
    return _written("v.safetensors", lambda path: _vector().save(path))


def card_seed() -> Any:
    return json.loads(json.dumps(_vector().to_dict()))


def control_seed() -> bytes:
    from lmhead.steer.control import save_control_vector

    return _written("v.gguf", lambda path: save_control_vector([_vector()], path))


def read_vector(data: bytes, folder: Path) -> None:
    from lmhead.steer.control import load_vectors

    (folder / "v.safetensors").write_bytes(data)
    load_vectors(folder / "v.safetensors")


def read_card(data: bytes, folder: Path) -> None:
    from lmhead.files.safetensors import pack_header

    card = {"card": data.decode("utf-8", "replace")}
    header = pack_header({"direction": ("F32", (8,), 32)}, card)
    read_vector(header + b"\0\0\x80?" * 8, folder)


def read_control(data: bytes, folder: Path) -> None:
    from lmhead.steer.control import load_vectors

    (folder / "v.gguf").write_bytes(data)
    load_vectors(folder / "v.gguf")


def keep_seed() -> bytes:
    from lmhead.trim.idmap import TrimMap
    from lmhead.trim.keepfile import KeepFile

    kept = KeepFile(TrimMap.of([0, 3, 4, 9], 12), "tiny", "0" * 64)
    return _written("k.safetensors", kept.save)


def read_keep(data: bytes, folder: Path) -> None:
    from lmhead.trim.keepset import read_ids

    (folder / "k.safetensors").write_bytes(data)
    read_ids(folder / "k.safetensors")


def read_id_list(data: bytes, folder: Path) -> None:
    from lmhead.trim.keepset import read_ids

    (folder / "ids").write_bytes(data)
    read_ids(folder / "ids")


def counts_seed() -> bytes:
    import numpy as np

    from lmhead.trim.counts import Counts

    return _written("c", Counts("0" * 64, np.array([3, 0, 5, 1]), 2, 0).save)


def read_counts(data: bytes, folder: Path) -> None:
    from lmhead.trim.counts import Counts

    (folder / "c").write_bytes(data)
    Counts.load(folder / "c")


def read_report(data: bytes, folder: Path) -> None:
    from lmhead.trim.inputs import read_report, recorded_inputs

    (folder / "lmhead_trim.json").write_bytes(data)
    recorded_inputs(read_report(folder))


def tokenizer_seed() -> Any:
    vocab = {"a": 0, "b": 1, "ab": 2, "<s>": 3}
    added = {"id": 3, "content": "<s>", "special": True, "single_word": False}
    added |= {"lstrip": False, "rstrip": False, "normalized": False}
    model = {"type": "BPE", "vocab": vocab, "merges": [["a", "b"]], "unk_token": None}
    return {"version": "1.0", "added_tokens": [added], "model": model, "normalizer": None}


def read_tokenizer(data: bytes, folder: Path) -> None:
    from lmhead.trim.tokenizer import TokenizerJson

    (folder / "tokenizer.json").write_bytes(data)
    tokenizer = TokenizerJson.read(folder / "tokenizer.json")
    tokenizer.closure([2])


def _training() -> Any:
    import torch

    from lmhead.steer.learn.tsv import _State

    names = ("v", "first", "second", "prototypes", "best_v", "best_prototypes", "joined", "soft")
    return _State(**{name: torch.ones(4) for name in names}, history=({"loss": 1.0},))


def training_seed() -> bytes:
    return _written("state", lambda path: _training().save(path, "key"))


def read_training(data: bytes, folder: Path) -> None:
    from lmhead.steer.learn.tsv import _State

    (folder / "state").write_bytes(data)
    _State.load(folder / "state", "key")


@cache
def _saved_by_ranks() -> dict[str, bytes]:
    import torch

    from lmhead.ranks import save_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        about = {"step": 5, "names": ["a"]}
        save_checkpoint({"w": torch.ones(4, 3), "about": about}, Path(folder) / "c")
        return {path.name: path.read_bytes() for path in (Path(folder) / "c").iterdir()}


def read_saved_by_ranks(data: bytes, folder: Path) -> None:
    import torch

    from lmhead.ranks import load_checkpoint

    for name, content in _saved_by_ranks().items():
        (folder / name).write_bytes(content)
    (folder / ".metadata").write_bytes(data)
    load_checkpoint({"w": torch.zeros(4, 3), "about": {"step": 0, "names": [""]}}, folder)


def targets() -> dict[str, tuple[bool, Callable[[], list[Any]], Reader]]:
    """Return name -> (whether it is JSON, what makes the seeds, what reads a file)."""
    inputs = {"texts": [[1, 2]], "prompts": [[1]], "fresh": [], "max_tokens": 8, "binds": True}
    report = {"form": "model", "proof_inputs": inputs}
    return {
        "vector": (False, lambda: [vector_seed()], read_vector),
        "card": (True, lambda: [card_seed()], read_card),
        "control-vector": (False, lambda: [control_seed()], read_control),
        "keep-set": (False, lambda: [keep_seed()], read_keep),
        "ids": (False, lambda: [b"1\n2\n3\n", b"[1, 2, 3]"], read_id_list),
        "counts": (False, lambda: [counts_seed()], read_counts),
        "trim-report": (True, lambda: [report], read_report),
        "training-state": (False, lambda: [training_seed()], read_training),
        "checkpoint": (False, lambda: [_saved_by_ranks()[".metadata"]], read_saved_by_ranks),
        "trim-tokenizer": (True, lambda: [tokenizer_seed()], read_tokenizer),
    }
