"""What is asked of a trim, and what it says when it is done."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from lmhead import __version__
from lmhead.errors import BadInput
from lmhead.trim.corpus import Corpus
from lmhead.trim.estimate import Estimate, News
from lmhead.trim.idmap import TrimMap
from lmhead.trim.inputs import Proof
from lmhead.trim.keepset import Keep

Form = Literal["model", "gguf", "head"]
LISTS = ("proof_inputs", "id_map")  # what a whole report has at its end: thousands of ids


@dataclass(frozen=True)
class TrimRequest:
    """What to trim and what to keep.

    With `coverage`, the model runs over at most `positions` tokens of the corpus and continues at
    most `continuations` of its texts by `max_tokens` tokens. Its top choice at every step is kept,
    and this share of all its probability, averaged over the steps. With None the model is not run.
    Its outputs are cached; with `resume` they are taken from the cache.

    The proof runs the trimmed model on `proof_prompts` prompts, half of them from texts that played
    no part in choosing what to keep; without `run`, on none. With `link`, weights that do not
    change are hard links to the original's files instead of copies.
    """

    model: str
    keep: Keep = Keep()  # noqa: RUF009
    corpus: Corpus | None = None
    counts: tuple[Path, ...] = ()
    coverage: float | None = None
    positions: int = 20_000
    continuations: int = 48
    max_tokens: int = 64
    proof_prompts: int = 20
    run: bool = True
    resume: bool = True
    ray: str | None = None
    link: bool = False

    def __post_init__(self) -> None:
        for name in ("positions", "continuations", "max_tokens", "proof_prompts"):
            if (number := getattr(self, name)) < 1:
                raise BadInput(f"{name} is {number}; expected at least 1")
        if self.coverage is not None:
            if not 0 <= self.coverage <= 1:
                raise BadInput(
                    f"the coverage is {self.coverage}; expected a share from 0 to 1, such as 0.99"
                )
            if self.corpus is None:
                raise BadInput("coverage needs texts to run the model on; give a corpus")
        asked = self.keep.names_something or self.keep.size is not None
        if self.corpus is None and not self.counts and not asked:
            raise BadInput(
                "nothing says what to keep; give texts of yours as a corpus, or counts, scripts, "
                "languages, ascii, ids, tokens or a size"
            )


@dataclass(frozen=True)
class Price:
    """What a coverage costs, and what it buys on texts held back."""

    coverage: float
    rows: int
    estimate: Estimate | None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        estimate = self.estimate.to_dict() if self.estimate else None
        return {**asdict(self), "estimate": estimate}


@dataclass(frozen=True)
class Coverage:
    """What the model said on the corpus, and how much of it the keep-set holds."""

    wanted: float
    share: float  # of all probability, averaged over positions
    positions: int
    added: int  # ids that nothing else asked for
    new_choices: News  # how often it still chose something new at the end
    estimate: Estimate | None
    prices: tuple[Price, ...] = ()  # of other coverages

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        estimate = self.estimate.to_dict() if self.estimate else None
        prices = [price.to_dict() for price in self.prices]
        return {**asdict(self), "estimate": estimate, "prices": prices}


@dataclass(frozen=True)
class Saving:
    """How large something was and is."""

    before: float
    after: float

    @property
    def share(self) -> float:
        """The share that went away."""
        return 1 - self.after / self.before if self.before else 0.0


@dataclass(frozen=True)
class TrimReport:
    """What a trim keeps and saves, and the proof where it was made."""

    model: str
    form: Form
    ids: TrimMap
    reasons: Mapping[str, int]
    texts: int
    tokens: int
    skipped: int
    parameters: Saving
    nbytes: Saving
    coverage: Coverage | None
    dropped_examples: tuple[str, ...]
    proof: Proof | None = None
    out: Path | None = None

    def to_dict(self, *, whole: bool = False) -> dict[str, Any]:
        """Return the JSON object; the `whole` one has the id map and what the proof ran on."""
        savings = {
            name: {**asdict(saving), "share_saved": saving.share}
            for name, saving in (
                ("parameters", self.parameters),
                ("bytes", self.nbytes),
            )
        }
        inputs = self.proof.inputs if self.proof else None
        lists = {
            "proof_inputs": inputs.to_dict() if inputs else None,
            "id_map": self.ids.to_dict(),
        }
        return {
            "lmhead": __version__,
            "model": self.model,
            "form": self.form,
            "rows": self.ids.rows,
            "kept_rows": self.ids.kept_rows,
            "kept_tokens": len(self.ids),
            "reasons": dict(self.reasons),
            "corpus": {"texts": self.texts, "tokens": self.tokens, "skipped": self.skipped},
            **savings,
            "coverage": self.coverage.to_dict() if self.coverage else None,
            "dropped_examples": list(self.dropped_examples),
            "proof": self.proof.to_dict() if self.proof else None,
            "out": str(self.out) if self.out else None,
            **(lists if whole else {}),
        }
