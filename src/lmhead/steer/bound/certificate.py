"""What a vector at the head's input can do at most, in every context: the certificate.

Symbols: W `[V, d]`, v `[d]`, s the head's scale, c its softcap; a = s W (alpha v) `[V]`.

Adding alpha v to what enters the projection adds a_i to the score of token i, whatever the context.
Without a softcap that is delta itself, and the softmax ignores what all of delta have in common, so
R = max a - min a. A softcap bends every score by itself and a common shift does not cancel: delta_i
lies between 0 and 2c tanh(a_i / 2c), which it reaches at the score -a_i / 2; so R is the largest of
these upwards plus the largest downwards.

Then p' is p weighted by exp(delta), delta within an interval of length R, so in every context
- the log-odds of any two tokens move by at most R,
- KL(p || p') <= R^2 / 8 (Hoeffding's lemma), and
- the total variation of p and p' is at most tanh(R / 4).
Leaving out tokens (padding rows, top-k, a keep-set) leaves all three true; a temperature T makes
R / T of R.
"""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmhead.errors import BadInput
from lmhead.head import LMHead
from lmhead.loading import Model, load
from lmhead.steer.measure import token_head
from lmhead.steer.vector import HEAD, SteeringVector, check_alpha

_CHUNK = 2**17  # weights made float64 at a time: what a core keeps in its cache
_SHOWN = 10
_UPWARDS = 1 + 2.0**-30  # a bound is rounded up, by more than sums in float64 can lose
_LARGEST = 1e30  # beyond, alpha v is nothing that float32 states can be added to


@dataclass(frozen=True)
class Moved:
    """A token and by how much its logit moves (with a softcap: at most)."""

    id: int
    delta: float


@dataclass(frozen=True, eq=False)
class Certificate:
    """What adding alpha v before the projection does at most, in every context.

    `max_alpha` is the largest strength, of either sign, that keeps `budget`: None without a
    budget, infinite where every strength does. It is never below |alpha| where alpha keeps it.
    """

    alpha: float
    range: float
    kl_bound: float
    tv_bound: float
    budget: float | None
    max_alpha: float | None
    raised: tuple[Moved, ...]
    lowered: tuple[Moved, ...]
    shift: Tensor = field(repr=False)  # [V] float64: a, what is added before a softcap

    @property
    def within(self) -> bool:
        """Whether the budget is kept; without one it is."""
        return self.budget is None or self.range <= self.budget

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object; a `max_alpha` of null beside a budget means no limit."""
        limited = self.max_alpha is not None and math.isfinite(self.max_alpha)
        return {
            "alpha": self.alpha,
            "range": self.range,
            "kl_bound": self.kl_bound,
            "tv_bound": self.tv_bound,
            "budget": self.budget,
            "max_alpha": self.max_alpha if limited else None,
            "within": self.within,
            "raised": [{"id": m.id, "delta": m.delta} for m in self.raised],
            "lowered": [{"id": m.id, "delta": m.delta} for m in self.lowered],
        }


def certify(
    model: str | Path | Model | LMHead,
    vector: SteeringVector | Tensor | str | Path,
    alpha: float | None = None,
    budget: float | None = None,
) -> Certificate:
    """Certify a vector at the layer `"head"`, or a direction `[d]`, over the whole vocabulary.

    Of a model, over the rows that have a token; of a bare head, over all rows.

    `alpha` defaults to the vector's own (1 for a bare direction), `budget` to that of its card.

        proved = lmhead.certify("smollm2-135m", "honest.safetensors", budget=2)
        proved.range, proved.kl_bound, proved.max_alpha
    """
    head = _head(load(model) if isinstance(model, str | Path) else model)
    if isinstance(vector, str | Path):
        vector = SteeringVector.load(vector)
    direction, alpha, budget = _given(head, vector, alpha, budget)
    a = project(head, _rounded(direction, alpha))
    r = range_of(a, head.softcap)
    most = None
    if budget is not None:
        most = _most(head, direction, budget)
        most = max(most, abs(alpha)) if r <= budget else most
    delta = a if head.softcap is None else 2 * head.softcap * torch.tanh(a / (2 * head.softcap))
    k = min(_SHOWN, len(a))
    up, down = torch.topk(delta, k), torch.topk(delta, k, largest=False)
    return Certificate(
        alpha=alpha,
        range=r,
        kl_bound=r * r / 8,
        tv_bound=math.tanh(r / 4),
        budget=budget,
        max_alpha=most,
        raised=tuple(map(Moved, up.indices.tolist(), up.values.tolist())),
        lowered=tuple(map(Moved, down.indices.tolist(), down.values.tolist())),
        shift=a,
    )


def certified(vector: SteeringVector, model: Model) -> SteeringVector:
    """Put the certificate on the card of a vector at the head; others have none."""
    if vector.layer != HEAD or not vector.direction.any():
        return vector
    certificate = certify(model, vector).to_dict()
    return replace(vector, card=replace(vector.card, certificate=certificate))


def alpha_for(model: Model | LMHead, vector: SteeringVector | Tensor, budget: float) -> float:
    """Return the largest alpha whose range is within `budget`, infinite where every one's is.

    It holds for alpha v as it is added, rounded to float32, and for -alpha as well.
    """
    head = _head(model)
    direction, _, _ = _given(head, vector, 1.0, budget)
    return _most(head, direction, budget)


def share_within(model: Model | LMHead, added: Tensor, budget: float) -> float:
    """Return the share of `[d]` that may be added: all of it, 1.0, if that keeps the budget.

    Whoever lowers a vector to a budget asks here, so that what one has lowered no other lowers
    again: whether all of it is within is judged as a certificate judges it.
    """
    check_budget(budget)
    head = _head(model)
    if range_of(project(head, added), head.softcap) <= budget:
        return 1.0
    return _most(head, added, budget)


def _head(model: Model | LMHead) -> LMHead:
    return token_head(model) if isinstance(model, Model) else model


def _most(head: LMHead, direction: Tensor, budget: float) -> float:
    a = project(head, direction)
    alpha = _solve(float(a.max()), float(a.min()), len(a), head.softcap, budget)
    if math.isinf(alpha) or alpha * float(direction.abs().max()) > _LARGEST:
        return math.inf
    step = 2.0**-23
    while range_of(project(head, _rounded(direction, alpha)), head.softcap) > budget:
        alpha *= 1 - step
        step = min(4 * step, 0.5)  # what rounding added is soon outrun
    return alpha


def project(head: LMHead, vector: Tensor) -> Tensor:
    """Return s W v, `[V]` float64, added up in float64."""
    W = head.weight.detach()[: head.vocab_size]
    v = vector.detach().to(W.device, torch.float64)
    a = torch.empty(len(W), dtype=torch.float64, device=W.device)
    step = max(1, _CHUNK // W.shape[1])
    rows = torch.empty(step, W.shape[1], dtype=torch.float64, device=W.device)
    for i in range(0, len(W), step):
        part = W[i : i + step]
        torch.mv(rows[: len(part)].copy_(part), v, out=a[i : i + step])
    return (a if head.scale is None else a * head.scale.factor).cpu()


def range_of(a: Tensor, softcap: float | None) -> float:
    """Return R for what is added to the scores, `[V]`: how far any log-odds can move."""
    return _range(float(a.max()), float(a.min()), len(a), softcap) * _UPWARDS


def _range(up: float, down: float, V: int, c: float | None) -> float:
    if V < 2:
        return 0.0  # one token is certain, whatever its logit
    if c is None:
        return up - down
    return 2 * c * (math.tanh(max(up, 0.0) / (2 * c)) + math.tanh(max(-down, 0.0) / (2 * c)))


def _solve(up: float, down: float, V: int, c: float | None, budget: float) -> float:
    """Return the largest alpha with `_range(alpha up, alpha down) <= budget`, in real numbers."""
    at_1 = _range(up, down, V, c)
    if at_1 == 0:
        return math.inf
    if c is None:
        return budget / at_1
    up, down = max(up, 0.0), max(-down, 0.0)
    if budget >= 2 * c * ((up > 0) + (down > 0)):
        return math.inf  # the softcap itself keeps the budget
    if not (up and down):
        return 2 * c * math.atanh(budget / (2 * c)) / (up + down)
    # Two tanhs have no inverse; R grows with alpha, at most as fast as at 0.
    low, high = 0.0, budget / (up + down)
    while _range(high * up, -high * down, V, c) <= budget:
        low, high = high, 2 * high
    while (middle := (low + high) / 2) not in (low, high):
        if _range(middle * up, -middle * down, V, c) <= budget:
            low = middle
        else:
            high = middle
    return low


def _rounded(direction: Tensor, alpha: float) -> Tensor:
    added = direction * alpha  # float32, as it will be added
    if not added.isfinite().all():
        raise BadInput(f"alpha is {alpha:g}, so large that alpha * v is infinite; lower it")
    return added


def check_budget(budget: float, name: str = "the budget") -> None:
    """Refuse a limit that is no positive number."""
    number = isinstance(budget, int | float) and not isinstance(budget, bool)
    if not number or not 0 < budget < math.inf:
        raise BadInput(f"{name} is {budget!r}; expected a positive number")


def _given(
    head: LMHead, vector: SteeringVector | Tensor, alpha: float | None, budget: float | None
) -> tuple[Tensor, float, float | None]:
    if isinstance(vector, Tensor):
        vector = SteeringVector(vector, HEAD)
    if vector.layer != HEAD:
        raise BadInput(
            f"the vector is of layer {vector.layer}; only one of the layer {HEAD!r} can be "
            "certified: audit it instead, or guard it while generating"
        )
    if vector.size != head.hidden_size:
        raise BadInput(
            f"the vector has width {vector.size}, but the head reads {head.hidden_size}; "
            "expected a vector made for this model"
        )
    alpha = vector.alpha if alpha is None else alpha
    budget = vector.card.budget if budget is None else budget
    check_alpha(alpha)
    if budget is not None:
        check_budget(budget)
    return vector.direction, float(alpha), budget
