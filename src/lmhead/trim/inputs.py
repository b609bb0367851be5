"""What a proof runs on, and what it says: all that needs no model. Needs no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmhead.errors import BadInput
from lmhead.files.jsons import read_json
from lmhead.trim.folder import ModelFolder
from lmhead.trim.idmap import TrimMap
from lmhead.trim.proof import PROBES, Check
from lmhead.trim.sample import cut_prompts

if TYPE_CHECKING:
    from torch import Tensor

REPORT = "lmhead_trim.json"
LOGIT_TEXTS, LOGIT_TOKENS = 4, 64
_MOST, _LONGEST = 1000, 1000  # rows, and ids of a row, that are read from a report

# By prompt: how the original goes on, and the states [T, d] that entered its head at each step.
Greedy = dict[tuple[int, ...], "tuple[list[int], Tensor]"]


@dataclass(frozen=True)
class ProofInputs:
    """What the models run on, as ids of the original: the same in every proof of one trim.

    `prompts` are those that rows were chosen by (or any, where the model was not run);
    `fresh` are others, of the same corpus. `binds`: greedy text on `prompts` is promised.
    """

    texts: tuple[tuple[int, ...], ...]
    prompts: tuple[tuple[int, ...], ...]
    fresh: tuple[tuple[int, ...], ...] = ()
    max_tokens: int = 64
    binds: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        rows = {
            name: [list(row) for row in getattr(self, name)]
            for name in ("texts", "prompts", "fresh")
        }
        return {**rows, "max_tokens": self.max_tokens, "binds": self.binds}

    @classmethod
    def from_dict(cls, data: Any) -> "ProofInputs":
        """Read what `to_dict` wrote."""

        def rows(name: str) -> tuple[tuple[int, ...], ...]:
            found = data[name]
            good = (
                isinstance(found, list)
                and len(found) <= _MOST
                and all(isinstance(row, list) and 0 < len(row) <= _LONGEST for row in found)
                and all(type(i) is int and i >= 0 for row in found for i in row)
            )
            if not good:
                raise ValueError(name)
            return tuple(tuple(row) for row in found)

        try:
            steps, binds = data["max_tokens"], data["binds"]
            if type(steps) is not int or not 0 < steps <= _LONGEST or type(binds) is not bool:
                raise ValueError("max_tokens")
            fresh = "fresh" if "fresh" in data else "unheard"  # its name in earlier reports
            return cls(rows("texts"), rows("prompts"), rows(fresh), steps, binds)
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(
                f"the proof_inputs of {REPORT} are not what lmhead wrote ({error!r}); trim again"
            ) from error

    def inside(self, ids: TrimMap) -> "ProofInputs":
        """Leave out what cannot be given to both models: tokens that were dropped, or have no row.

        Where no text is left, a few kept tokens stand for one.
        """

        def good(rows: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
            return tuple(row for row in rows if row and all(i in ids and i < ids.rows for i in row))

        any_row = (tuple(ids.kept[: min(8, ids.kept_rows)]),)
        return replace(
            self,
            texts=good(self.texts)[:LOGIT_TEXTS] or any_row,
            prompts=good(self.prompts) or any_row,
            fresh=good(self.fresh),
        )


@dataclass(frozen=True)
class Proof:
    """Every check of a trimmed model against its original."""

    checks: tuple[Check, ...]
    inputs: ProofInputs | None = None  # None: no model ran
    ran_by: str = "transformers"  # or "lmhead": what computed the blocks of the models

    @property
    def passed(self) -> bool:
        """Whether all checks passed."""
        return all(check.passed for check in self.checks)

    @property
    def failures(self) -> str:
        """What failed, in one line."""
        wrong = (c for c in self.checks if not c.passed)
        return "; ".join(f"{c.name}: {c.failed:,} of {c.tested:,} ({c.note})" for c in wrong)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "passed": self.passed,
            "models_ran": self.inputs is not None,
            "ran_by": self.ran_by if self.inputs is not None else None,
            "left_out": [] if self.inputs is not None else ["logits", "greedy text"],
            "checks": [check.to_dict() for check in self.checks],
        }


def inputs_of(
    samples: Sequence[Sequence[int]],
    fresh: Sequence[Sequence[int]] = (),
    *,
    max_tokens: int,
    binds: bool,
) -> ProofInputs:
    """Make the inputs of a proof from texts of a corpus, as ids of the original."""
    texts = [tuple(map(int, row[:LOGIT_TOKENS])) for row in samples[: 5 * LOGIT_TEXTS]]
    return ProofInputs(
        tuple(texts),
        tuple(map(tuple, cut_prompts(samples))),
        tuple(map(tuple, cut_prompts(fresh))),
        max_tokens,
        binds,
    )


def probe_inputs(original: ModelFolder, max_tokens: int = 4) -> ProofInputs:
    """Make inputs where nothing is known of what will be read: a few steps show that it runs."""
    rows = [e.ids for e in original.readings[0].encode_batch(list(PROBES))]
    return inputs_of(rows, max_tokens=max_tokens, binds=False)


def recorded_inputs(report: Mapping[str, Any] | None) -> ProofInputs | None:
    """Return what the proof of a trim ran on, where its report tells."""
    if report is None or report.get("proof_inputs") is None:
        return None
    return ProofInputs.from_dict(report["proof_inputs"])


def read_report(trimmed: Path) -> dict[str, Any] | None:
    """Return the report of a trimmed folder, GGUF file or keep-set file; None if there is none."""
    path = trimmed / REPORT if trimmed.is_dir() else trimmed.with_name(f"{trimmed.name}.{REPORT}")
    return read_json(path) if path.is_file() else None
