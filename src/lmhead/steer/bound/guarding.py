"""The guard: steering that is held back at every token just enough to keep a limit.

The body runs the batch twice side by side, unsteered and steered, in one pass. The head scores
both, z and z', and answers z_m = z + m (z' - z) with the largest m in [0, 1] that keeps

    KL(p || p_m) <= kl_cap   and   range(m (z' - z)) <= budget,

p and p_m the softmax of z and z_m over the tokens that can be drawn, before any sampling control.
KL is convex in m and 0 at 0, so the chord to a point above the cap meets it at an m that keeps it.
What is returned is checked once more as the float32 numbers it is.

Symbols: B sequences, T tokens, h `[B, T, d]`, z `[..., V]`; delta = z' - z.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lmhead.body import Additions, State, TorchBody
from lmhead.body.adding import adding
from lmhead.body.torch_body import sha256_with
from lmhead.errors import BadInput
from lmhead.head import Head, LMHead
from lmhead.loading import Model
from lmhead.steer.bound.certificate import check_budget, share_within
from lmhead.steer.bound.steering import (
    Vectors,
    additions,
    torch_body,
    warn_of_other_heads,
    with_alpha,
)
from lmhead.steer.measure import AIM
from lmhead.steer.vector import HEAD

_TRIES = 60


@dataclass
class GuardLog:
    """How often and how much the guard held back, since it was made or since `clear`."""

    tokens: int = 0  # next-token distributions that were asked for
    held_back: int = 0
    max_kl: float = 0.0
    max_range: float = 0.0
    min_strength: float = 1.0
    _strengths: float = field(default=0.0, repr=False)

    @property
    def mean_strength(self) -> float:
        """The mean of m; 1 is all of the steering."""
        return self._strengths / self.tokens if self.tokens else 1.0

    def add(self, m: Tensor, kl: Tensor, ranges: Tensor) -> None:
        """Count rows `[n]`: the strength, and the KL and the range that came of it."""
        self.tokens += len(m)
        self.held_back += int((m < 1).sum())
        self._strengths += float(m.sum())
        self.min_strength = min(self.min_strength, float(m.min()))
        self.max_kl = max(self.max_kl, float(kl.max()))
        self.max_range = max(self.max_range, float(ranges.max()))

    def clear(self) -> None:
        """Begin again at 0."""
        self.__init__()  # type: ignore[misc]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "tokens": self.tokens,
            "held_back": self.held_back,
            "mean_strength": self.mean_strength,
            "min_strength": self.min_strength,
            "max_kl": self.max_kl,
            "max_range": self.max_range,
        }


@dataclass(frozen=True)
class Guarded:
    """A guarded model, its head (also `model.head`), and the log that the head keeps."""

    model: Model
    head: "GuardedHead"
    log: GuardLog


def guard(
    model: Model,
    vectors: Vectors,
    kl_cap: float | None = None,
    budget: float | None = None,
    *,
    alpha: float | None = None,
    head: Head | None = None,
) -> Guarded:
    """Steer a model, held back at every token so that `kl_cap` (nat) and `budget` are kept.

    `generate(prompts, guarded.model)` then works as on any model. `head` is an engine to use
    instead of the model's own head; it is asked for all logits.
    """
    if kl_cap is None and budget is None:
        raise BadInput("neither kl_cap nor budget is given; expected at least one limit to keep")
    if kl_cap is not None:
        check_budget(kl_cap, "the KL cap")
    if budget is not None:
        check_budget(budget)
    chosen = with_alpha(vectors, alpha)
    body = torch_body(model)
    added = additions(body, chosen)
    body = GuardedBody(body, added)
    warn_of_other_heads(model, chosen)
    if budget is not None and set(added) == {HEAD}:
        # What the certificate proves is not measured again, where rounding could say otherwise.
        budget = None if share_within(model, added[HEAD], budget) == 1 else budget
    log = GuardLog()
    guarded = GuardedHead(model.head, head or model.head, model.reachable, kl_cap, budget, log)
    return Guarded(replace(model, body=body, head=guarded), guarded, log)


class GuardedBody(TorchBody):
    """A body that runs every batch unsteered and steered, and returns both states side by side."""

    def __init__(self, body: TorchBody, added: Mapping[int | str, Tensor]) -> None:
        super().__init__(body.model)
        self._body, self._added = body, added
        self._twice = set(added) != {HEAD}  # at the head, both states come from one pass

    @property
    def sha256(self) -> str:
        """What the body is, and what it adds, as one hexadecimal number."""
        return sha256_with(self._body.sha256, self._added)

    def __call__(self, input_ids: Tensor, **inputs: Any) -> tuple[Tensor, Any]:
        """Run `[B, T]` ids; return h `[B, T, 2d]`, unsteered then steered, and the output."""
        B, n = len(input_ids), 2 if self._twice else 1
        for name, value in inputs.items():
            if isinstance(value, Tensor) and len(value) == B:
                inputs[name] = value.repeat_interleave(n, dim=0)
        return self._side_by_side(input_ids.repeat_interleave(n, dim=0), **inputs)

    def run(
        self, ids: Tensor, state: State | None = None, *, rows: Sequence[Additions] | None = None
    ) -> tuple[Tensor, State]:
        """Read ids `[B, T]` behind what `state` remembers; return h `[B, T, 2d]` and the memory."""
        if rows is not None:
            raise BadInput("rows is given for a guarded model; expected a model without a guard")
        state = State() if state is None else state
        if self._twice and not state.length:
            state.repeat(2)
        ids = ids.repeat_interleave(state.each, dim=0)
        h, output = self._side_by_side(**state.inputs(ids, self._takes))
        state.take(ids, output)
        return h[:, -ids.shape[1] :], state

    def _side_by_side(self, input_ids: Tensor, **inputs: Any) -> tuple[Tensor, Any]:
        """Run the rows of a batch, each unsteered and then steered if the two differ below."""
        with adding(self.model, self._added, slice(1, None, 2)):
            h, output = self._body(input_ids, **inputs)
        plain, steered = (h[::2], h[1::2]) if self._twice else (h, h)
        if HEAD in self._added:
            steered = steered + self._added[HEAD].to(h.dtype)
        return torch.cat([plain, steered], dim=-1), output


class GuardedHead(LMHead):
    """A head that reads the two states of a GuardedBody, `[..., 2d]`, and keeps the limits.

    `reachable`: how many rows have a token; what is drawn from is the softmax over those.
    """

    def __init__(
        self,
        dense: LMHead,
        engine: Head,
        reachable: int,
        kl_cap: float | None,
        budget: float | None,
        log: GuardLog,
    ) -> None:
        super().__init__(
            dense.weight,
            dense.bias,
            dense.norm,
            dense.softcap,
            dense.scale,
            dense.tied,
            logits_dtype=dense.logits_dtype,
            vocab_size=dense.vocab_size,
            state_size=dense.state_size,
        )
        self._engine = (engine,)  # in a tuple, so that its parameters are not listed twice
        self.reachable, self.kl_cap, self.budget, self.log = reachable, kl_cap, budget, log

    @torch.no_grad()
    def forward(self, h: Tensor, *, from_block: bool = False) -> Tensor:
        """Score every token: `[..., 2d]` to float32 logits `[..., V]` that keep the limits."""
        if h.shape[-1] % 2 or h.ndim == 0:
            raise BadInput(
                f"h has width {h.shape[-1] if h.ndim else 0}; expected the two states of a "
                "guarded model side by side: use this head with the model it was made with"
            )
        plain, steered = h.chunk(2, dim=-1)
        engine = self._engine[0]
        z = engine(plain, from_block=from_block).float()  # [..., V]
        other = engine(steered, from_block=from_block).float()
        rows = z.reshape(-1, z.shape[-1])
        mixed, m, kl, ranges = mix(
            rows, other.reshape(rows.shape), self.reachable, self.kl_cap, self.budget
        )
        self.log.add(m, kl, ranges)
        return mixed.view(z.shape)


def mix(
    z: Tensor, other: Tensor, reachable: int, kl_cap: float | None, budget: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Go from z towards `other`, `[n, V]` float32, as far as the limits allow.

    Returns the mixture, and for each row the strength m, its KL and its range, `[n]` float64. A row
    that cannot be steered at all (NaN or infinity in `other`) stays z.
    """
    there = z[:, :reachable].isfinite()  # -inf: a token that an engine left out
    delta = torch.where(there, (other - z)[:, :reachable].double(), 0.0)
    sound = delta.isfinite().all(-1)
    delta[~sound] = 0.0
    logp = torch.log_softmax(z[:, :reachable].double(), dim=-1)
    m = torch.where(sound, 1.0, 0.0).double()
    if budget is not None:
        widest = _range(delta, there)
        m = torch.where(widest > budget, m * budget * AIM / widest, m)
    if kl_cap is not None:
        over = _kl_at(m, logp, delta) > kl_cap
        if over.any():
            m[over] = _largest(m[over], logp[over], delta[over], kl_cap * AIM)
    step = 2.0**-12
    for _ in range(_TRIES):
        mixed = torch.where(z.isfinite(), torch.lerp(z, other, m.float().unsqueeze(-1)), z)
        mixed = torch.where((m == 0).unsqueeze(-1), z, mixed)
        kl, ranges = _measured(z[:, :reachable], mixed[:, :reachable], logp, there)
        bad = torch.zeros_like(sound)
        if kl_cap is not None:
            bad |= ~(kl <= kl_cap)
        if budget is not None:
            bad |= ~(ranges <= budget)
        bad &= m > 0
        if not bad.any():
            break
        m = torch.where(bad, m * (1 - step), m)
        step = min(2 * step, 1.0)  # in the end m is 0, and z itself is returned
    return mixed, m, kl, ranges


def _kl_at(m: Tensor, logp: Tensor, delta: Tensor) -> Tensor:
    """KL(p || p_m) `[n]` of the mixture in real numbers: log E exp(m delta) - m E delta."""
    moved = torch.logsumexp(logp + m.unsqueeze(-1) * delta, dim=-1)
    return moved - m * (logp.exp() * delta).sum(-1)


def _largest(high: Tensor, logp: Tensor, delta: Tensor, cap: float) -> Tensor:
    """Return m `[n]` with KL at most `cap`, and above 0.999 of it; at `high` it is more."""
    centred = delta - (logp.exp() * delta).sum(-1, keepdim=True)  # [n, V]
    m = high.clone()
    going = torch.arange(len(m))
    for _ in range(_TRIES):
        scores = logp[going] + m[going].unsqueeze(-1) * centred[going]
        kl = torch.logsumexp(scores, dim=-1)
        near = kl <= cap * 1.001
        # on the chord from 0, which lies above the convex KL, there is the cap itself
        m[going[near]] *= (cap / kl[near]).clamp(max=1)
        if near.all():
            return m
        going, kl, scores = going[~near], kl[~near], scores[~near]
        slope = (torch.softmax(scores, dim=-1) * centred[going]).sum(-1)
        m[going] -= (kl - cap) / slope  # Newton's steps stay above the cap: KL is convex
    m[going] = 0.0
    return m


def _measured(z: Tensor, mixed: Tensor, logp: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
    """KL and range `[n]` of the float32 logits as they are, over the tokens that are there."""
    logq = torch.log_softmax(mixed.double(), dim=-1)
    kl = (logp.exp() * torch.where(there, logp - logq, 0.0)).sum(-1).clamp(min=0)
    moved = torch.where(there, mixed.double() - z.double(), 0.0)
    return kl, _range(moved, there)


def _range(delta: Tensor, there: Tensor) -> Tensor:
    """Return max - min `[n]` of delta `[n, V]` over the tokens that are there."""
    inf = float("inf")
    return delta.masked_fill(~there, -inf).amax(-1) - delta.masked_fill(~there, inf).amin(-1)
