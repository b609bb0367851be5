"""The errors that lmhead raises on purpose.

Each message is one line that says what was got, what was expected and what to do next.
`exit_code` is what the command line returns: 1 for a failure, 2 for a wrong call.
"""


class LMHeadError(Exception):
    """The root of every error that lmhead raises on purpose."""

    exit_code = 1


class BadInput(LMHeadError, ValueError):
    """A value given by the caller is wrong: an option, a prompt, a shape, an id."""

    exit_code = 2


class ModelNotFound(LMHeadError):
    """MODEL is no folder, no file, no built-in name and no reachable Hugging Face id."""


class FetchError(LMHeadError):
    """A built-in model could not be fetched, or what came is not what was pinned."""


class BadCheckpoint(LMHeadError):
    """The files are there, but truncated, inconsistent, or holding NaN or infinity."""


class UnsupportedModel(LMHeadError):
    """The checkpoint is sound, but of a kind that lmhead does not read; says the way out."""


class MissingExtra(LMHeadError, ImportError):
    """An optional dependency is needed; the message names the extra to install."""
