"""lmhead: a toolkit for the last layer of a language model.

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
    "Comparison": "lmhead.inspect.compare",
    "Corpus": "lmhead.trim.corpus",
    "Choice": "lmhead.generation",
    "Edit": "lmhead.head",
    "Engine": "lmhead.generation.engine",
    "Event": "lmhead.generation.request",
    "FetchError": "lmhead.errors",
    "Generation": "lmhead.generation",
    "Geometry": "lmhead.inspect.geometry",
    "Head": "lmhead.head",
    "LMHead": "lmhead.head",
    "LMHeadError": "lmhead.errors",
    "LMHeadWarning": "lmhead.errors",
    "Lens": "lmhead.inspect.lens",
    "LostRank": "lmhead.errors",
    "MissingExtra": "lmhead.errors",
    "Model": "lmhead.loading",
    "ModelNotFound": "lmhead.errors",
    "Reading": "lmhead.inspect.reading",
    "Request": "lmhead.generation.request",
    "Sampler": "lmhead.sampling",
    "SamplingParams": "lmhead.sampling",
    "ScreenedHead": "lmhead.head.screened",
    "ShardedHead": "lmhead.head.sharded",
    "SteeringVector": "lmhead.steer",
    "TextScore": "lmhead.generation",
    "TopK": "lmhead.head",
    "TrimRequest": "lmhead.trim.report",
    "TrimmedHead": "lmhead.head.trimmed",
    "UnsupportedModel": "lmhead.errors",
    "Why": "lmhead.inspect.attribution",
    "audit": "lmhead.steer",
    "certify": "lmhead.steer",
    "compare": "lmhead.inspect.compare",
    "detect": "lmhead.steer",
    "choose": "lmhead.generation.choose",
    "engine": "lmhead.generation.engines",
    "explain_generate": "lmhead.patch",
    "generate": "lmhead.generation",
    "geometry": "lmhead.inspect.geometry",
    "guard": "lmhead.steer",
    "inspect_model": "lmhead.inspect",
    "lens": "lmhead.inspect.lens",
    "linear_cross_entropy": "lmhead.loss",
    "load": "lmhead.loading",
    "load_checkpoint": "lmhead.ranks",
    "next_tokens": "lmhead.generation",
    "patch_generate": "lmhead.patch",
    "patch_loss": "lmhead.patch",
    "read": "lmhead.inspect.reading",
    "read_data": "lmhead.steer",
    "save_checkpoint": "lmhead.ranks",
    "score_text": "lmhead.generation",
    "steer_model": "lmhead.steer",
    "stream": "lmhead.generation",
    "train": "lmhead.steer",
    "trim_model": "lmhead.trim.run",
    "unpatch_generate": "lmhead.patch",
    "unpatch_loss": "lmhead.patch",
    "verify": "lmhead.trim.recheck:verify_path",
    "why": "lmhead.inspect.attribution",
}

if TYPE_CHECKING:
    from lmhead.errors import (
        BadCheckpoint,
        BadInput,
        FetchError,
        LMHeadError,
        LMHeadWarning,
        LostRank,
        MissingExtra,
        ModelNotFound,
        UnsupportedModel,
    )
    from lmhead.generation import (
        Choice,
        Generation,
        TextScore,
        generate,
        next_tokens,
        score_text,
        stream,
    )
    from lmhead.generation.choose import (
        choose,
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
    from lmhead.head.sharded import (
        ShardedHead,
    )
    from lmhead.head.trimmed import (
        TrimmedHead,
    )
    from lmhead.inspect import (
        inspect_model,
    )
    from lmhead.inspect.attribution import (
        Why,
        why,
    )
    from lmhead.inspect.compare import (
        Comparison,
        compare,
    )
    from lmhead.inspect.geometry import (
        Geometry,
        geometry,
    )
    from lmhead.inspect.lens import (
        Lens,
        lens,
    )
    from lmhead.inspect.reading import (
        Reading,
        read,
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
    from lmhead.ranks import (
        load_checkpoint,
        save_checkpoint,
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
    "Comparison",
    "Corpus",
    "Edit",
    "Engine",
    "Event",
    "FetchError",
    "Generation",
    "Geometry",
    "Head",
    "LMHead",
    "LMHeadError",
    "LMHeadWarning",
    "Lens",
    "LostRank",
    "MissingExtra",
    "Model",
    "ModelNotFound",
    "Reading",
    "Request",
    "Sampler",
    "SamplingParams",
    "ScreenedHead",
    "ShardedHead",
    "SteeringVector",
    "TextScore",
    "TopK",
    "TrimRequest",
    "TrimmedHead",
    "UnsupportedModel",
    "Why",
    "audit",
    "certify",
    "choose",
    "compare",
    "detect",
    "engine",
    "explain_generate",
    "generate",
    "geometry",
    "guard",
    "inspect_model",
    "lens",
    "linear_cross_entropy",
    "load",
    "load_checkpoint",
    "next_tokens",
    "patch_generate",
    "patch_loss",
    "read",
    "read_data",
    "save_checkpoint",
    "score_text",
    "steer_model",
    "stream",
    "train",
    "trim_model",
    "unpatch_generate",
    "unpatch_loss",
    "verify",
    "why",
]


def __getattr__(name: str) -> object:
    if name in _WHERE:
        module, _, inner = _WHERE[name].partition(":")
        return getattr(import_module(module), inner or name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
