"""Statements that are true or false: naming them, and splitting them by seed.

A row is one text with a label (1 true, 0 false, None unlabelled). A pair is a prompt with a true
and a false ending. Rows that belong together (the endings of one prompt, the answers to one
question, a text that is there twice) share a group, and no split takes a group apart.
"""

import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from lmhead.errors import BadInput

_MARKS = tuple(".!?…。！？\"'”’)]")


@dataclass(frozen=True)
class Row:
    """One text; `label` is 1 (true), 0 (false) or None (unlabelled).

    `prompt` is how the text begins where that is given (a question, the prompt of a pair): it is
    no part of what may be true or false. `about` is what rows that belong together share, where
    the file says so.
    """

    text: str
    label: int | None = None
    prompt: str = ""
    about: str = ""

    @property
    def group(self) -> str:
        """What the rows that belong together share: a split never takes them apart."""
        return self.about or self.prompt or self.text

    @property
    def sha256(self) -> str:
        """What a card remembers the row by: the hash of its text."""
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True)
class Pair:
    """A prompt, and a true and a false ending of it; an ending begins with its own space."""

    prompt: str
    true: str
    false: str
    about: str = ""  # the subject, which other pairs may share

    @property
    def group(self) -> str:
        """What the pairs that belong together share: a split never takes them apart."""
        return self.about or self.prompt

    @property
    def rows(self) -> tuple[Row, Row]:
        """The two texts as statements, the true one first."""
        return (
            Row(closed(self.prompt + self.true), 1, self.prompt, self.about),
            Row(closed(self.prompt + self.false), 0, self.prompt, self.about),
        )

    @property
    def sha256(self) -> str:
        """The hash of both texts."""
        return hashlib.sha256(f"{self.prompt}\0{self.true}\0{self.false}".encode()).hexdigest()


@dataclass(frozen=True)
class Data:
    """Rows, and the pairs that they were made of, where they were."""

    name: str
    rows: tuple[Row, ...]
    pairs: tuple[Pair, ...] = ()
    group: str | None = None  # the column that says which rows belong together
    offered: tuple[str, ...] = ()  # columns that may say so as well

    @cached_property
    def labelled(self) -> tuple[Row, ...]:
        """The rows that have a label."""
        return tuple(row for row in self.rows if row.label is not None)


@dataclass(frozen=True)
class Split:
    """Rows for training (with and without labels), for choosing, and for the final figure.

    The rows of `unlabelled` may know their label; training never looks at it.
    """

    labelled: tuple[Row, ...]
    unlabelled: tuple[Row, ...]
    validation: tuple[Row, ...]
    test: tuple[Row, ...]
    seed: int

    def to_dict(self) -> dict[str, int]:
        """Return the sizes and the seed."""
        parts = ("labelled", "unlabelled", "validation", "test")
        found = {name: len(getattr(self, name)) for name in parts}
        return {"labels": self.labels, **found, "seed": self.seed}

    @property
    def labels(self) -> int:
        """How many labels are used, to learn or to choose by."""
        return len(self.labelled) + len(self.validation)


def closed(text: str) -> str:
    """End a statement with a full stop, unless some mark ends it already.

    What a text says as a whole is summed up in the state at its last mark; and a class whose
    texts happen to lack the mark would be told by that alone.
    """
    text = text.rstrip()
    return text if text[-1:] in _MARKS else text + "."


def split(
    data: Data,
    seed: int,
    *,
    labels: int = 32,
    unlabelled: int = 500,
    validation: int = 100,
    test: float = 0.25,
) -> Split:
    """Split by seed: the share `test` of the labelled rows, then the others, groups kept whole.

    The labelled rows to train on are as even between the classes as the data allows. Rows that
    have no label at all join the unlabelled ones. Counts are reached to within one group.
    """
    if labels < 2:
        raise BadInput(f"labels is {labels}; expected at least 2, one of each class")
    if not 0 <= test < 1:
        raise BadInput(f"test is {test}; expected a share from 0 to below 1")
    require_both(data.labelled, data.name)
    groups: dict[str, list[Row]] = {}
    for row in data.rows:
        groups.setdefault(row.group, []).append(row)
    order = sorted(groups)  # by name, so that the order of the file does not matter
    random.Random(seed).shuffle(order)
    left = [groups[name] for name in order]

    parts: dict[str, list[Row]] = {"test": [], "validation": []}
    sizes = {"test": round(test * len(data.labelled)), "validation": validation}
    for name, size in sizes.items():
        while left and len(parts[name]) < size:
            parts[name] += [row for row in left.pop() if row.label is not None]
    if len(rows := [row for group in left for row in group if row.label is not None]) < labels:
        raise BadInput(
            f"{data.name} has {len(data.labelled):,} labelled rows, {len(rows):,} of them left "
            f"beside test and validation; expected {labels} to train on: ask for fewer labels or "
            "a smaller validation set"
        )
    chosen = _balanced(left, labels)
    taken = {id(row) for group in chosen for row in group}
    rest = [row for group in left for row in group if id(row) not in taken]
    return Split(
        tuple(row for group in chosen for row in group if row.label is not None),
        tuple(rest[:unlabelled]),
        tuple(parts["validation"]),
        tuple(parts["test"]),
        seed,
    )


def _balanced(groups: Sequence[list[Row]], labels: int) -> list[list[Row]]:
    """Take groups in order, leaving out what would put one class above half, until enough."""
    chosen: list[list[Row]] = []
    spare: list[list[Row]] = []
    counts = [0, 0]
    half = (labels + 1) // 2
    for group in groups:
        known = [row.label for row in group if row.label is not None]
        if not known:
            continue
        if sum(counts) >= labels:
            break
        if all(counts[c] + known.count(c) <= half for c in (0, 1)):
            chosen.append(group)
            counts = [counts[c] + known.count(c) for c in (0, 1)]
        else:
            spare.append(group)
    for group in spare:  # one class is short: the other fills up
        if sum(counts) >= labels:
            break
        chosen.append(group)
        known = [row.label for row in group if row.label is not None]
        counts = [counts[c] + known.count(c) for c in (0, 1)]
    return chosen


def require_both(rows: Sequence[Row], name: str) -> None:
    """Refuse rows that are all of one class."""
    found = {row.label for row in rows}
    if not {0, 1} <= found:
        only = ", ".join(str(label) for label in sorted(found - {None}, key=str)) or "none"
        raise BadInput(
            f"the labelled rows of {name} have the labels {only}; expected both true (1) and "
            "false (0) ones"
        )


def split_pairs(
    pairs: Sequence[Pair], seed: int, test: float = 0.25
) -> tuple[list[Pair], list[Pair]]:
    """Split pairs by seed into those to train on and those held out; subjects stay together.

    The same seed and share hold out the same subjects whatever the order of the file.
    """
    groups = sorted({pair.group for pair in pairs})
    random.Random(seed).shuffle(groups)
    held = set(groups[: round(test * len(groups))])
    if not held or len(held) == len(groups):
        raise BadInput(
            f"{len(groups)} subjects cannot be split with a test share of {test}; expected more "
            "pairs"
        )
    return (
        [pair for pair in pairs if pair.group not in held],
        [pair for pair in pairs if pair.group in held],
    )


def hashes(rows: Iterable[Row | Pair]) -> list[str]:
    """Return the sorted SHA-256 of all of them, for a card."""
    return sorted({row.sha256 for row in rows})
