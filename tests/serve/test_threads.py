"""Work aside: in a thread that is gone when it is done."""

import threading
from contextvars import ContextVar

import pytest

from lmhead.errors import BadInput
from lmhead.serve.threads import aside

ASKED: ContextVar[str] = ContextVar("asked", default="")


def test_it_is_done_elsewhere_and_the_thread_is_gone() -> None:
    ASKED.set("here")
    seen, asked = aside(lambda: (threading.current_thread(), ASKED.get()))
    assert seen is not threading.current_thread()
    assert not seen.is_alive()
    assert asked == "here"


def test_its_error_is_raised_here() -> None:
    def refuse() -> None:
        raise BadInput("no")

    with pytest.raises(BadInput, match="no"):
        aside(refuse)
