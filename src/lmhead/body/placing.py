"""A model of transformers, loaded from a folder; where it runs, and in what dtype."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lmhead.errors import BadCheckpoint, BadInput, LMHeadError, UnsupportedModel
from lmhead.files.jsons import read_json
from lmhead.models.reading import first_line, refusing

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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


def model_of(folder: Path, config: Any, dtype: torch.dtype | None) -> "PreTrainedModel":
    """Load a causal language model of a folder as transformers does, whole or not at all."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # what its warnings say is checked below

    def refused(reason: str) -> LMHeadError:
        if "ignore_mismatched_sizes" in reason:
            reason = "tensors have other shapes than config.json says"
        return UnsupportedModel(
            f"transformers cannot load {folder} as a causal language model ({reason}); expected "
            "one that AutoModelForCausalLM loads without remote code"
        )

    if (folder / "generation_config.json").exists():
        read_json(folder / "generation_config.json")
    try:
        with refusing(refused):
            model, info = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                **({} if dtype is None else {"dtype": dtype}),
            )
    finally:
        logging.set_verbosity(verbosity)
    if missing := sorted(info["missing_keys"]):
        raise BadCheckpoint(
            f"{folder} lacks {len(missing)} of the tensors of a {type(model).__name__} "
            f"({missing[0]}, ...), which would be random; expected a whole causal language model"
        )
    loaded: PreTrainedModel = model.eval()
    return loaded
