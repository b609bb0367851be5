"""An alias of `lmhead.files.checkpoint`, until everything imports from there."""

from lmhead.files.checkpoint import Checkpoint, open_checkpoint, weight_files
from lmhead.files.jsons import read_json
from lmhead.files.safetensors import TensorHeader, read_header

__all__ = [
    "Checkpoint",
    "TensorHeader",
    "open_checkpoint",
    "read_header",
    "read_json",
    "weight_files",
]
