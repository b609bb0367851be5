"""The three matrix products of the loss, in blocks where a factor has to be converted.

Symbols: V rows of the head that are here, m tokens of a chunk, d hidden size.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK = 8192
"""Rows of W that are converted at once where its type is not the one of the accumulation."""


def project(weight: Tensor, hs: Tensor, z: Tensor, product: torch.dtype) -> None:
    """Write W h^T into z: [V, d] x [m, d] -> [V, m]."""
    factor = hs.to(product).T
    for v in _blocks(weight, z):
        if product == z.dtype:
            torch.mm(weight[v].to(product), factor, out=z[v])
        else:
            z[v] = weight[v].to(product) @ factor


def back(weight: Tensor, z: Tensor, product: torch.dtype) -> Tensor:
    """Give z^T W: [V, m] x [V, d] -> [m, d]."""
    out = z.new_empty(z.shape[1], weight.shape[1])
    for i, v in enumerate(_blocks(weight, z)):
        _add_product(out, z[v].T, weight[v], product, first=i == 0)
    return out


def gather(grad_W: Tensor, z: Tensor, hs: Tensor, product: torch.dtype, first: bool) -> None:
    """Add z h to the gradient of W: [V, m] x [m, d] -> [V, d]."""
    for v in _blocks(grad_W, z) if product == z.dtype else _cut(z.shape[0]):
        _add_product(grad_W[v], z[v], hs, product, first)


def _add_product(out: Tensor, a: Tensor, b: Tensor, product: torch.dtype, first: bool) -> None:
    """Add a @ b to `out`, or put it there if it is the first term."""
    a, b = a.to(product), b.to(product)
    if product == out.dtype:
        torch.addmm(out, a, b, beta=0 if first else 1, out=out)
    elif first:
        out.copy_(a @ b)
    else:
        out.add_(a @ b)


def _blocks(matrix: Tensor, z: Tensor) -> Iterator[slice]:
    """Cut the V rows where they must be converted; a whole product is faster where not."""
    return iter([slice(None)]) if matrix.dtype == z.dtype else _cut(z.shape[0])


def _cut(V: int) -> Iterator[slice]:
    return (slice(v, v + BLOCK) for v in range(0, V, BLOCK))
