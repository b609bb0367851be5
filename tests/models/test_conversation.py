"""Conversations: every turn reaches the model as its own template writes it."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from lmhead.errors import BadInput
from lmhead.generation import generate
from lmhead.loading import load
from lmhead.models.conversation import check_conversation, wrapped

SYSTEM = {"role": "system", "content": "Answer in one word."}
USER = {"role": "user", "content": "The capital of France?"}
ASSISTANT = {"role": "assistant", "content": "Paris"}
# a template that takes no system message, as some do
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}"
    "{% endif %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
)


def tokenizer(template: str | None) -> Any:
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    )
    made.chat_template = template
    return made


@pytest.mark.model
def test_every_turn_is_read(smollm2: Path) -> None:
    model = load(smollm2)
    talk = [SYSTEM, USER, ASSISTANT, {"role": "user", "content": "And of Italy?"}]
    ids = model.encode_chat(talk)
    assert ids == model.tokenizer.apply_chat_template(
        talk, add_generation_prompt=True, return_dict=False
    )
    assert model.encode(USER["content"], chat=True) == model.encode_chat([USER])
    both = generate([talk, [USER]], model, max_tokens=3)
    assert both[0].prompt_ids == tuple(ids)
    assert [r.prompt for r in both] == ["And of Italy?", "The capital of France?"]
    assert generate(talk, model, max_tokens=3) == both[:1]


def test_a_template_that_refuses_is_quoted() -> None:
    assert wrapped(tokenizer(STRICT), [USER], "m") == "[user] The capital of France?\n"
    with pytest.raises(BadInput, match=r"template of m rejects this conversation.*no system role"):
        wrapped(tokenizer(STRICT), [SYSTEM, USER], "m")
    with pytest.raises(BadInput, match="m has no chat template"):
        wrapped(tokenizer(None), [USER], "m")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "expected a list of messages"),
        ("hello", "expected a list of messages"),
        ([USER, "hello"], "message 2 of the conversation is 'hello'"),
        ([{"content": "a"}], "message 1 of the conversation has no role"),
        ([{"role": "user"}], "message 1 of the conversation has no content"),
        ([{**USER, "name": "x"}], "message 1 of the conversation has 'name'"),
        ([{"role": "tool", "content": "a"}], "the role 'tool'; expected system, user, assistant"),
        ([{"role": "user", "content": 3}], "the content 3; expected a text"),
        ([{"role": "user", "content": ""}], "message 1 of the conversation is empty"),
        ([USER, ASSISTANT, SYSTEM, USER], "message 3 of the conversation has the role system"),
        ([USER, ASSISTANT], "ends with a message from the assistant"),
    ],
)
def test_what_is_wrong_with_a_conversation_is_said(messages: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        check_conversation(messages)
