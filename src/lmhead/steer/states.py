"""Rows of data as states of a model: what it thinks at the last token of each, at every layer."""

from collections.abc import Sequence

from lmhead.body.blocks import Blocks
from lmhead.body.reading import Encoded
from lmhead.body.states import States, states_of
from lmhead.errors import BadInput
from lmhead.loading import Model
from lmhead.progress import Progress, silent
from lmhead.steer.learn.data import Row
from lmhead.steer.measure import token_head


def encode(model: Model, rows: Sequence[Row | str]) -> list[Encoded]:
    """Return the ids of every text and where its prompt ends; refuse what cannot be read."""
    found = []
    for number, row in enumerate(rows, 1):
        text, prompt = (row.text, row.prompt) if isinstance(row, Row) else (row, "")
        if not text.strip():
            raise BadInput(f"text {number} of {len(rows)} is empty; expected some text")
        try:
            ids = model.encode(text)
            begins = len(model.encode(prompt)) if prompt else 1
        except BadInput as error:
            raise BadInput(f"text {number} of {len(rows)} ({text[:40]!r}): {error}") from error
        found.append((ids, max(1, min(begins, len(ids) - 1))))
    return found


def read_states(
    model: Model,
    rows: Sequence[Row | str],
    *,
    keep: bool = True,
    progress: Progress = silent,
) -> States:
    """Run the model over all texts that the cache does not know, and keep what it thought.

    `keep=False` neither asks the cache nor adds to it.
    """
    encoded = encode(model, rows)
    return states_of(Blocks(model.body), token_head(model), encoded, keep=keep, progress=progress)
