"""The blocks of a model: adding to what one of them puts out, and running only those above it.

Symbols: B texts, T tokens, x `[B, T, d]` what a block puts out, h `[B, T, d]` what enters the head.
Texts are padded on the right: attention looks back only, so no token ever sees the padding.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lmhead.errors import BadInput, UnsupportedModel
from lmhead.loading import Body
from lmhead.steer.vector import HEAD, SteeringVector

Change = Callable[[Tensor], Tensor]


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """Find the blocks of a decoder: the list of modules that is as long as its configuration says.

    Where several are (a model with an encoder, or with lists of norms), the last one whose
    modules hold the most parameters is it.
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    count = getattr(text, "num_hidden_layers", None) or getattr(text, "n_layer", None)
    found = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not found:
        raise UnsupportedModel(
            f"{type(model).__name__} has no list of {count} blocks to steer at; expected a "
            "decoder of equal blocks: steer at the layer 'head' instead"
        )
    return max(reversed(found), key=lambda blocks: sum(p.numel() for p in blocks.parameters()))


def check_layer(layer: int | str, blocks: nn.ModuleList) -> None:
    """Refuse a layer that the model does not have."""
    if layer != HEAD and not 0 <= int(layer) < len(blocks):
        raise BadInput(
            f"the layer is {layer}, but the model has {len(blocks)} blocks; expected 0 to "
            f"{len(blocks) - 1}, or {HEAD!r}"
        )


@contextmanager
def changed(block: nn.Module, change: Change) -> Iterator[None]:
    """While it lasts, what the block puts out is `change` of what it would."""

    def hook(_module: nn.Module, _args: Any, result: Any) -> Any:
        if isinstance(result, tuple):
            return (change(result[0]), *result[1:])
        return change(result)

    handle = block.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def adding(
    model: nn.Module, added: Mapping[int | str, Tensor], rows: slice = slice(None)
) -> Iterator[None]:
    """While it lasts, `[d]` is added to what each of these blocks puts out, at every position.

    `rows` are the rows of the batch that it is added to; the others stay as they are, bit by bit.
    """

    def change(vector: Tensor) -> Change:
        def add(x: Tensor) -> Tensor:
            x = x.clone()
            x[rows] += vector.to(x.dtype)
            return x

        return add

    layers = {layer: vector for layer, vector in added.items() if layer != HEAD}
    blocks = blocks_of(model) if layers else nn.ModuleList()
    with ExitStack() as stack:
        for layer, vector in layers.items():
            stack.enter_context(changed(blocks[int(layer)], change(vector)))
        yield


class Blocks:
    """A body whose blocks can be looked into, changed, and left out from below."""

    def __init__(self, body: Body) -> None:
        if not isinstance(body, Body):
            raise UnsupportedModel("this engine runs its blocks as one; load the model with torch")
        self.body = body
        self.blocks = blocks_of(body.model)
        self._returns = self._try()

    def __len__(self) -> int:
        return len(self.blocks)

    def _try(self) -> int:
        """Run two tokens to see how many things a block returns; 0 is a bare tensor."""
        seen: list[int] = []

        def look(_module: nn.Module, _args: Any, result: Any) -> None:
            seen.append(len(result) if isinstance(result, tuple) else 0)

        handle = self.blocks[0].register_forward_hook(look)
        try:
            with torch.no_grad():
                self.body(torch.zeros(1, 2, dtype=torch.long), use_cache=False)
        finally:
            handle.remove()
        return seen[0]

    def states(self, ids: Tensor) -> list[Tensor]:
        """Return what every block puts out, and last what enters the head; each `[B, T, d]`."""
        caught: list[Tensor] = []

        def catch(x: Tensor) -> Tensor:
            caught.append(x)
            return x

        with ExitStack() as stack, torch.no_grad():
            for block in self.blocks:
                stack.enter_context(changed(block, catch))
            h, _ = self.body(ids, use_cache=False)
        return [*caught, h]

    def above(self, layer: int, x: Tensor) -> Tensor:
        """Run the blocks above `layer` on what it puts out, `[B, T, d]`; return h, gradients too.

        The model runs whole, by its own rules for masks and positions; the blocks up to `layer`
        are left out.
        """
        check_layer(layer, self.blocks)
        result = (x, *[None] * (self._returns - 1)) if self._returns else x
        with ExitStack() as stack:
            for block in self.blocks[: layer + 1]:
                stack.enter_context(_replaced(block, result))
            ids = torch.zeros(x.shape[:2], dtype=torch.long)
            h, _ = self.body(ids, use_cache=False)
        return h


@contextmanager
def _replaced(block: nn.Module, result: Any) -> Iterator[None]:
    block.forward = lambda *_args, **_kwargs: result
    try:
        yield
    finally:
        del block.forward  # the class's own forward shows again


def steering(body: Body, vectors: Sequence[SteeringVector]) -> dict[int | str, Tensor]:
    """Sum what is added at every layer, `[d]` each; check layers and widths."""
    total: dict[int | str, Tensor] = {}
    blocks = blocks_of(body.model) if any(v.layer != HEAD for v in vectors) else nn.ModuleList()
    for vector in vectors:
        check_layer(vector.layer, blocks)
        width = _width(body, vector.layer)
        if vector.size != width:
            raise BadInput(
                f"the vector has width {vector.size}, but the model's states at layer "
                f"{vector.layer} have {width}; expected a vector made for this model"
            )
        total[vector.layer] = total.get(vector.layer, 0) + vector.added
    return total


def _width(body: Body, layer: int | str) -> int:
    if layer == HEAD:
        return int(body.model.get_output_embeddings().weight.shape[1])
    return int(body.config.hidden_size)
