"""Chat templates, run within limits: they come with a model, and a model may come from anyone.

jinja's sandbox keeps a template from touching anything, but not from looping for hours or from
doubling a text forty times. Every line of a template is watched while it runs, and the first one
after the deadline is its last; a process with one thread has a limit on memory besides. A single
operation cannot be interrupted, so the one that takes hours by itself, `**`, is refused.
"""

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from lmhead.errors import BadCheckpoint, BadInput
from lmhead.models.reading import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SECONDS = 5.0  # a template takes about a thousandth of one
BYTES = 2**30  # a template takes about a thousandth of it
_FILE = "<template>"  # what jinja calls the file of a template that came as a text


class _TooLongError(Exception):
    """The template goes on after its deadline."""


def render(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Any], name: str, **options: Any
) -> str:
    """Return the text that the chat template of the model `name` makes of messages.

    `options` are those of `apply_chat_template`. A conversation that the template does not take is
    a `BadInput`, a template that does what none should a `BadCheckpoint`.
    """
    template = options.get("chat_template") or tokenizer.chat_template
    if isinstance(template, str) and _has_power(template):
        raise _bad(name, "raises a number to a power, which may take hours")
    deadline = time.monotonic() + SECONDS

    def line(_frame: FrameType, _event: str, _argument: Any) -> Any:
        if time.monotonic() > deadline:
            raise _TooLongError
        return line

    def call(frame: FrameType, _event: str, _argument: Any) -> Any:
        return line if frame.f_code.co_filename == _FILE else None

    before = sys.gettrace()  # of this thread alone
    try:
        with _limited_memory():
            sys.settrace(call)
            try:
                text = tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
            finally:
                sys.settrace(before)
    except _TooLongError:
        raise _bad(name, f"does not finish: it was stopped after {SECONDS:g} s") from None
    except RecursionError:
        raise _bad(name, "does not end") from None
    except MemoryError:
        raise _bad(name, f"takes more than {BYTES // 2**20:,} MB") from None
    except Exception as error:  # of jinja, or of whatever the template tries
        raise BadInput(
            f"the chat template of {name} rejects this conversation ({first_line(error)}); many "
            "accept a system message only at the start or not at all, then messages of user and "
            "assistant in turn"
        ) from error
    return str(text)


def _bad(name: str, how: str) -> BadCheckpoint:
    return BadCheckpoint(
        f"the chat template of {name} {how}; expected one that only writes a conversation; mend it "
        "in tokenizer_config.json or chat_template.jinja"
    )


@lru_cache(maxsize=16)
def _has_power(template: str) -> bool:
    """Tell whether a template uses `**` other than to pass arguments on."""
    if "**" not in template:
        return False
    from jinja2 import Environment, TemplateError

    try:
        tokens = [kind_and_text[1:] for kind_and_text in Environment().lex(template)]  # noqa: S701  # the text of a prompt, no HTML
    except (TemplateError, RecursionError):
        return False  # rendering it will say what is wrong
    code = [(kind, text) for kind, text in tokens if kind not in ("whitespace", "data", "comment")]
    # As an argument it comes behind a bracket or a comma; as a power, behind a value.
    return any(b == ("operator", "**") and a[1] not in ("(", ",") for a, b in pairwise(code))


@contextmanager
def _limited_memory() -> Iterator[None]:
    """Let this process grow by `BYTES` at most, where it has no other thread to fall over that."""
    statm = Path("/proc/self/statm")
    others = [t for t in threading.enumerate() if not t.daemon]  # daemons only show progress
    if len(others) > 1 or not statm.is_file():
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = int(statm.read_text().split()[0]) * resource.getpagesize() + BYTES
    if soft != resource.RLIM_INFINITY:
        most = min(soft, most)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
