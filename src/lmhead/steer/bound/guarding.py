"""The guard: steering that is held back at every token just enough to keep a limit.

A guarded sequence is run twice side by side, unsteered and steered. The head scores both, and
the answer lies between them, as near to the steered one as the limits allow (`mixing.py`). A
request to the generation engine is guarded by a `Guard` of its own, whose record is its own; a
whole model is guarded by a body that runs every batch twice, and a head that reads both states.

Symbols: B sequences, T tokens, h `[B, T, d]`, z `[..., V]`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from lmhead.body import Additions, Body, State, TorchBody
from lmhead.body.adding import adding
from lmhead.body.llama_cpp import LlamaBody
from lmhead.body.torch_body import sha256_with
from lmhead.errors import BadInput
from lmhead.head import Head
from lmhead.loading import Model, load
from lmhead.steer.bound.certificate import check_budget, share_within
from lmhead.steer.bound.mixing import Mixed, mix
from lmhead.steer.bound.rows import GuardedRows
from lmhead.steer.bound.steering import (
    Added,
    SteeredBody,
    Vectors,
    additions,
    steer_model,
    steerable,
    warn_of_other_heads,
    with_alpha,
)
from lmhead.steer.vector import HEAD


@dataclass
class GuardLog:
    """What the guard let through, token by token, since it was made or since `clear`."""

    kl: list[float] = field(default_factory=list)  # KL(p || p_m) of each distribution asked for
    range: list[float] = field(default_factory=list)
    strength: list[float] = field(default_factory=list)  # m; 1 is all of the steering
    flipped: list[bool] = field(default_factory=list)  # whether the best token is another

    @property
    def tokens(self) -> int:
        """How many next-token distributions were asked for."""
        return len(self.kl)

    @property
    def held_back(self) -> int:
        """At how many of them less than all of the steering was let through."""
        return sum(m < 1 for m in self.strength)

    @property
    def flips(self) -> float:
        """The share of them whose best token is another than without the vectors."""
        return sum(self.flipped) / len(self.flipped) if self.flipped else 0.0

    @property
    def mean_strength(self) -> float:
        """The mean of m; 1 is all of the steering."""
        return sum(self.strength) / len(self.strength) if self.strength else 1.0

    @property
    def min_strength(self) -> float:
        """The smallest m."""
        return min(self.strength, default=1.0)

    @property
    def max_kl(self) -> float:
        """The largest KL, in nat."""
        return max(self.kl, default=0.0)

    @property
    def max_range(self) -> float:
        """The largest range of delta, in logits."""
        return max(self.range, default=0.0)

    def add(self, mixed: Mixed, flipped: Tensor, rows: slice = slice(None)) -> None:
        """Note some rows: the strength, and what came of it."""
        self.kl += mixed.kl[rows].tolist()
        self.range += mixed.range[rows].tolist()
        self.strength += mixed.m[rows].tolist()
        self.flipped += flipped[rows].tolist()

    def extend(self, other: "GuardLog") -> None:
        """Note all that another log holds."""
        self.kl += other.kl
        self.range += other.range
        self.strength += other.strength
        self.flipped += other.flipped

    def clear(self) -> None:
        """Begin again with nothing."""
        for numbers in (self.kl, self.range, self.strength, self.flipped):
            numbers.clear()

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object: the figures, and the KL of every token."""
        return {
            "tokens": self.tokens,
            "held_back": self.held_back,
            "flips": self.flips,
            "mean_strength": self.mean_strength,
            "min_strength": self.min_strength,
            "max_kl": self.max_kl,
            "max_range": self.max_range,
            "kl": list(self.kl),
        }


@dataclass(frozen=True, eq=False)
class Guard:
    """The steering of one request, held back at every token; its `log` is of this request alone.

    It is what a request to the generation engine takes as its `steering`. `reachable`: how many
    rows of the head have a token; what is drawn from is the softmax over those.
    """

    added: Mapping[int | str, Tensor]
    reachable: int
    kl_cap: float | None
    budget: float | None
    log: GuardLog = field(default_factory=GuardLog)

    @property
    def rows(self) -> tuple[Additions, ...]:
        """What is added to each row that the body runs for a sequence: nothing, and the vectors.

        Vectors at the head need one row only, for both states come from it.
        """
        return (None,) if set(self.added) == {HEAD} else (None, self.added)

    @property
    def law(self) -> object:
        """What sequences that are guarded alike share: vectors and limits, not the log."""
        return self.added

    def answer(self, head: Head, h: Tensor, alike: Sequence[Any]) -> Tensor:
        """Return logits `[B, V]` that keep the limits, from h `[B, n, d]` of the n `rows`.

        `alike` are the guards of the B sequences; each notes what became of its own.
        """
        plain, steered = h[:, 0], h[:, -1]
        if len(self.rows) == 1:
            steered = steered + self.added[HEAD].to(h)
        return self.between(head, plain, steered, [one.log for one in alike])

    @torch.no_grad()
    def between(
        self, head: Head, plain: Tensor, steered: Tensor, logs: Sequence[GuardLog] | None = None
    ) -> Tensor:
        """Return float32 logits `[..., V]` between those of two states `[..., d]`; note them.

        `logs`: one for each state; by default all are noted in the guard's own.
        """
        z = head(plain).float()  # [..., V]
        rows = z.reshape(-1, z.shape[-1])
        other = head(steered).float().reshape(rows.shape)
        found = mix(rows, other, self.reachable, self.kl_cap, self.budget, rounding=True)
        V = self.reachable
        flipped = rows[:, :V].argmax(-1) != found.z[:, :V].argmax(-1)
        for row, log in enumerate([self.log] if logs is None else logs):
            log.add(found, flipped, slice(None) if logs is None else slice(row, row + 1))
        return found.z.view(z.shape)

    def alone(self) -> "Guard":
        """Return the same guard for another request, with a log of its own."""
        return replace(self, log=GuardLog())


@dataclass(frozen=True)
class Guarded:
    """A guarded model, its head (also `model.head`), and the log that the head keeps.

    `steering` is the guard of one request to the generation engine: `steering.alone()` for each.
    """

    model: Model
    head: "GuardedHead"
    log: GuardLog
    steering: Guard


def guard(
    model: str | Path | Model,
    vectors: Vectors,
    kl_cap: float | None = None,
    budget: float | None = None,
    *,
    alpha: float | None = None,
    head: Head | None = None,
) -> Guarded:
    """Steer a model, but hold it back at every token to keep within `kl_cap` (nats) and `budget`.

    `generate(prompts, guarded.model)` then works as on any model. `head` is an engine to use
    instead of the model's own head; it is asked for all logits.

        guarded = lmhead.guard("smollm2-135m", "honest.safetensors", kl_cap=0.5)
        lmhead.generate("The capital of Peru is", guarded.model)
        guarded.log.held_back
    """
    model = load(model)
    if kl_cap is None and budget is None:
        raise BadInput("neither kl_cap nor budget is given; expected at least one limit to keep")
    if kl_cap is not None:
        check_budget(kl_cap, "the KL cap")
    if budget is not None:
        check_budget(budget)
    chosen = with_alpha(vectors, alpha)
    body = steerable(model)
    added = additions(body, chosen)
    warn_of_other_heads(model, chosen)
    if budget is not None and set(added) == {HEAD}:
        # What the certificate proves is not measured again, where rounding could say otherwise.
        budget = None if share_within(model, added[HEAD], budget) == 1 else budget
    steering = Guard(added, model.reachable, kl_cap, budget)
    guarded = GuardedHead(head or model.head, steering)
    # a model's head is dense, but for this one: whoever asks it gets answers of two states
    below: Body = (
        GuardedRows(body, added) if isinstance(body, LlamaBody) else GuardedBody(body, added)
    )
    made = replace(model, body=below, head=cast("Any", guarded))
    return Guarded(made, guarded, steering.log, steering)


def steering_for(
    model: Model,
    vectors: Vectors,
    kl_cap: float | None = None,
    budget: float | None = None,
    *,
    alpha: float | None = None,
) -> Guard | Added:
    """Return the steering of one request to the generation engine: a guard where a limit is.

    A budget at the head needs no guard: the vectors are lowered to it, certified.
    """
    if kl_cap is not None:
        check_budget(kl_cap, "the KL cap")
    chosen = with_alpha(vectors, alpha)
    below = any(v.layer != HEAD for v in chosen)
    if kl_cap is not None or (budget is not None and below):
        return guard(model, chosen, kl_cap, budget).steering
    body = steer_model(model, chosen, alpha, budget).body
    return Added(cast("SteeredBody", body).added)


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


class GuardedHead(Head):
    """A head that reads the two states of a GuardedBody, `[..., 2d]`, and keeps the limits."""

    reads_all = True

    def __init__(self, engine: Head, steering: Guard) -> None:
        self.engine, self.steering = engine, steering

    @property
    def vocab_size(self) -> int:
        """V, the number of logits."""
        return self.engine.vocab_size

    @property
    def hidden_size(self) -> int:
        """2d: two states side by side."""
        return 2 * self.engine.hidden_size

    @property
    def sha256(self) -> str:
        """What the projection is: that of the engine that scores both states."""
        return self.engine.sha256

    def __call__(self, h: Tensor, *, from_block: bool = False) -> Tensor:
        """Score every token: `[..., 2d]` to float32 logits `[..., V]` that keep the limits."""
        if from_block or h.ndim == 0 or h.shape[-1] != self.hidden_size:
            raise BadInput(
                f"h has width {h.shape[-1] if h.ndim else 0}; expected the two states of a "
                "guarded model side by side: use this head with the model it was made with"
            )
        plain, steered = h.chunk(2, dim=-1)
        return self.steering.between(self.engine, plain, steered)

    def score(self, h: Tensor, ids: Tensor, *, from_block: bool = False) -> Tensor:
        """Score just these tokens, `[..., n]`; what they score depends on all the others."""
        z = self(h, from_block=from_block)
        return z[..., ids] if ids.ndim == 1 else z.gather(-1, ids)

    def loss(
        self, h: Tensor, targets: Tensor, *, from_block: bool = False, **options: Any
    ) -> Tensor:
        """Give the cross-entropy of `targets` over the tokens that can be drawn; no gradients."""
        z = self(h, from_block=from_block)[..., : self.steering.reachable]
        losses = F.cross_entropy(z.flatten(0, -2), targets.flatten(), **options)
        return losses.view(targets.shape) if options.get("reduction") == "none" else losses
