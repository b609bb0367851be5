"""Inside one part: the heads of an attention, the neurons of an MLP.

Both end in one linear layer. Its input is a row of heads side by side, or of neurons; so what each
of them adds is its own slice of the product, sent through whatever follows that layer (a norm, a
multiplier) as `frozen` does it.

Symbols: d the width of the stream, n the width of the layer's input.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lmhead.body.parts import Part, Parts
from lmhead.body.stream import Node, Product
from lmhead.body.units import MLP
from lmhead.errors import BadInput, UnsupportedModel
from lmhead.inspect.frozen import passed

Map = Callable[[Tensor], Tensor]  # rows [k, d] to rows [k, d]
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "attention_heads")
_CLOSE = 1e-3  # of the largest entry; bfloat16 rounds as much


def split_heads(part: Part, model: nn.Module) -> tuple[Tensor, Tensor]:
    """Return what each head added to the stream, `[heads, d]`, and the bias and rounding `[d]`."""
    product, after = _last_layer(part, model, "heads")
    x, weight = product.x.double(), product.weight.detach().double()
    heads = _head_count(model, part)
    n = len(x)
    if n % heads:
        raise UnsupportedModel(
            f"{part.unit.name} of {type(model).__name__} has {heads} heads side by side in {n} "
            "numbers; its heads cannot be told apart"
        )
    each = torch.einsum(
        "dhk,hk->hd", weight.view(len(weight), heads, n // heads), x.view(heads, n // heads)
    )
    rows = after(each.cpu())
    return rows, part.value.cpu() - rows.sum(0)


def neurons_of(apart: Parts, model: nn.Module, block: int) -> tuple[Tensor, Tensor]:
    """Return a block's neurons: activations `[n]`, and what each added to the stream `[n, d]`."""
    those = [p for p in apart.parts if p.unit.kind == MLP and p.unit.block == block]
    if not those:
        blocks = sorted({b for p in apart.parts if (b := p.unit.block) is not None})
        with_mlp = sorted({p.unit.block or 0 for p in apart.parts if p.unit.kind == MLP})
        if block not in blocks:
            expected = f"expected {blocks[0]} to {blocks[-1]}" if blocks else "it has none"
            raise BadInput(
                f"neurons is {block}, but the model has no such block; {expected}",
                names=["neurons"],
            )
        raise BadInput(
            f"neurons is {block}, a block without an MLP; {type(model).__name__} has one in "
            f"{', '.join(map(str, with_mlp)) or 'no block'}",
            names=["neurons"],
        )
    if len(those) > 1:
        raise UnsupportedModel(
            f"block {block} of {type(model).__name__} has {len(those)} MLPs side by side; its "
            "neurons cannot be told apart"
        )
    product, after = _last_layer(those[0], model, "neurons")
    x = product.x.double().cpu()
    return x, after(product.weight.detach().double().cpu().T * x.unsqueeze(-1))


def _last_layer(part: Part, model: nn.Module, what: str) -> tuple[Product, Map]:
    """Find the linear layer that a part ends in, and what its output goes through after it."""
    kind = type(model).__name__
    fails = UnsupportedModel(
        f"{part.unit.name} of {kind} does not end in one linear layer; its {what} cannot be told "
        "apart"
    )
    if len(part.made_of) != 1:
        raise fails
    node, factor = part.made_of[0]
    maps: list[Map] = [_times(factor)]
    while node.product is None:
        if node.norm is not None:
            module, before = node.norm
            if before.value is None:
                raise fails
            maps.append(_norm(module, before.value.double().cpu(), kind))
            node = before
        elif len(node.sums) == 1:
            node, by = node.sums[0]
            maps.append(_times(by))
        else:
            raise fails

    def after(rows: Tensor) -> Tensor:
        for step in reversed(maps):
            rows = step(rows)
        return rows

    return _checked(part, node, node.product, after, fails), after


def _checked(part: Part, node: Node, product: Product, after: Map, fails: Exception) -> Product:
    """Refuse a layer that does not give what the part is."""
    out = product.weight.detach().double() @ product.x.double()
    bias = product.bias if product.bias is not None else torch.zeros_like(out)
    assert node.value is not None
    whole = out + bias.detach().double()
    if bool((whole - node.value.double()).abs().max() > _CLOSE * whole.abs().max() + 1e-12):
        raise fails
    return product


def _times(factor: float | Tensor) -> Map:
    if isinstance(factor, Tensor):
        return lambda rows: rows * factor.double().cpu()
    return lambda rows: rows * factor


def _norm(module: nn.Module, x: Tensor, kind: str) -> Map:
    return lambda rows: passed([module], x, rows, kind).parts


def _head_count(model: nn.Module, part: Part) -> int:
    attention = model.get_submodule(part.unit.name)
    config: Any = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    for holder in (*attention.modules(), text):
        for name in _HEADS:
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    raise UnsupportedModel(
        f"{part.unit.name} of {type(model).__name__} does not say how many heads it has"
    )
