"""Starting quickly: what a server imports and loads lives as long as it does."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def starting() -> Iterator[None]:
    """Search for no garbage while a server starts, nor ever among what it has made by then.

    Imports and models are a million objects that never become garbage: to walk over them again
    and again is an eighth of the start, and later a pause amid an answer.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
