"""Changes to single logits that every head takes into account exactly.

A penalty, a bias or a ban touches some ids and leaves the rest alone. A screened head scores the
touched rows exactly, changes them as told, and lets the others compete with them through their
bounds: whatever the change is, the answer is the one that the dense logits would give.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import index

import torch
from torch import Tensor

from lmhead.errors import BadInput
from lmhead.head.answers import each


@dataclass(frozen=True)
class Edit:
    """The ids `[n]` whose logits change, each once, and their new logits, float64 `[n]`.

    Chain edits with `then`; -inf forbids a token.
    """

    ids: Tensor
    change: Callable[[Tensor], Tensor]

    def __post_init__(self) -> None:
        ids = self.ids
        if not isinstance(ids, Tensor):
            raise BadInput(f"an edit got ids as a {type(ids).__name__}; expected a tensor [n]")
        whole = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
        if ids.ndim != 1 or not whole or len(set(ids.tolist())) != len(ids):
            raise BadInput(
                f"an edit got ids {ids.dtype} of shape {list(ids.shape)}; "
                "expected whole numbers [n], each once"
            )
        object.__setattr__(self, "ids", ids.detach().cpu().long())

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
        ids = _ids(sorted({*self.ids.tolist(), *other.ids.tolist()}))
        mine, theirs = torch.searchsorted(ids, self.ids), torch.searchsorted(ids, other.ids)

        def both(z: Tensor) -> Tensor:
            z = z.index_copy(0, mine, self.change(z[mine]))
            return z.index_copy(0, theirs, other.change(z[theirs]))

        return Edit(ids, both)

    def apply(self, y: Tensor) -> Tensor:
        """Return the new logits of the touched ids, given the old ones y `[n]`, in float64."""
        new = self.change(y.double())
        if not isinstance(new, Tensor) or new.shape != self.ids.shape:
            got = list(new.shape) if isinstance(new, Tensor) else type(new).__name__
            raise BadInput(
                f"an edit of {len(self.ids)} ids gave logits of shape {got}; "
                f"expected a tensor [{len(self.ids)}], one for each"
            )
        return new.detach().double()


Edits = Edit | Sequence[Edit | None] | None


def edited(z: Tensor, edits: Edits) -> Tensor:
    """Do edits to logits z `[..., V]`, in float32 or wider: the same to all, or one to each."""
    V = z.shape[-1]
    rows = (z if z.dtype == torch.float64 else z.float()).reshape(-1, V).clone()
    for i, edit in enumerate(each(edits, len(rows), "edits")):
        check_edit(edit, V)
        if edit is not None and len(edit.ids):
            ids = edit.ids.to(rows.device)
            rows[i, ids] = edit.apply(rows[i, ids].cpu()).to(rows)  # also where h has a gradient
    return rows.view(z.shape)


def check_edit(edit: Edit | None, V: int) -> None:
    """Refuse what is no edit of ids below V."""
    if edit is None:
        return
    if not isinstance(edit, Edit):
        raise BadInput(f"edits holds a {type(edit).__name__}; expected lmhead.Edit, or None")
    if not len(edit.ids):
        return
    low, high = int(edit.ids.min()), int(edit.ids.max())
    if low < 0 or high >= V:
        raise BadInput(
            f"an edit touches the id {low if low < 0 else high}; expected ids from 0 to {V - 1:,}"
        )


def _ids(ids: Iterable[int]) -> Tensor:
    given = ids.tolist() if hasattr(ids, "tolist") else ids  # a tensor or an array
    try:
        whole = [index(i) for i in given if not isinstance(i, bool)]
        found = torch.tensor(list(dict.fromkeys(whole)), dtype=torch.int64)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise BadInput(
            f"an edit got something that is not an id ({error}); expected whole numbers"
        ) from error
    if isinstance(given, list) and len(whole) != len(given):
        raise BadInput("an edit got booleans as ids; expected whole numbers")
    return found
