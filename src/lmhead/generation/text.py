"""From ids to text while they come: no character is shown in halves, no stop string at all."""

from collections.abc import Callable, Sequence

_UNFINISHED = "�"  # what a decoder writes for bytes that are no whole character


class TextStream:
    """Decodes ids one by one, and gives only text that later ids cannot change.

    Decoding is not additive (bytes of one character, leading spaces), so the text of an id is
    what it adds behind the ids before it.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode, self._stop = decode, tuple(stop)
        self._ids: list[int] = []
        self._start = self._read = 0  # the window that is decoded, and what of it is text already
        self._held = ""  # text that may yet turn out to begin a stop string
        self.text = ""  # all that was given out
        self.stopped_by: str | None = None

    def push(self, token_id: int) -> str:
        """Take the next id; return the text that is certain now."""
        self._ids.append(token_id)
        before, after = self._window()
        if after.endswith(_UNFINISHED) or len(after) <= len(before):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return self._release(after[len(before) :])

    def finish(self) -> str:
        """Return what was held back, unfinished characters included."""
        if self.stopped_by is not None:
            return ""
        before, after = self._window()
        new = self._release(after[len(before) :])
        rest, self._held = self._held, ""
        if self.stopped_by is None:
            self.text += rest
            new += rest
        return new

    def _window(self) -> tuple[str, str]:
        window = self._ids[self._start :]
        return self._decode(window[: self._read - self._start]), self._decode(window)

    def _release(self, new: str) -> str:
        text = self._held + new
        found = (
            min((i, s) for s in self._stop if (i := text.find(s)) >= 0)
            if any(s in text for s in self._stop)
            else None
        )
        if found is not None:
            text, self.stopped_by, self._held = text[: found[0]], found[1], ""
        else:
            keep = max((_overlap(text, s) for s in self._stop), default=0)
            self._held = text[len(text) - keep :]
            text = text[: len(text) - keep]
        self.text += text
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop`."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
