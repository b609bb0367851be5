"""The blocks of a decoder, and adding to what they put out, for some rows of a batch or for all.

Symbols: B texts, T tokens, x `[B, T, d]` what a block puts out, h `[B, T, d]` what enters the head.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lmhead.body.base import HEAD, Additions
from lmhead.body.tap import Change, tapped
from lmhead.errors import BadInput, UnsupportedModel


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


def check_layer(layer: int | str, blocks: Sized) -> None:
    """Refuse a layer that the model does not have."""
    if layer != HEAD and not 0 <= int(layer) < len(blocks):
        raise BadInput(
            f"the layer is {layer}, but the model has {len(blocks)} blocks; expected 0 to "
            f"{len(blocks) - 1}, or {HEAD!r}"
        )


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
            x[rows] += vector.to(x)
            return x

        return add

    layers = {layer: vector for layer, vector in added.items() if layer != HEAD}
    blocks = blocks_of(model) if layers else nn.ModuleList()
    with ExitStack() as stack:
        for layer, vector in layers.items():
            check_layer(layer, blocks)
            stack.enter_context(tapped(blocks[int(layer)], leave=change(vector)))
        yield


@contextmanager
def adding_rows(
    model: nn.Module, rows: Sequence[Additions], B: int
) -> Iterator[Callable[[Tensor], Tensor] | None]:
    """While it lasts, each row of a batch of B has its own additions, at every position.

    It gives what is to be done to h once it is there, or None where nothing is.
    """
    changes = row_changes(rows, B)
    at_head = changes.pop(HEAD, None)
    blocks = blocks_of(model) if changes else nn.ModuleList()
    with ExitStack() as stack:
        for layer, change in changes.items():
            check_layer(layer, blocks)
            stack.enter_context(tapped(blocks[int(layer)], leave=change))
        yield at_head


def row_changes(rows: Sequence[Additions], B: int) -> dict[int | str, Change]:
    """Return for every layer what is done to x `[B, T, d]`: rows without an addition stay."""
    if len(rows) != B:
        raise BadInput(f"rows has {len(rows)} entries for a batch of {B}; expected one for each")
    found: dict[int | str, tuple[list[int], list[Tensor]]] = {}
    for row, added in enumerate(rows):
        for layer, vector in (added or {}).items():
            at, vectors = found.setdefault(layer, ([], []))
            at.append(row)
            vectors.append(vector)

    def change(at: list[int], vectors: list[Tensor]) -> Change:
        index, added = torch.tensor(at), torch.stack(vectors).unsqueeze(1)  # [n], [n, 1, d]

        def add(x: Tensor) -> Tensor:
            if len(at) == B:
                return x + added.to(x)
            x = x.clone()
            x[index] += added.to(x)
            return x

        return add

    return {layer: change(*given) for layer, given in found.items()}
