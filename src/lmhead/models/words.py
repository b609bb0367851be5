"""Tokens as they look within a text, whatever holds the tokenizer."""

from functools import cached_property
from typing import Any


class Words:
    """Something with a tokenizer, whose tokens have texts."""

    tokenizer: Any

    def token_text(self, token_id: int) -> str:
        """Return a token as it looks within a text, its leading space included."""
        decode = self.tokenizer.decode
        # Alone, many tokenizers strip a leading space; behind another token none does.
        before = decode([self._anchor])
        text = decode([self._anchor, token_id])
        if text.startswith(before) and text != before and "�" not in text:
            return str(text[len(before) :])
        piece = self.tokenizer.convert_ids_to_tokens(token_id)
        return str(piece) if piece is not None else ""

    @cached_property
    def _anchor(self) -> int:
        return int(self.tokenizer("a", add_special_tokens=False)["input_ids"][-1])
