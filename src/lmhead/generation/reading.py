"""Reading prompts: several short ones in one pass, a long one in pieces, and what it says of them.

Symbols: B prompts, R >= B rows of the body (a guarded prompt has two), T columns, h `[R, T, d]`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lmhead.body import Body, Memory
from lmhead.generation.sequence import Running, additions_of, starts_of
from lmhead.head import Head
from lmhead.sampling import Logprobs
from lmhead.sampling.logprobs import top_logprobs

ROOM = 64  # columns that keys and values get at a time, so that they are not copied for each
LOGITS_AT_ONCE = 1 << 24  # 64 MB of float32

Heed = Callable[[Tensor, Sequence[int]], None]  # is given h `[n, T, d]` of n prompts, and their ids


@dataclass
class Reading:
    """Prompts that are being read together; one that occurs twice is read once."""

    group: list[Running]
    read: list[Running] = field(init=False)  # those whose prompts the body reads
    at: int = 0  # columns read so far
    parts: list[Tensor] = field(default_factory=list)  # h `[R, t, d]`; of the last column alone
    # where nobody asks about the others
    heed: Heed | None = None

    def __post_init__(self) -> None:
        self._firsts: dict[tuple[tuple[int, ...], int, int | None], Running] = {}
        for s in self.group:
            self._firsts.setdefault(_key(s), s)
        self.read = list(self._firsts.values())
        self.prompts = [s.request.ids for s in self.read for _ in range(s.rows)]
        self.columns = max(map(len, self.prompts))  # T
        self.memory: Memory | None = None

    @property
    def _asked(self) -> bool:
        """Whether somebody asks about more than the last column."""
        return self.heed is not None or any(
            s.request.prompt_logprobs is not None for s in self.group
        )

    @property
    def done(self) -> bool:
        """Whether every column was read."""
        return self.at >= self.columns

    def advance(self, body: Body, columns: int | None = None) -> None:
        """Read the next columns; all that are left by default.

        Only prompts of one length are read in pieces.
        """
        end = self.columns if columns is None else min(self.at + columns, self.columns)
        added, whole = additions_of(self.read), self._asked
        if self.memory is None:
            prompts = self.prompts if end == self.columns else [ids[:end] for ids in self.prompts]
            room = min(ROOM, max(s.max_tokens for s in self.group))
            h, self.memory = body.prefill(prompts, rows=added, room=room, whole=whole)
            h = h if whole else h.unsqueeze(1)  # [R, t, d]
        else:
            ids = torch.tensor([ids[self.at : end] for ids in self.prompts])
            h, self.memory = body.run(ids, self.memory, rows=added)
        self.at = end
        if whole:
            self.parts.append(h)
        elif self.done:
            self.parts = [h[:, -1:]]

    def joined(self, head: Head) -> tuple[Tensor, Memory]:
        """Return h `[R, d]` of the last tokens and the memory, for every member of the group.

        Those who asked are told the log-probabilities of their prompts.
        """
        h = self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts, dim=1)
        starts = dict(zip(self._firsts, starts_of(self.read), strict=True))
        if self.heed is not None:
            last_rows = [starts[_key(s)] + s.rows - 1 for s in self.read]
            self.heed(h[last_rows], [s.id for s in self.read])
        known: dict[tuple[tuple[int, ...], int, int | None], list[Logprobs | None]] = {}
        for key, s in self._firsts.items():
            if s.request.prompt_logprobs is not None:
                own = h[starts[key] : starts[key] + s.rows, -len(s.request.ids) :]
                known[key] = prompt_logprobs(head, own.transpose(0, 1), s)
        for s in self.group:
            if s.request.prompt_logprobs is not None:
                s.prompt_logprobs = tuple(known[_key(s)])
        last, memory = h[:, -1], self.memory
        assert memory is not None  # it has read
        if len(self.read) < len(self.group):
            rows = [starts[_key(s)] + i for s in self.group for i in range(s.rows)]
            memory.select(rows)
            last = last[rows]
        return last, memory


def prompt_logprobs(head: Head, h: Tensor, s: Running) -> list[Logprobs | None]:
    """Report on every id of a prompt but the first, from h `[T, n, d]` of its n rows.

    They are those of the model as it is steered for this request, before any sampling filter.
    """
    ids, steering = list(s.request.ids), s.request.steering
    found: list[Logprobs | None] = [None]
    size = max(1, LOGITS_AT_ONCE // head.vocab_size)
    noted = None if steering is None else steering.alone()  # what it notes is of no request
    for start in range(0, len(ids) - 1, size):
        before = h[start : min(start + size, len(ids) - 1)]  # [t, n, d]
        z = None if noted is None else noted.answer(head, before, [noted] * len(before))
        if z is None:
            z = head(before[:, -1])
        targets = ids[start + 1 : start + 1 + len(before)]
        found += top_logprobs(z.float(), targets, s.request.prompt_logprobs or 0)
    return found


def _key(s: Running) -> tuple[tuple[int, ...], int, int | None]:
    return tuple(s.request.ids), s.law, s.request.prompt_logprobs


def short_and_long(
    taken: Sequence[Running], pads: bool, columns: int | None
) -> tuple[list[Reading], list[Reading]]:
    """Sort newcomers into those read at once, in as few passes as go, and those read in pieces."""
    pieces = columns if pads else None  # a memory without a time dimension is not read on from
    long = [s for s in taken if pieces is not None and len(s.request.ids) > pieces]
    short = [s for s in taken if s not in long]
    groups: dict[int, list[Running]] = {}
    for s in short:
        groups.setdefault(0 if pads else len(s.request.ids), []).append(s)
    return [Reading(group) for group in groups.values()], [Reading([s]) for s in long]
