"""Errors as the command line tells them: one line on stderr, options named as they are typed."""

import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from lmhead.errors import LMHeadError, LMHeadWarning


def explain(error: Exception, command: Any, path: str, arguments: list[str]) -> tuple[str, int]:
    """Return the line that tells an error, and the exit code: 1 for a failure, 2 for usage.

    - `command`: the command that was called, whose options the message may name.
    - `path`: how it is called, e.g. "lmhead steer train".
    - `arguments`: all that was typed after `lmhead`.
    """
    if isinstance(error, LMHeadError):
        return as_typed(str(error), command, error.names), error.exit_code
    if hasattr(error, "format_message"):  # the parser's own
        return _usage(error, arguments, path), 2
    return (
        f"{type(error).__name__}: {error} (unexpected; run again with --debug for the traceback, "
        "and please report it)"
    ), 1


def option(name: str) -> str:
    """Return the option of an argument of the library: `top_p` is typed `--top-p`."""
    return "--" + name.replace("_", "-")


def as_typed(message: str, command: Any, named: Iterable[str] = ()) -> str:
    """Write the options of a command as they are typed: `top_p is 2` becomes `--top-p is 2`.

    The library names its arguments; these are the same words as the options, so that only their
    spelling differs. What stands in quotes was written by the user and stays.

    - `named`: arguments that the message is known to speak of, plain words such as `stop` too.
    """
    names = {
        param.name: max(param.opts, key=len)
        for param in getattr(command, "params", [])
        if param.param_type_name == "option"
    }
    first = re.match(r"[a-z_0-9]+(?= (is|are|needs|has|and|must|cannot)\b)", message)
    if first and first[0] in names:
        message = names[first[0]] + message[first.end() :]
    names |= {name: names.get(name, option(name)) for name in named}
    words = [re.escape(name) for name in names if "_" in name or name in named]
    if not words:
        return message
    word = re.compile(rf"(?<![\w./'\"`-])({'|'.join(words)})(?![\w./'\"`(-])")
    return word.sub(lambda found: names[found[0]], message)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Show our own warnings as one line each on stderr, as they come; other ones as Python does."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", LMHeadWarning)
        others = warnings.showwarning

        def show(message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
            if not isinstance(message, LMHeadWarning):
                others(message, category, *where, **more)
                return
            from lmhead.cli import render

            render.note(f"warning: {as_typed(str(message), None, message.names)}")

        warnings.showwarning = show
        yield


def _usage(error: Any, arguments: list[str], path: str) -> str:
    kind = type(error).__name__
    param: Any = getattr(error, "param", None)
    see = f"; see `{path} --help`"
    name = ""
    if param is not None:
        is_option = param.param_type_name == "option"
        name = max(param.opts, key=len) if is_option else param.metavar or param.name.upper()
    if kind == "MissingParameter" and name:
        return f"{name} is missing{see}"
    if kind == "NoSuchOption":
        meant = " or ".join(sorted(error.possibilities or ()))
        return f"there is no option {error.option_name}" + (_meant(meant) if meant else see)
    message = " ".join(str(error.message if name else error.format_message()).split()).rstrip(".")
    if name:
        # "Input should be a valid number, unable to parse string as a number" and the like
        message = message.removeprefix("Value error, ").split(", unable to")[0]
        expected = re.match(r"Input should be (.*)", message)
        got = _given(param.opts, arguments)
        if expected and got is not None:
            return f"{name} is {got}; expected {_plain(expected[1])}{see}"
        return f"{name}: {message}{see}"
    if found := re.match(r"No such command '(.*?)'(?:. Did you mean (.*)\?)?", message):
        meant = (found[2] or "").replace("'", "").replace(",", " or")
        return f"there is no command {found[1]}" + (_meant(meant) if meant else see)
    if found := re.match(r"Got unexpected extra arguments? ?\(?s?\)? ?\((.*)\)", message):
        return f"got more than expected: {found[1]}{see}"
    return message[:1].lower() + message[1:] + see


def _meant(meant: str) -> str:
    return f"; did you mean {meant}?"


def _plain(expected: str) -> str:
    expected = expected.replace("greater than or equal to", "at least")
    return (
        expected.replace("less than or equal to", "at most")
        .replace("a valid integer", "a whole number")
        .replace("valid ", "")
    )


def _given(options: list[str], arguments: list[str]) -> str | None:
    """Return what was typed for an option, if it is one word of its own."""
    for word, value in zip(arguments, [*arguments[1:], None], strict=True):
        if word in options:
            return value
        name, equals, value = word.partition("=")
        if equals and name in options:
            return value
    return None
