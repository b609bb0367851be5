"""The units of a model's blocks: the modules with weights of their own, such as attention and MLP.

Kinds go by what modules are called. A module that holds both kinds is looked into.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

ATTENTION, MLP = "attention", "mlp"
EMBEDDING, POSITION, BIAS = "embedding", "position", "bias"  # of no block
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_MLP = re.compile(
    r"mlp|ffn|feed_?forward|moe|expert|^fc_?\d|^ff|^lin[12]$|^w[io123]$|^dense_|intermediate"
    r"|^(gate|up|down)_proj$",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Unit:
    """A module that adds to the stream, and where it stands."""

    name: str  # its path in the model
    kind: str  # "attention", "mlp", "embedding", "position", or what its own name is
    block: int | None  # None: before the first block


def units_of(model: nn.Module, blocks: nn.ModuleList) -> dict[nn.Module, Unit]:
    """Find the units of all blocks; a module that several blocks share belongs to the first."""
    names = {module: name for name, module in model.named_modules()}
    found: dict[nn.Module, Unit] = {}
    for i, block in enumerate(blocks):
        for module, kind in _inside(block):
            found.setdefault(module, Unit(names[module], kind, i))
    return found


def norms_of(blocks: nn.ModuleList) -> list[nn.Module]:
    """Return the children of the blocks that hold no matrix: norms, mostly."""
    children = (child for block in blocks for child in block.children())
    return list(dict.fromkeys(child for child in children if not _has_matrix(child)))


def _inside(parent: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for name, child in parent.named_children():
        if not _has_matrix(child):
            continue
        kind = _kind(name, child)
        listed = isinstance(child, nn.ModuleList | nn.ModuleDict)
        if listed or (kind is None and _holds_both(child)):
            yield from _inside(child)
        else:
            yield child, kind or name


def _has_matrix(module: nn.Module) -> bool:
    return any(p.ndim > 1 for p in module.parameters())


def _kind(name: str, module: nn.Module) -> str | None:
    for text in (name, type(module).__name__):
        # by its own name first: attention is often called after its model, and so is its MLP
        if _ATTENTION.search(text) and not _holds_both(module):
            return ATTENTION
        if _MLP.search(text) and not _holds_both(module):
            return MLP
    return None


def _holds_both(module: nn.Module) -> bool:
    names = [name.rpartition(".")[2] for name, _ in module.named_modules() if name]
    return any(map(_ATTENTION.search, names)) and any(map(_MLP.search, names))
