"""Chat templates, run for a limited time: they come with a model, and a model may come from anyone.

jinja's sandbox keeps a template from touching anything, but not from looping for hours. Every line
of a template is watched while it runs, and the first one after the deadline is its last.
"""

import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from lmhead.errors import BadCheckpoint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SECONDS = 5.0  # a template takes about a thousandth of one
_FILE = "<template>"  # what jinja calls the file of a template that came as a text


class _TooLongError(Exception):
    """The template goes on after its deadline."""


def render(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Any], name: str, **options: Any
) -> str:
    """Return the text that the chat template of the model `name` makes of messages.

    `options` are those of `apply_chat_template`. What the template itself raises is passed on.
    """
    deadline = time.monotonic() + SECONDS

    def line(_frame: FrameType, _event: str, _argument: Any) -> Any:
        if time.monotonic() > deadline:
            raise _TooLongError
        return line

    def call(frame: FrameType, _event: str, _argument: Any) -> Any:
        return line if frame.f_code.co_filename == _FILE else None

    before = sys.gettrace()  # of this thread alone
    sys.settrace(call)
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
    except (_TooLongError, RecursionError) as error:
        how = "does not end" if isinstance(error, RecursionError) else "goes on and on"
        raise BadCheckpoint(
            f"the chat template of {name} {how}: it was stopped after at most {SECONDS:g} s; "
            "expected one that only writes a conversation; mend it in tokenizer_config.json or "
            "chat_template.jinja"
        ) from None
    finally:
        sys.settrace(before)
    return str(text)
