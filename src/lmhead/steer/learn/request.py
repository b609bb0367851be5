"""What to train: the job, the method, the layer, how much data, and which constraints."""

from dataclasses import dataclass

from lmhead.errors import BadInput
from lmhead.steer.bound.constraints import Constraints
from lmhead.steer.learn.data import Data, Pair, Split, split, split_pairs
from lmhead.steer.learn.select import METHODS
from lmhead.steer.learn.tsv import PAPER, UNCONSTRAINED, Settings
from lmhead.steer.vector import JOBS

AUTO = "auto"
DETECTORS = (AUTO, "tsv", *METHODS)
STEERERS = (AUTO, "gradient", *METHODS)
LABELS = 132
_TAUGHT = 32  # labels that tsv learns by; the others choose, unless told otherwise


@dataclass(frozen=True)
class Request:
    """What to train, and on how much; `method` and `layer` may be `auto`.

    `labels` are all that are used. Of them `tsv` sets `validation` apart to choose layer and epoch
    by (all but 32, if not given); every other method chooses by folds and needs none.
    """

    job: str = "detect"
    method: str = AUTO
    layer: int | str = AUTO
    labels: int = LABELS
    unlabelled: int = 500
    validation: int | None = None
    test: float = 0.25
    seed: int = 0
    settings: Settings = PAPER
    constraints: Constraints = UNCONSTRAINED

    def __post_init__(self) -> None:
        if self.job not in JOBS:
            raise BadInput(f"the job is {self.job!r}; expected one of {', '.join(JOBS)}")
        if self.validation and self.method != "tsv":
            raise BadInput(
                f"validation is {self.validation} for the method {self.method}, which chooses by "
                "folds over all labels; leave it out, or choose tsv"
            )
        if self.validation is not None and not 0 <= self.validation <= self.labels - 2:
            raise BadInput(
                f"validation is {self.validation} of {self.labels} labels; expected to leave 2 or "
                "more to train on"
            )
        methods = DETECTORS if self.job == "detect" else STEERERS
        if self.method not in methods:
            raise BadInput(
                f"the method is {self.method!r}; expected one of {', '.join(methods)} to {self.job}"
            )
        if self.job == "detect":
            if self.method != "tsv" and self.constraints != UNCONSTRAINED:
                raise BadInput(
                    f"constraints are given for the method {self.method}, which reads states and "
                    "adds nothing to them; leave them out, or choose tsv"
                )
            return
        c = self.constraints
        if c.mean:
            raise BadInput(
                f"mean is {c.mean:g}, a penalty that detectors are compared by; to steer, "
                "expected kl, excess or budget"
            )
        if self.method in METHODS and c.measures:
            raise BadInput(
                f"a penalty (kl or excess) is given for the method {self.method}, which takes its "
                "direction from states and trains nothing; leave it out, or choose gradient"
            )

    def check(self, data: Data) -> None:
        """Say what is wrong with the data for this training; it needs no model."""
        if self.job == "detect":
            self.split(data)
        else:
            self.pairs(data)

    def pairs(self, data: Data) -> tuple[list[Pair], list[Pair]]:
        """Split the pairs of the data into those to train on, and those held out."""
        if not data.pairs:
            raise BadInput(
                f"{data.name} holds no pairs; to steer, expected prompt, true and false (or "
                "TruthfulQA)"
            )
        return split_pairs(data.pairs, self.seed, self.test)

    @property
    def choosing(self) -> int:
        """How many of the labels are set apart to choose by."""
        if self.validation is None:
            return max(0, self.labels - _TAUGHT) if self.method == "tsv" else 0
        return self.validation

    def split(self, data: Data) -> Split:
        """Split the data as training does; the test rows are those it never sees."""
        return split(
            data,
            self.seed,
            labels=self.labels - self.choosing,
            unlabelled=self.unlabelled,
            validation=self.choosing,
            test=self.test,
        )
