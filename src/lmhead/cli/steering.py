"""The options of commands that steer: which vectors, how strongly, within which limits."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from lmhead.cli.options import Force as Force  # what it writes is a file as well
from lmhead.errors import BadInput

if TYPE_CHECKING:
    from lmhead.generation import Generation
    from lmhead.head import Head
    from lmhead.loading import Model as Loaded
    from lmhead.steer import Guard, GuardLog, SteeringVector
    from lmhead.steer.bound.keeping import Kept
    from lmhead.steer.bound.steering import Added

Alpha = Annotated[
    float | None,
    typer.Option(
        "--alpha",
        help="The strength of every vector; by default the one on its card.",
        rich_help_panel="Steering",
    ),
]
Budget = Annotated[
    float | None,
    typer.Option(
        "--budget",
        help="The largest allowed range of delta, the change in the logits.",
        rich_help_panel="Steering",
    ),
]
KlCap = Annotated[
    float | None,
    typer.Option(
        "--kl-cap",
        help="The largest allowed KL at any token, in nats; steering is held back to it.",
        rich_help_panel="Steering",
    ),
]
_FIT = (
    "First lower alpha until plain sentences stay within the limits{}; the default if there is a "
    "limit and the blocks run in torch."
)


def _fit(more: str = "") -> Any:
    return typer.Option("--fit/--no-fit", help=_FIT.format(more), rich_help_panel="Steering")


Fit = Annotated[bool | None, _fit()]
FitTexts = Annotated[
    bool | None, _fit(", and rewrite a text that repeats itself with less of the vector")
]


@contextmanager
def noted() -> Iterator[None]:
    """Show what the steering code warns of as notes on stderr."""
    from lmhead.cli import render
    from lmhead.steer.vector import SteeringWarning

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SteeringWarning)
        yield
    for warning in caught:
        if issubclass(warning.category, SteeringWarning):
            render.note(f"warning: {warning.message}")
        else:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )


@dataclass(frozen=True)
class Steering:
    """The options of `generate` that steer: which vectors, how strongly, within which limits."""

    vectors: Sequence["SteeringVector"]
    alpha: float | None
    budget: float | None
    kl_cap: float | None
    fit: bool | None  # None: where there is a limit to fit to, and a body that can be measured

    @classmethod
    def of(
        cls,
        files: Sequence[Path],
        alpha: float | None,
        budget: float | None,
        kl_cap: float | None,
        fit: bool | None,
    ) -> "Steering | None":
        """Read the vectors, and refuse wrong values before a model is loaded."""
        if not files:
            for name, value in (("alpha", alpha), ("budget", budget), ("kl-cap", kl_cap)):
                if value is not None:
                    raise BadInput(f"--{name} is given without a vector; add --steer VECTOR")
            if fit is not None:
                raise BadInput("--fit is given without a vector; add --steer VECTOR")
            return None
        if fit and budget is None and kl_cap is None:
            raise BadInput("--fit is given without a limit to fit to; add --budget B or --kl-cap K")
        from lmhead.steer import load_vectors
        from lmhead.steer.bound.certificate import check_budget
        from lmhead.steer.bound.steering import with_alpha

        for name, limit in (("the budget", budget), ("the KL cap", kl_cap)):
            if limit is not None:
                check_budget(limit, name)
        vectors = [v for file in files for v in load_vectors(file)]
        return cls(with_alpha(vectors, alpha), alpha, budget, kl_cap, fit)

    def fitted(self, loaded: "Loaded") -> "Steering":
        """Lower the vectors to the limits, unless told not to, and say by how much.

        What is certified at the head is lowered to its budget in any case.
        """
        from lmhead.body import TorchBody
        from lmhead.steer import HEAD, fitted

        at_head = all(v.layer == HEAD for v in self.vectors)
        certain = at_head and self.budget is not None and self.kl_cap is None
        able = self.fit is None and isinstance(loaded.body, TorchBody)
        limited = self.budget is not None or self.kl_cap is not None
        if not limited or not (self.fit or able or certain):
            return self
        from lmhead.cli import render

        vectors = fitted(loaded, self.vectors, self.budget, self.kl_cap, progress=render.progress)
        share = vectors[0].alpha / self.vectors[0].alpha
        if self.fit or share < 1:
            where = "for every text" if certain else "on plain texts (--no-fit turns this off)"
            limits = [f"the budget {self.budget:g}"] if self.budget is not None else []
            limits += [f"a KL of {self.kl_cap:g}"] if self.kl_cap is not None else []
            kept = " and ".join(limits)
            render.note(f"alpha lowered to {share:.3g} of itself to keep {kept}, {where}")
        return replace(self, vectors=vectors, alpha=None, fit=self.fit or not certain)

    def apply(self, loaded: "Loaded", head: "Head") -> "tuple[Loaded, Head, GuardLog | None]":
        """Return the steered model, the head to use with it, and the guard's log if there is one.

        A budget at the head is kept by a lower strength, elsewhere by the guard.
        """
        from lmhead.steer import HEAD, guard, steer_model

        with noted():
            below = any(v.layer != HEAD for v in self.vectors)
            if self.kl_cap is not None or (self.budget is not None and below):
                done = guard(loaded, self.vectors, self.kl_cap, self.budget, head=head)
                return done.model, done.head, done.log
            return steer_model(loaded, self.vectors, self.alpha, self.budget), head, None

    def requests(self, loaded: "Loaded") -> "Requests":
        """Return what gives each request its own steering, within the limits."""
        from lmhead.steer import steering_for

        with noted():
            first = steering_for(loaded, self.vectors, self.kl_cap, self.budget, alpha=self.alpha)
        return Requests(first, bool(self.fit))

    def to_dict(self, log: "GuardLog | None") -> dict[str, Any]:
        """Return the JSON object that stands beside the generations."""
        return {
            "layers": [v.layer for v in self.vectors],
            "alpha": [v.alpha for v in self.vectors],
            "budget": self.budget,
            "kl_cap": self.kl_cap,
            "fit": bool(self.fit),
            "guard": log and log.to_dict(),
        }


class Requests:
    """Gives the steering of each request, one after the other, and remembers it.

    `keeps`: a guarded text is compared with the unsteered one before it is shown.
    """

    def __init__(self, first: "Guard | Added", fit: bool) -> None:
        from lmhead.steer import Guard

        self._first = first
        self._made: list[Guard | Added] = []
        self._kept: dict[int, Kept] = {}
        self.keeps = fit and isinstance(first, Guard)

    def kept(
        self, texts: Sequence[Any], loaded: "Loaded", head: "Head", **options: Any
    ) -> "Iterator[tuple[int, Generation]]":
        """Write guarded texts that stay whole; yield the place and the text of each."""
        from lmhead.generation.api import requests
        from lmhead.steer.bound.keeping import kept

        size = options.pop("batch_size")
        asked = requests(texts, loaded, **options)
        guard = cast("Guard", self._first)
        for place, found in kept(loaded, asked, guard, head, batch_size=size):
            self._kept[place] = found
            yield place, found.generation

    def __call__(self) -> "Guard | Added":
        """Return the steering of the next request."""
        self._made.append(self._first.alone())
        return self._made[-1]

    def record(self, place: int) -> dict[str, Any]:
        """Return the JSON fields of a request: what its guard noted, if it has one."""
        if self.keeps:
            return {"guard": self._kept[place].to_dict()}
        log = getattr(self._made[place], "log", None)
        return {} if log is None else {"guard": log.to_dict()}

    @property
    def log(self) -> "GuardLog | None":
        """What the guards of all requests noted; None where there is no guard."""
        from lmhead.steer import Guard, GuardLog

        if not isinstance(self._first, Guard):
            return None
        total = GuardLog()
        for one in self._made:
            if isinstance(one, Guard):
                total.extend(one.log)
        for place in sorted(self._kept):
            total.extend(self._kept[place].log)
        return total

    def note(self) -> None:
        """Say on stderr what the guards did, and which texts were written again."""
        from lmhead.cli import render

        note_guard(self.log)
        again = [one.share for one in self._kept.values() if one.share < 1]
        off = "(--no-fit turns this off)"
        if again and len(self._kept) == 1:
            less = f"with {again[0]:.3g} of alpha" if again[0] else "without the vector"
            render.note(f"the text repeated itself, and was written again {less} {off}")
        elif again:
            render.note(
                f"{len(again)} of {len(self._kept)} texts repeated themselves, and were written "
                f"again with less of the vector {off}"
            )


def note_guard(log: "GuardLog | None") -> None:
    """Say on stderr how often and how much the guard held back."""
    from lmhead.cli import render

    if log is not None:
        render.note(
            f"guard: held back {log.held_back:,} of {log.tokens:,} tokens, mean strength "
            f"{log.mean_strength:.2f}; largest KL {log.max_kl:.3g} nat, largest range "
            f"{log.max_range:.3g}"
        )
