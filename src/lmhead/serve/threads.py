"""Why a server lets one thread alone compute.

OpenMP gives every thread that multiplies a team of helpers, and keeps it as long as the thread
lives. Once all teams together have more threads than there are processors, helpers no longer wait
awake between two products but fall asleep, and every product waits until they wake up: a lens took
twice as long in a thread beside a main thread that had only loaded the model.

So everything that needs the model runs in the worker's thread, and what is computed before there is
a worker runs in a thread that ends, and takes its team with it.
"""

import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


def aside(work: Callable[[], _T]) -> _T:
    """Do some work in a thread of its own that ends with it; return or raise what it does."""
    done: list[_T] = []
    failed: list[BaseException] = []
    context = contextvars.copy_context()

    def run() -> None:
        try:
            done.append(context.run(work))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="lmhead-aside", daemon=True)
    thread.start()
    thread.join()  # Ctrl-C is raised here, and the process ends without waiting for a daemon
    if failed:
        raise failed[0]
    return done[0]
