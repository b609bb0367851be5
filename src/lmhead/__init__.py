"""lmhead: the toolkit for the last layer of a language model.

The public names are imported when they are first used, so that `import lmhead` is instant and
does not import torch. `docs/python.md` has an example for each.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# Where a public name is defined; `module:name` where it has a longer name there.
_WHERE = {
    "BadCheckpoint": "lmhead.errors",
    "BadInput": "lmhead.errors",
    "Corpus": "lmhead.trim.corpus",
    "Choice": "lmhead.generation",
    "Edit": "lmhead.head",
    "Engine": "lmhead.generation.engine",
    "Event": "lmhead.generation.request",
    "FetchError": "lmhead.errors",
    "Generation": "lmhead.generation",
    "Head": "lmhead.head",
    "LMHead": "lmhead.head",
    "LMHeadError": "lmhead.errors",
    "LMHeadWarning": "lmhead.errors",
    "MissingExtra": "lmhead.errors",
    "Model": "lmhead.loading",
    "ModelNotFound": "lmhead.errors",
    "Request": "lmhead.generation.request",
    "Sampler": "lmhead.sampling",
    "SamplingParams": "lmhead.sampling",
    "ScreenedHead": "lmhead.head.screened",
    "SteeringVector": "lmhead.steer",
    "TextScore": "lmhead.generation",
    "TopK": "lmhead.head",
    "TrimRequest": "lmhead.trim.report",
    "TrimmedHead": "lmhead.head.trimmed",
    "UnsupportedModel": "lmhead.errors",
    "audit": "lmhead.steer",
    "certify": "lmhead.steer",
    "detect": "lmhead.steer",
    "choose": "lmhead.generation",
    "engine": "lmhead.generation.engines",
    "explain_generate": "lmhead.patch",
    "generate": "lmhead.generation",
    "guard": "lmhead.steer",
    "inspect_model": "lmhead.inspect",
    "linear_cross_entropy": "lmhead.loss",
    "load": "lmhead.loading",
    "next_tokens": "lmhead.generation",
    "patch_generate": "lmhead.patch",
    "patch_loss": "lmhead.patch",
    "read_data": "lmhead.steer",
    "score_text": "lmhead.generation",
    "steer_model": "lmhead.steer",
    "stream": "lmhead.generation",
    "train": "lmhead.steer",
    "trim_model": "lmhead.trim.run",
    "unpatch_generate": "lmhead.patch",
    "unpatch_loss": "lmhead.patch",
    "verify": "lmhead.trim.recheck:verify_path",
}

if TYPE_CHECKING:
    from lmhead.errors import (
        BadCheckpoint,
        BadInput,
        FetchError,
        LMHeadError,
        LMHeadWarning,
        MissingExtra,
        ModelNotFound,
        UnsupportedModel,
    )
    from lmhead.generation import (
        Choice,
        Generation,
        TextScore,
        choose,
        generate,
        next_tokens,
        score_text,
        stream,
    )
    from lmhead.generation.engine import (
        Engine,
    )
    from lmhead.generation.engines import (
        engine,
    )
    from lmhead.generation.request import (
        Event,
        Request,
    )
    from lmhead.head import (
        Edit,
        Head,
        LMHead,
        TopK,
    )
    from lmhead.head.screened import (
        ScreenedHead,
    )
    from lmhead.head.trimmed import (
        TrimmedHead,
    )
    from lmhead.inspect import (
        inspect_model,
    )
    from lmhead.loading import (
        Model,
        load,
    )
    from lmhead.loss import (
        linear_cross_entropy,
    )
    from lmhead.patch import (
        explain_generate,
        patch_generate,
        patch_loss,
        unpatch_generate,
        unpatch_loss,
    )
    from lmhead.sampling import (
        Sampler,
        SamplingParams,
    )
    from lmhead.steer import (
        SteeringVector,
        audit,
        certify,
        detect,
        guard,
        read_data,
        steer_model,
        train,
    )
    from lmhead.trim.corpus import (
        Corpus,
    )
    from lmhead.trim.recheck import (
        verify_path as verify,
    )
    from lmhead.trim.report import (
        TrimRequest,
    )
    from lmhead.trim.run import (
        trim_model,
    )

__all__ = [
    "BadCheckpoint",
    "BadInput",
    "Choice",
    "Corpus",
    "Edit",
    "Engine",
    "Event",
    "FetchError",
    "Generation",
    "Head",
    "LMHead",
    "LMHeadError",
    "LMHeadWarning",
    "MissingExtra",
    "Model",
    "ModelNotFound",
    "Request",
    "Sampler",
    "SamplingParams",
    "ScreenedHead",
    "SteeringVector",
    "TextScore",
    "TopK",
    "TrimRequest",
    "TrimmedHead",
    "UnsupportedModel",
    "audit",
    "certify",
    "choose",
    "detect",
    "engine",
    "explain_generate",
    "generate",
    "guard",
    "inspect_model",
    "linear_cross_entropy",
    "load",
    "next_tokens",
    "patch_generate",
    "patch_loss",
    "read_data",
    "score_text",
    "steer_model",
    "stream",
    "train",
    "trim_model",
    "unpatch_generate",
    "unpatch_loss",
    "verify",
]


def __getattr__(name: str) -> object:
    if name in _WHERE:
        module, _, inner = _WHERE[name].partition(":")
        return getattr(import_module(module), inner or name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
