"""Guarded texts that stay whole: none may repeat itself much more than the unsteered one does.

A limit at every token does not prevent loops: a small push, always in the same direction, can lead
a text into one, and there the model stays by itself. Whether that happens shows only in the text.
So each text is written next to the unsteered one and compared with it; if it has lost too many of
its distinct pairs, it is written again with half the vectors, and at last without them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lmhead.generation.api import cut_short, warn_of_cut
from lmhead.generation.engine import Engine
from lmhead.generation.request import Generation, Request
from lmhead.head import Head
from lmhead.loading import Model
from lmhead.steer.bound.auditing import distinct_2
from lmhead.steer.bound.guarding import Guard, GuardLog

LEAST = 0.8  # of the distinct-2 of the unsteered text
SHARES = (1.0, 0.5, 0.25, 0.125, 0.0625)  # of the vectors, one after the other; then none of them


@dataclass(frozen=True, eq=False)
class Kept:
    """A guarded text that repeats itself little more than the unsteered one.

    - `share`: of the vectors; 1 is all of them, 0 none, and then the text is the unsteered one.
    - `distinct_2`: of the unsteered text, and of this one.
    - `log`: what the guard noted while this text was written.
    """

    generation: Generation
    share: float
    distinct_2: tuple[float, float]
    log: GuardLog

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object: the guard's figures, the share, and both distinct-2."""
        pair = dict(zip(("unsteered", "steered"), self.distinct_2, strict=True))
        return {**self.log.to_dict(), "share": self.share, "distinct_2": pair}


def kept(
    model: Model,
    asked: Sequence[Request],
    guard: Guard,
    head: Head | None = None,
    *,
    batch_size: int = 8,
) -> Iterator[tuple[int, Kept]]:
    """Answer requests under a guard; yield the place and the text of each as soon as it is there.

    At least `LEAST` of the distinct-2 of the unsteered text is kept, as both were written.
    """
    engine = Engine(model, head, batch_size=batch_size)
    guards = [
        replace(guard, added={layer: share * v for layer, v in guard.added.items()})
        for share in SHARES
    ]
    going: dict[int, tuple[int, int | None, Guard | None]] = {}  # place, which share, its guard
    plain: dict[int, Generation] = {}
    steered: dict[int, tuple[Generation, int, Guard]] = {}
    cut = 0

    def submit(place: int, turn: int | None) -> None:
        own = None if turn is None else guards[turn].alone()
        going[engine.submit(replace(asked[place], steering=own))] = (place, turn, own)

    for place in range(len(asked)):
        submit(place, None)
        submit(place, 0)
    for event in engine.run():
        if event.error is not None:
            raise event.error
        if event.result is None:
            continue
        place, turn, own = going.pop(event.id)
        if turn is None or own is None:
            plain[place] = event.result
        else:
            steered[place] = (event.result, turn, own)
        if place not in plain or place not in steered:
            continue
        result, turn, own = steered.pop(place)
        first, now = distinct_2(plain[place].ids), distinct_2(result.ids)
        if now >= LEAST * first:
            found = Kept(result, SHARES[turn], (first, now), own.log)
        elif turn + 1 < len(SHARES):
            submit(place, turn + 1)
            continue
        else:
            found = Kept(plain[place], 0.0, (first, first), GuardLog())
        del plain[place]
        cut += cut_short(asked[place], found.generation)
        yield place, found
    warn_of_cut(cut, asked)
