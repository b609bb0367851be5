"""lmhead: the toolkit for the last layer of a language model.

The public names are imported when they are first used, so that `import lmhead` is instant and
does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_WHERE = {
    "Edit": "lmhead.head",
    "Generation": "lmhead.generation",
    "LMHead": "lmhead.head",
    "LMHeadError": "lmhead.errors",
    "Model": "lmhead.loading",
    "ScreenedHead": "lmhead.head.screened",
    "SteeringVector": "lmhead.steer",
    "TextScore": "lmhead.generation",
    "TopK": "lmhead.head",
    "TrimmedHead": "lmhead.head.trimmed",
    "engine": "lmhead.generation.engines",
    "generate": "lmhead.generation",
    "inspect_model": "lmhead.inspect",
    "linear_cross_entropy": "lmhead.loss",
    "load": "lmhead.loading",
    "next_tokens": "lmhead.generation",
    "patch_loss": "lmhead.patch",
    "score_text": "lmhead.generation",
    "stream": "lmhead.generation",
    "unpatch_loss": "lmhead.patch",
}

if TYPE_CHECKING:
    from lmhead.errors import LMHeadError
    from lmhead.generation import (
        Generation,
        TextScore,
        generate,
        next_tokens,
        score_text,
        stream,
    )
    from lmhead.generation.engines import engine
    from lmhead.head import Edit, LMHead, TopK
    from lmhead.head.screened import ScreenedHead
    from lmhead.head.trimmed import TrimmedHead
    from lmhead.inspect import inspect_model
    from lmhead.loading import Model, load
    from lmhead.loss import linear_cross_entropy
    from lmhead.patch import patch_loss, unpatch_loss
    from lmhead.steer import SteeringVector

__all__ = [
    "Edit",
    "Generation",
    "LMHead",
    "LMHeadError",
    "Model",
    "ScreenedHead",
    "SteeringVector",
    "TextScore",
    "TopK",
    "TrimmedHead",
    "engine",
    "generate",
    "inspect_model",
    "linear_cross_entropy",
    "load",
    "next_tokens",
    "patch_loss",
    "score_text",
    "stream",
    "unpatch_loss",
]


def __getattr__(name: str) -> object:
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
