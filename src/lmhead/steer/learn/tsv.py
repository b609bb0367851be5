"""The truthfulness separator vector: trained so that true and false texts move apart.

After Park et al., "Steer LLM Latents for Hallucination Detection" (ICML 2025). alpha v is added
at every token after one block. What enters the head at the last token, r `[N, d]` of length 1, is
compared with two prototypes, true first: p = softmax(cosine / 0.1). First cross-entropy on the
labelled texts; then optimal transport gives the unlabelled ones soft labels, and the surest join.

This differs from the published code, unless `as_published=True`, in two ways: the prototypes start
at the class means, not at random, unless those rank the validation rows worse than chance; and soft
labels stay soft (there they are cast to integers, which leaves nearly all of them without a label).
Either way, the epoch is chosen on the validation rows, never on the test rows.
"""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from lmhead.errors import BadInput, LMHeadError
from lmhead.head import LMHead
from lmhead.progress import Progress, silent
from lmhead.steer.bound.certificate import share_within
from lmhead.steer.bound.constraints import Constraints, mean_penalty, penalty
from lmhead.steer.learn.sinkhorn import most_confident, soft_labels
from lmhead.steer.measure import AIM, harm
from lmhead.steer.metrics import auroc
from lmhead.steer.runs import Runs
from lmhead.steer.vector import HEAD, check_alpha, write_whole

Report = Callable[[dict[str, float]], None]
POSITIONS = 64  # at which a penalty looks, in every run of a batch
LOOKED_AT = 4  # labelled texts whose harm is shown after every epoch
_SMALLEST = 60  # halvings after which nothing is left of a vector
SHRINKING_STEPS = 4  # of the bisection that finds how far a vector must shrink


@dataclass(frozen=True)
class Settings:
    """How a separator vector is trained; the defaults are the paper's."""

    alpha: float = 5.0
    temperature: float = 0.1
    momentum: float = 0.99
    learning_rate: float = 5e-3
    batch: int = 128
    epochs: int = 20  # in each of the two stages
    confident: int = 128
    epsilon: float = 0.05
    iterations: int = 3
    every: int = 2  # epochs from one look at the validation rows to the next
    as_published: bool = False
    last: bool = False  # keep the last epoch, not the best one on the validation rows

    def __post_init__(self) -> None:
        check_alpha(self.alpha)
        if self.alpha < 0:
            raise BadInput(f"alpha is {self.alpha}; a vector is trained with a positive one")
        for name in ("batch", "epochs", "every"):
            if (value := getattr(self, name)) < 1:
                raise BadInput(f"{name} is {value}; expected at least 1")


PAPER = Settings()
UNCONSTRAINED = Constraints()


class Texts(NamedTuple):
    """Texts of one split, ready to run, with their labels `[N]` (none for unlabelled ones)."""

    runs: Runs
    y: Tensor


@dataclass(frozen=True)
class Fit:
    """A trained vector, at the epoch that was chosen."""

    direction: Tensor  # [d]
    prototypes: Tensor  # [2, d], true first
    epoch: int
    auroc: float | None  # on the validation rows
    history: tuple[dict[str, float], ...]


@dataclass
class _State:
    """All that training goes on from; it is written after every epoch."""

    v: Tensor
    first: Tensor  # Adam's moments
    second: Tensor
    prototypes: Tensor
    best_v: Tensor
    best_prototypes: Tensor
    joined: Tensor  # which unlabelled rows have joined, and their soft labels
    soft: Tensor
    epoch: int = 0
    steps: int = 0
    best_epoch: int = 0
    best: float = -1.0
    history: tuple[dict[str, float], ...] = ()

    def save(self, path: Path, key: str) -> None:
        """Write it whole, under the name of the training it belongs to."""
        every = vars(self)
        tensors = {k: x.contiguous() for k, x in every.items() if isinstance(x, Tensor)}
        about = {k: x for k, x in every.items() if k not in tensors}
        write_whole(path, save(tensors, {"state": json.dumps({**about, "key": key})}))

    @classmethod
    def load(cls, path: Path, key: str) -> "_State | None":
        """Read what `save` wrote for the same training; None where nothing is."""
        if not path.is_file():
            return None
        try:
            with safe_open(path, "pt") as file:
                about = json.loads((file.metadata() or {})["state"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                of, history = about.pop("key"), tuple(about.pop("history"))
                state = cls(**tensors, **about, history=history)
        except Exception as error:
            raise LMHeadError(f"{path} is not a training state ({error}); remove it") from error
        if of != key:
            raise LMHeadError(
                f"{path} is the state of another training (data, seed or settings differ); "
                "go on with the same ones, or remove it"
            )
        return state


def score(r: Tensor, prototypes: Tensor, temperature: float = 0.1) -> Tensor:
    """Return the log-probability of each class, `[N, 2]`, true first, of states `[N, d]`."""
    cosine = F.normalize(r, dim=-1) @ F.normalize(prototypes, dim=-1).T
    return (cosine / temperature).log_softmax(-1)


def fit(
    head: LMHead,
    labelled: Texts,
    unlabelled: Texts | None = None,
    validation: Texts | None = None,
    *,
    seed: int = 0,
    settings: Settings = PAPER,
    constraints: Constraints = UNCONSTRAINED,
    calibration: Runs | None = None,
    checkpoint: Path | None = None,
    progress: Progress = silent,
    report: Report | None = None,
) -> Fit:
    """Train a vector; the same arguments give the same vector, also after a kill.

    - `calibration`: texts on which a budget at a block is measured; by default the labelled ones.
    - `checkpoint`: a file that is written after every epoch, from which a killed training goes on.
    - `report` is told loss, validation AUROC, largest delta and KL after every epoch.
    """
    training = _Training(head, labelled, settings, constraints, calibration, seed)
    key = training.key(unlabelled, validation)
    state = (checkpoint and _State.load(checkpoint, key)) or training.start(validation)
    total = settings.epochs * (1 if unlabelled is None else 2)
    with progress("training the vector", total=total) as advance:
        advance(state.epoch)
        while state.epoch < total:
            if unlabelled is not None and state.epoch == settings.epochs:
                state.joined, state.soft = training.labels_for(state, unlabelled)
            figures = training.epoch(state, unlabelled)
            state.epoch += 1
            ends = state.epoch % settings.epochs == 0  # a stage
            # Without validation rows, the last epoch; with them, the first of the best.
            found = float(state.epoch) if validation is None else -1.0
            if validation is not None and (ends or state.epoch % settings.every == 0):
                found = figures["auroc"] = auroc(training.scores(state, validation), validation.y)
            if (settings.last and ends) or found > state.best:
                state.best, state.best_epoch = found, state.epoch
                state.best_v, state.best_prototypes = state.v.clone(), state.prototypes.clone()
            state.history = (*state.history, figures)
            if checkpoint is not None:
                state.save(checkpoint, key)
            if report is not None:
                report({"epoch": state.epoch, **figures})
            advance(1)
    return Fit(
        state.best_v,
        state.best_prototypes,
        state.best_epoch,
        None if validation is None else state.best,
        state.history,
    )


class _Training:
    def __init__(
        self,
        head: LMHead,
        labelled: Texts,
        settings: Settings,
        constraints: Constraints,
        calibration: Runs | None,
        seed: int,
    ) -> None:
        self.head, self.labelled, self.settings = head, labelled, settings
        self.constraints, self.seed = constraints, seed
        self.calibration = labelled.runs if calibration is None else calibration
        true = float((labelled.y == 1).float().mean())
        self.shares = torch.tensor([true, 1 - true])

    def key(self, unlabelled: Texts | None, validation: Texts | None) -> str:
        """Name what the training is made of, so that no other one goes on from its state."""
        about = [asdict(self.settings), asdict(self.constraints), self.seed, self.head.sha256]
        for texts in (self.labelled, unlabelled, validation):
            if texts is not None:
                about += [texts.runs.layer, texts.runs.encoded, texts.y.tolist()]
        return hashlib.sha256(json.dumps(about, default=str).encode()).hexdigest()

    def start(self, validation: Texts | None) -> _State:
        prototypes = F.normalize(self._first_prototypes(validation), dim=-1)
        zeros = torch.zeros(self.head.hidden_size)
        return _State(
            v=zeros.clone(),
            first=zeros.clone(),
            second=zeros.clone(),
            prototypes=prototypes,
            best_v=zeros.clone(),
            best_prototypes=prototypes.clone(),
            joined=torch.zeros(0, dtype=torch.long),
            soft=torch.zeros(0, 2),
        )

    def _first_prototypes(self, validation: Texts | None) -> Tensor:
        """Return the class means; if the validation rows say they mislead, a random pair."""
        if not self.settings.as_published:
            r = F.normalize(self.labelled.runs.last(None), dim=-1)
            means = torch.stack([r[self.labelled.y == c].mean(0) for c in (1, 0)])
            if validation is None:
                return means
            found = score(validation.runs.last(None), means, self.settings.temperature)[:, 0]
            if auroc(found, validation.y) >= 0.5:
                return means
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(2, self.head.hidden_size, generator=generator)

    def scores(self, state: _State, texts: Texts) -> Tensor:
        """Return p(true) of each text, `[N]`."""
        r = texts.runs.last(self.settings.alpha * state.v)
        return score(r, state.prototypes, self.settings.temperature)[:, 0].exp()

    def labels_for(self, state: _State, unlabelled: Texts) -> tuple[Tensor, Tensor]:
        """Choose the unlabelled rows that join, and their soft labels."""
        r = unlabelled.runs.last(self.settings.alpha * state.v)
        log_p = score(r, state.prototypes, self.settings.temperature)
        q = soft_labels(log_p, self.shares, self.settings.epsilon, self.settings.iterations)
        joined = most_confident(q, self.shares, self.settings.confident)
        # Cast to integers, a soft label that is not exactly 1 is no label at all.
        return joined, q[joined].long().float() if self.settings.as_published else q[joined]

    def epoch(self, state: _State, unlabelled: Texts | None) -> dict[str, float]:
        """Run once over the labelled rows and those that have joined, in an order by seed."""
        hard = torch.stack([self.labelled.y == 1, self.labelled.y == 0], 1).float()
        targets = torch.cat([hard, state.soft])
        parts = [(self.labelled.runs, i) for i in range(len(hard))]
        if unlabelled is not None:
            parts += [(unlabelled.runs, i) for i in state.joined.tolist()]
        generator = torch.Generator().manual_seed(self.seed * 10_007 + state.epoch)
        order = torch.randperm(len(parts), generator=generator)
        losses = []
        for chosen in torch.split(order, self.settings.batch):
            losses.append(self._batch(state, chosen, parts, targets, generator))
        figures = {"loss": sum(losses) / len(losses)}
        self._hold(state)
        return figures | self._looks(state)

    def _batch(
        self,
        state: _State,
        chosen: Tensor,
        parts: Sequence[tuple[Runs, int]],
        targets: Tensor,
        generator: torch.Generator,
    ) -> float:
        s, c = self.settings, self.constraints
        v = state.v.clone().requires_grad_()
        total, seen, weights = 0.0, [], []
        for runs in {id(parts[i][0]): parts[i][0] for i in chosen.tolist()}.values():
            mine = [i for i in chosen.tolist() if parts[i][0] is runs]
            if not c.measures:  # what has no label has nothing to say
                mine = [i for i in mine if bool(targets[i].any())]
            for rows in runs.chunks([parts[i][1] for i in mine]):
                picked = [mine[k] for k in rows.order]
                h = rows.run(s.alpha * v)  # [B, T, d]
                r = F.normalize(rows.at_last(h), dim=-1)
                target = targets[picked]
                log_p = score(r, state.prototypes, s.temperature)
                loss = -(target * log_p).sum() / len(chosen)
                if c.measures:
                    before, after = rows.positions(h, POSITIONS, generator)
                    share = len(picked) / len(chosen)
                    loss = loss + share * penalty(c, self.head, before, after)
                loss.backward()  # type: ignore[no-untyped-call]
                total += float(loss.detach())
                seen.append(r.detach())
                weights.append(target)
        if c.mean:
            extra = mean_penalty(c, self.head, s.alpha * v)
            extra.backward()  # type: ignore[no-untyped-call]
            total += float(extra.detach())
        self._step(state, torch.zeros_like(v) if v.grad is None else v.grad)
        if self.labelled.runs.layer == HEAD:
            self._hold(state)  # it costs little here
        if seen:
            self._move(state, torch.cat(seen), torch.cat(weights))
        return total

    def _step(self, state: _State, gradient: Tensor) -> None:
        """Step v by AdamW; all that it remembers is in the state, to go on from after a kill."""
        optimiser = torch.optim.AdamW([state.v], lr=self.settings.learning_rate)
        if state.steps:
            optimiser.state[state.v] = {
                "step": torch.tensor(float(state.steps)),
                "exp_avg": state.first,
                "exp_avg_sq": state.second,
            }
        state.v.grad = gradient
        optimiser.step()
        state.v.grad = None
        memory = optimiser.state[state.v]
        state.first, state.second = memory["exp_avg"], memory["exp_avg_sq"]
        state.steps += 1

    def _move(self, state: _State, r: Tensor, weights: Tensor) -> None:
        """Move the prototypes a little towards the class means of a batch."""
        mass = weights.sum(0)  # [2]
        means = (weights.T @ r) / mass.clamp(min=1e-6)[:, None]
        moved = state.prototypes * self.settings.momentum + means * (1 - self.settings.momentum)
        moved = torch.where(mass[:, None] > 0, moved, state.prototypes)
        state.prototypes = F.normalize(moved, dim=-1)

    def _hold(self, state: _State) -> None:
        """Shrink v until the budget is kept: proved at the head, measured elsewhere."""
        budget = self.constraints.budget
        if budget is None or not state.v.any():
            return
        if self.labelled.runs.layer == HEAD:
            while (share := share_within(self.head, self.settings.alpha * state.v, budget)) < 1:
                state.v = state.v * min(share, 1 - 2.0**-20)  # as it is rounded then
            return
        added = self.settings.alpha * state.v
        limit = budget * AIM
        share = largest_share(lambda part: self._range(part * added), limit, SHRINKING_STEPS)
        state.v = state.v * share

    def _range(self, added: Tensor) -> float:
        h, steered = self.calibration.compare(added)
        return float(harm(self.head, h, steered).range.max())

    def _looks(self, state: _State) -> dict[str, float]:
        """Measure, at a few positions of the labelled texts, what is shown while one waits."""
        h, steered = self.labelled.runs.compare(self.settings.alpha * state.v, texts=LOOKED_AT)
        found = harm(self.head, h, steered).summary()
        return {"max_delta": found["max_delta"], "max_kl": found["max_kl"]}


def largest_share(measure: Callable[[float], float], limit: float, steps: int) -> float:
    """Return the largest share in (0, 1] that was measured to be within the limit, by bisection."""

    def within(share: float) -> bool:
        if math.isnan(found := measure(share)):
            raise BadInput(
                f"at {share:g} of its strength the vector makes logits that are not numbers; train "
                "with a lower alpha or learning rate"
            )
        return found <= limit

    if within(1.0):
        return 1.0
    low, high = 0.0, 1.0
    for step in range(_SMALLEST):
        if step >= steps and low > 0:
            return low
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle) else (low, middle)
    raise BadInput(f"no share of the vector is within the limit {limit:g}; raise the budget")
