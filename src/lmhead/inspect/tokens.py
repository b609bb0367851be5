"""Naming one token: by its text, or by its id."""

from dataclasses import dataclass

from lmhead.errors import BadInput
from lmhead.loading import HeadOnly, Model


@dataclass(frozen=True)
class Token:
    """A token: its id, and its text with the leading space that it has within a text."""

    id: int
    text: str

    @classmethod
    def of(cls, model: Model | HeadOnly, id: int) -> "Token":
        """Name a token of a model."""
        return cls(id, model.token_text(id))


def find_token(model: Model | HeadOnly, token: "str | int | Token", name: str = "token") -> Token:
    """Return the one token that a text is, or that has an id; `name` is the argument's own.

    A word that is no token as it stands, but is one behind a space, is that one.
    """
    if isinstance(token, Token):
        token = token.id
    if isinstance(token, bool) or not isinstance(token, str | int):
        raise BadInput(
            f"{name} is {token!r}; expected the text of one token, or its id", names=[name]
        )
    if isinstance(token, int):
        if not 0 <= token < model.reachable:
            raise BadInput(
                f"{name} is {token}; {model.name} has ids from 0 to {model.reachable - 1:,}",
                names=[name],
            )
        return Token.of(model, token)
    known = model.tokenizer.get_vocab().get(token)  # a special token, by its name
    tried = [
        model.tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in (token, f" {token}")
    ]
    for ids in tried:
        if len(ids) == 1 and ids[0] < model.reachable:
            return Token.of(model, ids[0])
    if known is not None and known < model.reachable:
        return Token.of(model, known)
    pieces = ", ".join(repr(model.token_text(i)) for i in tried[0][:8])
    raise BadInput(
        f"{name} is {token!r}, which {model.name} reads as {len(tried[0])} pieces ({pieces}); "
        "expected the text of one, or its id"
    )
