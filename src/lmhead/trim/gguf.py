"""GGUF to GGUF: the kept rows as they are quantised, and a smaller tokenizer in the metadata.

A row of a quantised matrix is a whole number of blocks, so rows can be cut out as bytes; nothing
is dequantised, and nothing else of the file changes. Keys that hold no token ids are copied byte by
byte.
"""

import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmhead.errors import UnsupportedModel
from lmhead.files.gguf import (
    SCALARS,
    TENSOR_TYPES,
    GGUFFile,
    GGUFTensor,
    pack_string,
)
from lmhead.files.safetensors import TensorHeader
from lmhead.models.gguf_tokenizer import build_tokenizer
from lmhead.progress import Progress, silent
from lmhead.trim.bpe import Pair, merge_all
from lmhead.trim.checkpoint import row_pieces
from lmhead.trim.idmap import TrimMap
from lmhead.trim.tokenizer import TokenizerJson

_STRING, _ARRAY = 8, 9
_PER_TOKEN = ("tokens", "scores", "token_type")


@dataclass(frozen=True)
class _Key:
    """One key of the metadata: its type and its value, as bytes of the file."""

    name: str
    kind: int
    raw: bytes


def closure(file: GGUFFile, tokenizer: TokenizerJson, ids: Iterable[int]) -> frozenset[int]:
    """Close a keep-set for every reader of the file.

    SentencePiece files hold scores, not merges: their readers join the adjacent pair whose token
    scores highest. The tree by scores is kept beside the tree by merges.
    """
    closed = set(tokenizer.closure(ids))
    if file.metadata.get("tokenizer.ggml.model") != "llama":
        return frozenset(closed)
    scores: Sequence[float] = file.metadata["tokenizer.ggml.scores"][:]
    names, vocab = tokenizer.names, tokenizer.model_vocab

    def by_score(pair: Pair) -> tuple[float, int] | None:
        joined = vocab.get(names[pair[0]] + names[pair[1]])
        return None if joined is None else (-scores[joined], joined)

    for token_id in list(closed):
        symbols = tokenizer.merges.symbols(names[token_id]) if token_id in names else None
        if symbols:
            tokens, made = merge_all(symbols, by_score)
            if tokens == [token_id]:
                closed.update(symbols, (merged.token for merged in made))
    return frozenset(closed)


def read_tokenizer(file: GGUFFile) -> TokenizerJson:
    """Return the tokenizer of a GGUF file in the form that can be trimmed."""
    built = build_tokenizer(file).tokenizer
    return TokenizerJson.of(json.loads(built.to_str()), str(file.path))


def write_trimmed_gguf(
    file: GGUFFile, ids: TrimMap, target: Path, progress: Progress = silent
) -> None:
    """Write a GGUF file with the kept rows only."""
    cut = {name for name, tensor in file.tensors.items() if _has_rows(file, name, tensor, ids.rows)}
    alignment = file.alignment
    keys = (_Key(key.name, key.kind, file.raw(key)) for key in file.keys.values())
    new_keys = [_changed(key, file.metadata, ids) for key in keys]

    with file.path.open("rb") as stream, target.open("wb") as out:
        out.write(b"GGUF" + struct.pack("<IQQ", file.version, len(file.tensors), len(new_keys)))
        for key in new_keys:
            out.write(pack_string(key.name) + struct.pack("<I", key.kind))
            out.write(key.raw)
        end = 0
        for name, tensor in file.tensors.items():
            shape = (ids.kept_rows, *tensor.shape[1:]) if name in cut else tensor.shape
            kind = next(n for n, t in TENSOR_TYPES.items() if t[0] == tensor.type)
            out.write(pack_string(name) + struct.pack("<I", len(shape)))
            out.write(struct.pack(f"<{len(shape)}QIQ", *shape[::-1], kind, end))
            end += _aligned(_nbytes(tensor, name in cut, ids), alignment)
        out.write(b"\0" * (-out.tell() % alignment))
        with progress("writing the weights", total=end) as advance:
            for name, tensor in file.tensors.items():
                kept = ids.row_ids if name in cut else None
                rows = tensor.shape[0] if name in cut else 1
                for piece in row_pieces(stream, tensor.offset, tensor.nbytes, rows, kept):
                    out.write(piece.data)
                    advance(piece.nbytes)
                out.write(b"\0" * (-out.tell() % alignment))


def tensors_of(file: GGUFFile) -> dict[str, TensorHeader]:
    """Return where the tensors of a GGUF file lie, in the form in which a proof compares them."""
    return {
        name: TensorHeader(name, t.type, t.shape, t.nbytes, file.path, t.offset)
        for name, t in file.tensors.items()
    }


def row_bytes(file: GGUFFile, rows: int) -> int:
    """Return how many bytes of a file one token takes in the matrices with `rows` rows."""
    with_rows = [t for name, t in file.tensors.items() if _has_rows(file, name, t, rows)]
    return sum(tensor.nbytes // rows for tensor in with_rows)


def _has_rows(file: GGUFFile, name: str, tensor: GGUFTensor, rows: int) -> bool:
    if name.startswith("per_layer_token_embd"):
        raise UnsupportedModel(
            f"{file.path} has {name}, an embedding for every layer; only a head and an embedding "
            "can be trimmed"
        )
    return name.split(".")[0] in ("token_embd", "output") and tensor.shape[0] == rows


def _nbytes(tensor: GGUFTensor, cut: bool, ids: TrimMap) -> int:
    return tensor.nbytes // tensor.shape[0] * ids.kept_rows if cut else tensor.nbytes


def _changed(key: _Key, metadata: Mapping[str, Any], ids: TrimMap) -> _Key:
    """Return a key with its ids renumbered and its arrays cut."""
    name = key.name
    value = metadata[name]
    short = name.removeprefix("tokenizer.ggml.")
    if name == "tokenizer.ggml.merges":
        tokens = metadata["tokenizer.ggml.tokens"][:]  # at once: one by one takes far longer
        kept = {tokens[i] for i in ids.kept}
        return _with_array(key, [m for m in value[:] if _merge_stays(m, kept)])
    if short in _PER_TOKEN and name != short:
        values = value[:]
        return _with_array(key, [values[i] for i in ids.kept])
    if name.startswith("tokenizer.") and name.endswith(("_token_id", "_token_ids")):
        new: Callable[[int], int] = lambda i: ids.to_trimmed([i])[0] if i in ids else i  # noqa: E731
        if key.kind == _ARRAY:
            return _with_array(key, [new(i) for i in value])
        return _Key(name, key.kind, struct.pack("<" + SCALARS[key.kind], new(value)))
    if name.endswith(".vocab_size") and value == ids.rows:
        return _Key(name, key.kind, struct.pack("<" + SCALARS[key.kind], ids.kept_rows))
    return key


def _merge_stays(merge: str, kept: set[str]) -> bool:
    left, _, right = merge.partition(" ")
    return left in kept and right in kept and left + right in kept


def _with_array(key: _Key, values: Sequence[Any]) -> _Key:
    (kind,) = struct.unpack_from("<I", key.raw)
    head = struct.pack("<IQ", kind, len(values))
    if kind == _STRING:
        body = b"".join(map(pack_string, values))
    else:
        body = struct.pack(f"<{len(values)}{SCALARS[kind]}", *values)
    return _Key(key.name, key.kind, head + body)


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
