"""What a caller may give: as prompts a text, the ids of one, or a list of either; as a model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard

from torch import nn

from lmhead.errors import BadInput
from lmhead.loading import Model

Prompt = str | Sequence[int]
Prompts = Prompt | Sequence[Prompt]
Source = str | Path | Model | nn.Module  # what `load` takes


def listed(prompts: Prompts) -> list[Prompt]:
    """Return the prompts as a list, each a text or a list of ids; refuse anything else."""
    if hasattr(prompts, "tolist"):  # a tensor, or an array of numpy
        prompts = prompts.tolist()
    if isinstance(prompts, str) or _is_ids(prompts):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise _wrong("the prompt is", prompts)
    found: list[Prompt] = []
    for prompt in prompts:
        if hasattr(prompt, "tolist"):
            prompt = prompt.tolist()
        if not isinstance(prompt, str) and not _is_ids(prompt):
            raise _wrong("the prompts hold", prompt)
        found.append(prompt)
    return found


def encoded(model: Model, prompt: Prompt, *, chat: bool = False) -> tuple[str, list[int]]:
    """Return a prompt's text and its ids, which the model can read."""
    if isinstance(prompt, str):
        return prompt, model.encode(prompt, chat=chat)
    if chat:
        raise BadInput("chat wraps a text, but the prompt is a list of ids; expected a text")
    ids = check_prompt_ids(model, prompt)
    model.check_ids(ids)
    return model.decode(ids), ids


def check_prompt_ids(model: Model, prompt: Sequence[int]) -> list[int]:
    """Return ids that a caller gave, if they are the model's."""
    ids, V = list(prompt), model.head.vocab_size
    for i in ids:
        if not 0 <= i < V:
            raise BadInput(
                f"the prompt holds the id {i:,}; {model.name} has ids from 0 to {V - 1:,}"
            )
    return ids


def _is_ids(value: Any) -> TypeGuard[Sequence[int]]:
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and all(isinstance(i, int) and not isinstance(i, bool) for i in value)
    )


def _wrong(what: str, value: object) -> BadInput:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return BadInput(f"{what} {shown}; expected a text, a list of ids, or a list of either")
