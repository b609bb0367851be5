"""What a caller may give: as prompts a text, its ids, a conversation, or a list; as a model."""

from collections.abc import Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, TypeGuard

from torch import nn

from lmhead.errors import BadInput
from lmhead.loading import Model
from lmhead.models.conversation import Conversation, check_conversation, is_conversation

Prompt = str | Sequence[int] | Conversation
Prompts = Prompt | Sequence[Prompt]
Source = str | Path | Model | nn.Module  # what `load` takes


def listed(prompts: Prompts) -> list[Prompt]:
    """Return the prompts as a list, each a text, ids or a conversation; refuse anything else."""
    if hasattr(prompts, "tolist"):  # a tensor, or an array of numpy
        prompts = prompts.tolist()
    if isinstance(prompts, str) or _is_ids(prompts):
        return [_plain(prompts)]
    if is_conversation(prompts):
        check_conversation(prompts)
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise _wrong("the prompt is", prompts)
    found: list[Prompt] = []
    for prompt in prompts:
        if hasattr(prompt, "tolist"):
            prompt = prompt.tolist()
        if is_conversation(prompt):
            check_conversation(prompt)
        elif not isinstance(prompt, str) and not _is_ids(prompt):
            raise _wrong("the prompts hold", prompt)
        found.append(_plain(prompt))
    return found


def encoded(model: Model, prompt: Prompt, *, chat: bool = False) -> tuple[str, list[int]]:
    """Return a prompt's text and its ids, which the model can read.

    The text of a conversation is its last message; it is wrapped with or without `chat`.
    """
    if isinstance(prompt, str):
        return prompt, model.encode(prompt, chat=chat)
    if is_conversation(prompt):
        return prompt[-1]["content"], model.encode_chat(prompt)
    if chat:
        raise BadInput("chat wraps a text, but the prompt is a list of ids; expected a text")
    ids = check_prompt_ids(model, prompt)
    model.check_ids(ids)
    return model.decode(ids), ids


def check_prompt_ids(model: Model, prompt: Prompt) -> list[int]:
    """Return ids that a caller gave, if they are the model's."""
    if not _is_ids(prompt):
        raise BadInput("a conversation is not accepted here; expected a text, or its ids")
    ids, V = list(prompt), model.head.vocab_size
    for i in ids:
        if not 0 <= i < V:
            raise BadInput(
                f"the prompt holds the id {i:,}; {model.name} has ids from 0 to {V - 1:,}"
            )
    return ids


def check_head(head: object) -> None:
    """Refuse what is no engine of a head, an engine's name among others."""
    if head is not None and not callable(head):
        raise BadInput(
            f"head is {head!r}; expected an engine, such as lmhead.engine(model, 'screened')",
            names=["head"],
        )


def _is_ids(value: Any) -> TypeGuard[Sequence[int]]:
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and all(isinstance(i, Integral) and not isinstance(i, bool) for i in value)
    )


def _plain(prompt: Prompt) -> Prompt:
    """Return ids as whole numbers of Python, numpy's among them."""
    return [int(i) for i in prompt] if _is_ids(prompt) else prompt


def _wrong(what: str, value: object) -> BadInput:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return BadInput(
        f"{what} {shown}; expected a text, a list of ids, a conversation, or a list of these"
    )
