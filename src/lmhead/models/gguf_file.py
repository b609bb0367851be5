"""An alias of `lmhead.files.gguf`, until everything imports from there."""

from lmhead.files.gguf import TENSOR_TYPES, GGUFArray, GGUFFile, GGUFTensor, open_gguf

__all__ = ["TENSOR_TYPES", "GGUFArray", "GGUFFile", "GGUFTensor", "open_gguf"]
