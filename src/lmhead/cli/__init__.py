"""The command line: one file per command; `render.py` alone knows how results look."""

import atexit
import os
import sys
from contextlib import suppress
from threading import enumerate as enumerate_threads
from typing import Any, NoReturn

OURS = "lmhead-"  # what the names of our threads begin with


def main() -> None:
    """Run the command line; the entry point of the `lmhead` program."""
    from lmhead.cli.starting import search_rarely

    search_rarely()
    end(run(sys.argv[1:]))


def end(code: int) -> NoReturn:
    """Exit, also if a thread of ours is still computing: Ctrl-C does not wait for a model to load.

    Python's own way out would tear such a thread out of the middle of C++, which aborts the process
    (and leaves a core file).
    """
    if not any(thread.daemon and thread.name.startswith(OURS) for thread in enumerate_threads()):
        sys.exit(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the reader is gone, or it was closed
            stream.flush()
    os._exit(code)


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code: 0, 1 (failure), 2 (usage), 130 (Ctrl-C)."""
    from lmhead.cli.spinner import Spinner

    debug = "--debug" in arguments
    words = [word for word in arguments if word != "--debug"]
    with Spinner():
        try:
            return _dispatch(words) if not _is_one_of_many() else _dispatch_together(words)
        except KeyboardInterrupt:
            return 130
        except BrokenPipeError:
            # The reader of our output is gone; keep the interpreter from flushing into the void.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        except Exception as error:
            if debug:
                raise
            return _explain(error, words)
        except BaseException as error:
            if debug or type(error).__name__ != "PanicException":  # Rust code that gave up
                raise
            return _explain(RuntimeError(f"a library gave up: {error}"), words)


def _is_one_of_many() -> bool:
    """Tell whether torchrun may have started us; `launch` looks closer."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def _dispatch_together(words: list[str]) -> int:
    from lmhead.cli.launch import is_launched, together

    if not is_launched():
        return _dispatch(words)
    with together(words):
        return _dispatch(words)


def _dispatch(arguments: list[str]) -> int:
    import typer

    from lmhead.cli.explain import one_line_errors

    try:
        with one_line_errors():
            code = _command(arguments).main(
                args=arguments, prog_name="lmhead", standalone_mode=False
            )
        sys.stdout.flush()
    except typer.Abort:
        return 130
    return code if isinstance(code, int) else 0


def _command(arguments: list[str]) -> Any:
    """Return the parser: with the one command that is called, or whole, to show or to suggest."""
    from lmhead.cli.app import COMMANDS, command

    completing = "_LMHEAD_COMPLETE" in os.environ
    names = [word for word in arguments if not word.startswith("-")]
    name = names[0] if names else None
    asks_for_all = not arguments or arguments in (["-h"], ["--help"])
    return command(name if name in COMMANDS else None, brief=asks_for_all and not completing)


def _explain(error: Exception, arguments: list[str]) -> int:
    from lmhead.cli.explain import explain
    from lmhead.cli.plain import plain

    if type(error).__name__ == "NoArgsIsHelpError":  # a group without its command: its help
        error.show()  # type: ignore[attr-defined]
        return 2
    called = _command(arguments)
    path = ["lmhead"]
    for word in arguments:
        if word not in getattr(called, "commands", {}):
            break
        called = called.commands[word]
        path.append(word)
    line, code = explain(error, called, " ".join(path), arguments)
    print(f"error: {plain(line)}", file=sys.stderr)  # noqa: T201
    return code
