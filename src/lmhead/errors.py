"""The errors that lmhead raises on purpose.

Each message is one line that says what was got, what was expected and what to do next.
`exit_code` is what the command line returns: 1 for a failure, 2 for a wrong call. `names` are the
arguments that a message speaks of, as Python spells them (`top_p`); the command line writes them
as they are typed there (`--top-p`).
"""

import json
from collections.abc import Iterable


class LMHeadError(Exception):
    """The base class of every error that lmhead raises deliberately."""

    exit_code = 1

    def __init__(self, message: str = "", *, names: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)


class LMHeadWarning(UserWarning):
    """The call succeeded, but probably not as intended; the message is one line, as in an error."""

    def __init__(self, message: str = "", *, names: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)


class BadInput(LMHeadError, ValueError):
    """A value given by the caller is wrong: an option, a prompt, a shape, an id."""

    exit_code = 2


class ModelNotFound(LMHeadError):
    """MODEL is neither a folder, a file, a built-in name nor a reachable Hugging Face id."""


class FetchError(LMHeadError):
    """A built-in model could not be downloaded, or is not the one that was pinned."""


class BadCheckpoint(LMHeadError):
    """The files exist, but are truncated or inconsistent, or contain NaN or infinity."""


class UnsupportedModel(LMHeadError):
    """The checkpoint is valid, but of a kind that lmhead does not support; the message says what to
    do."""


class MissingExtra(LMHeadError, ImportError):
    """An optional dependency is needed; the message names the extra to install."""


class LostRank(LMHeadError):
    """A rank that shares the work has died, hangs, or does not take part in an exchange."""

    def __init__(self, message: str = "", *, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


def how_to_install(extra: str) -> str:
    """Return the command that adds an extra to lmhead, the way lmhead itself was installed."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        origin = json.loads(distribution("lmhead").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        origin = {}
    if "dir_info" not in origin:  # from an index, or a wheel
        return f"pip install 'lmhead[{extra}]'"
    editable = "-e " if origin["dir_info"].get("editable") else ""
    return f"pip install {editable}'.[{extra}]' in lmhead's checkout"
