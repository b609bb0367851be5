"""How results look: tables for people, JSON for programs, bars on stderr while one waits."""

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from lmhead.cli.plain import plain, plain_json
from lmhead.progress import Advance

_BLOCKS = " ▏▎▍▌▋▊▉█"
_EVERY = 10.0  # seconds between two lines of a step, where there is no terminal
_FORESEEN = 0.01  # of a step: before that, the time left is anybody's guess
_SHORTEST = 8  # letters that are left of a text at least


@cache
def out() -> Console:
    """Return the console for results."""
    width = None if sys.stdout.isatty() else 120  # a pipe has no width of its own
    return Console(highlight=False, width=width)


@cache
def err() -> Console:
    """Return the console for everything else."""
    return Console(stderr=True, highlight=False)


def print_json(result: Any) -> None:
    """Print one JSON object; NaN and infinity are errors, for they are not JSON."""
    text = json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False)
    sys.stdout.write(plain_json(text) + "\n")


def say(message: str) -> None:
    """Print a line of the result, as it is: brackets in it are no markup."""
    out().print(Text(plain(message)), soft_wrap=True)


def note(message: str) -> None:
    """Say something beside the result, on stderr."""
    err().print(Text(plain(message), style="dim"), soft_wrap=True)


@contextmanager
def progress(title: str, total: int | None = None) -> Iterator[Advance]:
    """Show a bar on a terminal, or plain lines where a step takes more than a second."""
    started = time.monotonic()
    if not err().is_terminal:
        with _waiting(title, unknown=total is None):
            yield _lines(title, total, started)
        if (took := time.monotonic() - started) > 1:
            err().print(Text(plain(f"{title}: done in {took:.1f} s")))
        return
    from rich import progress as bars

    name = bars.TextColumn("{task.description}", markup=False)
    columns: list[bars.ProgressColumn] = [name, bars.BarColumn()]
    if total is None:
        columns = [bars.SpinnerColumn(), name, bars.TimeElapsedColumn()]
    elif total > 10_000_000:  # bytes, or as good as
        columns += [bars.DownloadColumn(), bars.TimeRemainingColumn()]
    else:
        columns += [bars.MofNCompleteColumn(), bars.TimeRemainingColumn()]
    with bars.Progress(*columns, console=err(), transient=True) as shown:
        task = shown.add_task(plain(title), total=total)
        yield lambda n: shown.advance(task, n)


def _lines(title: str, total: int | None, started: float) -> Advance:
    """Return what prints, every ten seconds, how far a step is and how long it will take."""
    done, shown_at = 0, started

    def advance(n: int) -> None:
        nonlocal done, shown_at
        done += n
        now = time.monotonic()
        if total and 0 < done < total and now - shown_at >= _EVERY:
            shown_at = now
            left = (now - started) * (total - done) / done
            told = f"{title}: {done / total:.0%}"
            if done >= total * _FORESEEN:
                told += f", about {left:.0f} s left"
            err().print(Text(plain(told)))

    return advance


@contextmanager
def _waiting(title: str, unknown: bool) -> Iterator[None]:
    """Name a step of unknown length (a wait for another process) while it lasts."""
    timer = threading.Timer(1.0, lambda: err().print(Text(plain(f"{title} ..."))))
    timer.daemon = True
    if unknown:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


class _Fitted(Table):
    """A table that loses bars first and letters of its texts second; its numbers stay whole."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._excess(console, options) > 0:  # to measure takes milliseconds
            self._give_way(console, options)
        return super().__rich_console__(console, options)

    def _give_way(self, console: Console, options: ConsoleOptions) -> None:
        for column in reversed(self.columns):
            if _is_bar(column) and self._excess(console, options) > 0:
                self.columns.remove(column)
        if all(column.no_wrap for column in self.columns):  # else one of them gives way
            for column in self.columns:
                excess = self._excess(console, options)
                if excess > 0 and column.justify == "left":
                    cells = [column.header, *column.cells]
                    width = max(console.measure(cell).maximum for cell in cells)
                    column.max_width = max(width - excess, _SHORTEST)
            while len(self.columns) > 2 and self._excess(console, options) > 0:
                del self.columns[-1]

    def _excess(self, console: Console, options: ConsoleOptions) -> int:
        unlimited = options.update(width=10_000)
        return console.measure(self, options=unlimited).maximum - options.max_width


def _is_bar(column: Column) -> bool:
    cells = (
        c.plain if isinstance(c, Text) else Text.from_markup(str(c)).plain for c in column.cells
    )
    return not column.header and set("".join(cells)) <= set(_BLOCKS)


def table(*columns: str, title: str | None = None, left: int = 1) -> Table:
    """Return an empty table whose first `left` columns are text and the others numbers.

    Give a bar no name; narrow terminals leave it out.
    """
    result = _Fitted(title=title, box=SIMPLE_HEAD, title_justify="left", title_style="bold")
    result.show_edge = result.pad_edge = False
    for i, name in enumerate(columns):
        result.add_column(name, justify="left" if i < left else "right", no_wrap=True)
    return result


class Facts:
    """A list of names and values under a title."""

    def __init__(self, title: str) -> None:
        self._title = Text(plain(title), style="bold")
        self._table = Table(box=None, show_header=False)
        self._table.add_column(style="dim", no_wrap=True)
        self._table.add_column()

    def __call__(self, name: str, value: str) -> None:
        self._table.add_row(Text(plain(name)), Text(plain(value)))

    def print(self) -> None:
        """Print it on stdout."""
        out().print(self._title, soft_wrap=True)  # a title of the table is cut to its width
        out().print(self._table)


def bar(share: float, width: int = 16) -> str:
    """Draw `share` (0 to 1) as a bar of eighth blocks; anything above 0 is seen."""
    eighths = max(round(share * width * 8), 1 if share > 0 else 0)
    full, part = divmod(eighths, 8)
    return "█" * full + (_BLOCKS[part] if part else "")


def token(text: str) -> Text:
    """Quote a token so that spaces and control characters are seen."""
    return Text(plain_json(json.dumps(text, ensure_ascii=False)), style="bold")


def shown(text: str) -> str:
    """Quote a token for the head of a column, where brackets must be no markup."""
    return escape(token(text).plain)


def running(text: str) -> str:
    """Show a token within a running text: its line ends and spaces stay what they are."""
    return plain(text)


def heat(share: float) -> str:
    """Return the style of a share from 0 (plain) to 1 (white on red)."""
    if share <= 0.02:
        return ""
    level = min(1.0, share)
    red, other = round(90 + 130 * level), round(70 - 50 * level)
    return f"white on rgb({red},{other},{other})" if level > 0.1 else f"rgb({red + 60},110,100)"


def percent(share: float) -> str:
    """Write a share with enough figures to tell a small one from none."""
    if 0 < share < 0.0001:
        return f"{share * 100:.1e} %"
    return f"{share * 100:.2f} %"


def count(number: int) -> str:
    """Write a count with separators."""
    return f"{number:,}"


def plural(number: int, noun: str) -> str:
    """Write a count with its noun: "1 text", "2,000 texts"."""
    return f"{number:,} {noun}" + "s" * (number != 1)


def size(nbytes: float) -> str:
    """Write bytes in the unit that fits, powers of 1,000."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"
