"""Which ids a trim keeps, and what they are called before and after it.

A canonical id is an id of the original vocabulary. The kept ids keep their order and are numbered
from 0, so that new id i stands for canonical id `kept[i]`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lmhead.errors import BadInput

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True)
class TrimMap:
    """The ids that a trim keeps, and the way between old and new ids.

    `kept` holds canonical ids, ascending and without repeats. `rows` is how many rows the original
    head has: a tokenizer may know ids beyond its last row, which have a token but no logit.
    """

    kept: tuple[int, ...]
    rows: int

    def __post_init__(self) -> None:
        if any(a >= b for a, b in zip(self.kept, self.kept[1:], strict=False)):
            raise BadInput("the kept ids are not ascending and distinct; expected sorted(set(ids))")
        if self.kept and self.kept[0] < 0:
            raise BadInput(f"the kept id {self.kept[0]} is negative; expected ids from 0")
        if self.kept_rows < 2:
            raise BadInput(
                f"the keep-set leaves {self.kept_rows} of {self.rows:,} rows; expected at least 2, "
                "or there is nothing to choose between"
            )

    @classmethod
    def of(cls, ids: Iterable[int], rows: int) -> "TrimMap":
        """Make a map from ids in any order."""
        return cls(tuple(sorted(set(ids))), rows)

    @cached_property
    def kept_rows(self) -> int:
        """How many rows of the head stay."""
        return sum(i < self.rows for i in self.kept)

    @cached_property
    def _new(self) -> dict[int, int]:
        return {old: new for new, old in enumerate(self.kept)}

    @property
    def row_ids(self) -> "npt.NDArray[np.int64]":
        """The canonical ids of the rows that stay, `[kept_rows]`."""
        import numpy as np

        return np.array(self.kept[: self.kept_rows], np.int64)

    def __contains__(self, canonical_id: int) -> bool:
        return canonical_id in self._new

    def __len__(self) -> int:
        return len(self.kept)

    def to_trimmed(self, canonical_ids: Iterable[int]) -> list[int]:
        """Return the new ids; an id that was not kept is a `BadInput`."""
        try:
            return [self._new[i] for i in canonical_ids]
        except KeyError as error:
            raise BadInput(
                f"the id {error.args[0]} is not in the keep-set of {len(self):,} ids"
            ) from None

    def to_original(self, trimmed_ids: Iterable[int]) -> list[int]:
        """Return the canonical ids; an id that the trimmed model lacks is a `BadInput`."""
        ids = list(trimmed_ids)
        if wrong := [i for i in ids if not 0 <= i < len(self)]:
            raise BadInput(f"the id {wrong[0]} is not below {len(self):,}, the trimmed vocabulary")
        return [self.kept[i] for i in ids]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {"rows": self.rows, "kept": list(self.kept)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "TrimMap":
        """Read what `to_dict` wrote."""
        try:
            kept, rows = data["kept"], data["rows"]
            if not isinstance(kept, list) or any(type(i) is not int for i in (*kept, rows)):
                raise TypeError("expected whole numbers")
            return cls(tuple(kept), rows)
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(
                f"this is not an id map ({error!r}); expected the object id_map of lmhead_trim.json"
            ) from error
