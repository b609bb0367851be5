"""The command line: one file per command; `render.py` alone knows how results look."""

import sys


def main() -> None:
    """Run the command line; the entry point of the `lmhead` program."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code: 0, 1 (failure), 2 (usage), 130 (Ctrl-C)."""
    debug = "--debug" in arguments
    try:
        return _dispatch([word for word in arguments if word != "--debug"])
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output is gone; keep the interpreter from flushing into the void.
        import os

        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug:
            raise
        return _explain(error)


def _dispatch(arguments: list[str]) -> int:
    import typer

    from lmhead.cli.app import app

    command = typer.main.get_command(app)
    try:
        code = command.main(args=arguments, prog_name="lmhead", standalone_mode=False)
        sys.stdout.flush()
    except typer.Abort:
        return 130
    return code if isinstance(code, int) else 0


def _explain(error: Exception) -> int:
    from lmhead.errors import LMHeadError

    show = getattr(error, "show", None)  # the parser's own usage errors print themselves
    if show is not None:
        show()
        return int(getattr(error, "exit_code", 2))
    if isinstance(error, LMHeadError):
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    print(  # noqa: T201
        f"error: {type(error).__name__}: {error} (unexpected; run again with --debug for the "
        "traceback, and please report it)",
        file=sys.stderr,
    )
    return 1
