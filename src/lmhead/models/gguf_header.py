"""The metadata of a GGUF model, typed: counts, numbers, and the sizes of its tensors."""

from typing import Any

from lmhead.errors import BadCheckpoint, UnsupportedModel
from lmhead.files import limits
from lmhead.files.gguf import GGUFArray, GGUFFile


class GGUFHeader:
    """The metadata of the file's architecture, typed."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        kind = file.metadata.get("general.type", "model")
        architecture = file.metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise BadCheckpoint(f"{file.path} names no architecture; expected a whole model")
        if kind != "model":
            raise UnsupportedModel(f"{file.path} is of the type {kind!r}; expected a whole model")
        self.architecture: str = architecture

    def get(self, key: str) -> Any:
        """Return a value of the architecture's own, or None."""
        return self.file.metadata.get(f"{self.architecture}.{key}")

    def unsupported(self, what: str) -> UnsupportedModel:
        """Return the error for what a conversion would have to guess."""
        return UnsupportedModel(
            f"{self.file.path} ({self.architecture}) has {what}, which lmhead does not convert; "
            "take the original safetensors folder instead"
        )

    def count(self, key: str, default: int | None = None) -> int:
        """Return a whole number from 1 on."""
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, GGUFArray):
            raise self.unsupported(f"one {key} per layer")
        if type(value) is not int or not 1 <= value <= limits.COUNT:
            raise self._wrong(key, value, "a count")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """Return a finite number, as it was written before it became a float32."""
        import numpy as np

        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, float | int) or not abs(value) < 1e30:  # nor NaN
            raise self._wrong(key, value, "a number")
        return float(str(np.float32(value)))  # 1e-05, not the float32's 9.999999747378752e-06

    def _wrong(self, key: str, value: Any, expected: str) -> BadCheckpoint:
        return BadCheckpoint(
            f"{self.file.path}: {self.architecture}.{key} is {value!r}, expected {expected}; "
            "fetch it again"
        )

    def sizes(self) -> dict[str, int]:
        """Work out what each letter of the shapes stands for."""
        embedding = self.file.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise BadCheckpoint(f"{self.file.path} has no embedding (V, d); expected a whole model")
        d = self.count("embedding_length")
        heads = self.count("attention.head_count")
        head = self.count("attention.key_length", max(1, d // heads))
        if self.get("attention.value_length") not in (None, head):
            raise self.unsupported("keys and values of different widths")
        return {
            "V": embedding.shape[0],
            "d": d,
            "t": 3 * d,
            "n": head,
            "q": head * heads,
            "k": head * self.count("attention.head_count_kv", heads),
            "f": self.count("feed_forward_length"),
            "c": self.count("context_length"),
        }
