"""What every body does, whatever computes it.

Symbols: B sequences, T tokens read now, h `[B, T, d]` what enters the head.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from lmhead.body.state import State

HEAD = "head"  # the layer that is no block: what enters the head

# What is added to one row of a batch: `[d]` for each layer, a block's index or HEAD. None: nothing.
Additions = Mapping[int | str, Tensor] | None


class Body(Protocol):
    """A causal language model up to the input of its head."""

    model: Any  # the model it runs

    @property
    def config(self) -> Any:
        """The configuration of the text model."""
        ...

    @property
    def context(self) -> int | None:
        """The longest sequence the model was made for, where it says so."""
        ...

    def __call__(self, input_ids: Tensor, **inputs: Any) -> tuple[Tensor, Any]:
        """Run `[B, T]` ids with the model's own arguments; return h, and the model's output."""
        ...

    def run(
        self, ids: Tensor, state: State | None = None, *, rows: Sequence[Additions] | None = None
    ) -> tuple[Tensor, State]:
        """Read ids `[B, T]` behind what `state` remembers; return h `[B, T, d]` and the memory.

        `rows` says for each of the B rows what is added to it; a row with None, whatever runs
        beside it, has the same bits as in a run without `rows`. The state that is given is used
        up: go on with the one that is returned.
        """
        ...
