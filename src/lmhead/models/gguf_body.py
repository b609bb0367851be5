"""A GGUF file without its vocabulary: the blocks alone, for a runtime that reads embeddings.

llama.cpp computes its own output layer at every token, whoever asks. In this copy there is next to
none: a vocabulary of ROWS empty rows in place of the embedding and of the output layer, and no
tokenizer. All other tensors are copied byte by byte, as they are quantised.
"""

import struct
from collections.abc import Iterator
from pathlib import Path

from lmhead.files.gguf import SCALARS, STRING, TENSOR_TYPES, GGUFFile, open_gguf, pack_string
from lmhead.models.gguf_header import GGUFHeader
from lmhead.progress import Progress, silent

ROWS = 32
_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"
_KINDS = {name: number for number, (name, _, _) in TENSOR_TYPES.items()}
_UINT32 = next(number for number, code in SCALARS.items() if code == "I")
_PIECE = 1 << 24  # bytes copied at a time


def write_body(source: Path, target: Path, progress: Progress = silent) -> None:
    """Write the blocks of the GGUF file `source`, with a vocabulary of ROWS empty rows."""
    file = open_gguf(source)
    header = GGUFHeader(file)
    d = header.sizes()["d"]
    keys = list(_keys(file, header.architecture))
    # name, shape, type, bytes, where they lie in the source (None: zeros)
    tensors: list[tuple[str, tuple[int, ...], str, int, int | None]] = [
        (_EMBEDDING, (ROWS, d), "F32", 4 * ROWS * d, None)
    ]
    tensors += [
        (t.name, t.shape, t.type, t.nbytes, t.offset)
        for t in file.tensors.values()
        if t.name not in (_EMBEDDING, _OUTPUT)
    ]
    with source.open("rb") as stream, target.open("wb") as out:
        out.write(b"GGUF" + struct.pack("<IQQ", file.version, len(tensors), len(keys)))
        out.write(b"".join(keys))
        end = 0
        for name, shape, kind, nbytes, _ in tensors:
            out.write(pack_string(name) + struct.pack("<I", len(shape)))
            out.write(struct.pack(f"<{len(shape)}QIQ", *shape[::-1], _KINDS[kind], end))
            end += -(-nbytes // file.alignment) * file.alignment
        out.write(b"\0" * (-out.tell() % file.alignment))
        with progress("writing the body", total=end) as advance:
            for _, _, _, nbytes, offset in tensors:
                if offset is None:
                    out.write(b"\0" * nbytes)
                else:
                    stream.seek(offset)
                    for first in range(0, nbytes, _PIECE):
                        out.write(stream.read(min(_PIECE, nbytes - first)))
                out.write(b"\0" * (-out.tell() % file.alignment))
                advance(nbytes)


def _keys(file: GGUFFile, architecture: str) -> Iterator[bytes]:
    """Give the metadata, packed: all but the tokenizer, and the size of the vocabulary."""
    size = f"{architecture}.vocab_size"
    for key in file.keys.values():
        if not key.name.startswith("tokenizer.") and key.name != size:
            yield pack_string(key.name) + struct.pack("<I", key.kind) + file.raw(key)
    yield pack_string("tokenizer.ggml.model") + struct.pack("<I", STRING) + pack_string("none")
    yield pack_string(size) + struct.pack("<II", _UINT32, ROWS)
