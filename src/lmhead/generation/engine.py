"""The engine: requests join and leave a running batch between two steps.

    engine = Engine(model)
    first = engine.submit(Request(model.encode("Once upon a time"), sampler))
    while engine.busy:
        for event in engine.step():
            print(event.id, event.text)

Each request has its own sampler, seed, stop texts, limits and steering, and draws with its own
generator: what it gives does not depend on who runs beside it, but for rounding (a product of
several rows rounds differently from that of one, by about 1e-6 of its size). There are no threads
here; whoever has several lets one of them own the engine.

Symbols: B sequences that are going, R >= B rows of the body (a guarded sequence has two),
h `[R, d]` what enters the head.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lmhead.body import Memory
from lmhead.body.joining import joining
from lmhead.errors import BadInput
from lmhead.generation.next_ids import next_ids
from lmhead.generation.reading import Heed, Reading, short_and_long
from lmhead.generation.request import Event, Request
from lmhead.generation.sequence import (
    Drawn,
    Running,
    additions_of,
    alike,
    check_request,
    no_text,
    starts_of,
)
from lmhead.generation.text import TextStream
from lmhead.head import Head
from lmhead.head.rowwise import rowwise
from lmhead.loading import Model
from lmhead.sampling import Logprobs

Choose = Callable[[Tensor, Sequence[int]], Sequence[int]]


class Engine:
    """Continues requests together, one token each per step.

    `batch_size` sequences run at a time; the others wait, first come, first served. `head` is an
    engine to use instead of the model's own head. `choose` picks a token for each of the h `[B, d]`
    of the requests with these ids, in place of their samplers; -1 ends a request. `read` receives
    the h `[n, T, d]` of prompts that were read, each at the end of its row, and their ids.
    `prefill`: prompts longer than this many tokens are read in pieces of that size, one per step,
    so that requests that are already running need not wait; shorter ones are read at once.
    """

    def __init__(
        self,
        model: Model,
        head: Head | None = None,
        *,
        batch_size: int = 8,
        choose: Choose | None = None,
        read: Heed | None = None,
        prefill: int | None = None,
    ) -> None:
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise BadInput(f"batch_size is {batch_size!r}; expected a whole number of at least 1")
        self.model, self.head, self.batch_size = model, head or model.head, batch_size
        self._choose, self._heed, self._prefill = choose, read, prefill
        self._waiting: deque[tuple[int, Request]] = deque()
        self._going: list[Running] = []
        self._reading: list[Reading] = []  # long prompts; they have a place in the batch
        self._memory: Memory | None = None  # of the rows of those that are going, in their order
        self._count = 0

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._going or self._reading or self._waiting)

    @property
    def running(self) -> int:
        """How many requests are in the batch."""
        return len(self._going) + len(self._reading)

    @property
    def waiting(self) -> int:
        """How many requests are waiting for a place in the batch."""
        return len(self._waiting)

    @property
    def ids(self) -> list[int]:
        """The ids of all unfinished requests."""
        read = [s.id for reading in self._reading for s in reading.group]
        return [s.id for s in self._going] + read + [id for id, _ in self._waiting]

    @property
    def in_turn(self) -> str | None:
        """Why requests to this model run one after the other; None if they run together."""
        return joining(self.model.body).in_turn

    def check(self, request: Request) -> None:
        """Raise what `submit` would raise."""
        check_request(request)
        self.model.check_ids(list(request.ids))

    def submit(self, request: Request) -> int:
        """Accept a request, which joins at the next step; return the id that its events have."""
        self.check(request)
        self._waiting.append((self._count, request))
        self._count += 1
        return self._count - 1

    def cancel(self, id: int) -> bool:
        """End a request without a result and forget it; False if it had already ended."""
        for waiting in self._waiting:
            if waiting[0] == id:
                self._waiting.remove(waiting)
                return True
        for reading in self._reading:
            if reading.group[0].id == id:
                self._reading.remove(reading)
                return True
        left = [s for s in self._going if s.id != id]
        found = len(left) < len(self._going)
        if found:
            self._keep(left)
        return found

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Admit waiting requests, draw a token for every running one, and return the events.

        A prompt that is read in pieces has no event until all of it has been read. If this raises
        because the model cannot run, every request in the batch is lost.
        """
        if not self.busy:
            return []
        events: list[Event] = []
        try:
            # the head multiplies row by row where the body does
            with rowwise(getattr(self.model.body, "rowwise", False)):
                h = self._read(events)
                drawn = self._draw(h) if self._going else []
        except BaseException:
            self._keep([])
            raise
        events += [self._accept(s, one) for s, one in zip(self._going, drawn, strict=True)]
        ended = {event.id for event in events if event.result or event.error}
        if ended:
            self._keep([s for s in self._going if s.id not in ended])
        return events

    def run(self) -> Iterator[Event]:
        """Step until every request has finished."""
        while self.busy:
            yield from self.step()

    def _read(self, events: list[Event]) -> Tensor:
        """Run the body on the last tokens and on the newcomers; return h `[R, d]`.

        `events` learns of prompts that could not be read, where anybody else is left.
        """
        parts = []
        if self._going:
            ids = [[s.state.output_ids[-1]] for s in self._going for _ in range(s.rows)]
            h, self._memory = self.model.body.run(
                torch.tensor(ids), self._memory, rows=additions_of(self._going)
            )
            parts.append(h[:, -1])
        short, long = self._newcomers()
        self._reading += long
        failed: list[tuple[Running, Exception]] = []
        for reading in short + self._reading[:1]:
            parts += self._read_prompts(reading, failed)
        if failed and (self._choose is not None or not (self._going or self._reading)):
            raise failed[0][1]
        events += [Event(s.id, error=error) for s, error in failed]
        return torch.cat(parts) if len(parts) > 1 else parts[0] if parts else torch.empty(0)

    def _newcomers(self) -> tuple[list[Reading], list[Reading]]:
        """Take those from the queue that there is room for: read at once, or in pieces."""
        free = min(self.batch_size - self.running, len(self._waiting))
        if self.running + free > 1 and self.in_turn is not None:
            free = 0 if self.running else 1
        taken: list[Running] = []
        for _ in range(free):
            taken.append(self._started(*self._waiting.popleft(), taken))
        if not taken:
            return [], []
        several = len(taken) > 1 or self._prefill is not None
        return short_and_long(taken, not several or joining(self.model.body).pads, self._prefill)

    def _read_prompts(
        self, reading: Reading, failed: list[tuple[Running, Exception]]
    ) -> list[Tensor]:
        """Read some prompts, or a piece of one; those at their end join, with h `[R, d]`."""
        long = any(reading is one for one in self._reading)
        reading.heed = self._heed
        try:
            reading.advance(self.model.body, self._prefill if long else None)
            if not reading.done:
                return []
            h, memory = reading.joined(self.head)
        except Exception as error:
            if long:
                self._reading.remove(reading)
            if len(reading.group) == 1:
                failed.append((reading.group[0], error))
                return []
            alone = [self._read_prompts(Reading([s]), failed) for s in reading.group]
            return [h for parts in alone for h in parts]
        if long:
            self._reading.remove(reading)
        if self._memory is None:
            self._memory = memory
        else:
            self._memory.join(memory)
        self._going += reading.group
        return [h]

    def _draw(self, h: Tensor) -> list[Drawn]:
        """Draw a token for each sequence from h `[R, d]`; those sampled alike in one go."""
        going = self._going
        logits: dict[int, Tensor] = {}  # [V] by place, of those that the head does not answer
        drawn: dict[int, Drawn] = {}
        last = list(range(len(going)))  # the row of h that the head answers
        if any(s.request.steering is not None for s in going):
            logits, last = self._steered(h, drawn)
        if self._choose is not None:
            tokens = self._choose(h[last], [s.id for s in going])
            for s, token in zip(going, tokens, strict=True):
                if token >= 0:
                    s.state.accept(token)
            return [Drawn(token) for token in tokens]
        groups: dict[tuple[int, bool], list[int]] = {}
        for place, s in enumerate(going):
            if place not in drawn:
                groups.setdefault((id(s.sampler), place in logits), []).append(place)
        if self.head.reads_all and sum(not answered for _, answered in groups) > 1:
            # several samplers, each of which would ask for all logits: W is read once for them
            places = [place for (_, answered), at in groups.items() if not answered for place in at]
            z = self.head(h[[last[place] for place in places]])
            logits |= dict(zip(places, z, strict=True))
            groups = {
                (key, True): groups.get((key, True), []) + groups.get((key, False), [])
                for key, _ in groups
            }
        for (_, answered), places in groups.items():
            if answered:
                z = torch.stack([logits[place] for place in places])  # [B, V]
                drawn |= self._ask(places, z, answered=True)
            else:
                rows = [last[place] for place in places]
                whole = len(rows) == len(h)
                drawn |= self._ask(places, h if whole else h[rows], answered=False)
        return [drawn[place] for place in range(len(going))]

    def _steered(self, h: Tensor, drawn: dict[int, Drawn]) -> tuple[dict[int, Tensor], list[int]]:
        """Return the logits `[V]` of the sequences whose steering gives them, and last rows.

        `drawn` learns of those whose steering fails.
        """
        starts = starts_of(self._going)
        by_law: dict[int, list[int]] = {}
        for place, s in enumerate(self._going):
            if s.request.steering is not None:
                by_law.setdefault(s.law, []).append(place)
        logits: dict[int, Tensor] = {}
        for places in by_law.values():
            each = [self._going[place].request.steering for place in places]
            steerings = [steering for steering in each if steering is not None]
            n = len(steerings[0].rows)
            rows = torch.tensor([[starts[place] + i for i in range(n)] for place in places])
            try:
                z = steerings[0].answer(self.head, h[rows], steerings)
            except Exception as error:
                drawn |= {place: Drawn(error=error) for place in places}
                continue
            if z is not None:
                logits |= dict(zip(places, z, strict=True))
        return logits, [start + s.rows - 1 for start, s in zip(starts, self._going, strict=True)]

    def _ask(self, places: list[int], x: Tensor, answered: bool) -> dict[int, Drawn]:
        """Draw for sequences that are sampled alike, from h `[B, d]` or from logits `[B, V]`."""
        sampler = self._going[places[0]].sampler
        states = [self._going[place].state for place in places]
        before = [len(state.output_ids) for state in states]
        logprobs: tuple[Logprobs, ...] | None
        try:
            if answered:
                step = sampler.step(x, states)
                ids, logprobs = step.ids.tolist(), step.logprobs
            else:
                ids, logprobs = next_ids(self.head, x, sampler, states)
        except Exception as error:  # a grammar's own, for one; whatever it is, it is theirs
            if len(places) == 1:
                return {places[0]: Drawn(error=error)}
            if [len(state.output_ids) for state in states] != before:
                raise
            alone: dict[int, Drawn] = {}  # one of them cannot go on; the others can
            for i, place in enumerate(places):
                alone |= self._ask([place], x[i : i + 1], answered)
            return alone
        rows_of_logprobs = logprobs if logprobs is not None else [None] * len(ids)
        return {p: Drawn(i, row) for p, i, row in zip(places, ids, rows_of_logprobs, strict=True)}

    def _accept(self, s: Running, drawn: Drawn) -> Event:
        """Let a sequence grow by the token that was drawn for it."""
        if drawn.error is not None:
            return Event(s.id, error=drawn.error)
        token = drawn.token
        if drawn.logprobs is not None:
            s.logprobs.append(drawn.logprobs)
        stops = token < 0 or token in s.request.sampler.params.stop_ids
        text = "" if stops else s.text.push(token)
        stops = stops or s.text.stopped_by is not None or s.state.finished
        result = None
        if stops or len(s.state.output_ids) >= s.max_tokens:
            text += s.text.finish()
            stops = stops or s.text.stopped_by is not None
            result = s.result("stop" if stops else "length")
        first = len(s.state.output_ids) <= 1
        read = s.prompt_logprobs if first else None
        return Event(s.id, text, token, drawn.logprobs, result, prompt_logprobs=read)

    def _keep(self, left: list[Running]) -> None:
        """Forget all sequences but these, and what the body remembers of them."""
        if not left:
            self._memory = None
        elif self._memory is not None:
            starts = dict(zip((s.id for s in self._going), starts_of(self._going), strict=True))
            with torch.inference_mode():
                self._memory.select([starts[s.id] + i for s in left for i in range(s.rows)])
        self._going = left

    def _started(self, id: int, request: Request, beside: Sequence[Running]) -> Running:
        """Begin a sequence; one that is sampled like another shares its sampler."""
        ids = list(request.ids)
        others = (s.sampler for s in (*self._going, *beside) if alike(s.sampler, request.sampler))
        return Running(
            id=id,
            request=request,
            sampler=next(others, request.sampler),
            max_tokens=self.model.room(ids, request.max_tokens),
            state=request.sampler.start(ids, seed=request.seed, index=request.index),
            text=TextStream(self.model.decode if self._choose is None else no_text, request.stop),
        )
