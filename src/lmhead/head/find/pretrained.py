"""Read the head of a Hugging Face folder, and nothing else of it.

The model is built from its configuration on the meta device, where it has structure but no
weights; `locate` finds the head there; then the tensors of the head alone are read from the
safetensors files, memory-mapped. transformers' own rules say what they are called in the files,
and which dtype the loaded model would give them, so that the head is the one of
`AutoModelForCausalLM.from_pretrained`.
"""

import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lmhead.errors import BadCheckpoint, LMHeadError, UnsupportedModel
from lmhead.files import limits
from lmhead.files.checkpoint import Checkpoint, open_checkpoint
from lmhead.head.find.locate import P, locate
from lmhead.models.reading import first_line, has_odd_sizes, refuse_endless, refusing
from lmhead.models.settings import keep_own_code

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def read_head(folder: Path, make: type[P]) -> P:
    """Read the head of a causal language model from its folder."""
    return _read(folder, make, None)


def read_rows(folder: Path, make: type[P], mine: Callable[[int], slice]) -> tuple[P, int]:
    """Read some rows of a head, and nothing else; `mine` chooses them, given how many there are.

    Gives a head of these rows, and how many logits the whole one has.
    """
    head = _read(folder, make, mine)
    V = head.vocab_size
    bias = head.bias
    local = make(
        head.weight,
        bias,
        head.norm,
        head.softcap,
        head.scale,
        head.tied,
        logits_dtype=head.logits_dtype,
        state_size=head.state_size,
    )
    return local, V


def _read(folder: Path, make: type[P], mine: Callable[[int], slice] | None) -> P:
    checkpoint = open_checkpoint(folder)
    twin = _twin(checkpoint)
    found = locate(twin, make)
    head, tensors = found.head, _Tensors(checkpoint, twin)
    for path, tensor in (*head.named_parameters(), *head.named_buffers()):
        names = tensors.names(tensor)
        if not names:
            raise BadCheckpoint(
                f"{folder} holds no tensor for the head's {path}, "
                f"which the model calls {tensors.called(tensor)}; fetch the model again"
            )
        # A tied weight that is stored twice all the same: the output layer's own copy counts.
        names.sort(key=lambda name: not name.startswith(f"{found.layer_name}."))
        rows = mine(len(tensor)) if mine is not None and path in ("weight", "bias") else None
        value = tensors.read(names[0], tensor, rows)
        if path == "weight" and head.tied and len(names) > 1 and rows is None:
            head.tied = torch.equal(value, tensors.read(names[1], tensor))
        if isinstance(tensor, nn.Parameter):
            value = nn.Parameter(value, requires_grad=False)
        owner, _, name = path.rpartition(".")
        setattr(head.get_submodule(owner), name, value)
    return head


def causal_config(checkpoint: Checkpoint) -> Any:
    """Read a folder's configuration as transformers does; refuse what has no head for text."""
    import transformers
    from transformers import AutoConfig

    folder = checkpoint.folder
    refuse_endless(checkpoint.config, len(checkpoint.tensors), folder / "config.json")

    def refused(reason: str) -> LMHeadError:
        return UnsupportedModel(
            f"transformers {transformers.__version__} does not know the model in {folder} "
            f"({reason}); expected an architecture that it has, without remote code"
        )

    with refusing(refused):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    architecture = _architecture(config)
    kind: Any = getattr(transformers, architecture, None)
    mapped = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if not (mapped if kind is None else kind.can_generate()):
        raise UnsupportedModel(
            f"{folder} holds {architecture or config.model_type}, which has no head that generates "
            "text; expected a causal language model, one that AutoModelForCausalLM loads"
        )
    return keep_own_code(config)


def refuse_oversized(checkpoint: Checkpoint) -> None:
    """Refuse a configuration of far more weights than the files hold.

    transformers takes the memory of a tensor that the files have in another shape, and only then
    says so. Building the model without weights takes a tenth of a second, so it is built only if
    the numbers of the configuration do not look like those of the files.
    """
    shapes = [tensor.shape for tensor in checkpoint.tensors.values()]
    if not has_odd_sizes(checkpoint.config, shapes):
        return
    try:
        twin = _twin(checkpoint)
    except UnsupportedModel:  # whoever loads the model says why
        return
    described = sum(weight.numel() for weight in twin.parameters())
    stored = sum(math.prod(shape) for shape in shapes)
    if described > max(limits.UNSTORED, 8 * stored):  # four bits to a weight, and room to spare
        raise BadCheckpoint(
            f"{checkpoint.folder / 'config.json'} describes {described:,} weights, but the files "
            f"hold {stored:,}: tensors have other shapes than config.json says; fetch the model "
            "again"
        )


def _architecture(config: Any) -> str:
    names = config.architectures
    return str(names[0]) if isinstance(names, list) and names else ""


def _twin(checkpoint: Checkpoint) -> "PreTrainedModel":
    """Build the model of a folder on the meta device."""
    import transformers
    from transformers import AutoModelForCausalLM

    folder = checkpoint.folder
    config = causal_config(checkpoint)
    architecture = _architecture(config)
    kind: Any = getattr(transformers, architecture, None)
    mapped = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    # Experts are run one by one: the grouped kernels refuse tensors without data.
    settings: dict[str, Any] = {"experts_implementation": "eager"}
    settings["dtype"] = config.dtype or _stored_dtype(checkpoint)
    try:
        with torch.device("meta"):
            if mapped:
                model = AutoModelForCausalLM.from_config(config, **settings)
            else:
                model = kind._from_config(config, **settings)
    except Exception as error:  # whatever the model's own code may raise
        raise UnsupportedModel(
            f"{architecture or config.model_type} cannot be built from {folder}/config.json "
            f"({first_line(error)}); check the file, or install what it asks for"
        ) from error
    # Some parameters are made on the CPU whatever one says.
    return model.to("meta").eval()


class _Tensors:
    """The tensors of a checkpoint under the names and in the dtypes of the model."""

    def __init__(self, checkpoint: Checkpoint, twin: "PreTrainedModel") -> None:
        self._checkpoint = checkpoint
        self._stored = _stored_names(checkpoint.tensors, twin)
        self._fp32 = list(twin._get_dtype_plan(twin.dtype))  # what stays float32 in a half model
        self._names: dict[int, list[str]] = {}
        for name, tensor in twin.state_dict(keep_vars=True).items():
            self._names.setdefault(id(tensor), []).append(name)

    def names(self, tensor: Tensor) -> list[str]:
        """List the model's names for a tensor that the folder holds; tied tensors have several."""
        return [name for name in self._names.get(id(tensor), ()) if name in self._stored]

    def called(self, tensor: Tensor) -> str:
        """Tell what the model calls a tensor, stored or not."""
        return " or ".join(self._names.get(id(tensor), ["nothing"]))

    def read(self, name: str, like: Tensor, rows: slice | None = None) -> Tensor:
        """Read one tensor, or some rows of it, memory-mapped unless its dtype has to be changed."""
        header = self._checkpoint.tensors[self._stored[name]]
        if header.shape != tuple(like.shape):
            raise BadCheckpoint(
                f"{header.name} in {header.file} has shape {list(header.shape)}, but the "
                f"configuration expects {list(like.shape)}; fetch the model again"
            )
        if header.dtype not in _FLOATS:
            raise UnsupportedModel(
                f"{header.name} in {header.file} is stored as {header.dtype}; expected a head in "
                f"{', '.join(_FLOATS)}: take the model before it was quantised"
            )
        keep = any(re.search(pattern.replace("*", ".*"), name) for pattern in self._fp32)
        return self._checkpoint.read(header.name, rows).to(torch.float32 if keep else like.dtype)


def _stored_names(stored: Iterable[str], twin: "PreTrainedModel") -> dict[str, str]:
    """Map the model's tensor names to those in the files, as transformers does when loading."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    rules = get_model_conversion_mapping(twin)
    # What is converted (split, merged, transposed) on loading cannot be mapped, so is left out.
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if not isinstance(rule, WeightRenaming)]
    expected = twin.state_dict()
    names: dict[str, str] = {}
    for name in stored:
        prefix = twin.base_model_prefix
        new, converted = rename_source_key(name, renamings, converters, prefix, expected)
        if new not in expected and name in expected:
            new, converted = name, None
        if new in expected and converted is None:
            names[new] = name
    return names


def _stored_dtype(checkpoint: Checkpoint) -> torch.dtype | None:
    stored = (header.dtype for header in checkpoint.tensors.values())
    return next((_FLOATS[dtype] for dtype in stored if dtype in _FLOATS), None)
