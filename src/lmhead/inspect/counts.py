"""The head in numbers: size, share, memory and reach, without torch and without reading a weight.

>>> inspect_model("gemma-7b").head_share
0.0921...
>>> inspect_model("gpt2").total_parameters
124439808

A folder is counted from its configuration and safetensors headers, a GGUF file from its header, a
well-known name from its configuration. A tied matrix is one matrix: it counts once, however often
it is stored.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lmhead.errors import BadCheckpoint, BadInput, UnsupportedModel
from lmhead.files import limits
from lmhead.files.checkpoint import open_checkpoint, weight_files
from lmhead.files.gguf import GGUFFile, open_gguf
from lmhead.inspect.reach import TokenizerReach, folder_reach, gguf_reach
from lmhead.inspect.shapes import parameter_shapes
from lmhead.inspect.stored import Stored, Weight, from_checkpoint, from_gguf
from lmhead.models import architecture
from lmhead.models.architecture import HeadTensors, find_head
from lmhead.models.fetch import folder_of, is_here
from lmhead.models.known import is_known, known_config
from lmhead.models.registry import BUILT_IN
from lmhead.models.resolve import as_path, hub_snapshot, local_source, resolve
from lmhead.progress import Progress, silent

BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "int4": 4}
LOGIT_DTYPES = ("float32", "bfloat16")

# GGUF has no word for "tied": a head of its own is missing, or (older converters of these
# architectures) is a copy.
_GGUF_ALWAYS_TIED = ("gpt2", "gemma", "gemma2", "gemma3", "command-r", "cohere2")


@dataclass(frozen=True)
class Footprint:
    """Bytes of the head alone and of the whole model (None where it could not be counted)."""

    head: int
    total: int | None


@dataclass(frozen=True)
class LogitsMemory:
    """Bytes of the logits `[batch, sequence, V]`, and of one position's `[V]`, per dtype."""

    batch: int
    sequence: int
    full: Mapping[str, int]
    one_position: Mapping[str, int]


@dataclass(frozen=True)
class HeadReport:
    """What a model's head is and weighs. `to_dict` gives the JSON object, by the same names."""

    source: str
    counted_from: str  # "safetensors", "gguf" or "configuration"
    architecture: str  # the class, or GGUF's own name for it
    vocab_size: int  # V, the rows of W
    hidden_size: int  # d, the columns of W
    tied: bool
    bias: bool
    softcap: float | None
    scale: float | None  # the factor on the logits
    dtype: str | None  # in which W is stored
    head_parameters: int  # W, and the bias where there is one
    embedding_parameters: int  # tied: the same matrix
    total_parameters: int | None  # tied weights once; None where packed weights cannot be counted
    head_share: float | None  # of the whole
    embedding_and_head_share: float | None
    stored_bytes: Footprint | None  # as the file has them
    bytes: Mapping[str, Footprint]  # in each dtype, without the scales of a quantisation
    logits: LogitsMemory
    tokenizer: TokenizerReach | None  # None where there is none to compare with
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain dictionaries, lists and numbers."""
        return asdict(self)


@dataclass(frozen=True)
class _Facts:
    """What the three kinds of source come down to."""

    counted_from: str
    architecture: str
    head: HeadTensors
    weights: Mapping[str, Weight]
    nbytes: int | None
    whole: bool  # whether `weights` is all of the model
    softcap: float | None
    scale: float | None
    warnings: tuple[str, ...] = ()


def inspect_model(
    model: str | Path, *, batch: int = 8, sequence: int = 2048, progress: Progress = silent
) -> HeadReport:
    """Report on MODEL: a folder, a `.gguf` file, a built-in or well-known name, or a hub id.

    `batch` and `sequence` set the shape of the logits, `[batch, sequence, V]`, whose memory is
    given.
    """
    for name, value in (("batch", batch), ("sequence", sequence)):
        if type(value) is not int or not 1 <= value <= limits.COUNT:
            raise BadInput(
                f"{name} is {architecture.short(value)}; expected at least 1, a whole number"
            )
    where = _source(model, progress)
    if isinstance(where, str):
        facts = _configuration_facts(known_config(where), where)
        reach = None
    elif where.is_dir():
        facts = _folder_facts(where)
        reach = folder_reach(where, _rows(facts))
    else:
        file = open_gguf(where)
        facts = _gguf_facts(file)
        reach = gguf_reach(file.metadata, _rows(facts))
    return _report(str(model), facts, reach, batch, sequence)


def _source(model: str | Path, progress: Progress) -> Path | str:
    """Return what to count: a folder, a file, or the name of a known configuration.

    A known name is counted from its configuration, unless the model itself is here already.
    """
    if path := local_source(as_path(model)):
        return path
    name = str(model)
    if name in BUILT_IN and is_here(name):
        return folder_of(name)
    if is_known(name) and not ("/" in name and hub_snapshot(name)):
        return name
    if "/" in name:
        return resolve(name, progress)
    return name  # `known_config` says which names there are


def _folder_facts(folder: Path) -> _Facts:
    checkpoint = open_checkpoint(folder, weights=False)
    if not _has_weights(folder):
        return _configuration_facts(checkpoint.config, str(folder))
    checkpoint = open_checkpoint(folder)
    stored = from_checkpoint(checkpoint)
    shapes = {name: weight.shape for name, weight in stored.weights.items()}
    head = find_head(shapes, checkpoint.config, str(folder))
    return _Facts(
        counted_from="safetensors",
        architecture=architecture.class_name(checkpoint.config),
        head=head,
        weights=stored.weights,
        nbytes=stored.nbytes,
        whole=not stored.uncounted,
        softcap=architecture.softcap(checkpoint.config),
        scale=architecture.scale(checkpoint.config),
        warnings=_storage_warnings(head, stored, checkpoint.config),
    )


def _has_weights(folder: Path) -> bool:
    """Return False where there is nothing but a configuration; damaged or pickled still raises."""
    if any(folder.glob("*.safetensors*")):
        return True
    try:
        return bool(weight_files(folder))
    except BadCheckpoint:
        return False


def _configuration_facts(config: Mapping[str, Any], where: str) -> _Facts:
    architecture.require_causal(config, has_head=False, where=where)
    shapes = parameter_shapes(config, where)
    return _Facts(
        counted_from="configuration",
        architecture=architecture.class_name(config),
        head=find_head(shapes, config, where),
        weights={name: Weight(shape, "", 0) for name, shape in shapes.items()},
        nbytes=None,
        whole=True,
        softcap=architecture.softcap(config),
        scale=architecture.scale(config),
    )


def _gguf_facts(file: GGUFFile) -> _Facts:
    name = str(file.metadata.get("general.architecture", "unknown"))
    stored = from_gguf(file)
    embedding = stored.weights.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2 or 0 in embedding.shape:
        raise UnsupportedModel(
            f"{file.path} ({name}) has no matrix token_embd.weight; expected a language model "
            "(an adapter, a projector or a control vector has no head)"
        )
    own = stored.weights.get("output.weight")
    if own is not None and (len(own.shape) != 2 or 0 in own.shape):
        raise BadCheckpoint(
            f"{file.path}: output.weight has the shape {list(own.shape)}, expected a matrix; "
            "fetch it again"
        )
    tied = own is None or (name in _GGUF_ALWAYS_TIED and own.shape == embedding.shape)
    head = HeadTensors(
        weight="output.weight" if own else "token_embd.weight",
        bias="output.bias" if "output.bias" in stored.weights else None,
        embedding="token_embd.weight",
        tied=tied,
    )
    softcap = _real(file, f"{name}.final_logit_softcapping")
    scale = _real(file, f"{name}.logit_scale")
    if scale and name.startswith("granite"):  # Granite divides where others multiply
        scale = 1 / scale
    return _Facts(
        counted_from="gguf",
        architecture=name,
        head=head,
        weights=stored.weights,
        nbytes=stored.nbytes,
        whole=True,
        softcap=softcap or None,
        scale=None if scale in (None, 0, 1) else scale,
        warnings=_storage_warnings(head, stored, {}),
    )


def _real(file: GGUFFile, key: str) -> float | None:
    value = file.metadata.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
        raise BadCheckpoint(f"{file.path}: {key} is {value!r}, expected a number; fetch it again")
    return value


def _storage_warnings(
    head: HeadTensors, stored: Stored, config: Mapping[str, Any]
) -> tuple[str, ...]:
    said = []
    if head.stored_twice:
        said.append(
            f"the tied matrix is stored twice ({head.weight} and {head.embedding}); "
            "it is counted once, as it is in use"
        )
    if head.weight == head.embedding and architecture.says_tied(config) is False:
        said.append(
            "the configuration says that the head is not tied, but no head is stored; "
            "it is counted as tied"
        )
    if stored.uncounted:
        said.append(
            f"{stored.uncounted} packed tensors could not be counted: the configuration does not "
            "say how many bits each weight has"
        )
    return tuple(said)


def _rows(facts: _Facts) -> int:
    return facts.weights[facts.head.weight].shape[0]


def _report(
    source: str, facts: _Facts, reach: TokenizerReach | None, batch: int, sequence: int
) -> HeadReport:
    head, weights = facts.head, facts.weights
    W, embedding = weights[head.weight], weights[head.embedding]
    V, d = W.shape
    bias = weights[head.bias].parameters if head.bias else 0
    in_head = W.parameters + bias
    both = in_head + (0 if head.tied else embedding.parameters)
    total = None
    if facts.whole:
        total = sum(weight.parameters for weight in weights.values())
        total -= embedding.parameters if head.stored_twice else 0
    warnings = list(facts.warnings)
    if reach and reach.tokens_without_row:
        warnings.append(
            f"the tokenizer has {reach.tokens_without_row:,} ids without a row: its largest is "
            f"{reach.largest_id:,}, the head has {V:,} rows"
        )
    stored = None
    if facts.nbytes is not None:
        head_nbytes = W.nbytes + (weights[head.bias].nbytes if head.bias else 0)
        stored = Footprint(head_nbytes, facts.nbytes)
    return HeadReport(
        source=source,
        counted_from=facts.counted_from,
        architecture=facts.architecture,
        vocab_size=V,
        hidden_size=d,
        tied=head.tied,
        bias=bias > 0,
        softcap=facts.softcap,
        scale=facts.scale,
        dtype=W.dtype or None,
        head_parameters=in_head,
        embedding_parameters=embedding.parameters,
        total_parameters=total,
        head_share=in_head / total if total else None,
        embedding_and_head_share=both / total if total else None,
        stored_bytes=stored,
        bytes={
            dtype: Footprint(_nbytes(in_head, bits), _nbytes(total, bits) if total else None)
            for dtype, bits in BITS.items()
        },
        logits=LogitsMemory(
            batch=batch,
            sequence=sequence,
            full={dtype: _nbytes(batch * sequence * V, BITS[dtype]) for dtype in LOGIT_DTYPES},
            one_position={dtype: _nbytes(V, BITS[dtype]) for dtype in LOGIT_DTYPES},
        ),
        tokenizer=reach,
        warnings=tuple(warnings),
    )


def _nbytes(count: int, bits: int) -> int:
    return -(-count * bits // 8)
