"""What a screened head refuses, and how it reads its arguments."""

from pathlib import Path

import torch

from lmhead.errors import BadCheckpoint, BadInput, UnsupportedModel
from lmhead.head.dense import LMHead
from lmhead.head.screening.bounds import SMALLEST_STEP, Screen

_CHUNK = 2**16  # weights checked together: they stay in the processor's cache
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NEARLY = 1 + 1e-10


def check_head(head: LMHead) -> None:
    """Refuse a head that cannot be screened."""
    if not isinstance(head, LMHead):
        raise BadInput(f"the head is a {type(head).__name__}; expected an LMHead to screen")
    weight = head.weight
    if weight.dtype not in _DTYPES or weight.device.type != "cpu":
        raise UnsupportedModel(
            f"the head's weight is {weight.dtype} on {weight.device}; a screened head takes "
            "float32, bfloat16 or float16 on the cpu: convert it, or use the dense head"
        )
    if head.scale is not None and head.scale.factor < 0:
        raise UnsupportedModel(
            f"the head scales its logits by {head.scale.factor}, which turns their order around; "
            "a screened head takes a scale above 0: use the dense head"
        )


def check_copy(screen: Screen, head: LMHead) -> None:
    """Refuse a copy of another shape."""
    if (screen.vocab_size, screen.hidden_size) != (head.vocab_size, head.hidden_size):
        raise BadInput(
            f"the int8 copy is of {screen.vocab_size} x {screen.hidden_size}, the head has "
            f"{head.vocab_size} x {head.hidden_size}; expected the head's own copy"
        )


@torch.no_grad()
def check_rows(screen: Screen, head: LMHead, path: Path) -> None:
    """Refuse a copy that does not bound the head's own rows, whatever its file says of itself.

    One pass over weight and copy in float64. What `build_screen` wrote is larger than the exact
    norms by one part in 10^9; a sum in another order is off by far less than one in 10^10.
    """
    V, d = head.vocab_size, head.hidden_size
    weight, q = head.weight.detach(), screen.q
    s, residual, norm = (t.double() for t in (screen.scale, screen.residual, screen.norm))
    sound = bool(((s == 0) | (s.abs() >= SMALLEST_STEP)).all())  # false for NaN
    sound &= all(bool((t.isfinite() & (t >= 0)).all()) for t in (s, residual, norm))
    step = max(1, _CHUNK // d)
    for first in range(0, V if sound else 0, step):
        part = slice(first, min(first + step, V))
        rows = q[part, :d]
        copy = rows.double().mul_(s[part].unsqueeze(1))
        size = copy.square().sum(1).sqrt_()
        off = copy.sub_(weight[part]).square_().sum(1).sqrt_()
        good = (size * _NEARLY <= norm[part]) & (off * _NEARLY <= residual[part])
        if not bool(good.all()) or int(rows.min()) < -127:
            sound = False
            break
    if not sound:
        raise BadCheckpoint(
            f"{path} is damaged: it is not a copy of this head's weights, although it claims to "
            "be; "
            "remove it and run `lmhead screen` again"
        )
