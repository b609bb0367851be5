"""Steering vectors: directions that raise true endings over false ones, within a budget.

`gradient` trains v on the log-odds of pairs through the blocks above; `mean-diff`, `pca` and
`probe` take their direction from the states at the endings and only choose how far to go.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lmhead.body.blocks import Blocks
from lmhead.head import LMHead
from lmhead.loading import Model
from lmhead.progress import Progress, silent
from lmhead.steer.bound.certificate import certified
from lmhead.steer.bound.constraints import Constraints, penalty
from lmhead.steer.bound.strength import alpha_within
from lmhead.steer.learn.data import Data, hashes
from lmhead.steer.learn.pairs import PairRuns, ending_logprob
from lmhead.steer.learn.request import AUTO, Request
from lmhead.steer.learn.select import METHODS
from lmhead.steer.learn.tsv import Report
from lmhead.steer.measure import harm, token_head
from lmhead.steer.prompts import NEUTRAL
from lmhead.steer.runs import Runs, frozen
from lmhead.steer.vector import HEAD, Card, SteeringVector

EPOCHS = 4
BATCH = 32  # pairs
LEARNING_RATE = 0.02
KL_WEIGHT = 1.0  # on neutral text: what is no pair shall stay as it is
POSITIONS = 64
DEFAULT_BUDGET = 2.0  # logits, where a method only gives a direction


def train_steering(
    data: Data,
    model: Model,
    request: Request,
    *,
    progress: Progress = silent,
    report: Report | None = None,
) -> SteeringVector:
    """Train a vector on the pairs that are not held out; keep the budget, 2.0 unless given."""
    train, _ = request.pairs(data)
    blocks = Blocks(model.body)
    layer = len(blocks) // 2 if request.layer == AUTO else request.layer
    method = "gradient" if request.method == AUTO else request.method
    head, done = token_head(model), applied(request, method)
    with frozen(model):
        pairs = PairRuns.read(model, train, layer, blocks=blocks, progress=progress)
        neutral = Runs.read(model, NEUTRAL, layer, blocks=blocks)
        if method == "gradient":
            v, figures = _gradient(head, pairs, neutral, done, request.seed, progress, report)
        else:
            v, figures = _direction(method, pairs), {}
        budget = float(done.budget or DEFAULT_BUDGET)
        alpha = alpha_within(head, neutral, v, budget)
        gain = pairs.log_odds(head, alpha * v) - pairs.log_odds(head, None)
        h, steered = neutral.compare(alpha * v)
        found = harm(head, h, steered).summary()
    metrics: dict[str, Any] = {
        "training_log_odds_gain": float(gain.mean()),
        "neutral": found,
        "budget_is": "certified" if layer == HEAD else "measured on neutral prompts",
        "constraints": done.to_dict(),
        **figures,
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


def applied(request: Request, method: str) -> Constraints:
    """Return the constraints that a training really has, its defaults among them.

    Without a penalty of its own, `gradient` has KL on neutral text; every method has a budget.
    """
    asked = replace(request.constraints, budget=request.constraints.budget or DEFAULT_BUDGET)
    if method == "gradient" and not asked.measures:
        return replace(asked, kl=KL_WEIGHT)
    return asked


def _direction(method: str, pairs: PairRuns) -> Tensor:
    """Take the direction of a linear method from the states at the last token of each text."""
    x = torch.stack([x[-1] for x in pairs.runs.x]).float()  # [2 N, d]
    y = torch.tensor([1] * pairs.count + [0] * pairs.count)
    return F.normalize(METHODS[method](x, y, x).direction, dim=0)


def _gradient(
    head: LMHead,
    pairs: PairRuns,
    neutral: Runs,
    constraints: Constraints,
    seed: int,
    progress: Progress,
    report: Report | None,
) -> tuple[Tensor, dict[str, Any]]:
    """Raise log sigmoid(log-odds) of the pairs, at a price for every change of neutral text."""
    v = torch.zeros(head.hidden_size, requires_grad=True)
    optimiser = torch.optim.AdamW([v], lr=LEARNING_RATE, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    history: list[dict[str, float]] = []
    with progress("training the vector", total=EPOCHS) as advance:
        for epoch in range(EPOCHS):
            losses = []
            order = torch.randperm(pairs.count, generator=generator)
            for chosen in torch.split(order, BATCH):
                optimiser.zero_grad()
                losses.append(len(chosen) * _step(head, pairs, chosen.tolist(), v))
                for run in neutral.chunks(range(len(neutral))):
                    before, after = run.positions(run.run(v), POSITIONS, generator)
                    price = penalty(constraints, head, before, after)
                    price.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
            h, steered = neutral.compare(v.detach(), texts=8)
            found = harm(head, h, steered).summary()
            figures = {"loss": sum(losses) / pairs.count}  # the last batch may be a small one
            figures |= {"max_delta": found["max_delta"], "max_kl": found["max_kl"]}
            history.append(figures)
            if report is not None:
                report({"epoch": epoch + 1, **figures})
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
