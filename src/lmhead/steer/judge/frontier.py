"""What safety costs: effect against harm, over constraints and budgets.

For a detector the effect is AUROC on the validation rows, for a steering vector the gain in the
log-odds of held-out pairs. Harm is measured on neutral text, at every position, end to end. Every
vector is trained to the last epoch: one that was stopped early is harmless by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lmhead.body.blocks import Blocks
from lmhead.errors import BadInput
from lmhead.generation import generate
from lmhead.loading import Model
from lmhead.progress import Progress, silent
from lmhead.steer.bound.constraints import Constraints
from lmhead.steer.bound.steering import SteeredBody
from lmhead.steer.judge.detector import prototype_scores
from lmhead.steer.learn.data import Data, split_pairs
from lmhead.steer.learn.pairs import PairRuns
from lmhead.steer.learn.request import AUTO, Request
from lmhead.steer.learn.training import choose_tsv_layer, labels_of, train
from lmhead.steer.measure import harm, token_head
from lmhead.steer.metrics import auroc
from lmhead.steer.prompts import NEUTRAL
from lmhead.steer.runs import Runs
from lmhead.steer.vector import SteeringVector

PROMPT = "The weather in the mountains"  # what is continued, to be seen
SETTINGS: tuple[tuple[str, Constraints], ...] = (
    ("none", Constraints()),
    ("mean penalty 0.2", Constraints(mean=0.2)),
    ("largest excess 0.2", Constraints(excess=0.2)),
    ("KL 0.1", Constraints(kl=0.1)),
    ("KL 1", Constraints(kl=1.0)),
    ("budget 8", Constraints(budget=8.0)),
    ("budget 4", Constraints(budget=4.0)),
)
STEERING: tuple[tuple[str, Constraints], ...] = tuple(
    (f"budget {budget:g}", Constraints(budget=budget)) for budget in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
)


@dataclass(frozen=True)
class Point:
    """One setting: what it achieves, and at what price."""

    name: str
    seed: int
    effect: float
    max_delta: float
    max_kl: float
    median_kl: float
    flips: float
    text: str

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        return dict(vars(self))


@dataclass(frozen=True)
class Frontier:
    """All points, in the order of the settings and seeds."""

    job: str
    layer: int | str
    measure: str
    points: tuple[Point, ...]

    def means(self) -> list[Point]:
        """Average over the seeds of every setting; the text is that of the first."""
        result = []
        for name in dict.fromkeys(p.name for p in self.points):
            mine = [p for p in self.points if p.name == name]
            numbers = ("effect", "max_delta", "max_kl", "median_kl", "flips")
            mean = {n: sum(getattr(p, n) for p in mine) / len(mine) for n in numbers}
            result.append(replace(mine[0], **mean))
        return result

    def best_within(self, max_kl: float) -> Point | None:
        """Return the setting of most effect whose mean largest KL is within the limit."""
        found = [p for p in self.means() if p.max_kl <= max_kl]
        return max(found, key=lambda p: p.effect, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "job": self.job,
            "layer": self.layer,
            "measure": self.measure,
            "means": [p.to_dict() for p in self.means()],
            "points": [p.to_dict() for p in self.points],
        }


def find_frontier(
    data: Data,
    model: Model,
    request: Request | None = None,
    *,
    settings: Sequence[tuple[str, Constraints]] = SETTINGS,
    seeds: Sequence[int] = (0, 1, 2),
    on_test: bool = False,
    progress: Progress = silent,
) -> Frontier:
    """Train once for every setting and seed, at one layer, and measure effect and harm.

    The effect of a detector is measured on the validation rows, because a setting is to be chosen
    by it; `on_test` measures it on the test rows instead, once the choice is made.
    """
    request = request or Request(job="detect", method="tsv")
    if request.job == "detect" and request.method not in ("tsv", AUTO):
        raise BadInput(
            f"the method is {request.method}, which adds nothing to the model and so harms "
            "nothing; expected tsv, or the job steer"
        )
    if request.job == "detect":
        request = replace(request, method="tsv", settings=replace(request.settings, last=True))
        if not on_test and request.validation == 0:
            raise BadInput("the frontier is measured on validation rows; ask for some")
    blocks = Blocks(model.body)
    if request.layer == AUTO:
        first = replace(request, seed=seeds[0])
        layer: int | str = len(blocks) // 2
        if request.job == "detect":
            layer, _ = choose_tsv_layer(first.split(data), model, blocks, first, progress)
        request = replace(request, layer=layer)
    neutral = Runs.read(model, NEUTRAL, request.layer, blocks=blocks)
    points = []
    with progress("settings and seeds", total=len(settings) * len(seeds)) as advance:
        for name, constraints in settings:
            for seed in seeds:
                mine = replace(request, seed=seed, constraints=constraints)
                vector = train(data, model, mine, progress=progress)
                effect = _effect(vector, data, model, mine, blocks, on_test)
                points.append(measure_point(name, seed, effect, vector, model, neutral))
                advance(1)
    what = "log-odds gain" if request.job == "steer" else "AUROC"
    rows = "held-out pairs" if request.job == "steer" else "test" if on_test else "validation"
    return Frontier(request.job, request.layer, f"{what} ({rows})", tuple(points))


def _effect(
    vector: SteeringVector,
    data: Data,
    model: Model,
    request: Request,
    blocks: Blocks,
    on_test: bool,
) -> float:
    if request.job == "steer":
        _, held = split_pairs(data.pairs, request.seed, request.test)
        runs = PairRuns.read(model, held, vector.layer, blocks=blocks)
        head = token_head(model)
        gain = runs.log_odds(head, vector.added) - runs.log_odds(head, None)
        return float(gain.mean())
    parts = request.split(data)
    rows = parts.test if on_test else parts.validation
    r = Runs.read(model, rows, vector.layer, blocks=blocks).last(vector.added)
    return auroc(prototype_scores(vector, r), labels_of(rows))


def measure_point(
    name: str, seed: int, effect: float, vector: SteeringVector, model: Model, neutral: Runs
) -> Point:
    """Measure the harm of one vector on neutral text, and let it write a line."""
    h, steered = neutral.compare(vector.added)
    found = harm(token_head(model), h, steered).summary()
    body = SteeredBody(model.body, {vector.layer: vector.added})  # type: ignore[arg-type]
    text = generate(PROMPT, replace(model, body=body), max_tokens=24)[0].text
    return Point(
        name,
        seed,
        effect,
        found["max_delta"],
        found["max_kl"],
        found["median_kl"],
        found["flips"],
        text,
    )
