"""What a file's tensors are worth in parameters.

Three things make a plain sum over the file wrong: buffers (causal masks, rotary frequencies) that
older exporters saved beside the weights, the scales and zero points of a quantised checkpoint, and
weights packed several to an integer.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from lmhead.files.checkpoint import Checkpoint
from lmhead.files.gguf import GGUFFile
from lmhead.files.safetensors import TensorHeader
from lmhead.models.architecture import Shape, vocab_size

_BUFFER = re.compile(r"(inv_freq|masked_bias|position_ids|rope_\w+\.weight)$")
# What quantised checkpoints keep beside a weight: GPTQ and AWQ, bitsandbytes, compressed-tensors,
# FP8, MXFP4, MLX.
_QUANTISER = re.compile(
    r"([._](scales|biases|qzeros|g_idx|absmax|quant_map|SCB|weight_format|scale_inv"
    r"|weight_scale(_\d)?|input_scale|k_scale|v_scale|global_scale|zero_point|weight_shape)"
    r"|quant_state\.\w+)$"
)
_PACKED_NAME = re.compile(r"(\.qweight|\.weight_packed|_blocks)$")
_PLAIN_INTEGERS = ("BOOL", "I64", "U64", "I16", "U16")  # masks, positions, counters: no weights
_PACKING = ("I32", "U32", "U8")

# Others keep the name that the file gives them.
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I8": "int8"}


@dataclass(frozen=True)
class Weight:
    """One stored weight."""

    shape: Shape  # of a packed one: (parameters,) or, with V rows, (V, parameters / V)
    dtype: str  # float32, bfloat16, ...; of a packed one, or in GGUF, as the file spells it
    nbytes: int
    packed: bool = False

    @property
    def parameters(self) -> int:
        """The number of its elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class Stored:
    """All the weights of a file or folder."""

    weights: Mapping[str, Weight]
    nbytes: int  # of all tensors, buffers and scales too
    uncounted: int = 0  # tensors packed in a way that the configuration does not tell


def from_checkpoint(checkpoint: Checkpoint) -> Stored:
    """Count a folder's safetensors headers."""
    bits = _bits_per_weight(checkpoint.config)
    V = vocab_size(checkpoint.config)
    weights: dict[str, Weight] = {}
    uncounted = 0
    for name, header in checkpoint.tensors.items():
        if _is_buffer(name, header):
            continue
        if header.dtype not in _PACKING:
            dtype = _DTYPES.get(header.dtype, header.dtype.lower())
            weights[name] = Weight(header.shape, dtype, header.nbytes)
        elif bits is None:
            uncounted += 1
        else:
            count = header.nbytes * 8 // bits
            shape: Shape = (count,)
            if V is not None and count % V == 0:
                shape = (V, count // V)
            plain_name = _PACKED_NAME.sub(".weight", name)
            weights[plain_name] = Weight(shape, f"packed {bits}-bit", header.nbytes, packed=True)
    return Stored(weights, sum(t.nbytes for t in checkpoint.tensors.values()), uncounted)


def from_gguf(file: GGUFFile) -> Stored:
    """Count a GGUF file's header, whose shapes are those of the unpacked weights."""
    weights = {
        name: Weight(tensor.shape, _DTYPES.get(tensor.type, tensor.type), tensor.nbytes)
        for name, tensor in file.tensors.items()
        if not _BUFFER.search(name)
    }
    return Stored(weights, sum(t.nbytes for t in file.tensors.values()))


def _is_buffer(name: str, header: TensorHeader) -> bool:
    mask = len(header.shape) == 4 and header.shape[:2] == (1, 1)  # [1, 1, context, context]
    return (
        mask
        or header.dtype in _PLAIN_INTEGERS
        or _BUFFER.search(name) is not None
        or _QUANTISER.search(name) is not None
    )


def _bits_per_weight(config: Mapping[str, Any]) -> int | None:
    """Return how many bits a packed weight has, None if the configuration does not tell."""
    how = config.get("quantization_config", config.get("quantization"))
    if not isinstance(how, Mapping):
        return None
    bits: Any = how.get("bits")
    if _is_width(bits):
        return int(bits)
    if how.get("load_in_4bit") or how.get("quant_method") == "mxfp4":
        return 4
    if how.get("load_in_8bit"):
        return 8
    groups = how.get("config_groups")
    if isinstance(groups, Mapping):
        found = [_at(_at(group, "weights"), "num_bits") for group in groups.values()]
        if found and _is_width(found[0]) and all(width == found[0] for width in found):
            return int(found[0])
    return None


def _is_width(bits: Any) -> bool:
    return type(bits) is int and 1 <= bits <= 64


def _at(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, Mapping) else None
