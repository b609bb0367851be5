"""The body of a causal model of transformers.

Every such model runs its own head at the end of `forward`; the tap takes h from the output layer
before it is multiplied by W. That holds for any architecture, and no logits are computed.
"""

import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lmhead.body.adding import adding_rows
from lmhead.body.base import Additions
from lmhead.body.prefill import padded_prefill
from lmhead.body.state import State
from lmhead.body.tap import install, taking_input
from lmhead.errors import UnsupportedModel
from lmhead.head.find.locate import output_layer

# Of a configuration, what says nothing about the model: where it lay, and who wrote it.
_ELSEWHERE = {"_name_or_path", "transformers_version"}


class TorchBody:
    """A causal language model up to the input of its head; several may share one model."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        layer = output_layer(model)
        # by name, because resizing the vocabulary replaces the layer
        self._output = next(name for name, module in model.named_modules() if module is layer)
        self._takes = frozenset(inspect.signature(model.forward).parameters)
        self._digest: tuple[object, str] | None = None
        install(layer)

    @property
    def config(self) -> Any:
        """The configuration of the text model."""
        return self.model.config.get_text_config(decoder=True)

    @property
    def context(self) -> int | None:
        """The longest sequence the model was made for, where it says so."""
        length = getattr(self.config, "max_position_embeddings", None)
        return int(length) if length and length > 0 else None

    @property
    def vocab_size(self) -> int:
        """How many ids it reads: the rows of the embedding."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def generation_config(self) -> Any:
        """What says which ids end a text, where the model has such a thing."""
        return getattr(self.model, "generation_config", None)

    @property
    def device(self) -> torch.device:
        """Where ids are read."""
        weight = getattr(self.model.get_input_embeddings(), "weight", None)
        found: Tensor = next(self.model.parameters()) if weight is None else weight
        return found.device

    @property
    def sha256(self) -> str:
        """What the body is, as one hexadecimal number: its configuration and all of its weights.

        It is computed when first asked for, and again after a weight changed.
        """
        tensors = dict(self.model.state_dict())
        key = tuple((name, t.data_ptr(), t.device, _version(t)) for name, t in tensors.items())
        if self._digest is None or self._digest[0] != key:
            self._digest = key, _hash(self.model.config, tensors)
        return self._digest[1]

    def __call__(self, input_ids: Tensor, **inputs: Any) -> tuple[Tensor, Any]:
        """Run `[B, T]` ids; return h `[B, T, d]` as it enters the head, and the model's output."""
        with taking_input(self.model.get_submodule(self._output)) as caught:
            result = self.model(input_ids=input_ids.to(self.device), **inputs)
        if not caught:
            raise UnsupportedModel(
                f"{type(self.model).__name__} did not run its output layer {self._output}; "
                "expected a causal language model that does, on every call"
            )
        return caught[0], result

    def run(
        self, ids: Tensor, state: State | None = None, *, rows: Sequence[Additions] | None = None
    ) -> tuple[Tensor, State]:
        """Read ids `[B, T]` behind what `state` remembers; return h `[B, T, d]` and the memory.

        `rows` says for each of the B rows what is added to it, `[d]` for each layer, or None. A
        row with None has the bits of a run without `rows`.
        """
        state = State() if state is None else state
        ids = ids.to(self.device)
        with adding_rows(self.model, rows, len(ids)) if rows else nullcontext(None) as at_head:
            h, output = self(**state.inputs(ids, self._takes))
        if at_head is not None:
            h = at_head(h)
        state.take(ids, output)
        return h[:, -ids.shape[1] :], state

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        rows: Sequence[Additions] | None = None,
        room: int = 0,
        whole: bool = False,
    ) -> tuple[Tensor, State]:
        """Read prompts, padded on the left; return h `[B, d]` of their last tokens, and memory."""
        return padded_prefill(self, prompts, rows, room, whole)


def sha256_with(sha256: str, added: Mapping[int | str, Tensor]) -> str:
    """Name a body that adds to its states: that of the plain body, and what it adds where."""
    digest = hashlib.sha256(sha256.encode())
    for layer in sorted(added, key=str):
        v = added[layer].detach().float().cpu().contiguous()
        digest.update(f"{layer} {list(v.shape)}".encode() + v.numpy().tobytes())
    return digest.hexdigest()


def _version(tensor: Tensor) -> int | None:
    """Count the changes in place, where torch does."""
    return None if tensor.is_inference() else tensor._version


def _hash(config: Any, tensors: Mapping[str, Tensor]) -> str:
    about = config.to_dict() if hasattr(config, "to_dict") else vars(config)
    decisive = {name: value for name, value in about.items() if name not in _ELSEWHERE}
    digest = hashlib.sha256(json.dumps(decisive, sort_keys=True, default=str).encode())
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        # Bytes, because numpy has no bfloat16.
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
