"""Which loops a screened head runs on: numba's compiled ones, or the portable ones.

Compiled loops need numba, and a place where it may keep what it compiled: to compile them anew in
every process would take longer than most processes run. They also need the threads of the process
that started them; a forked child has none, and OpenMP ends it when it asks.
"""

import os
import sys
import warnings
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Literal
from weakref import WeakSet

from lmhead.errors import BadInput, LMHeadError, MissingExtra
from lmhead.files.cache import cache_root
from lmhead.files.stamp import private_folder

Kernels = Literal["auto", "numba", "torch"]
_ROOM = "lmhead.head.screening"


class Forked:
    """Whether this process was forked from one whose compiled loops had run."""

    started = False  # the threads run
    child = False


def loops(which: Kernels) -> ModuleType:
    """Give the loops of this kind; with `auto`, numba's where it is installed."""
    if which not in ("auto", "numba", "torch"):
        raise BadInput(f"kernels is {which!r}; expected 'auto', 'numba' or 'torch'")
    if which == "numba" and find_spec("numba") is None:
        raise MissingExtra("numba is not installed; install it with: pip install numba")
    if which == "torch" or (which == "auto" and not can_compile()):
        return import_module(f"{_ROOM}.portable")
    if Forked.child:
        raise LMHeadError(
            "this process was forked from one that used a screened head, whose threads it does not "
            "have; start it with multiprocessing's 'spawn', or take kernels='torch'"
        )
    return _compiled()


def can_compile() -> bool:
    """Tell whether numba's loops can run in this process; where not for want of a place, say so."""
    if find_spec("numba") is None or Forked.child:
        return False
    try:
        _compiled()
    except LMHeadError as error:
        _warn_once(str(error))
        return False
    return True


@cache
def _warn_once(message: str) -> None:
    warnings.warn(f"{message}; slower loops are used", stacklevel=2)


def _compiled() -> ModuleType:
    try:
        return import_module(f"{_ROOM}.kernels")
    except RuntimeError as error:
        if "cache" not in str(error):
            raise
    # Neither beside the source nor in the home folder: in our own cache, if that can be written.
    import numba

    place = cache_root() / "numba"
    try:
        private_folder(place)  # numba's files hold pickles and machine code
        numba.config.CACHE_DIR = str(place)
        return import_module(f"{_ROOM}.kernels")
    except (OSError, RuntimeError) as error:
        numba.config.CACHE_DIR = ""
        raise LMHeadError(
            "numba has no writable folder for its compiled loops; set LMHEAD_CACHE or "
            "NUMBA_CACHE_DIR to a folder that is writable"
        ) from error


_heads: "WeakSet[object]" = WeakSet()


def survive_forks(head: object) -> None:
    """Let a head with compiled loops go on with portable ones in a forked child."""
    _heads.add(head)


def _in_child() -> None:
    if Forked.started:
        Forked.child = True
        # torch's own threads did not come along either, and a child that waits for them never ends
        sys.modules["torch"].set_num_threads(1)
        for head in _heads:
            head._go_portable()  # type: ignore[attr-defined]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
