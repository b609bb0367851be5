"""lmhead: the toolkit for the last layer of a language model.

The public names are imported when they are first used, so that `import lmhead` is instant and
does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_WHERE = {
    "Generation": "lmhead.generation",
    "LMHead": "lmhead.head",
    "LMHeadError": "lmhead.errors",
    "Model": "lmhead.loading",
    "TopK": "lmhead.head",
    "generate": "lmhead.generation",
    "inspect_model": "lmhead.inspect",
    "load": "lmhead.loading",
    "next_tokens": "lmhead.next",
    "stream": "lmhead.generation",
}

if TYPE_CHECKING:
    from lmhead.errors import LMHeadError
    from lmhead.generation import Generation, generate, stream
    from lmhead.head import LMHead, TopK
    from lmhead.inspect import inspect_model
    from lmhead.loading import Model, load
    from lmhead.next import next_tokens

__all__ = [
    "Generation",
    "LMHead",
    "LMHeadError",
    "Model",
    "TopK",
    "generate",
    "inspect_model",
    "load",
    "next_tokens",
    "stream",
]


def __getattr__(name: str) -> object:
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
