"""Reading prompts of several lengths in one pass, padded on the left."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lmhead.body.base import Additions
from lmhead.body.growing import grow_in_place
from lmhead.body.state import State


def padded_prefill(
    body: Any,
    prompts: Sequence[Sequence[int]],
    rows: Sequence[Additions] | None,
    room: int,
    whole: bool = False,
) -> tuple[Tensor, State]:
    """Return h `[B, d]` of the last tokens of the prompts, and a memory that grows in place.

    `whole`: h `[B, T, d]` of all tokens, each prompt at the end of its row.
    """
    ids, state = State.of_prompts(prompts)
    h, state = body.run(ids, state, rows=rows)
    grow_in_place(state.past, room)
    return h if whole else h[:, -1], state
