"""What every body does, whatever computes it.

Symbols: B sequences, T tokens read now, h `[B, T, d]` what enters the head.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

HEAD = "head"  # the layer that is no block: what enters the head

# What is added to one row of a batch: `[d]` for each layer, a block's index or HEAD. None: nothing.
Additions = Mapping[int | str, Tensor] | None


class Memory(Protocol):
    """What a body remembers of the rows of a batch; it is changed in place."""

    def select(self, rows: Sequence[int]) -> None:
        """Let row i be what row `rows[i]` was; a row may be taken more than once."""
        ...

    def join(self, other: Any) -> None:
        """Put the rows of `other`, of the same body, below those of this batch; it is used up."""
        ...


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

    @property
    def vocab_size(self) -> int:
        """How many ids it reads: the rows of the embedding."""
        ...

    @property
    def generation_config(self) -> Any:
        """What says which ids end a text, where the model has such a thing."""
        ...

    def __call__(self, input_ids: Tensor, **inputs: Any) -> tuple[Tensor, Any]:
        """Run `[B, T]` ids with the model's own arguments; return h, and the model's output."""
        ...

    def run(
        self, ids: Tensor, state: Any = None, *, rows: Sequence[Additions] | None = None
    ) -> tuple[Tensor, Memory]:
        """Read ids `[B, T]` behind what `state` remembers; return h `[B, T, d]` and the memory.

        `rows` says for each of the B rows what is added to it; a row with None, whatever runs
        beside it, has the same bits as in a run without `rows`. The state that is given is used
        up: go on with the one that is returned.
        """
        ...

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        rows: Sequence[Additions] | None = None,
        room: int = 0,
        whole: bool = False,
    ) -> tuple[Tensor, Memory]:
        """Read prompts of any lengths; return h `[B, d]` of their last tokens, and the memory.

        `whole`: return h `[B, T, d]` of all tokens instead, each prompt at the end of its row.
        `room`: for how many more tokens there should be room in the memory, if that helps.
        """
        ...
