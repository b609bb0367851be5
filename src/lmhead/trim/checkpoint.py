"""Surgery on a model folder: the rows of the kept ids, every id renumbered, the rest untouched.

Rows are cut out as bytes, read and written in pieces, so that memory holds no whole tensor,
whatever the size of the model, and no dtype needs to be understood. Files without vocabulary rows
are copied, or hard-linked where asked. Nothing from outside of the folder gets into the result.
"""

import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from lmhead.errors import UnsupportedModel
from lmhead.files.checkpoint import INDEX, SINGLE, TEMPLATES, weight_files
from lmhead.files.jsons import read_json
from lmhead.files.safetensors import TensorHeader, open_safetensors, pack_header
from lmhead.progress import Advance, Progress, silent
from lmhead.trim.bpe import split_rule
from lmhead.trim.folder import ModelFolder, remap_ids
from lmhead.trim.idmap import TrimMap
from lmhead.trim.tokenizer import TokenizerJson

_IN_A_LAYER = re.compile(r"(^|\.)\d+\.")
_OTHER_IDS = re.compile(
    r"pos|wpe|token_type"
)  # rows that are not tokens, should V of them be there
_PIECE = 2**20  # bytes copied at a time; a processor's cache holds them

_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx"}
_KEEP = {".json", ".jinja", ".md", ".txt", ".html", ".pdf", ""}  # licences, cards, templates
# Vocabularies in other forms than tokenizer.json. Those with a plain form are written anew.
_STALE = {"vocab.json", "merges.txt", "vocab.txt", "added_tokens.json", "lmhead_trim.json"}
_WRITTEN = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}


def vocabulary_tensors(model: ModelFolder) -> dict[str, TensorHeader]:
    """Return the stored tensors that have one row per token."""
    found = {}
    for name, header in model.checkpoint.tensors.items():
        if _IN_A_LAYER.search(name) or _OTHER_IDS.search(name):
            continue
        if "per_layer" in name and "emb" in name:
            raise UnsupportedModel(
                f"{model.folder} has {name}, an embedding for every layer; "
                "only a head and an embedding can be trimmed; use --form head"
            )
        if header.shape and header.shape[0] == model.rows:
            found[name] = header
        elif model.rows in header.shape:
            raise UnsupportedModel(
                f"{model.folder} has {name} of shape {list(header.shape)}, with the tokens not in "
                "its rows; only rows can be trimmed; use --form head"
            )
    return found


def write_trimmed(
    model: ModelFolder,
    ids: TrimMap,
    target: Path,
    progress: Progress = silent,
    *,
    link: bool = False,
) -> None:
    """Write the trimmed model into the empty folder `target`, which is made if need be.

    With `link`, files of weights without vocabulary rows are the same files as in the original.
    """
    extras = published(model)
    target.mkdir(exist_ok=True)
    _write_configs(model, ids, target)
    for path in extras:
        copy = target / path.relative_to(model.folder)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)
    cut = vocabulary_tensors(model)
    touched = {header.file for header in cut.values()}
    total = sum(file.stat().st_size for file in touched)

    def write(advance: Advance) -> None:
        for file in weight_files(model.folder):
            if file in touched:
                for nbytes in _write_shard(file, target / file.name, ids, set(cut)):
                    advance(nbytes)
            else:
                link_or_copy(file, target / file.name, link=link)

    # One waits for the disk, the other for the processor.
    with progress("writing the weights", total=total) as advance, ThreadPoolExecutor(1) as pool:
        written = pool.submit(write, advance)
        _write_tokenizer(model, ids, model.tokenizer.cut(ids), target)
        written.result()
    _write_index(model, ids, cut, target)


def published(model: ModelFolder) -> list[Path]:
    """Return the files that are copied as they are; refuse what is not in the folder itself."""
    for name in (*_WRITTEN, *_STALE, INDEX):
        if (path := model.folder / name).exists():
            model.inside(path)
    for file in weight_files(model.folder):
        if model.inside(file).parent != model.folder:
            raise UnsupportedModel(
                f"the index of {model.folder} names {file.relative_to(model.folder)}, a file in a "
                "folder of its own; expected all weights beside the index"
            )
    extras: list[Path] = []
    for path in sorted(model.folder.iterdir()):
        if path.name in _WRITTEN | _STALE or path.name.endswith(".index.json"):
            continue
        if path.is_file() and path.suffix.lower() in _KEEP - _WEIGHTS and path.name[0] != ".":
            extras.append(model.inside(path))
        elif path.is_dir() and path.name == TEMPLATES:
            inner = (p for p in sorted(model.inside(path).iterdir()) if p.is_file())
            extras += [model.inside(p) for p in inner]
    return extras


def link_or_copy(source: Path, target: Path, *, link: bool = False) -> None:
    """Give `target` the content of `source`: a copy of its own, or with `link` the same file."""
    source = source.resolve()  # a Hugging Face cache holds links
    if link:
        try:
            os.link(source, target)
        except OSError:  # another disk, or one without hard links
            pass
        else:
            return
    shutil.copyfile(source, target)


def _write_shard(source: Path, target: Path, ids: TrimMap, cut: set[str]) -> Iterator[int]:
    """Write one safetensors file anew, yielding how many bytes were read."""
    header = open_safetensors(source)
    tensors = sorted(header.tensors.values(), key=lambda tensor: (tensor.offset, tensor.nbytes))
    new = {
        t.name: (t.dtype, (ids.kept_rows, *t.shape[1:]), t.nbytes // t.shape[0] * ids.kept_rows)
        if t.name in cut
        else (t.dtype, t.shape, t.nbytes)
        for t in tensors
    }
    with source.open("rb") as stream, target.open("wb") as out:
        out.write(pack_header(new, header.metadata))
        for tensor in tensors:
            kept = ids.row_ids if tensor.name in cut else None
            rows = tensor.shape[0] if tensor.name in cut else 1
            for piece in row_pieces(stream, tensor.offset, tensor.nbytes, rows, kept):
                out.write(piece.data)
            yield tensor.nbytes


def row_pieces(
    stream: IO[bytes],
    offset: int,
    nbytes: int,
    rows: int = 1,
    kept: npt.NDArray[np.int64] | None = None,
) -> Iterator[npt.NDArray[np.uint8]]:
    """Read a tensor in pieces, or its `kept` rows only; memory holds one piece at a time.

    Read and not mapped: the pages of a mapped file count as memory of the process.
    """
    stream.seek(offset)
    if kept is None:
        for at in range(0, nbytes, _PIECE):
            yield np.frombuffer(stream.read(min(_PIECE, nbytes - at)), np.uint8)
        return
    width = nbytes // rows
    step = max(1, _PIECE // max(1, width))
    for first in range(0, rows, step):
        raw = stream.read(min(step, rows - first) * width)
        low, high = np.searchsorted(kept, [first, first + step])
        block = np.frombuffer(raw, np.uint8).reshape(-1, width)
        yield np.ascontiguousarray(block[kept[low:high] - first])


def _write_index(
    model: ModelFolder, ids: TrimMap, cut: Mapping[str, TensorHeader], target: Path
) -> None:
    path = model.folder / INDEX
    if weight_files(model.folder) == [model.folder / SINGLE] or not path.is_file():
        return
    index = read_json(path)
    gone = model.rows - ids.kept_rows
    metadata = index.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    if type(metadata.get("total_size")) is int:
        metadata["total_size"] -= sum(h.nbytes // model.rows * gone for h in cut.values())
    if type(metadata.get("total_parameters")) is int:
        metadata["total_parameters"] -= sum(prod(h.shape[1:]) * gone for h in cut.values())
    write_json(target / INDEX, {**index, "metadata": metadata})


def _write_configs(model: ModelFolder, ids: TrimMap, target: Path) -> None:
    def new(i: int) -> int | None:
        return ids.to_trimmed([i])[0] if i in ids else None

    def sized(config: dict[str, Any]) -> dict[str, Any]:
        return {
            key: ids.kept_rows
            if key == "vocab_size" and value == model.rows
            else sized(value)
            if isinstance(value, dict)
            else value
            for key, value in config.items()
        }

    write_json(target / "config.json", sized(remap_ids(model.checkpoint.config, new)))
    if model.checkpoint.generation_config:
        write_json(
            target / "generation_config.json", remap_ids(model.checkpoint.generation_config, new)
        )


def _write_tokenizer(
    model: ModelFolder, ids: TrimMap, tokenizer: TokenizerJson, target: Path
) -> None:
    (target / "tokenizer.json").write_text(tokenizer.text, encoding="utf-8")
    path = model.folder / "tokenizer_config.json"
    if path.is_file():
        config = read_json(path)
        decoder = config.get("added_tokens_decoder")
        if isinstance(decoder, dict):
            config["added_tokens_decoder"] = {
                str(ids.to_trimmed([int(i)])[0]): token
                for i, token in decoder.items()
                if int(i) in ids
            }
        write_json(target / path.name, config)
    vocab: dict[str, int] = dict(tokenizer.model_vocab)
    if (model.folder / "vocab.json").is_file():
        write_json(target / "vocab.json", vocab)
    if (model.folder / "merges.txt").is_file() and tokenizer.type == "BPE":
        lines = [" ".join(split_rule(merge)) for merge in tokenizer.model["merges"]]
        text = "\n".join(["#version: 0.2", *lines, ""])
        (target / "merges.txt").write_text(text, encoding="utf-8")
    if (model.folder / "vocab.txt").is_file():
        tokens = sorted(vocab, key=vocab.__getitem__)
        (target / "vocab.txt").write_text("\n".join([*tokens, ""]), encoding="utf-8")
    if (added := model.folder / "added_tokens.json").is_file():
        kept = {token: tokenizer.vocab[token] for token in read_json(added)}
        write_json(target / added.name, kept)


def write_json(path: Path, value: Mapping[str, Any], long: Collection[str] = ()) -> None:
    """Write a JSON object; the keys `long`, which come last, on a line each: that is quicker."""
    first = {key: part for key, part in value.items() if key not in long}
    text = json.dumps(first, indent=2, ensure_ascii=False)
    lines = [f'  "{key}": {json.dumps(value[key], ensure_ascii=False)}' for key in long]
    if lines:
        text = ",\n".join([text.removesuffix("\n}"), *lines]) + "\n}"
    path.write_text(text + "\n", encoding="utf-8")
