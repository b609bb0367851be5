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
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lmhead.body import Additions, Memory
from lmhead.body.joining import joining
from lmhead.errors import BadInput, LMHeadError
from lmhead.generation.asking import next_ids
from lmhead.generation.request import Event, Generation, Request
from lmhead.generation.text import TextStream
from lmhead.head import Head
from lmhead.loading import Model
from lmhead.sampling import Logprobs, Sampler, SequenceState

_ROOM = 64  # columns that keys and values get at a time, so that they are not copied for each

Choose = Callable[[Tensor, Sequence[int]], Sequence[int]]


@dataclass(eq=False)
class _Sequence:
    """A request on its way."""

    id: int
    request: Request
    sampler: Sampler  # one object for all that are sampled alike
    max_tokens: int
    state: SequenceState
    text: TextStream
    logprobs: list[Logprobs] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """How many rows of the body are its own."""
        return 1 if self.request.steering is None else len(self.request.steering.rows)

    @property
    def law(self) -> int:
        """Which sequences are steered as this one is: those of the same number."""
        return 0 if self.request.steering is None else id(self.request.steering.law)

    def result(self, reason: str) -> Generation:
        """Return what has become of it."""
        return Generation(
            self.request.prompt,
            self.text.text,
            tuple(self.request.ids),
            tuple(self.state.output_ids),
            reason,
            self.text.stopped_by,
            tuple(self.logprobs) if self.logprobs else None,
        )


@dataclass(frozen=True)
class _Drawn:
    """What was drawn for one sequence: a token, or the reason why none could be."""

    token: int = -1
    logprobs: Logprobs | None = None
    error: LMHeadError | None = None


class Engine:
    """Continues requests together, a token each per step.

    `batch_size` sequences run at a time; the others wait, first come, first served. `head` is an
    engine to use instead of the model's own head. `choose` makes a token for each of the h
    `[B, d]` of the requests with these ids, in place of their samplers; -1 ends a request.
    """

    def __init__(
        self,
        model: Model,
        head: Head | None = None,
        *,
        batch_size: int = 8,
        choose: Choose | None = None,
    ) -> None:
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise BadInput(f"batch_size is {batch_size!r}; expected a whole number of at least 1")
        self.model, self.head, self.batch_size = model, head or model.head, batch_size
        self._choose = choose
        self._waiting: deque[tuple[int, Request]] = deque()
        self._going: list[_Sequence] = []
        self._memory: Memory | None = None  # of the rows of those that are going, in their order
        self._count = 0

    @property
    def busy(self) -> bool:
        """Whether any request is not at its end."""
        return bool(self._going or self._waiting)

    @property
    def running(self) -> int:
        """How many requests are in the batch."""
        return len(self._going)

    @property
    def waiting(self) -> int:
        """How many requests wait for a place in the batch."""
        return len(self._waiting)

    @property
    def in_turn(self) -> str | None:
        """Why requests to this model run one after the other; None where they run together."""
        return joining(self.model.body).in_turn

    def submit(self, request: Request) -> int:
        """Take a request; return the id that its events will have. It joins at the next step."""
        _check(request)
        self.model.check_ids(list(request.ids))
        self._waiting.append((self._count, request))
        self._count += 1
        return self._count - 1

    def cancel(self, id: int) -> bool:
        """End a request without a result, and forget it; False where it had ended already."""
        for waiting in self._waiting:
            if waiting[0] == id:
                self._waiting.remove(waiting)
                return True
        left = [s for s in self._going if s.id != id]
        found = len(left) < len(self._going)
        if found:
            self._keep(left)
        return found

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Let newcomers in, draw a token for every request, and tell what came of it.

        Where it raises, because a model cannot run, every request in the batch is lost.
        """
        if not self.busy:
            return []
        try:
            h = self._read()
            drawn = self._draw(h)
        except BaseException:
            self._keep([])
            raise
        told = [self._accept(s, one) for s, one in zip(self._going, drawn, strict=True)]
        ended = {event.id for event in told if event.result or event.error}
        if ended:
            self._keep([s for s in self._going if s.id not in ended])
        return told

    def run(self) -> Iterator[Event]:
        """Step until every request is at its end."""
        while self.busy:
            yield from self.step()

    def _read(self) -> Tensor:
        """Run the body on the last tokens and on the newcomers; return h `[R, d]`."""
        parts = []
        if self._going:
            ids = [[s.state.output_ids[-1]] for s in self._going for _ in range(s.rows)]
            h, self._memory = self.model.body.run(
                torch.tensor(ids), self._memory, rows=_additions(self._going)
            )
            parts.append(h[:, -1])
        for group in self._newcomers():
            h, memory = self._prefill(group)
            parts.append(h)
            if self._memory is None:
                self._memory = memory
            else:
                self._memory.join(memory)
            self._going += group
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _newcomers(self) -> list[list[_Sequence]]:
        """Take those from the queue that there is room for, in groups that are read together."""
        free = min(self.batch_size - len(self._going), len(self._waiting))
        if len(self._going) + free > 1 and self.in_turn is not None:
            free = 0 if self._going else 1
        taken: list[_Sequence] = []
        for _ in range(free):
            taken.append(self._started(*self._waiting.popleft(), taken))
        if len(taken) < 2 or joining(self.model.body).pads:
            return [taken] if taken else []
        by_length: dict[int, list[_Sequence]] = {}
        for sequence in taken:
            by_length.setdefault(len(sequence.request.ids), []).append(sequence)
        return list(by_length.values())

    def _prefill(self, group: Sequence[_Sequence]) -> tuple[Tensor, Memory]:
        """Read the prompts of a group, a prompt that occurs twice once; return h `[R, d]`."""
        firsts: dict[tuple[tuple[int, ...], int], _Sequence] = {}
        for s in group:
            firsts.setdefault((tuple(s.request.ids), s.law), s)
        read = list(firsts.values())
        h, memory = self.model.body.prefill(
            [s.request.ids for s in read for _ in range(s.rows)],
            rows=_additions(read),
            room=min(_ROOM, max(s.max_tokens for s in group)),
        )
        if len(read) < len(group):
            starts = dict(zip(firsts, _starts(read), strict=True))
            rows = [starts[tuple(s.request.ids), s.law] + i for s in group for i in range(s.rows)]
            memory.select(rows)
            h = h[rows]
        return h, memory

    def _draw(self, h: Tensor) -> list[_Drawn]:
        """Draw a token for each sequence from h `[R, d]`; those sampled alike in one go."""
        going = self._going
        logits: dict[int, Tensor] = {}  # [V] by place, of those that the head does not answer
        last = list(range(len(going)))  # the row of h that the head answers
        if any(s.request.steering is not None for s in going):
            logits, last = self._steered(h)
        if self._choose is not None:
            tokens = self._choose(h[last], [s.id for s in going])
            for s, token in zip(going, tokens, strict=True):
                if token >= 0:
                    s.state.accept(token)
            return [_Drawn(token) for token in tokens]
        groups: dict[tuple[int, bool], list[int]] = {}
        for place, s in enumerate(going):
            groups.setdefault((id(s.sampler), place in logits), []).append(place)
        if self.head.reads_all and sum(not answered for _, answered in groups) > 1:
            # several samplers, each of which would ask for all logits: W is read once for them
            places = [place for place in range(len(going)) if place not in logits]
            z = self.head(h[[last[place] for place in places]])
            logits |= dict(zip(places, z, strict=True))
            groups = {
                (key, True): groups.get((key, True), []) + groups.get((key, False), [])
                for key, _ in groups
            }
        drawn: dict[int, _Drawn] = {}
        for (_, answered), places in groups.items():
            if answered:
                z = torch.stack([logits[place] for place in places])  # [B, V]
                drawn |= self._ask(places, z, answered=True)
            else:
                rows = [last[place] for place in places]
                whole = len(rows) == len(h)
                drawn |= self._ask(places, h if whole else h[rows], answered=False)
        return [drawn[place] for place in range(len(going))]

    def _steered(self, h: Tensor) -> tuple[dict[int, Tensor], list[int]]:
        """Return the logits `[V]` of the sequences whose steering gives them, and last rows."""
        starts = _starts(self._going)
        alike: dict[int, list[int]] = {}
        for place, s in enumerate(self._going):
            if s.request.steering is not None:
                alike.setdefault(s.law, []).append(place)
        logits: dict[int, Tensor] = {}
        for places in alike.values():
            each = [self._going[place].request.steering for place in places]
            steerings = [steering for steering in each if steering is not None]
            n = len(steerings[0].rows)
            rows = torch.tensor([[starts[place] + i for i in range(n)] for place in places])
            z = steerings[0].answer(self.head, h[rows], steerings)
            if z is not None:
                logits |= dict(zip(places, z, strict=True))
        return logits, [start + s.rows - 1 for start, s in zip(starts, self._going, strict=True)]

    def _ask(self, places: list[int], x: Tensor, answered: bool) -> dict[int, _Drawn]:
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
        except LMHeadError as error:
            if len(places) == 1:
                return {places[0]: _Drawn(error=error)}
            if [len(state.output_ids) for state in states] != before:
                raise
            alone: dict[int, _Drawn] = {}  # one of them cannot go on; the others can
            for i, place in enumerate(places):
                alone |= self._ask([place], x[i : i + 1], answered)
            return alone
        told = logprobs if logprobs is not None else [None] * len(ids)
        return {p: _Drawn(i, row) for p, i, row in zip(places, ids, told, strict=True)}

    def _accept(self, s: _Sequence, drawn: _Drawn) -> Event:
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
        return Event(s.id, text, token, drawn.logprobs, result)

    def _keep(self, left: list[_Sequence]) -> None:
        """Forget all sequences but these, and what the body remembers of them."""
        if not left:
            self._memory = None
        elif self._memory is not None:
            starts = dict(zip((s.id for s in self._going), _starts(self._going), strict=True))
            with torch.inference_mode():
                self._memory.select([starts[s.id] + i for s in left for i in range(s.rows)])
        self._going = left

    def _started(self, id: int, request: Request, beside: Sequence[_Sequence]) -> _Sequence:
        """Begin a sequence; one that is sampled like another shares its sampler."""
        ids = list(request.ids)
        others = (s.sampler for s in (*self._going, *beside) if _alike(s.sampler, request.sampler))
        return _Sequence(
            id=id,
            request=request,
            sampler=next(others, request.sampler),
            max_tokens=self.model.room(ids, request.max_tokens),
            state=request.sampler.start(ids, seed=request.seed, index=request.index),
            text=TextStream(self.model.decode if self._choose is None else _no_text, request.stop),
        )


def _no_text(_ids: list[int]) -> str:
    return ""  # who chooses by h wants ids


def _alike(a: Sampler, b: Sampler) -> bool:
    """Tell whether two samplers do the same but for the seed, which each sequence has its own."""
    return a is b or (
        (a.order, a.vocab_size) == (b.order, b.vocab_size)
        and replace(a.params, seed=None) == replace(b.params, seed=None)
    )


def _starts(sequences: Sequence[_Sequence]) -> list[int]:
    """Return the first row of the body for each sequence."""
    starts, row = [], 0
    for s in sequences:
        starts.append(row)
        row += s.rows
    return starts


def _additions(sequences: Sequence[_Sequence]) -> list[Additions] | None:
    """Return what is added to each row of the body; None where nothing is to any."""
    if all(s.request.steering is None for s in sequences):
        return None
    rows: list[Additions] = []
    for s in sequences:
        rows += [None] if s.request.steering is None else list(s.request.steering.rows)
    return rows if any(rows) else None


def _check(request: Request) -> None:
    if isinstance(request.max_tokens, bool) or not isinstance(request.max_tokens, int):
        raise BadInput(f"max_tokens is {request.max_tokens!r}; expected a whole number")
    if request.max_tokens < 1:
        raise BadInput(f"max_tokens is {request.max_tokens}; expected a whole number of at least 1")
    if "" in request.stop:
        raise BadInput("stop holds an empty text; expected texts of at least one character")
