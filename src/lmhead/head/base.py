"""The contract of a head, and the defaults of its verbs.

An engine brings `__call__`, `score`, `loss` and its sizes; what it cannot do better than from all
its logits, it inherits from here. A caller never asks which engine it has.

Symbols: h hidden state `[..., d]`, z logits `[..., V]`, V vocabulary rows, d hidden size.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmhead.errors import BadInput
from lmhead.head.answers import (
    Generators,
    check_draw,
    check_error,
    check_k,
    drawn,
    nucleus,
    ranked,
    within_sigma,
)
from lmhead.head.answers import TopK as TopK  # shown here, where the verbs are
from lmhead.head.edits import Edits, edited

GREEDY_BELOW = torch.finfo(torch.float32).tiny
"""Temperatures so small that float32 cannot divide by them are greedy, as 0 is."""


class Known(NamedTuple):
    """Logits z `[..., n]` of the ids `[n]`, ascending; None: of all. Every other token has -inf."""

    z: Tensor
    ids: Tensor | None

    def below(self, V: int) -> "Known":
        """Leave out the ids from V on."""
        if self.ids is None:
            return Known(self.z[..., :V], None)
        n = int(torch.searchsorted(self.ids, V))
        if not n:
            raise BadInput(f"no token of this head is below the limit {V:,}; raise the limit")
        return Known(self.z[..., :n], self.ids[:n])

    def named(self, columns: Tensor) -> Tensor:
        """Give the ids of columns."""
        return columns if self.ids is None else self.ids[columns]


class Head:
    """The last layer of a language model, however it is computed.

    Every method takes what enters the projection: transformers' `last_hidden_state`, the output of
    a body. `from_block=True` says that `h` comes straight from a block instead; the head then
    applies the final norm first.
    """

    reads_all = False
    """Whether each answer costs all logits; who can use them all may as well ask for them."""

    @property
    def vocab_size(self) -> int:
        """V, the number of logits."""
        raise NotImplementedError

    @property
    def hidden_size(self) -> int:
        """d, the width of what enters the projection."""
        raise NotImplementedError

    @property
    def sha256(self) -> str:
        """What the projection is, as one hexadecimal number."""
        raise NotImplementedError

    def __call__(self, h: Tensor, *, from_block: bool = False) -> Tensor:
        """Score every token: `[..., d]` to logits `[..., V]`."""
        raise NotImplementedError

    def score(self, h: Tensor, ids: Tensor, *, from_block: bool = False) -> Tensor:
        """Score just these tokens: logits `[..., n]`.

        `ids` are `[n]`, the same for every state, or `[..., n]`, different ones for each.
        """
        raise NotImplementedError

    def loss(
        self, h: Tensor, targets: Tensor, *, from_block: bool = False, **options: Any
    ) -> Tensor:
        """Return the cross-entropy of `targets [...]` under the head; the logits are never held.

        `options` are those of `linear_cross_entropy`: reduction, ignore_index, label_smoothing,
        z_loss, chunk.
        """
        raise NotImplementedError

    def topk(
        self,
        h: Tensor,
        k: int,
        *,
        edits: Edits = None,
        limit: int | None = None,
        from_block: bool = False,
    ) -> TopK:
        """Return the k best tokens, ids and logits `[..., k]` each.

        Best first; among equal logits the lower id is the better one. `edits`, one for all states
        or one for each, change logits first; only ids below `limit` take part.
        """
        check_k(k, self._limit(limit))
        known = self._answers(h, edits, limit, from_block)
        best = ranked(known.z, k)
        return TopK(known.named(best.ids), best.logits)

    @torch.no_grad()
    def candidates(
        self,
        h: Tensor,
        k: int,
        touched: Sequence[Tensor] | None = None,
        *,
        limit: int | None = None,
        from_block: bool = False,
    ) -> TopK:
        """Return the touched ids of each state and the k best of the others, with plain logits.

        Whatever is then done to the logits of the touched ids, the k best of all are among these.
        States with fewer are filled up with the id `limit` (or V) and the logit -inf.
        """
        V = self._limit(limit)
        k = min(k, V)
        if touched is None:
            return self.topk(h, k, limit=limit, from_block=from_block)
        check_k(k, V)
        z = self(h, from_block=from_block)[..., :V]
        rows = z.reshape(-1, V)
        found = []
        for row, ids in zip(rows, check_touched(touched, rows, V), strict=True):
            best = ranked(row.index_fill(0, ids, -torch.inf), k)
            others = ~torch.isin(best.ids, ids)  # where touched ones fill up what is not there
            found.append(
                TopK(
                    torch.cat([ids, best.ids[others]]),
                    torch.cat([row[ids], best.logits[others]]),
                )
            )
        return joined(found, V, z)

    @torch.no_grad()
    def sample(
        self,
        h: Tensor,
        temperature: float = 1.0,
        top_k: int | None = None,
        *,
        top_p: float | None = None,
        min_p: float | None = None,
        top_n_sigma: float | None = None,
        generator: Generators = None,
        edits: Edits = None,
        limit: int | None = None,
        from_block: bool = False,
    ) -> Tensor:
        """Draw the next token: ids `[...]`.

        Edits first, then temperature (0 is greedy), top_n_sigma (so many standard deviations of all
        logits below the best), top_k (exactly that many, the lower ids first among equal logits),
        top_p, min_p. One generator for all states, or one for each. Only ids below `limit` take
        part.
        """
        V = self._limit(limit)
        check_draw(temperature, top_k, top_p, min_p, top_n_sigma, V)
        known = self._answers(h, edits, limit, from_block)
        z, named = within_sigma(known.z, top_n_sigma), known.named
        if temperature < GREEDY_BELOW or top_k is not None or top_p is not None:
            k = 1 if temperature < GREEDY_BELOW else min(top_k or V, z.shape[-1])
            best = ranked(z, k)
            z = nucleus(best.logits, temperature, top_p, min_p) if k > 1 else best.logits
            at = drawn(z, temperature, generator)
            return named(best.ids.gather(-1, at.unsqueeze(-1)).squeeze(-1))
        return named(drawn(nucleus(z, temperature, None, min_p), temperature, generator))

    @torch.no_grad()
    def logprobs(
        self,
        h: Tensor,
        ids: Tensor,
        *,
        error: float = 0.0,
        limit: int | None = None,
        from_block: bool = False,
    ) -> Tensor:
        """Give the log-probabilities `[..., n]` of tokens: ids `[n]`, or different ones `[..., n]`.

        `error` says how far off each may be, where that spares reading all rows; 0: not at all.
        Only ids below `limit` take part.
        """
        check_error(error)
        V = self._limit(limit)
        z = self(h, from_block=from_block)[..., :V].double()
        ids = check_ids(ids, V, "ids").to(z.device)
        check_shape(ids, h)
        own = z.gather(-1, ids.expand(*z.shape[:-1], ids.shape[-1]))
        return (own - z.logsumexp(-1, keepdim=True)).float()

    def _known(self, h: Tensor, from_block: bool) -> Known:
        """Give the logits of the tokens that this engine has."""
        return Known(self(h, from_block=from_block), None)

    def _answers(self, h: Tensor, edits: Edits, limit: int | None, from_block: bool) -> Known:
        """Give the logits of the tokens below the limit, edited."""
        V = self._limit(limit)
        if edits is None:
            return self._known(h, from_block).below(V)
        return Known(edited(self(h, from_block=from_block)[..., :V], edits), None)

    def _limit(self, limit: int | None) -> int:
        if limit is None:
            return self.vocab_size
        check_k(limit, self.vocab_size, "limit")
        return limit


def check_ids(ids: Tensor, V: int, what: str = "the touched ids") -> Tensor:
    """Return ids of any shape as int64, if they are ids below V."""
    if not isinstance(ids, Tensor):
        raise BadInput(f"{what} are a {type(ids).__name__}; expected a tensor of whole numbers")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise BadInput(f"{what} are {ids.dtype}; expected whole numbers")
    if ids.numel():
        low, high = (int(end) for end in torch.aminmax(ids))
        if low < 0 or high >= V:
            wrong = low if low < 0 else high
            raise BadInput(f"{what} hold {wrong:,}; expected ids from 0 to {V - 1:,}")
    return ids.long()


def check_touched(touched: Sequence[Tensor], states: Tensor, V: int) -> list[Tensor]:
    """Return the touched ids of each of the states `[n, x]`, if they are ids below V."""
    if len(touched) != len(states):
        raise BadInput(
            f"got touched ids for {len(touched)} of {len(states)} states; expected them for each"
        )
    return [check_ids(ids, V).to(states.device) for ids in touched]


def check_shape(ids: Tensor, states: Tensor) -> None:
    """Refuse ids that are neither `[n]` for all states `[..., d]` nor `[..., n]`, own ones each."""
    if ids.ndim != 1 and (ids.ndim == 0 or ids.shape[:-1] != states.shape[:-1]):
        raise BadInput(
            f"ids have shape {list(ids.shape)} for states of shape {list(states.shape)}; "
            "expected [n], the same for all, or [..., n], separate ones for each state"
        )


def joined(found: Sequence[TopK], V: int, like: Tensor) -> TopK:
    """Put rows of different length together, `[..., n]` for the states of `like [..., x]`."""
    widest = max((len(row.ids) for row in found), default=0)
    ids = torch.full((len(found), widest), V, dtype=torch.int64, device=like.device)
    dtype = found[0].logits.dtype if found else like.dtype
    z = torch.full((len(found), widest), -torch.inf, dtype=dtype, device=like.device)
    for n, row in enumerate(found):
        ids[n, : len(row.ids)] = row.ids
        z[n, : len(row.ids)] = row.logits
    shape = like.shape[:-1]
    return TopK(ids.view(*shape, widest), z.view(*shape, widest))
