"""What a screened head refuses, and how it reads its arguments."""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Literal

import torch

from lmhead.errors import BadInput, MissingExtra, UnsupportedModel
from lmhead.head.dense import LMHead
from lmhead.head.screening.bounds import Screen

Kernels = Literal["auto", "numba", "torch"]


def check_head(head: LMHead) -> None:
    """Refuse a head that cannot be screened."""
    weight = head.weight
    if weight.dtype not in (torch.float32, torch.bfloat16) or weight.device.type != "cpu":
        raise UnsupportedModel(
            f"the head's weight is {weight.dtype} on {weight.device}; a screened head takes "
            "float32 or bfloat16 on the cpu: convert it, or use the dense head"
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


def kernels_named(which: Kernels) -> ModuleType:
    """Give the loops: numba's where it is installed, unless told otherwise."""
    if which not in ("auto", "numba", "torch"):
        raise BadInput(f"kernels is {which!r}; expected 'auto', 'numba' or 'torch'")
    has_numba = find_spec("numba") is not None
    if which == "numba" and not has_numba:
        raise MissingExtra("numba is not installed; install it with: pip install numba")
    compiled = has_numba and which != "torch"
    return import_module(f"lmhead.head.screening.{'kernels' if compiled else 'portable'}")
