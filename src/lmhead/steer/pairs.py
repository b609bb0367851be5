"""Steering vectors: directions that raise true endings over false ones, within a budget.

The log-odds of a pair are log p(true ending | prompt) - log p(false ending | prompt), each over all
of its tokens. `gradient` trains v on them through the blocks above; `mean-diff`, `pca` and `probe`
take their direction from the states at the endings and only choose how far to go.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lmhead.body.blocks import Blocks
from lmhead.errors import BadInput
from lmhead.head import LMHead
from lmhead.loading import Model
from lmhead.progress import Progress, silent
from lmhead.steer.constraints import harm, penalty
from lmhead.steer.data import Data, Pair, Row, hashes, split_pairs
from lmhead.steer.guard import GuardedHead
from lmhead.steer.prompts import NEUTRAL
from lmhead.steer.runs import Run, Runs, frozen
from lmhead.steer.select import METHODS
from lmhead.steer.strength import alpha_within
from lmhead.steer.tsv import Report
from lmhead.steer.vector import HEAD, Card, SteeringVector

if TYPE_CHECKING:
    from lmhead.steer.train import Request

EPOCHS = 4
BATCH = 32  # pairs
LEARNING_RATE = 0.02
KL_WEIGHT = 1.0  # on neutral text: what is no pair shall stay as it is
POSITIONS = 64
DEFAULT_BUDGET = 2.0  # logits, where a method only gives a direction


@dataclass(frozen=True)
class PairRuns:
    """Pairs held at one layer: true endings first, then the false ones in the same order."""

    runs: Runs
    count: int

    @classmethod
    def read(
        cls,
        model: Model,
        pairs: Sequence[Pair],
        layer: int | str,
        *,
        blocks: Blocks | None = None,
        progress: Progress = silent,
    ) -> "PairRuns":
        """Run both texts of every pair as far as the layer."""
        texts = [Row(p.prompt + p.true, 1, p.prompt) for p in pairs]
        texts += [Row(p.prompt + p.false, 0, p.prompt) for p in pairs]
        runs = Runs.read(model, texts, layer, blocks=blocks, progress=progress)
        return cls(runs, len(pairs))

    @torch.no_grad()
    def log_odds(self, head: LMHead, added: Tensor | None) -> Tensor:
        """Return the log-odds of every pair, `[N]`, with a vector `[d]` added at every token.

        A guarded head gets the states without and with it, and keeps its limits.
        """
        result = torch.zeros(2 * self.count)
        for run in self.runs.chunks(range(2 * self.count)):
            h = run.run(added)
            if isinstance(head, GuardedHead):
                h = torch.cat([run.unsteered(), h], dim=-1)
            result[run.indices] = ending_logprob(head, run, h)
        return result[: self.count] - result[self.count :]


def ending_logprob(head: LMHead, run: Run, h: Tensor) -> Tensor:
    """Return log p of each ending, `[B]`, from h `[B, T, d]`; gradients reach h."""
    B, T = h.shape[:2]
    ids = torch.zeros(B, T, dtype=torch.long)
    scored = torch.zeros(B, T - 1, dtype=torch.bool)  # positions whose next token is of the ending
    for b, i in enumerate(run.indices):
        tokens, first = run.runs.encoded[i]
        ids[b, : len(tokens)] = torch.tensor(tokens)
        scored[b, first - 1 : len(tokens) - 1] = True
    states, targets = h[:, :-1][scored], ids[:, 1:][scored]
    if isinstance(head, GuardedHead):
        losses = F.cross_entropy(head(states), targets, reduction="none")
    else:
        losses = head.loss(states, targets, reduction="none")
    return -torch.zeros(B).index_add(0, scored.nonzero()[:, 0], losses.float())


def train_steering(
    data: Data,
    model: Model,
    request: "Request",
    *,
    checkpoint: Path | None = None,
    progress: Progress = silent,
    report: Report | None = None,
) -> SteeringVector:
    """Train a vector on the pairs that are not held out; keep the budget, 2.0 unless given."""
    from lmhead.steer.train import AUTO, certified

    if not data.pairs:
        raise BadInput(
            f"{data.name} holds no pairs; to steer, expected prompt, true and false (or TruthfulQA)"
        )
    train, _ = split_pairs(data.pairs, request.seed, request.test)
    blocks = Blocks(model.body)
    layer = len(blocks) // 2 if request.layer == AUTO else request.layer
    method = "gradient" if request.method == AUTO else request.method
    budget = request.constraints.budget or DEFAULT_BUDGET
    with frozen(model):
        pairs = PairRuns.read(model, train, layer, blocks=blocks, progress=progress)
        neutral = Runs.read(model, NEUTRAL, layer, blocks=blocks)
        if method == "gradient":
            v, told = _gradient(model.head, pairs, neutral, request, progress, report)
        else:
            v, told = _direction(method, pairs), {}
        alpha = alpha_within(model.head, neutral, v, budget)
        gain = pairs.log_odds(model.head, alpha * v) - pairs.log_odds(model.head, None)
        h, steered = neutral.compare(alpha * v)
        found = harm(model.head, h, steered).summary()
    metrics: dict[str, Any] = {
        "training_log_odds_gain": float(gain.mean()),
        "neutral": found,
        "budget_is": "certified" if layer == HEAD else "measured on neutral prompts",
        "constraints": request.constraints.to_dict(),
        **told,
    }
    card = Card(
        job="steer",
        model=model.name,
        head_sha256=model.head.sha256,
        method=method,
        budget=budget,
        data={
            "source": data.name,
            "test": request.test,
            "split": {"pairs": len(train), "seed": request.seed},
            "sha256": hashes([*train, *(row for pair in train for row in pair.rows)]),
        },
        seed=request.seed,
        metrics=metrics,
    )
    return certified(SteeringVector(v, layer, alpha, card), model)


def _direction(method: str, pairs: PairRuns) -> Tensor:
    """Take the direction of a linear method from the states at the last token of each text."""
    x = torch.stack([x[-1] for x in pairs.runs.x]).float()  # [2 N, d]
    y = torch.tensor([1] * pairs.count + [0] * pairs.count)
    return F.normalize(METHODS[method](x, y, x).direction, dim=0)


def _gradient(
    head: LMHead,
    pairs: PairRuns,
    neutral: Runs,
    request: "Request",
    progress: Progress,
    report: Report | None,
) -> tuple[Tensor, dict[str, Any]]:
    """Raise log sigmoid(log-odds) of the pairs, at a price for every change of neutral text."""
    constraints = request.constraints
    if not constraints.measures:
        constraints = replace(constraints, kl=KL_WEIGHT)
    v = torch.zeros(head.hidden_size, requires_grad=True)
    optimiser = torch.optim.AdamW([v], lr=LEARNING_RATE, weight_decay=0.0)
    generator = torch.Generator().manual_seed(request.seed)
    history: list[dict[str, float]] = []
    with progress("training the vector", total=EPOCHS) as advance:
        for epoch in range(EPOCHS):
            losses = []
            order = torch.randperm(pairs.count, generator=generator)
            for chosen in torch.split(order, BATCH):
                optimiser.zero_grad()
                losses.append(_step(head, pairs, chosen.tolist(), v))
                for run in neutral.chunks(range(len(neutral))):
                    before, after = run.positions(run.run(v), POSITIONS, generator)
                    price = penalty(constraints, head, before, after)
                    price.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
            h, steered = neutral.compare(v.detach(), texts=8)
            found = harm(head, h, steered).summary()
            told = {"loss": sum(losses) / len(losses)}
            told |= {"max_delta": found["max_delta"], "max_kl": found["max_kl"]}
            history.append(told)
            if report is not None:
                report({"epoch": epoch + 1, **told})
            advance(1)
    return v.detach(), {"history": history}


def _step(head: LMHead, pairs: PairRuns, chosen: Sequence[int], v: Tensor) -> float:
    """Add the gradient of one batch of pairs to that of v; return the loss."""
    rows = [*chosen, *(i + pairs.count for i in chosen)]
    parts, order = [], []
    for run in pairs.runs.chunks(rows, size=2 * BATCH):
        parts.append(ending_logprob(head, run, run.run(v)))
        order += run.order
    logprob = torch.zeros(len(rows)).index_copy(0, torch.tensor(order), torch.cat(parts))
    odds = logprob[: len(chosen)] - logprob[len(chosen) :]
    loss = -F.logsigmoid(odds).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())
