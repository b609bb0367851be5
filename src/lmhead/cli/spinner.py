"""A spinner that a terminal shows until a command prints something.

Importing torch takes seconds, and people press Ctrl-C when nothing happens. The spinner is drawn on
stderr, on terminals only, and the first output removes it.
"""

import os
import sys
import threading
import time
from types import TracebackType
from typing import Any, TextIO, cast

_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_AFTER = 0.3  # seconds; anything faster needs no spinner
_ERASE = "\r\x1b[K"


class Spinner:
    """Draw the spinner while the block runs: `with Spinner(): ...`."""

    def __init__(self) -> None:
        self._stdout, self._stderr = sys.stdout, sys.stderr
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._drawn = False

    def __enter__(self) -> "Spinner":
        if not self._stderr.isatty() or os.environ.get("TERM") == "dumb":
            self._over.set()
            return self
        sys.stdout = cast(TextIO, _First(self._stdout, self))
        sys.stderr = cast(TextIO, _First(self._stderr, self))
        threading.Thread(target=self._draw, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the spinner for good."""
        with self._lock:
            if self._over.is_set():
                return
            self._over.set()
            sys.stdout, sys.stderr = self._stdout, self._stderr
            if self._drawn:
                self._stderr.write(_ERASE)
                self._stderr.flush()

    def _draw(self) -> None:
        started, frame = time.monotonic(), 0
        while not self._over.wait(_AFTER if frame == 0 else 0.1):
            with self._lock:
                if self._over.is_set():
                    return
                seconds = time.monotonic() - started
                elapsed = f" {seconds:.0f} s" if seconds >= 2 else ""
                sign = _FRAMES[frame % len(_FRAMES)] if _unicode(self._stderr) else "..."
                self._stderr.write(f"{_ERASE}{sign} working{elapsed}")
                self._stderr.flush()
                self._drawn = True
            frame += 1


class _First:
    """A stream that removes the spinner before anything is written to it."""

    def __init__(self, stream: TextIO, spinner: Spinner) -> None:
        self._stream, self._spinner = stream, spinner

    def write(self, text: str) -> int:
        self._spinner.remove()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        if name in ("buffer", "writelines"):  # a way to write past `write`
            self._spinner.remove()
        return getattr(self._stream, name)


def _unicode(stream: TextIO) -> bool:
    return "utf" in (stream.encoding or "").lower()
