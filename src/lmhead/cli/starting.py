"""Starting quickly: what is imported and loaded is no garbage, so do not search it for any."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_OFTEN = gc.get_threshold()
_RARELY = (100_000, *_OFTEN[1:])  # objects made since the last search, at which the next begins


def search_rarely() -> None:
    """Search for garbage rarely, for as long as the process lives.

    Imports and models are a million objects that never become garbage: to walk over them again
    and again is an eighth of the time in which `lmhead next` answers.
    """
    gc.set_threshold(*_RARELY)


@contextmanager
def starting() -> Iterator[None]:
    """Search for no garbage while a server starts, nor ever among what it has made by then.

    Afterwards it is searched for as often as usual: what clients leave behind goes at once.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.set_threshold(*_OFTEN)
        if was_on:
            gc.enable()
