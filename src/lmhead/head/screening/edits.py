"""Changes to single logits that a screened head takes into account exactly.

A penalty, a bias or a ban touches some ids and leaves the rest alone. The screened head scores the
touched rows exactly, changes them as told, and lets the others compete with them through their
bounds: whatever the change is, the answer is the one that the dense logits would give.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lmhead.errors import BadInput


@dataclass(frozen=True)
class Edit:
    """The ids `[n]` that are touched, each once, and what becomes of their logits, float64 `[n]`.

    Edits are done one after the other with `then`; -inf forbids a token.
    """

    ids: Tensor
    change: Callable[[Tensor], Tensor]

    def __post_init__(self) -> None:
        ids = self.ids
        if ids.ndim != 1 or ids.is_floating_point() or len(set(ids.tolist())) != len(ids):
            raise BadInput(
                f"an edit got ids {ids.dtype} of shape {list(ids.shape)}; "
                "expected whole numbers [n], each once"
            )

    @classmethod
    def add(cls, bias: Mapping[int, float]) -> "Edit":
        """Add bias[id] to the logit of each id."""
        added = torch.tensor(list(bias.values()), dtype=torch.float64)
        return cls(_ids(bias), lambda z: z + added)

    @classmethod
    def ban(cls, ids: Iterable[int]) -> "Edit":
        """Forbid ids."""
        return cls(_ids(ids), lambda z: torch.full_like(z, -torch.inf))

    @classmethod
    def repetition(cls, ids: Iterable[int], penalty: float) -> "Edit":
        """Divide positive logits of ids by the penalty, multiply the others."""
        if not penalty > 0:
            raise BadInput(f"the repetition penalty is {penalty}; expected a number above 0")
        return cls(_ids(ids), lambda z: torch.where(z < 0, z * penalty, z / penalty))

    def then(self, other: "Edit") -> "Edit":
        """Do this edit, then the other."""
        ids = torch.tensor(sorted({*self.ids.tolist(), *other.ids.tolist()}))
        mine, theirs = torch.searchsorted(ids, self.ids), torch.searchsorted(ids, other.ids)

        def both(z: Tensor) -> Tensor:
            z = z.index_copy(0, mine, self.change(z[mine]))
            return z.index_copy(0, theirs, other.change(z[theirs]))

        return Edit(ids, both)


def _ids(ids: Iterable[int]) -> Tensor:
    return torch.tensor(list(dict.fromkeys(ids)), dtype=torch.int64)
