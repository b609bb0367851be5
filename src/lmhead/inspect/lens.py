"""The logit lens: what the head would say after every block, position by position.

Each row of a lens is the output of one block, sent through the final norm and the head as if the
model ended there. The last row is what the model says: it is compared with the model's own logits
of the same run, bit by bit.

Symbols: T positions, d the width of a state, V tokens, x `[1, T, d]` what a block puts out,
z logits `[T, V]`.
"""

from collections.abc import Callable
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
from lmhead.head import LMHead
from lmhead.head.distributions import Distributions, Space, weighed
from lmhead.head.find.trace import tensors_in
from lmhead.inspect.tokens import Token, find_token
from lmhead.loading import Model, load
from lmhead.models.registry import DEFAULT_MODEL
from lmhead.progress import Progress, silent

STATES_AT_ONCE = 1024
LOGITS_AT_ONCE = 1 << 20  # 4 MB of float32, which stay in the processor's cache


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
    exact = torch.equal(own := head(_like(states[-1], logits, head, kind), from_block=True), logits)
    if not exact and not torch.allclose(own.float(), logits.float(), rtol=1e-3, atol=1e-3):
        raise UnsupportedModel(
            f"{kind} does more between its last block and its head than its final norm; the lens "
            "needs a model whose last block, normed, gives its logits"
        )
    del own
    said = logits[0, -last:, :V]
    last, blocks = len(said), len(states) - 1
    inner = torch.stack([_like(x, logits, head, kind)[0, -last:] for x in states[:-1]])
    positions = min(last, max(1, STATES_AT_ONCE // blocks))
    width = max(64, LOGITS_AT_ONCE // (blocks * positions) // 64 * 64)  # tokens of a stretch
    space = Space.to_hold(blocks * positions * width)
    text = cache(model.token_text)
    cells: list[list[LensCell]] = [[] for _ in states]
    with progress("looking through the lens", total=-(-last // positions) * V) as advance:
        for at in range(0, last, positions):
            z = said[at : at + positions].cpu()
            final = _Final.of(z, width, space)
            ids = torch.tensor(final.answer)[:, None]  # [T, 1]
            if followed is not None:
                ids = torch.cat([ids, torch.full_like(ids, followed.id)], 1)
            h = head.entering(inner[:, at : at + positions], from_block=True)  # [S, T, d]
            asked = head.score(h, ids.to(h.device).expand(len(h), *ids.shape)).float().cpu()
            read = _Read(final, ids, asked, top)
            for first in range(0, V, width):
                stop = min(first + width, V)
                read.add(head.stretch(h, first, stop).float().cpu(), first, space)
                advance(stop - first)
            _extend(cells[:-1], read, text)
            read = _Read(final, ids, z.float().gather(1, ids)[None], top)
            for first in range(0, V, width):
                read.add(z[None, :, first : first + width].float().clone(), first, space)
            _extend(cells[-1:], read, text)
    rows = [LensRow("embedding", None, tuple(cells[0]))]
    rows += [LensRow(f"block {i}", i, tuple(found)) for i, found in enumerate(cells[1:])]
    return rows, exact


class _Read:
    """What is read off the logits `[S, T, V]` of S blocks, beside what the model says in the end.

    `ids [T, q]` are tokens to follow, and `asked [S, T, q]` their logits.
    """

    def __init__(self, final: "_Final", ids: Tensor, asked: Tensor, top: int) -> None:
        S, T, _ = asked.shape
        self.final, self.ids, self.asked = final, ids, asked
        self.all = Distributions(S * T, min(top, final.z.shape[1]))
        self.more = torch.zeros(asked.shape)  # how many tokens are likelier; V is below 2^24
        self._cross = torch.zeros(S, T, dtype=torch.float64)  # of p (z - peak), p of the end
        self._mass = torch.zeros(T, dtype=torch.float64)  # of p, so far

    def add(self, z: Tensor, first: int, space: Space) -> None:
        """Read logits `[S, T, n]` of the tokens from `first` on; they are written over."""
        p = self.final.p(first, first + z.shape[-1])
        # their own product may have rounded otherwise; no token is likelier than itself
        inside = (self.ids >= first) & (self.ids < first + z.shape[-1])
        for t, j in inside.nonzero().tolist():
            z[:, t, int(self.ids[t, j]) - first] = self.asked[:, t, j]
        product = space.of(z)[1]
        for j in range(self.ids.shape[1]):
            # ones in float32 add up far quicker than booleans, and exactly
            self.more[..., j] += torch.gt(z, self.asked[..., j : j + 1], out=product).sum(-1)
        off, moved = self.all.add(z.flatten(0, 1), first, space)
        self._cross += moved.view_as(self._cross) * self._mass
        self._cross += weighed(p, off.view(z.shape), product)
        self._mass += p.sum(-1).double()

    @property
    def kl(self) -> Tensor:
        """KL(final || this) in nats, `[S, T]`."""
        return self.all.log_total.view_as(self._cross) - self._cross - self.final.entropy


def _extend(rows: list[list[LensCell]], read: _Read, text: Callable[[int], str]) -> None:
    """Add what was read to the cells of each of the S blocks."""
    S, T, q = read.asked.shape
    best, ids = read.all.best, read.all.ids.tolist()
    p = read.all.probability(best.T).T.tolist()
    entropy, kl = read.all.entropy.tolist(), read.kl.clamp(min=0.0).flatten().tolist()
    rank = (1 + read.more).long().view(S * T, q).tolist()
    chance = read.all.probability(read.asked.view(S * T, q).T).T.tolist()
    for n in range(S * T):
        rows[n // T].append(
            LensCell(
                top=tuple(LensToken(i, text(i), x) for i, x in zip(ids[n], p[n], strict=True)),
                entropy=entropy[n],
                kl=kl[n],
                rank=rank[n][0],
                probability=chance[n][0],
                token_rank=rank[n][1] if q > 1 else None,
                token_probability=chance[n][1] if q > 1 else None,
            )
        )


@dataclass(frozen=True)
class _Final:
    """What the model says in the end, at T positions."""

    z: Tensor  # [T, V]
    answer: list[int]
    log_total: Tensor  # [T, 1], of exp(z)
    entropy: Tensor  # [T]

    @classmethod
    def of(cls, z: Tensor, width: int, space: Space) -> "_Final":
        all_ = Distributions(len(z), 1)
        for first in range(0, z.shape[1], width):
            all_.add(z[:, first : first + width].float().clone(), first, space)
        log_total = (all_.peak + all_.log_total)[:, None]
        return cls(z, z.argmax(-1).tolist(), log_total, all_.entropy)

    def p(self, first: int, stop: int) -> Tensor:
        """Return the probabilities of a stretch of tokens, `[T, n]` float32."""
        return (self.z[:, first:stop].float() - self.log_total).exp_().float()


def _like(x: Tensor, logits: Tensor, head: LMHead, kind: str) -> Tensor:
    """Bring a block's output into the order of the logits `[1, T, V]`: `[1, T, d]`.

    Some models put the batch second, or a prompt of their own before the text.
    """
    T, width = logits.shape[1], head.state_size
    rows = x.reshape(-1, x.shape[-1])
    if x.shape[-1] != width or len(rows) < T or x.ndim > 3:
        raise UnsupportedModel(
            f"the blocks of {kind} put out {list(x.shape)}, which is not one state for each of "
            f"{T} positions; the lens needs [1, {T}, {width}]"
        )
    return rows[-T:].unsqueeze(0)
