"""Whether a head's weights are still those that its int8 copy was made of."""

from torch import Tensor

from lmhead.errors import LMHeadError
from lmhead.head.dense import LMHead

_MADE_OF = ("weight", "bias")


class Weights:
    """The numbers that a copy was made of: where they lie, and how often they were written to."""

    def __init__(self, head: LMHead) -> None:
        # Asked for where torch keeps them: to ask the module by name takes longer.
        places = [(kept, n) for kept in (head._parameters, head._buffers) for n in _MADE_OF]
        self._found = [(kept, name, _identity(kept.get(name))) for kept, name in places]

    def check(self) -> None:
        """Refuse to go on where they are no longer the same."""
        for kept, name, found in self._found:
            if _identity(kept.get(name)) != found:
                raise LMHeadError(
                    "the head's weights changed after its int8 copy was made; "
                    "make it again with ScreenedHead.from_head"
                )


def _identity(tensor: Tensor | None) -> tuple[int, int] | None:
    if tensor is None:
        return None
    return tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version
