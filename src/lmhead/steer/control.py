"""GGUF control vectors: what repeng writes and llama.cpp reads.

`general.architecture` is `controlvector`, `controlvector.model_hint` names the model's family, and
the tensor `direction.N` `[d]` is added, times a strength chosen when it is used, after the block
with the index N, counted from 0. llama.cpp refuses a `direction.0`.
"""

import re
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lmhead.errors import BadCheckpoint, BadInput
from lmhead.files.gguf import open_gguf
from lmhead.files.whole import written_whole
from lmhead.steer.vector import HEAD, Card, SteeringVector, SteeringWarning

_ARCHITECTURE = "controlvector"
_NAME = re.compile(r"direction\.(\d+)")


def save_control_vector(
    vectors: SteeringVector | Sequence[SteeringVector], path: str | Path, hint: str | None = None
) -> Path:
    """Write vectors at blocks as one GGUF control vector; strength 1 then adds alpha * v.

    `hint` is the model's family, such as `llama`; it defaults to the model on the first card.
    """
    path = Path(path)
    if path.suffix != ".gguf":
        raise BadInput(
            f"the control vector's file is {path.name}; expected a name that ends in .gguf"
        )
    added = _by_layer([vectors] if isinstance(vectors, SteeringVector) else vectors)
    first = vectors if isinstance(vectors, SteeringVector) else vectors[0]
    if 0 in added:
        warnings.warn(
            "llama.cpp refuses a control vector with a direction at block 0; repeng and lmhead "
            "read it",
            SteeringWarning,
            stacklevel=2,
        )
    from gguf import GGUFWriter

    with written_whole(path, force=True) as staging:
        writer = GGUFWriter(staging, _ARCHITECTURE)
        writer.add_string(f"{_ARCHITECTURE}.model_hint", hint or first.card.model or "unknown")
        writer.add_uint32(f"{_ARCHITECTURE}.layer_count", len(added))
        for layer in sorted(added):
            writer.add_tensor(f"direction.{layer}", added[layer].numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return path


def load_control_vector(path: str | Path) -> list[SteeringVector]:
    """Read a GGUF control vector: one vector of strength 1 per block, from below upwards."""
    path = Path(path)
    if not path.is_file():
        raise BadInput(f"there is no control vector at {path}; name its file")
    file = open_gguf(path)
    if (found := file.metadata.get("general.architecture")) != _ARCHITECTURE:
        raise BadCheckpoint(
            f"{path} holds a {found}, no control vector; expected general.architecture to be "
            f"{_ARCHITECTURE!r}"
        )
    hint = file.metadata.get(f"{_ARCHITECTURE}.model_hint")
    vectors = []
    for name, tensor in file.tensors.items():
        match = _NAME.fullmatch(name)
        if match is None or len(tensor.shape) != 1:
            raise BadCheckpoint(
                f"{path} holds the tensor {name} {list(tensor.shape)}; expected only direction.N "
                "[d], N the index of a block"
            )
        try:
            direction = torch.from_numpy(file.read(name))
            vectors.append(SteeringVector(direction, int(match[1]), 1.0, Card(model=hint)))
        except BadInput as error:
            raise BadCheckpoint(f"{path}, tensor {name}: {error}") from error
    if not vectors:
        raise BadCheckpoint(f"{path} holds no direction; expected tensors direction.N")
    if len({v.size for v in vectors}) > 1:
        raise BadCheckpoint(f"{path} holds directions of several widths; expected one width")
    return sorted(vectors, key=lambda v: int(v.layer))


def load_vectors(path: str | Path) -> list[SteeringVector]:
    """Read the vector of a `.safetensors` file, or all those of a `.gguf` control vector."""
    if Path(path).suffix == ".gguf":
        return load_control_vector(path)
    return [SteeringVector.load(path)]


def _by_layer(vectors: Sequence[SteeringVector]) -> dict[int, Tensor]:
    added: dict[int, Tensor] = {}
    if not vectors:
        raise BadInput("there is no vector to write; expected at least one")
    for v in vectors:
        if v.layer == HEAD:
            raise BadInput(
                f"the vector is of the layer {HEAD!r}, but a GGUF control vector is added after "
                "blocks only; keep it as .safetensors"
            )
        if v.size != vectors[0].size:
            raise BadInput(
                f"the vectors have the widths {vectors[0].size} and {v.size}; expected one width"
            )
        layer = int(v.layer)
        added[layer] = added[layer] + v.added if layer in added else v.added
    return added
