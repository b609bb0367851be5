"""Tokens as clients see them: their bytes, and a text for each.

A token may hold half a character. Its bytes are always exact; as a text it is then written
`bytes:\\xe2\\x82`, as OpenAI's older interface writes it.
"""

import re
from functools import lru_cache

from lmhead.loading import Model

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


class Pieces:
    """The tokens of a model."""

    def __init__(self, model: Model) -> None:
        self._tokenizer = model.tokenizer
        decoder = getattr(getattr(model.tokenizer, "backend_tokenizer", None), "decoder", None)
        self._bytes = _byte_level() if "ByteLevel" in repr(decoder) else None
        added = getattr(model.tokenizer, "added_tokens_decoder", {})
        self._added = {int(i): str(token) for i, token in added.items()}
        self.special = frozenset(model.tokenizer.all_special_ids)
        self.bytes_of = lru_cache(maxsize=1 << 16)(self._bytes_of)

    def _bytes_of(self, id: int) -> bytes:
        if id in self._added:
            return self._added[id].encode("utf-8", "surrogatepass")
        piece = self._tokenizer.convert_ids_to_tokens(id)
        if not isinstance(piece, str):
            return b""
        if self._bytes is not None and all(c in self._bytes for c in piece):
            return bytes(self._bytes[c] for c in piece)
        if found := _BYTE.fullmatch(piece):
            return bytes([int(found[1], 16)])
        return piece.replace("▁", " ").encode("utf-8", "surrogatepass")

    def text_of(self, id: int) -> str:
        """Return a token as text; one that is no whole character names its bytes."""
        raw = self.bytes_of(id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)

    def shown_bytes(self, id: int) -> bytes:
        """Return what a token adds to a text; special ones add nothing."""
        return b"" if id in self.special else self.bytes_of(id)
