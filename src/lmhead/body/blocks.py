"""The blocks of a model: looking into them, and running only those above a layer.

Symbols: B texts, T tokens, x `[B, T, d]` what a block puts out, h `[B, T, d]` what enters the head.
Texts are padded on the right: attention looks back only, so no token ever sees the padding.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lmhead.body.adding import blocks_of, check_layer
from lmhead.body.tap import tapped
from lmhead.body.torch_body import TorchBody
from lmhead.errors import UnsupportedModel


class Blocks:
    """A body whose blocks can be looked into, changed, and left out from below."""

    def __init__(self, body: TorchBody) -> None:
        if not isinstance(body, TorchBody):
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
                stack.enter_context(tapped(block, leave=catch))
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
