"""The blocks of a model: looking into them, and running only those above a layer.

Symbols: B texts, T tokens, x `[B, T, d]` what a block puts out, h `[B, T, d]` what enters the head.
Texts are padded on the right: attention looks back only, so no token ever sees the padding.
"""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from lmhead.body.adding import blocks_of, check_layer
from lmhead.body.base import Body
from lmhead.body.skipping import skipping
from lmhead.body.tap import tapped
from lmhead.body.torch_body import TorchBody
from lmhead.errors import UnsupportedModel


class Blocks:
    """A body whose blocks can be looked into, changed, and left out from below."""

    def __init__(self, body: Body) -> None:
        if not isinstance(body, TorchBody):
            raise UnsupportedModel(
                "this engine runs all blocks as one graph; load the model with body='torch'"
            )
        self.body = body
        self.blocks = blocks_of(body.model)
        self._returns = self._try()

    def __len__(self) -> int:
        return len(self.blocks)

    def _try(self) -> int:
        """Run two tokens to see how many things a block returns; 0 is a bare tensor."""
        seen: list[int] = []

        def look(result: Any) -> None:
            seen.append(len(result) if isinstance(result, tuple) else 0)

        with torch.no_grad(), tapped(self.blocks[0], see=look):
            self.body(torch.zeros(1, 2, dtype=torch.long), use_cache=False)
        if not seen:
            raise UnsupportedModel(
                f"{type(self.body.model).__name__} does not run its first block as a module; "
                "expected a model that runs its blocks one after another"
            )
        return seen[0]

    def states(self, ids: Tensor, **inputs: Any) -> list[Tensor]:
        """Return what every block puts out, and last what enters the head; each `[B, T, d]`."""
        caught: list[Tensor] = []

        def catch(x: Tensor) -> Tensor:
            caught.append(x)
            return x

        with ExitStack() as stack, torch.no_grad():
            for block in self.blocks:
                stack.enter_context(tapped(block, leave=catch))
            h, _ = self.body(ids, use_cache=False, **inputs)
        return [*caught, h]

    def above(self, layer: int, x: Tensor) -> Tensor:
        """Run the blocks above `layer` on what it puts out, `[B, T, d]`; return h, gradients too.

        The model runs whole, by its own rules for masks and positions; the blocks up to `layer`
        are left out.
        """
        check_layer(layer, self.blocks)
        result = (x, *[None] * (self._returns - 1)) if self._returns else x
        with skipping(self.blocks[: layer + 1], result):
            h, _ = self.body(torch.zeros(x.shape[:2], dtype=torch.long), use_cache=False)
        return h
