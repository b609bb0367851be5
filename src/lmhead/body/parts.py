"""What every unit added to the residual stream at one position, in one run of a model.

`parts_of` runs the model under a `Watch` and goes back from the state before the final norm, sum
by sum. The parts are float64, and add up to that state to the last bit: what a sum in the model's
own precision rounded away or up belongs to what was added there.

Symbols: T positions, d the width of the stream, x `[d]` the state before the final norm.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from typing import Any

import torch
from torch import Tensor, nn

from lmhead.body.adding import blocks_of
from lmhead.body.stream import Node, Watch
from lmhead.body.tap import tapped
from lmhead.body.torch_body import TorchBody
from lmhead.body.units import BIAS, EMBEDDING, POSITION, Unit, norms_of, units_of
from lmhead.errors import UnsupportedModel
from lmhead.head import LMHead
from lmhead.head.find.locate import output_layer

Factor = float | Tensor  # of a state: one number, or one for each of its d


@dataclass(frozen=True)
class Part:
    """What one unit added to the stream at the position."""

    unit: Unit
    value: Tensor  # [d] float64
    made_of: tuple[tuple[Node, Factor], ...]  # the states whose sum it is, each times this


@dataclass(frozen=True)
class Parts:
    """A state taken apart."""

    parts: tuple[Part, ...]  # from the embedding up
    x: Tensor  # [d] float64, their sum but for `rounding`: what enters the first of `steps`
    rounding: Tensor  # [d] float64: what scaling the whole stream rounded away
    steps: tuple[nn.Module, ...]  # what stands between x and the projection, the final norm mostly
    h: Tensor  # [d] what enters the projection
    logits: Tensor  # [V] the model's own


@torch.no_grad()
def parts_of(body: Any, head: LMHead, ids: list[int], position: int) -> Parts:
    """Run the model on ids `[T]`, and take the state at a position (0 to T - 1) apart."""
    if not isinstance(body, TorchBody):
        raise UnsupportedModel(
            "this engine runs all blocks as one graph; load the model with body='torch'"
        )
    model: nn.Module = body.model
    kind = type(model).__name__
    blocks = _blocks(model, kind)
    steps = _steps(model, head)
    watch = Watch(head.state_size if steps else head.hidden_size, len(ids), position)
    entered: dict[str, Node] = {}
    hs: list[Tensor] = []

    def enter(name: str, x: Tensor) -> Tensor:
        entered[name] = watch.node(x)
        if name == "layer":
            hs.append(x)
        return x

    with ExitStack() as stack:
        layer = output_layer(model)
        stack.enter_context(tapped(layer, enter=partial(enter, "layer")))
        if steps:
            stack.enter_context(tapped(steps[0], enter=partial(enter, "norm")))
        _tap_units(stack, watch, units_of(model, blocks), norms_of(blocks))
        stack.enter_context(watch)
        tensor = watch.read(torch.tensor([ids], device=body.device))
        logits = model(input_ids=tensor, use_cache=False).logits
    node = entered.get("norm" if steps else "layer")
    if node is None or node.value is None:
        raise UnsupportedModel(
            f"the state before the final norm of {kind} was not seen at every position, so it "
            "cannot be taken apart"
        )
    if not watch.began:
        raise UnsupportedModel(
            f"the blocks that were found in {kind} did not run on the text, so what they add is "
            "unknown"
        )
    parts, rounding = taken_apart(node, kind)
    row = position - len(ids)
    return Parts(
        parts=tuple(parts),
        x=node.value.double(),
        rounding=rounding,
        steps=steps,
        h=hs[-1].reshape(-1, hs[-1].shape[-1])[row],
        logits=logits.reshape(-1, logits.shape[-1])[row],
    )


def _blocks(model: nn.Module, kind: str) -> nn.ModuleList:
    try:
        return blocks_of(model)
    except UnsupportedModel:
        raise UnsupportedModel(
            f"the blocks of {kind} are not one list, as long as its configuration says; they "
            "cannot be told apart"
        ) from None


def _steps(model: nn.Module, head: LMHead) -> tuple[nn.Module, ...]:
    """Return what stands before the projection, from the first module of the model's own on."""
    if head.norm is None:
        return ()
    given = list(head.norm) if isinstance(head.norm, nn.Sequential) else [head.norm]
    own = set(model.modules())
    first = next((i for i, step in enumerate(given) if step in own), len(given))
    return tuple(given[first:])


def _tap_units(
    stack: ExitStack, watch: Watch, units: dict[nn.Module, Unit], norms: Iterable[nn.Module]
) -> None:
    def begin(unit: Unit, x: Tensor) -> Tensor:
        watch.begin(unit)
        return x

    def end(_result: Any) -> None:
        watch.end()

    before: dict[nn.Module, Node] = {}

    def enter(module: nn.Module, x: Tensor) -> Tensor:
        before[module] = watch.node(x)
        return x

    def leave(module: nn.Module, result: Any) -> None:
        watch.normed(module, before[module], result)

    for module, unit in units.items():
        stack.enter_context(tapped(module, enter=partial(begin, unit), see=end))
    for module in norms:
        stack.enter_context(
            tapped(module, enter=partial(enter, module), see=partial(leave, module))
        )


def taken_apart(top: Node, kind: str) -> tuple[list[Part], Tensor]:
    """Go back from a state to what was added up; return the parts, and what scaling rounded."""
    assert top.value is not None
    rounding = torch.zeros_like(top.value, dtype=torch.float64)
    factors: dict[Node, Factor] = {top: 1.0}
    extra: dict[Node, Tensor] = {}  # what was rounded, and belongs to a node
    found: dict[Unit, list[tuple[Node, Tensor, Factor]]] = {}
    heap = [(-top.at, id(top), top)]
    while heap:  # the newest first, so that all that is made of a node comes before it
        node = heappop(heap)[2]
        factor, more = factors.pop(node), extra.pop(node, None)
        assert node.value is not None
        opens = node.sums and node.norm is None and (node.stream or node.unit is None)
        if not opens:
            unit = _unit(node, kind)
            value = factor * node.value.double()
            found.setdefault(unit, []).append(
                (node, value if more is None else value + more, factor)
            )
            continue
        error = factor * _rounded(node, kind)
        error = error if more is None else error + more
        added = next((part for part, _ in node.sums if not part.stream), None)
        if added is None:
            rounding += error
        else:
            extra[added] = extra.get(added, 0.0) + error
        for part, by in node.sums:
            by = by.double() if isinstance(by, Tensor) else by
            if part in factors:
                factors[part] = factors[part] + factor * by
            else:
                factors[part] = factor * by
                heappush(heap, (-part.at, id(part), part))
    if not any(unit.kind == EMBEDDING for unit in found):
        raise UnsupportedModel(
            f"the state before the final norm of {kind} is not a sum that contains the embedding; "
            "its blocks cannot be told apart"
        )
    parts = [
        Part(unit, sum(v for _, v, _ in those), tuple((n, f) for n, _, f in those))  # type: ignore[arg-type]
        for unit, those in found.items()
    ]
    first = {p.unit: (p.unit.kind != EMBEDDING, min(n.at for n, _ in p.made_of)) for p in parts}
    parts.sort(
        key=lambda part: (-1 if part.unit.block is None else part.unit.block, first[part.unit])
    )
    return parts, rounding


def _rounded(node: Node, kind: str) -> Tensor:
    """Return by how much a sum differs from its terms, `[d]`; refuse more than rounding."""
    assert node.value is not None
    total = torch.zeros_like(node.value, dtype=torch.float64)
    size = total.clone()
    eps = torch.finfo(node.value.dtype).eps
    for part, by in node.sums:
        assert part.value is not None
        term = (by.double() if isinstance(by, Tensor) else by) * part.value.double()
        total, size = total + term, size + term.abs()
        eps = max(eps, torch.finfo(part.value.dtype).eps)
    error = node.value.double() - total
    if bool((error.abs() > 4 * eps * size + 1e-30).any()):
        raise UnsupportedModel(
            f"{kind} changes its residual stream in a way that was not seen (at {node.verb!r}); "
            "what its blocks add cannot be determined"
        )
    return error


def _unit(node: Node, kind: str) -> Unit:
    """Tell which unit made a state; refuse one that several kinds made together."""
    if node.unit is not None:
        return node.unit
    if node.constant:
        return Unit("bias", BIAS, None) if node.late else Unit("position", POSITION, None)
    if node.stream:
        return Unit("embedding", EMBEDDING, None)
    found: dict[Unit, None] = {}
    seen: set[Node] = set()
    todo = [node]
    while todo:
        at = todo.pop()
        if at in seen or at.constant:
            continue
        seen.add(at)
        if at.unit is not None:
            found[at.unit] = None
        elif at.stream:
            raise UnsupportedModel(_not_apart(kind, node, "the stream itself"))
        else:
            todo += at.parents
    if len({(unit.block, unit.kind) for unit in found}) != 1:
        names = " and ".join(sorted(unit.name for unit in found)[:3]) or "nothing that was seen"
        raise UnsupportedModel(_not_apart(kind, node, names))
    return next(iter(found))


def _not_apart(kind: str, node: Node, what: str) -> str:
    return (
        f"the blocks of {kind} cannot be told apart: {node.verb!r} acts on {what} between two "
        "blocks; expected a residual stream that blocks only add to"
    )
