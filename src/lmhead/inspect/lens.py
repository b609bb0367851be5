"""The logit lens: what the head would say after every block, position by position.

Each row of a lens is the output of one block, sent through the final norm and the head as if the
model ended there. The last row is what the model says: it is compared with the model's own logits
of the same run, bit by bit.

Symbols: T positions, d the width of a state, V tokens, x `[1, T, d]` what a block puts out,
z logits `[T, V]`.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lmhead import markup
from lmhead.body.adding import blocks_of
from lmhead.body.tap import tapped
from lmhead.body.torch_body import TorchBody
from lmhead.errors import BadInput, UnsupportedModel
from lmhead.generation.prompts import Prompt, Source, encoded, listed
from lmhead.head.find.trace import tensors_in
from lmhead.inspect.tokens import Token, find_token
from lmhead.loading import Model, load
from lmhead.models.registry import DEFAULT_MODEL
from lmhead.progress import Progress, silent

LOGITS_AT_ONCE = 1 << 25  # 128 MB of float32; each product packs the weight, so few are better
STRETCH = 256  # tokens whose largest logit says whether one of the best can be among them


@dataclass(frozen=True)
class LensToken:
    """One of the best tokens of a cell."""

    id: int
    text: str
    probability: float


@dataclass(frozen=True)
class LensCell:
    """What the head would say after one block, at one position."""

    top: tuple[LensToken, ...]  # the best tokens, best first
    entropy: float  # of the whole distribution, in nats
    kl: float  # KL(final || this), in nats: how far it is from what the model says in the end
    rank: int  # of the token that the model says in the end; 1 is the best
    probability: float  # of that token
    token_rank: int | None = None  # the same of the token that is followed
    token_probability: float | None = None


@dataclass(frozen=True)
class LensRow:
    """All positions after one block."""

    name: str  # "embedding", "block 0", ...
    block: int | None  # None: before the first block
    cells: tuple[LensCell, ...]


@dataclass(frozen=True)
class Lens:
    """What the head would say after every block; the last row is what the model says."""

    model: str
    prompt: str
    ids: tuple[int, ...]
    tokens: tuple[str, ...]  # the text of each id; the cell below it is about the token behind it
    rows: tuple[LensRow, ...]  # from the embedding up
    token: Token | None  # the one that is followed
    exact: bool  # the last row equals the model's own logits, bit by bit

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        # not `asdict`, which copies thousands of cells as slowly as they are computed
        rows = [
            {
                **vars(row),
                "cells": [{**vars(c), "top": [dict(vars(t)) for t in c.top]} for c in row.cells],
            }
            for row in self.rows
        ]
        followed = None if self.token is None else asdict(self.token)
        return {**vars(self), "rows": rows, "token": followed}

    def _repr_html_(self) -> str:
        head = ["", *self.tokens]
        body: list[list[str | markup.Cell]] = [
            [row.name, *(markup.Cell(c.top[0].text, shade=c.top[0].probability) for c in row.cells)]
            for row in reversed(self.rows)
        ]
        return markup.table(head, body, caption=f"{self.model}: what each block would say next")


def lens(
    prompt: Prompt,
    model: Source = DEFAULT_MODEL,
    *,
    token: str | int | Token | None = None,
    top: int = 5,
    last: int | None = None,
    chat: bool = False,
    tokenizer: Any = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    progress: Progress = silent,
) -> Lens:
    """Show what the head would say after every block, at every position of a prompt.

    - `token`: a token to follow, by its text or id: its rank and probability in every cell.
    - `top`: how many of the best tokens to keep in every cell.
    - `last`: only this many of the last positions.
    - `tokenizer`, `device`, `dtype`: as in `load`.

    Rows of the head without a token are ignored. A model whose blocks cannot be examined is
    refused, with the reason.
    """
    for name, value in (("top", top), ("last", 1 if last is None else last)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadInput(
                f"{name} is {value!r}; expected a whole number of at least 1", names=[name]
            )
    given = listed(prompt)
    if len(given) != 1:
        raise BadInput(f"lens got {len(given)} prompts; expected one")
    loaded = load(model, tokenizer=tokenizer, device=device, dtype=dtype, progress=progress)
    text, ids = encoded(loaded, given[0], chat=chat)
    followed = None if token is None else find_token(loaded, token)
    rows, exact, _ = looked(loaded, ids, followed, top=top, last=last, progress=progress)
    shown = ids[-last:] if last else ids
    return Lens(
        model=loaded.name,
        prompt=text,
        ids=tuple(shown),
        tokens=tuple(map(loaded.token_text, shown)),
        rows=tuple(rows),
        token=followed,
        exact=exact,
    )


def looked(
    model: Model,
    ids: list[int],
    followed: Token | None,
    *,
    top: int,
    last: int | None = None,
    progress: Progress = silent,
) -> tuple[list[LensRow], bool, Tensor]:
    """Do what `lens` does, for ids; return rows, whether they are exact, and the logits `[T, V]`.

    The logits are the model's own, of the same run.
    """
    states, logits = _run(model, ids)
    rows, exact = _rows(model, states, logits, followed, top, last or len(ids), progress)
    return rows, exact, logits[0]


@torch.inference_mode()
def _run(model: Model, ids: list[int]) -> tuple[list[Tensor], Tensor]:
    """Run the model; return what enters the first block and leaves each, and its own logits."""
    if not isinstance(model.body, TorchBody):
        raise UnsupportedModel(
            "this engine runs all blocks as one graph; load the model with body='torch'"
        )
    net = model.body.model
    try:
        blocks = blocks_of(net)
    except UnsupportedModel:
        raise UnsupportedModel(
            f"the blocks of {type(net).__name__} are not one list, as long as its configuration "
            "says; the lens cannot tell them apart"
        ) from None
    caught: list[Tensor] = []

    def catch(x: Tensor) -> Tensor:
        caught.append(x)
        return x

    def see(result: Any) -> None:
        caught.append(next(tensors_in(result)))

    with ExitStack() as stack:
        stack.enter_context(tapped(blocks[0], enter=catch))
        for block in blocks:
            stack.enter_context(tapped(block, see=see))
        out = net(input_ids=torch.tensor([ids], device=model.body.device), use_cache=False)
    if len(caught) != len(blocks) + 1:
        raise UnsupportedModel(
            f"{type(net).__name__} does not run each of the {len(blocks)} blocks that were found "
            f"exactly once ({max(0, len(caught) - 1)} runs); the lens needs a model that does"
        )
    return caught, out.logits


@torch.inference_mode()
def _rows(
    model: Model,
    states: list[Tensor],
    logits: Tensor,
    followed: Token | None,
    top: int,
    last: int,
    progress: Progress,
) -> tuple[list[LensRow], bool]:
    head, V = model.head, model.reachable
    kind = type(model.body.model).__name__
    own = head(_like(states[-1], logits, head.state_size, kind), from_block=True)
    exact = torch.equal(own, logits)
    if not exact and not torch.allclose(own.float(), logits.float(), rtol=1e-3, atol=1e-3):
        raise UnsupportedModel(
            f"{kind} does more between its last block and its head than its final norm; the lens "
            "needs a model whose last block, normed, gives its logits"
        )
    final = _Final.of(logits[0, -last:, :V].float().cpu())
    token_text = cache(model.token_text)
    last = len(final.answer)
    rows: list[LensRow] = []
    parts = list(_chunks(last, V))
    space = _Space.of(len(range(last)[parts[0]]), V)

    def read(z: Tensor, at: slice) -> list[LensCell]:
        """Read the cells of some positions off logits `[n, V]`."""
        return list(_cells(z.float().cpu(), final.at(at), followed, top, token_text, space))

    def add(cells: list[LensCell]) -> None:
        block = len(rows) - 1 if rows else None
        name = "embedding" if block is None else f"block {block}"
        rows.append(LensRow(name, block, tuple(cells)))
        advance(1)

    with progress("looking through the lens", total=len(states)) as advance:
        inner = [_like(x, logits, head.state_size, kind)[0, -last:] for x in states[:-1]]
        # few large products are quicker than one for each block
        together = max(1, LOGITS_AT_ONCE // (V * last))
        for first in range(0, len(inner), together):
            x = torch.stack(inner[first : first + together])  # [rows, T, d]
            found: list[list[LensCell]] = [[] for _ in x]
            for at in parts:
                z = head(x[:, at], from_block=True)[..., :V]
                for cells, one in zip(found, z, strict=True):
                    cells += read(one, at)
            for cells in found:
                add(cells)
        add([cell for at in parts for cell in read(logits[0, -last:, :V][at], at)])
    return rows, exact


def _cells(
    z: Tensor, final: "_Final", followed: Token | None, top: int, text: Any, space: "_Space"
) -> Iterator[LensCell]:
    """Read cells off logits `[n, V]` float32, beside what the model says in the end."""
    largest, best = _largest(z, min(top, z.shape[1]))
    values, ids = largest.tolist(), best.tolist()
    own = _Rows.of(z, largest[:, 0], space)
    entropy = own.entropy.tolist()
    kl = (own.log_total - own.mean(final.p) - final.entropy).tolist()
    total, found = own.total.tolist(), own.found(z, final.answer)
    wanted = [None] * len(z) if followed is None else own.found(z, [followed.id] * len(z))
    for n, follows in enumerate(wanted):
        yield LensCell(
            top=tuple(
                LensToken(i, text(i), math.exp(value - values[n][0]) / total[n])
                for i, value in zip(ids[n], values[n], strict=True)
            ),
            entropy=entropy[n],
            kl=max(kl[n], 0.0),
            rank=found[n][0],
            probability=found[n][1],
            token_rank=follows[0] if follows else None,
            token_probability=follows[1] if follows else None,
        )


def _largest(z: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest of each row of `z [n, V]` and their ids, as `torch.topk` does.

    They lie in the k stretches with the largest maxima, or behind the last whole stretch. To look
    for maxima first takes a third of the time.
    """
    V = z.shape[1]
    whole = V - V % STRETCH
    if whole // STRETCH <= k:
        best = torch.topk(z, k)
        return best.values, best.indices
    stretches = z.unfold(1, STRETCH, STRETCH)  # [n, V / 256, 256]
    first = torch.topk(stretches.amax(-1), k).indices * STRETCH
    ids = (first[..., None] + torch.arange(STRETCH, device=z.device)).flatten(1)
    ids = torch.cat([ids, torch.arange(whole, V, device=z.device).expand(len(z), -1)], 1)
    best = torch.topk(z.gather(1, ids), k)
    return best.values, ids.gather(1, best.indices)


@dataclass(frozen=True)
class _Space:
    """Memory for the rows of one block after another: to ask for it anew costs more than exp."""

    off: Tensor
    w: Tensor
    product: Tensor

    @classmethod
    def of(cls, n: int, V: int) -> "_Space":
        return cls(*torch.empty(3, n, V))

    def first(self, n: int) -> "_Space":
        return _Space(self.off[:n], self.w[:n], self.product[:n])


@dataclass(frozen=True)
class _Rows:
    """Distributions, `[n, V]`: whole matrices, which threads share, and not one row at a time."""

    off: Tensor  # [n, V] logits less the largest, so that nothing large is taken from a large one
    w: Tensor  # [n, V] exp(off)
    total: Tensor  # [n] of w, float64
    product: Tensor  # [n, V] to be written over

    @classmethod
    def of(cls, z: Tensor, best: Tensor, space: _Space) -> "_Rows":
        space = space.first(len(z))
        torch.sub(z, best[:, None], out=space.off)
        torch.exp(space.off, out=space.w)
        return cls(space.off, space.w, space.w.sum(-1).double(), space.product)

    @property
    def log_total(self) -> Tensor:
        return self.total.log()

    @property
    def entropy(self) -> Tensor:
        return (self.log_total - self.mean(self.w) / self.total).clamp(min=0.0)

    def mean(self, p: Tensor) -> Tensor:
        """Weigh the logits, less the largest, by p `[n, V]`."""
        # added up in pairs; a dot product would round far more
        found = torch.mul(p, self.off, out=self.product).sum(-1)
        if bool(found.isnan().any()):  # -inf times 0
            found = (p * self.off.clamp(min=-1e30)).sum(-1)
        return found.double()

    def found(self, z: Tensor, ids: list[int]) -> list[tuple[int, float]]:
        """Return the rank and the probability of one token in each row of logits `z [n, V]`."""
        at = torch.tensor(ids)[:, None]
        # ones in float32 add up far quicker than booleans, and exactly: V is below 2^24
        ranks = 1 + torch.gt(z, z.gather(1, at), out=self.product).sum(-1).long()
        p = self.off.gather(1, at)[:, 0].double().exp() / self.total
        return list(zip(ranks.tolist(), p.tolist(), strict=True))


@dataclass(frozen=True)
class _Final:
    """What the model says in the end, at n positions."""

    p: Tensor  # [n, V]
    entropy: Tensor  # [n]
    answer: list[int]

    @classmethod
    def of(cls, z: Tensor) -> "_Final":
        best, answer = z.max(-1)
        own = _Rows.of(z, best, _Space.of(*z.shape))
        return cls(own.w / own.total[:, None].float(), own.entropy, answer.tolist())

    def at(self, some: slice) -> "_Final":
        return _Final(self.p[some], self.entropy[some], self.answer[some])


def _like(x: Tensor, logits: Tensor, width: int, kind: str) -> Tensor:
    """Bring a block's output into the order of the logits `[1, T, V]`: `[1, T, d]`.

    Some models put the batch second, or a prompt of their own before the text.
    """
    T = logits.shape[1]
    rows = x.reshape(-1, x.shape[-1])
    if x.shape[-1] != width or len(rows) < T or x.ndim > 3:
        raise UnsupportedModel(
            f"the blocks of {kind} put out {list(x.shape)}, which is not one state for each of "
            f"{T} positions; the lens needs [1, {T}, {width}]"
        )
    return rows[-T:].unsqueeze(0)


def _chunks(T: int, V: int) -> Iterator[slice]:
    step = max(1, LOGITS_AT_ONCE // V)
    return (slice(at, at + step) for at in range(0, T, step))
