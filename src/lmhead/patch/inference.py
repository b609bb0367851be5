"""Torch's inference mode for a call of `generate`, where nothing of the call is seen afterwards.

`generate` runs without gradients, but its tensors still keep the books that autograd needs. In
inference mode they do not, which is some percent of a step on a CPU. A tensor made there cannot be
trained on later, nor changed in place: so whatever of a call outlives it, or is shown to code that
is not transformers', keeps the call out of it. What is left are the ids.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from lmhead.body.tap import is_ours

_CACHES = ("past_key_values", "cache_params", "encoder_outputs")
_given: ContextVar[bool] = ContextVar("lmhead_given_cache", default=True)


@contextmanager
def noting_caches(settings: dict[str, Any]) -> Iterator[None]:
    """Note, while `generate(**settings)` runs, whether the caller keeps a cache of it."""
    token = _given.set(any(settings.get(name) is not None for name in _CACHES))
    try:
        yield
    finally:
        _given.reset(token)


def leaves_only_ids(model: nn.Module, config: Any, arguments: dict[str, Any]) -> bool:
    """Tell whether a call of `generate` shows nobody a tensor but the ids that it returns."""
    others = [*arguments["stopping_criteria"], *filter(None, [arguments["streamer"]])]
    return not (
        config.return_dict_in_generate
        or config.cache_implementation is not None  # a static cache stays with the model
        or _given.get()
        or not all(type(one).__module__.startswith("transformers.") for one in others)
        or torch.is_inference_mode_enabled()
        or any(p.is_inference() for p in model.parameters())
        or any(_is_watched(module) for module in model.modules())
    )


def _is_watched(module: nn.Module) -> bool:
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return not all(is_ours(hook) for hook in hooks)


@contextmanager
def unseen(model: nn.Module) -> Iterator[None]:
    """Run in inference mode; what modules have kept of it becomes as usable as ever."""
    try:
        with torch.inference_mode():
            yield
    finally:
        for module in model.modules():
            for held in (module._buffers, vars(module)):
                for name, value in held.items():
                    if isinstance(value, Tensor) and value.is_inference():
                        held[name] = value.clone()
