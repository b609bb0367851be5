"""ShardedHead: the rows of one head over the ranks of torch.distributed.

Every rank has some rows, and asks the same question of the same h. It answers for its own rows, and
the ranks exchange what the whole answer needs: k candidates each for `topk`, one number per token
for `score`, a maximum and a sum for a draw, four numbers per token for a loss. Logits are exchanged
by `head(h)` alone, which is asked for them. All ranks get the same answer, that of `LMHead`.

Symbols: h hidden state `[..., d]`, V vocabulary rows, R ranks, V_r rows of rank r, n states.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lmhead.errors import BadInput
from lmhead.head.answers import (
    Generators,
    TopK,
    check_draw,
    check_k,
    drawn,
    nucleus,
    ranked,
    uniform,
)
from lmhead.head.base import GREEDY_BELOW, Head, check_ids, check_shape, check_touched, joined
from lmhead.head.dense import LMHead
from lmhead.head.edits import Edits
from lmhead.head.find.parallel import located_parallel
from lmhead.head.find.pretrained import read_rows
from lmhead.head.own_tensors import OwnTensors
from lmhead.head.sharding.drawing import (
    drawn_from_all,
    generators_of_all,
    largest,
    nucleus_of_all,
    sigma_floor,
)
from lmhead.head.sharding.joining import NOBODY, best_of_all
from lmhead.head.sharding.product import scored
from lmhead.head.sharding.rows import chosen, hashed, rows_of
from lmhead.head.sharding.touching import edited, untouched, untouched_screened
from lmhead.loss import linear_cross_entropy
from lmhead.loss.placed import rows_here
from lmhead.models.resolve import resolve
from lmhead.progress import Progress, silent
from lmhead.ranks import Group, ranks_of
from lmhead.ranks.autograd import columns_of_all, entering, summed
from lmhead.ranks.checkpoint import sharded_rows


class ShardedHead(OwnTensors, Head):
    """The answers of a head whose rows are split over ranks.

    `local` holds this rank's rows, in the order of the ranks, any number of them. `group` is a
    process group, a one-dimensional `DeviceMesh`, a pair (mesh, dimension), or None for all ranks.
    `vocab_size` cuts off padding rows at the end. `screened` lets each rank read an int8 copy of
    its rows where that is enough: for the best tokens and draws from them.

    `timeout` is how many seconds a rank that is alive may keep the others waiting. `LostRank`
    reports a dead or frozen rank sooner; see docs/scaling.md.
    """

    def __init__(
        self,
        local: LMHead,
        group: Group = None,
        *,
        vocab_size: int | None = None,
        screened: bool = False,
        timeout: float | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(local, LMHead):
            raise BadInput(
                f"the head is a {type(local).__name__}; expected an LMHead with this rank's rows"
            )
        if local.vocab_size != len(local.weight):
            raise BadInput(
                f"the local head keeps {local.vocab_size:,} of its {len(local.weight):,} rows; "
                "expected all: give vocab_size to the sharded head"
            )
        self.local = local
        self.ranks = ranks_of(group, timeout=timeout)
        self.rows = rows_of(self.ranks, len(local.weight), local.hidden_size, vocab_size)
        self._digest: tuple[object, str] | None = None
        self._screen: Head | None = None
        if screened:
            from lmhead.head.screened import ScreenedHead

            self._screen = ScreenedHead.from_head(local)

    @classmethod
    def from_head(
        cls,
        head: LMHead,
        group: Group = None,
        *,
        counts: Sequence[int] | None = None,
        **options: Any,
    ) -> "ShardedHead":
        """Take this rank's rows of a whole head, as a view of its weight.

        `counts` says how many rows each rank gets; equal blocks by default.
        """
        ranks = ranks_of(group)
        mine = chosen(len(head.weight), counts, ranks)
        whole = ranks.size == 1
        weight = head.weight if whole else head.weight[mine]
        bias = head.bias if whole or head.bias is None else head.bias[mine]
        return cls(_like(head, weight, bias), group, vocab_size=head.vocab_size, **options)

    @classmethod
    def from_model(cls, model: nn.Module, **options: Any) -> "ShardedHead":
        """Take the head of a tensor-parallel transformers model, whose weight is a DTensor.

        The parameters stay the model's own. (`LMHead.from_model` takes one that is not split.)
        """
        head = located_parallel(model, LMHead).head
        here = rows_here(head.weight, head.bias, None)
        if here.group is None:
            raise BadInput(
                "the weight of the model's output layer is not split over ranks; expected a "
                "DTensor of rows: use LMHead.from_model, or ShardedHead.from_head"
            )
        local = _like(head, here.weight, here.bias)
        return cls(local, here.group, vocab_size=head.vocab_size, **options)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        group: Group = None,
        *,
        counts: Sequence[int] | None = None,
        progress: Progress = silent,
        **options: Any,
    ) -> "ShardedHead":
        """Read this rank's rows, and nothing else, of a model folder, `.gguf` file or name."""
        ranks = ranks_of(group)
        local, V = read_rows(
            resolve(model, progress), LMHead, lambda total: chosen(total, counts, ranks)
        )
        local.require_finite()
        return cls(local, group, vocab_size=V, **options)

    @property
    def vocab_size(self) -> int:
        """V, the number of logits of all ranks."""
        return self.rows.V

    @property
    def hidden_size(self) -> int:
        """d, the width of what enters the projection."""
        return self.local.hidden_size

    @property
    def sha256(self) -> str:
        """What the projection is: the number of the same head on one rank.

        All ranks must ask: every one hashes all rows, which come in pieces.
        """
        own = [t for t in (self.local.weight, self.local.bias) if t is not None]
        key = tuple((t.data_ptr(), -1 if t.is_inference() else t._version) for t in own)
        if self._digest is None or self._digest[0] != key:
            self._digest = key, hashed(self.local, own, self.rows, self.ranks)
        return self._digest[1]

    def checkpoint(self) -> dict[str, Any]:
        """Return weight and bias, for `save_checkpoint` or to be filled by `load_checkpoint`."""
        parts = {"weight": self.local.weight, "bias": self.local.bias}
        return {
            name: sharded_rows(part.detach(), self.rows.counts, self.ranks)
            for name, part in parts.items()
            if part is not None
        }

    def forward(self, h: Tensor, *, from_block: bool = False) -> Tensor:
        """Score every token: `[..., d]` to logits `[..., V]`, gathered from all ranks."""
        z = scored(self.local, self._entering(h, from_block), self.rows)
        return columns_of_all(z, self.rows.counts, self.ranks)[..., : self.vocab_size]

    def score(self, h: Tensor, ids: Tensor, *, from_block: bool = False) -> Tensor:
        """Score just these tokens: logits `[..., n]`; each rank scores those whose rows it has."""
        h = self._entering(h, from_block)
        ids = check_ids(ids, self.vocab_size, "ids").to(self.local.weight.device)
        check_shape(ids, h)
        place, own = self.rows.here(ids)
        # all n rows, others' as row 0: a product of fewer would round otherwise
        z = (self._screen or self.local).score(h, place)
        return summed(z.masked_fill(~own, 0.0), self.ranks)

    def loss(
        self, h: Tensor, targets: Tensor, *, from_block: bool = False, **options: Any
    ) -> Tensor:
        """Give the cross-entropy of `targets [...]` under the whole head, with gradients.

        `options` are those of `linear_cross_entropy`, `sequence_parallel` included.
        """
        head = self.local
        h = head.entering(h, from_block=from_block)
        n = self.rows.below(self.vocab_size)[self.ranks.rank]
        weight, bias = head.weight, head.bias
        if n < len(weight):
            weight, bias = weight[:n], None if bias is None else bias[:n]
        return linear_cross_entropy(
            h,
            weight,
            targets,
            bias,
            softcap=head.softcap,
            scale=None if head.scale is None else head.scale.factor,
            group=self.ranks.group,
            **options,
        )

    @torch.no_grad()
    def topk(
        self,
        h: Tensor,
        k: int,
        *,
        edits: Edits = None,
        limit: int | None = None,
        from_block: bool = False,
    ) -> TopK:
        """Return the k best tokens, ids and logits `[..., k]` each; each rank sends its k best."""
        V = self._limit(limit)
        check_k(k, V)
        states, shape = self._states(h, from_block)
        best = self._best(states, k, edits, V)
        return TopK(best.ids.view(*shape, k), best.logits.view(*shape, k))

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
        """Return the touched ids of each state and the k best of the others, with plain logits."""
        V = self._limit(limit)
        k = min(k, V)
        if touched is None:
            return self.topk(h, k, limit=limit, from_block=from_block)
        check_k(k, V)
        states, shape = self._states(h, from_block)
        ids = check_touched(touched, states, V)
        places = [self.rows.here(one) for one in ids]
        columns = self.rows.below(V)
        width = min(k, columns[self.ranks.rank])
        if self._screen is not None and width:
            mine, values = untouched_screened(
                self._screen, states, width, places, columns[self.ranks.rank], self.rows.start
            )
        else:
            z = self._logits(states, None, V)
            mine, values = untouched(z, width, places, self.rows.start)
        counts = [min(k, n) for n in columns]
        best = best_of_all(mine, counts, sum(counts), self.ranks)
        flat = torch.cat(values) if values else mine.logits.new_empty(0)
        plain = torch.split(self.ranks.sum_(flat, "scoring touched tokens"), [len(i) for i in ids])
        found = []
        for n, given in enumerate(ids):
            there = (best.ids[n] != NOBODY).nonzero().squeeze(1)[:k]
            z = torch.cat([plain[n], best.logits[n][there]])
            found.append(TopK(torch.cat([given, best.ids[n][there]]), z))
        return joined(found, V, states.view(*shape, -1))

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
        """Draw the next token: ids `[...]`, the same on all ranks.

        Every rank must pass generators in the same state (the same seed); without any, the ranks
        agree on one. The same seed gives the same token on any number of ranks, and with `LMHead`.
        """
        V = self._limit(limit)
        check_draw(temperature, top_k, top_p, min_p, top_n_sigma, V)
        states, shape = self._states(h, from_block)
        greedy = temperature < GREEDY_BELOW
        one = generators_of_all(generator, len(states), self.ranks)
        if greedy or top_k is not None:
            k = 1 if greedy or top_k is None else top_k
            best = self._best(states, k, edits, V)
            z = best.logits
            if top_n_sigma and k > 1:
                every = self._logits(states, edits, V)
                z = z.masked_fill(
                    z.double() < sigma_floor(every, z[:, :1], top_n_sigma, self.ranks), -torch.inf
                )
            z = nucleus(z, temperature, top_p, min_p) if k > 1 else z
            at = drawn(z, temperature, one)
            return best.ids.gather(-1, at.unsqueeze(-1)).view(shape)
        z = self._logits(states, edits, V)
        z = z if z.dtype == torch.float64 else z.float()
        best_z = largest(z, self.ranks)
        if top_n_sigma:
            floor = sigma_floor(z, best_z, top_n_sigma, self.ranks)
            z = z.masked_fill(z.double() < floor, -torch.inf)
        if top_p is not None:
            best = nucleus_of_all(z, best_z, temperature, top_p, self.rows.start, self.ranks)
            at = drawn(nucleus(best.logits, temperature, None, min_p), temperature, one)
            return best.ids.gather(-1, at.unsqueeze(-1)).view(shape)
        if min_p is not None:
            p = ((z.double() - best_z.double()) / temperature).exp()
            z = z.masked_fill(p < min_p, -torch.inf)
        u = uniform(one, len(states)).to(z.device).unsqueeze(-1)
        start = self.rows.start
        return drawn_from_all(z.float(), best_z.float(), temperature, u, start, self.ranks).view(
            shape
        )

    def _best(self, states: Tensor, k: int, edits: Edits, V: int) -> TopK:
        """Give the k best of all ranks for states `[n, d]`, each `[n, k]`."""
        columns = self.rows.below(V)
        width = min(k, columns[self.ranks.rank])
        if width and self._screen is not None and edits is None:
            mine = self._screen.topk(states, width, limit=columns[self.ranks.rank])
        else:
            z = self._logits(states, edits, V)
            mine = ranked(z, width) if width else TopK(z[:, :0].long(), z)
        mine = TopK(mine.ids + self.rows.start, mine.logits)
        return best_of_all(mine, [min(k, n) for n in columns], k, self.ranks)

    def _logits(self, states: Tensor, edits: Edits, V: int) -> Tensor:
        """Give this rank's logits below V of states `[n, d]`, edited."""
        z = scored(self.local, states, self.rows)[:, : self.rows.below(V)[self.ranks.rank]]
        return z if edits is None else edited(z, edits, V, self.rows, self.ranks)

    def _entering(self, h: Tensor, from_block: bool) -> Tensor:
        return entering(self.local.entering(h, from_block=from_block), self.ranks)

    def _states(self, h: Tensor, from_block: bool) -> tuple[Tensor, torch.Size]:
        """Give what enters the projection as `[n, d]`, and the shape that its answers have."""
        h = self.local.entering(h, from_block=from_block)
        return h.reshape(-1, h.shape[-1]), h.shape[:-1]

    def __repr__(self) -> str:
        r, rows = self.ranks, self.rows
        screened = ", screened" if self._screen is not None else ""
        return (
            f"ShardedHead(rank {r.rank} of {r.size}: rows {rows.start} to "
            f"{rows.start + rows.counts[r.rank] - 1} of {rows.total}{screened}, {self.local!r})"
        )


def _like(head: LMHead, weight: Tensor, bias: Tensor | None) -> LMHead:
    """Make a head of other rows that does to logits what `head` does."""
    return LMHead(
        weight,
        bias,
        head.norm,
        head.softcap,
        head.scale,
        head.tied,
        logits_dtype=head.logits_dtype,
        state_size=head.state_size,
    )
