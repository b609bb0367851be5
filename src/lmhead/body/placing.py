"""Where a model of transformers runs, and in what: devices and dtypes, by name."""

from typing import TYPE_CHECKING

import torch

from lmhead.errors import BadInput

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, or its kind."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def device_of(device: "str | torch.device | None") -> torch.device | None:
    """Return a device that this machine has."""
    if device is None:
        return None
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        raise BadInput(
            f"device is {str(device)!r}, which torch cannot use here ({first_line(error)}); "
            "expected cpu, cuda, mps or another that this machine has",
            names=["device"],
        ) from error
    if found.type == "meta":
        raise BadInput("device is 'meta', which holds no numbers; expected cpu", names=["device"])
    return found


def dtype_of(dtype: "str | torch.dtype | None") -> torch.dtype | None:
    """Return a dtype that a model can have."""
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if dtype is not None and found not in DTYPES.values():
        raise BadInput(f"dtype is {dtype!r}; expected one of {', '.join(DTYPES)}", names=["dtype"])
    return found


def placed_on(model: "PreTrainedModel", device: torch.device | None) -> "PreTrainedModel":
    """Return the model on a device; None leaves it where it is."""
    if device is None:
        return model
    try:
        return model.to(device)
    except (RuntimeError, NotImplementedError) as error:
        raise BadInput(
            f"the model does not fit on {device} ({first_line(error)}); leave out device, or "
            "choose a smaller dtype",
            names=["device", "dtype"],
        ) from error
