"""What llama.cpp remembers of sequences: rows of a batch that are taken, copied and given back.

All sequences of a body lie in one context, each in cells of its own, so that what a row gives does
not depend on who runs beside it. A row is a number there; to leave a batch is to give the number
back, to join is to stand in another list. When the rows run out, or the cells of one, all go on in
a context of twice the size: llama.cpp takes memory for every cell that could be used.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from threading import RLock

from lmhead.body.llama.library import Context
from lmhead.errors import BadInput, UnsupportedModel

_CELLS, _ROWS = 256, 2  # cells of each row, and rows, to begin with


class Row:
    """One sequence; its number is given back when nobody holds it any more."""

    __slots__ = ("__weakref__", "_back", "id", "length")

    def __init__(self, id: int, back: deque[int], length: int = 0) -> None:
        self.id, self.length, self._back = id, length, back

    def __del__(self) -> None:
        self._back.append(self.id)  # by whatever thread; the next one that reads empties it


class Rows:
    """The sequences of one body, and the context that remembers them."""

    def __init__(self, make: Callable[[int, int], Context], most: int) -> None:
        self._make = make
        self.lock = RLock()  # one pass at a time, and no change of the rows meanwhile
        self.context = make(_CELLS, _ROWS)
        self.most = most  # rows that can be remembered side by side
        self._free = list(range(_ROWS))  # a heap: low numbers first, which lie side by side
        self._back: deque[int] = deque()
        self._used: dict[int, int] = {}  # cells of every sequence that is somebody's

    def new(self, count: int) -> list[Row]:
        """Return empty sequences."""
        self._collect()
        if (need := len(self._used) + count) > self.most:
            raise BadInput(
                f"{need} sequences are to run side by side, but the llama.cpp body remembers at "
                f"most {self.most}; lower batch_size",
                names=["batch_size"],
            )
        rows = self.context.sequences
        while rows < need:
            rows *= 2
        if rows > self.context.sequences:
            self._move(self.context.cells, min(rows, self.most))
        return [self._row(0) for _ in range(count)]

    def copy(self, row: Row) -> Row:
        """Return another sequence that remembers the same."""
        made = self.new(1)[0]
        self.context.copy(row.id, made.id)
        made.length = self._used[made.id] = row.length
        return made

    def grow(self, rows: Sequence[Row], tokens: Sequence[int]) -> None:
        """Make room for so many more tokens of each of these rows."""
        self._collect()
        need, cells = 0, self.context.cells
        for row, more in zip(rows, tokens, strict=True):
            need = max(need, row.length + more)
        while cells < need:
            cells *= 2
        if cells > self.context.cells:
            self._move(cells, self.context.sequences)
        for row, more in zip(rows, tokens, strict=True):
            self._used[row.id] = row.length + more

    def _move(self, cells: int, rows: int) -> None:
        """Go on in a larger context."""
        old, new = self.context, self._make(cells, rows)
        new.take_over(old, [id for id, used in self._used.items() if used])
        for id in range(old.sequences, rows):
            heapq.heappush(self._free, id)
        self.context = new
        old.free()

    def _row(self, length: int) -> Row:
        row = Row(heapq.heappop(self._free), self._back, length)
        self._used[row.id] = length
        return row

    def _collect(self) -> None:
        """Forget the sequences that nobody holds any more."""
        while self._back:
            id = self._back.popleft()
            self.context.forget(id)
            del self._used[id]
            heapq.heappush(self._free, id)


class LlamaState:
    """The memory of a batch that llama.cpp runs: one row of `Rows` for every row."""

    def __init__(self, rows: Rows, held: list[Row]) -> None:
        self._rows, self.held = rows, held
        self.each = 1  # rows of the memory for every row of the batch, one below the other

    @property
    def length(self) -> int:
        """How many tokens the longest row has."""
        return max((row.length for row in self.held), default=0)

    def select(self, rows: Sequence[int]) -> None:
        """Let row i be what row `rows[i]` was; a row may be taken more than once."""
        if self.each > 1:
            rows = [row * self.each + i for row in rows for i in range(self.each)]
        taken: set[int] = set()
        held = []
        with self._rows.lock:
            for row in rows:
                held.append(self._rows.copy(self.held[row]) if row in taken else self.held[row])
                taken.add(row)
        self.held = held

    def join(self, other: "LlamaState") -> None:
        """Put the rows of `other` below those of this batch; `other` is used up."""
        if not isinstance(other, LlamaState) or other._rows is not self._rows:
            raise UnsupportedModel(
                f"the memory to join is a {type(other).__name__} of another body; expected two "
                "memories of one model"
            )
        self.held += other.held
        other.held = []
