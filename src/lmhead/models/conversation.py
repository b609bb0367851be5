"""A conversation as a chat model reads it: messages of system, user and assistant in its template.

[{"role": "system", "content": "Answer in one word."},
 {"role": "user", "content": "The capital of France?"}]
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

from lmhead.errors import BadInput
from lmhead.models.templates import render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, str]
Conversation = Sequence[Message]

ROLES = ("system", "user", "assistant")


def is_conversation(value: Any) -> TypeGuard[Conversation]:
    """Tell whether a value is meant as a conversation, right or wrong."""
    return isinstance(value, list | tuple) and len(value) > 0 and isinstance(value[0], Mapping)


def wrapped(tokenizer: "PreTrainedTokenizerBase", messages: Conversation, name: str) -> str:
    """Return the text that the model `name` reads, up to where its next answer begins."""
    check_conversation(messages)
    if not tokenizer.chat_template:
        raise BadInput(
            f"{name} has no chat template; expected a chat model, or leave out chat",
            names=["chat"],
        )
    return render(
        tokenizer, [dict(message) for message in messages], name, add_generation_prompt=True
    )


def check_conversation(messages: Any) -> None:
    """Refuse what is no conversation that a model could answer, and say which message is wrong."""
    if not isinstance(messages, list | tuple) or not messages:
        raise BadInput(
            f"the conversation is {_shown(messages)}; expected a list of messages, each "
            '{"role": ..., "content": ...}'
        )
    for number, message in enumerate(messages, 1):
        which = f"message {number} of the conversation"
        if not isinstance(message, Mapping):
            raise BadInput(
                f'{which} is {_shown(message)}; expected {{"role": ..., "content": ...}}'
            )
        if lacking := [key for key in ("role", "content") if key not in message]:
            raise BadInput(f"{which} has no {lacking[0]}; expected a role and a content")
        if more := [key for key in message if key not in ("role", "content")]:
            raise BadInput(f"{which} has {_shown(more[0])}; expected only a role and a content")
        role, content = message["role"], message["content"]
        if role not in ROLES:
            raise BadInput(f"{which} has the role {_shown(role)}; expected {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise BadInput(f"{which} has the content {_shown(content)}; expected a text")
        if not content and role != "assistant":
            raise BadInput(f"{which} is empty; expected some text")
        if role == "system" and number > 1:
            raise BadInput(f"{which} has the role system; expected it in the first message only")
    if messages[-1]["role"] != "user":
        raise BadInput(
            f"the conversation ends with a message from the {messages[-1]['role']}; expected one "
            "from the user, for the model to answer"
        )


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
