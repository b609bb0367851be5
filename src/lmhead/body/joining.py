"""Whether the sequences of a model can run side by side: tried on the model itself, once.

Most models read several sequences at once, give each the answer that it gives alone, and let
others join. Some cannot: they count positions from the padding, keep a memory of a shape of their
own, or mix up the rows. No list of architectures tells which, so six tokens are run in two ways.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lmhead.body.state import State

if TYPE_CHECKING:
    from lmhead.body.base import Body

# Relative difference of h that is rounding, not another answer.
_FULL, _HALF = 1e-3, 5e-2


@dataclass(frozen=True)
class Joining:
    """What can be done with the sequences of a model.

    - `pads`: prompts of several lengths can be read in one pass, padded on the left.
    - `in_turn`: why sequences must run one after the other; None where they need not.
    """

    pads: bool
    in_turn: str | None = None


_known: "WeakKeyDictionary[Any, Joining]" = WeakKeyDictionary()


def joining(body: "Body") -> Joining:
    """Find out, at the first call for a model, whether its sequences can run side by side.

    A body that keeps its sequences apart by itself says so in its attribute `joining`.
    """
    if (own := getattr(body, "joining", None)) is not None:
        return cast(Joining, own)
    if (found := _known.get(body.model)) is None:
        with torch.inference_mode():
            found = _known[body.model] = _try(body)
    return found


def _try(body: Any) -> Joining:  # of a body whose memory is a `State`
    rows = body.vocab_size
    a, b, c, x, y, z = (k * rows // 7 for k in range(1, 7))
    name = type(body.model).__name__
    try:
        # [2, 3, d]: one pass over two sequences of equal length, which needs nothing special
        expected, state = body.run(torch.tensor([[a, b, c], [x, y, z]]))
        if why := state.unjoinable:
            return Joining(False, f"{name} cannot be joined: {why}")
        pads = False
        if not state.recurrent:
            ids, both = State.of_prompts([[a, b], [x]])
            h, both = body.run(ids, both)
            pads = far(h[:, -1], [expected[0, 1], expected[1, 0]]) is None
        if pads:
            first, second = copy.deepcopy(both), both
            first.select([0])
            second.select([1])
        else:
            _, first = body.run(torch.tensor([[a, b]]))
            _, second = body.run(torch.tensor([[x]]))
        first.join(second)
        h, _ = body.run(torch.tensor([[c], [y]]), first)
    except Exception as error:  # whatever the code of a model raises
        return Joining(False, f"{name} fails on two sequences at once: {error}")
    off = far(h[:, -1], [expected[0, 2], expected[1, 1]])
    if off is not None:
        return Joining(
            False,
            f"{name} does not answer two sequences of unequal length as it answers each alone "
            f"(h differs by {off:.0%} of its size)",
        )
    return Joining(pads)


def far(h: Tensor, expected: Sequence[Tensor]) -> float | None:
    """Return how far the rows of h `[B, d]` are from what is expected, where that is too far."""
    allowed = _FULL if h.dtype in (torch.float32, torch.float64) else _HALF
    wanted = torch.stack(list(expected)).double()
    off = ((h.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max()
    return None if bool(off <= allowed) else float(off)
