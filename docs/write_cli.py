"""Write docs/cli.md from the help of every command: `make docs`. A test compares them."""

import os
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("cli.md")
WIDTH = 100
OPENING = """\
# The command line

The help of every command. `make docs` generates this page from `--help`; edit the commands instead.

Results go to stdout, everything else to stderr. The exit code is 0 for success, 1 for a failure, 2
for wrong usage and 130 after Ctrl-C. `lmhead --debug COMMAND ...` shows the traceback of an error.
`lmhead --install-completion` sets up shell completion for commands, options and models.
Models are kept in `~/.cache/lmhead`, or in the folder that `LMHEAD_CACHE` names.
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """Return the page as it should be."""
    parts = [OPENING]
    for path in paths():
        title = " ".join(("lmhead", *path))
        parts.append(f"## {title}\n\n```text\n{help_of(path)}\n```\n")
    return "\n".join(parts)


def paths(group: Any = None, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of every command, groups first."""
    from lmhead.cli.app import command

    group = command() if group is None else group
    yield before
    for name, part in getattr(group, "commands", {}).items():
        yield from paths(part, (*before, name))


def help_of(path: tuple[str, ...]) -> str:
    """Return what `lmhead ... --help` prints on a terminal without colours."""
    from lmhead.cli import run

    said = StringIO()
    with redirect_stdout(said):
        run([*path, "--help"])
    return "\n".join(line.rstrip() for line in said.getvalue().strip("\n ").splitlines())


if __name__ == "__main__":
    # Read when typer is imported, which is why nothing of lmhead is imported above.
    os.environ |= {"COLUMNS": str(WIDTH), "TERMINAL_WIDTH": str(WIDTH), "NO_COLOR": "1"}
    if "--check" in sys.argv[1:]:
        sys.exit(PAGE.read_text(encoding="utf-8") != page())
    main()
