"""The proof that a trimmed model is its original on what was kept.

Tokens, bytes and ids are compared in `proof`. Here the trimmed model runs, and beside it the head
of the original: both get the same states, for every weight below the head was found equal, byte by
byte. Logits over the kept ids must be equal to the last bit. Greedy text goes on step by step as
long as both heads choose the same token; they may part only where the original chooses a token that
was dropped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmhead.errors import BadInput, LMHeadError, UnsupportedModel
from lmhead.files.jsons import read_json
from lmhead.head.dense import LMHead
from lmhead.head.find.pretrained import read_head
from lmhead.head.trimmed import TrimmedHead
from lmhead.loading import Model, load
from lmhead.progress import Progress, silent, titled
from lmhead.trim.corpus import Corpus
from lmhead.trim.coverage import continue_greedily, cut_prompts, logits
from lmhead.trim.folder import ModelFolder
from lmhead.trim.idmap import TrimMap
from lmhead.trim.keepfile import KeepFile
from lmhead.trim.proof import (
    PROBES,
    Check,
    check_corpus,
    check_ids,
    check_other_text,
    check_weights,
    id_map,
)

REPORT = "lmhead_trim.json"
LOGIT_TEXTS, LOGIT_TOKENS = 4, 64
_MOST, _LONGEST = 1000, 1000  # rows, and ids of a row, that are read from a report


@dataclass(frozen=True)
class ProofInputs:
    """What the models run on, as ids of the original: the same in every proof of one trim.

    `prompts` are those that the model was listened to on (or any, where it was not listened to);
    `unheard` are others, of the same corpus. `binds`: greedy text on `prompts` is promised.
    """

    texts: tuple[tuple[int, ...], ...]
    prompts: tuple[tuple[int, ...], ...]
    unheard: tuple[tuple[int, ...], ...] = ()
    max_tokens: int = 64
    binds: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        rows = {
            name: [list(row) for row in getattr(self, name)]
            for name in ("texts", "prompts", "unheard")
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
            return cls(rows("texts"), rows("prompts"), rows("unheard"), steps, binds)
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
            unheard=good(self.unheard),
        )


@dataclass(frozen=True)
class Proof:
    """Every check of a trimmed model against its original."""

    checks: tuple[Check, ...]
    inputs: ProofInputs | None = None  # None: no model ran

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
            "checks": [check.to_dict() for check in self.checks],
        }


def inputs_of(
    samples: Sequence[Sequence[int]],
    unheard: Sequence[Sequence[int]] = (),
    *,
    max_tokens: int,
    binds: bool,
) -> ProofInputs:
    """Make the inputs of a proof from texts of a corpus, as ids of the original."""
    texts = [tuple(map(int, row[:LOGIT_TOKENS])) for row in samples[: 5 * LOGIT_TEXTS]]
    return ProofInputs(
        tuple(texts),
        tuple(map(tuple, cut_prompts(samples))),
        tuple(map(tuple, cut_prompts(unheard))),
        max_tokens,
        binds,
    )


def probe_inputs(original: ModelFolder, max_tokens: int = 4) -> ProofInputs:
    """Make inputs where nothing is known of what will be read: a few steps show that it runs."""
    rows = [e.ids for e in original.readings[0].encode_batch(list(PROBES))]
    return inputs_of(rows, max_tokens=max_tokens, binds=False)


def verify_trim(
    original: ModelFolder,
    trimmed_folder: Path,
    *,
    corpus: Corpus | None = None,
    inputs: ProofInputs | None = None,
    model: Model | None = None,
    whole_original: bool = False,
    report: Mapping[str, Any] | None = None,
    run: bool = True,
    progress: Progress = silent,
) -> Proof:
    """Compare a trimmed folder with its original.

    `inputs` are what the models run on; those that the report of the trim names, if not given, or
    else texts of many kinds. `model` is the original where it is loaded already: then whole models
    are compared on the texts; with `whole_original` it is loaded for that. `report` is what the
    trim said of itself, and is checked too. Without `run` no model runs.
    """
    trimmed = ModelFolder.open(trimmed_folder)
    ids, checked = id_map(original, trimmed, report)
    checks = [checked]
    before, after = original.readings, trimmed.readings
    if not checked.passed or len(before) != len(after):
        return Proof(tuple(checks))
    checks.append(check_weights(original, trimmed, ids, progress))
    checks.append(check_ids(original, trimmed, ids))
    checks.append(check_other_text(before, after))
    if corpus is not None:
        checks.append(check_corpus(before, after, ids, corpus, progress))
    if not run or not all(check.passed for check in checks):
        return Proof(tuple(checks))  # models that are known to differ need not run

    if inputs is None:
        inputs = recorded_inputs(report) or probe_inputs(original)
    inside = inputs.inside(ids)
    if model is None and whole_original:
        model = load(original.folder, progress=titled(progress, "loading the original"))
    second = load(trimmed_folder, progress=titled(progress, "loading the trimmed model"))
    whole = _whole_head(original, model)
    checks.append(_check_logits(*_both_logits(inside.texts, ids, whole, second, model)))
    reachable = min(max(original.tokenizer.names) + 1, original.rows)
    parted = _in_step(inside, ids, whole, second, reachable=reachable, progress=progress)
    checks += _check_greedy(inside, parted)
    return Proof(tuple(checks), inputs)


def verify_keepset(
    model: Model,
    keepset: KeepFile,
    inputs: ProofInputs,
    *,
    run: bool = True,
    progress: Progress = silent,
) -> Proof:
    """Compare a model that answers with the rows of a keep-set alone with the whole one."""
    ids, head = keepset.ids, model.head
    same = keepset.head_sha256 == head.sha256
    note = f"{ids.kept_rows:,} of {ids.rows:,} rows" if same else (
        f"it was made for the head {keepset.head_sha256[:12]} of {keepset.model}, but this is "
        f"{head.sha256[:12]} of {model.name}"
    )  # fmt: skip
    checks = [Check("heads that are another", 1, int(not same), note)]
    if not same or not run:
        return Proof(tuple(checks))
    kept = torch.from_numpy(ids.row_ids)
    trimmed = TrimmedHead(head, kept)
    inside = inputs.inside(ids)
    old, new = [], []
    with torch.inference_mode():
        for row in inside.texts:
            h, _ = model.body(torch.tensor([list(row)]), use_cache=False)
            old.append(logits(head, h[0])[:, kept])
            new.append(logits(trimmed, h[0])[:, kept])
    checks.append(_check_logits(old, new))
    parted = _in_step(
        inside, ids, head, model, reachable=model.reachable, kept=trimmed, progress=progress
    )
    checks += _check_greedy(inside, parted)
    return Proof(tuple(checks), inputs)


def recorded_inputs(report: Mapping[str, Any] | None) -> ProofInputs | None:
    """Return what the proof of a trim ran on, where its report tells."""
    if report is None or report.get("proof_inputs") is None:
        return None
    return ProofInputs.from_dict(report["proof_inputs"])


def read_report(trimmed: Path) -> dict[str, Any] | None:
    """Return the report of a trimmed folder, GGUF file or keep-set file; None if there is none."""
    path = trimmed / REPORT if trimmed.is_dir() else trimmed.with_name(f"{trimmed.name}.{REPORT}")
    return read_json(path) if path.is_file() else None


def _whole_head(original: ModelFolder, model: Model | None) -> Any:
    head = model.head if model is not None else read_head(original.folder, LMHead)
    if head.weight.shape[0] != original.rows:
        raise UnsupportedModel(
            f"{original.folder} answers with {head.weight.shape[0]:,} rows, but the matrix that "
            f"was taken for its head has {original.rows:,}; use --form head"
        )
    return head


def _both_logits(
    texts: Sequence[Sequence[int]],
    ids: TrimMap,
    whole: Any,
    second: Model,
    first: Model | None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the logits `[T, K]` of kept ids, of the original and of the trimmed model."""
    kept = torch.from_numpy(ids.row_ids)
    old, new = [], []
    with torch.inference_mode():
        for row in texts:
            z_new = _logits(second, ids.to_trimmed(row))
            if first is not None:
                z = _logits(first, row)
            else:  # the same states under the original's head
                h, _ = second.body(torch.tensor([ids.to_trimmed(row)]), use_cache=False)
                z = logits(whole, h[0]).to(z_new.dtype)
            old.append(z[:, kept])
            new.append(z_new)
    return old, new


def _logits(model: Model, row: Sequence[int]) -> Tensor:
    """Return the logits `[T, V]` as the whole model gives them."""
    z: Tensor = model.body.model(input_ids=torch.tensor([list(row)]), use_cache=False).logits[0]
    return z


@dataclass(frozen=True)
class _Parting:
    """Where greedy texts part: at which token, and whether the original chose a kept one."""

    step: int
    explained: bool


def _in_step(
    inputs: ProofInputs,
    ids: TrimMap,
    whole: Any,
    model: Model,
    *,
    reachable: int,
    kept: TrimmedHead | None = None,
    progress: Progress,
) -> list[_Parting | None]:
    """Continue all prompts with the trimmed model, and ask the original's head at every step.

    `reachable` rows of the original have a token. With `kept` the model is the original, and
    answers by the kept rows in its own ids.
    """
    prompts = [*inputs.prompts, *inputs.unheard]
    head: Any = model.head if kept is None else kept
    canonical = torch.from_numpy(ids.row_ids) if kept is None else torch.arange(ids.rows)
    parted: list[_Parting | None] = [None] * len(prompts)
    steps = [0] * len(prompts)

    def choose(h: Tensor, which: Sequence[int]) -> Tensor:
        new = logits(head, h)[:, : model.reachable].argmax(-1)
        old = logits(whole, h)[:, :reachable].argmax(-1)
        for at, a, b in zip(which, old.tolist(), canonical[new].tolist(), strict=True):
            if a != b:
                parted[at] = _Parting(steps[at], a not in ids)
            steps[at] += 1
        return torch.where(old == canonical[new], new, -1)

    starts = prompts if kept is not None else [ids.to_trimmed(row) for row in prompts]
    continue_greedily(
        model,
        starts,
        inputs.max_tokens,
        choose=choose,
        title="comparing greedy text",
        progress=progress,
    )
    return parted


def _check_logits(old: list[Tensor], new: list[Tensor]) -> Check:
    pairs = list(zip(old, new, strict=True))
    wrong = sum(not torch.equal(a, b) for a, b in pairs)
    numbers = sum(a.numel() for a in old)
    if not wrong:
        return Check("texts with other logits", len(pairs), 0, f"{numbers:,} logits bit-equal")
    gap = max(float((a - b).abs().max()) for a, b in pairs)
    scale = max(float(a.abs().max()) for a in old)
    # The weights were found equal byte by byte, so all that is left is how the matrix product of
    # this machine adds up for another number of rows.
    rounding = gap <= 1e-5 * max(1.0, scale)
    note = f"largest difference {gap:.1e}" + (", rounding of the matrix product" * rounding)
    return Check("texts with other logits", len(pairs), wrong, note, binding=not rounding)


def _check_greedy(inputs: ProofInputs, parted: Sequence[_Parting | None]) -> list[Check]:
    heard, unheard = parted[: len(inputs.prompts)], parted[len(inputs.prompts) :]
    name = "prompts with other greedy text"
    checks = [_greedy(name, heard, inputs.max_tokens, inputs.binds)]
    if unheard:  # how often they part is an estimate; that they part for no reason is a failure
        checks.append(_greedy(f"unheard {name}", unheard, inputs.max_tokens, False))
    return checks


def _greedy(name: str, parted: Sequence[_Parting | None], max_tokens: int, binds: bool) -> Check:
    found = [(at, part) for at, part in enumerate(parted) if part is not None]
    note = f"{max_tokens} tokens each"
    if found:
        at, first = found[0]
        note += f"; prompt {at + 1} from its token {first.step + 1} on"
    unexplained = sum(not part.explained for _, part in found)
    if found and not unexplained:
        note += "; the original chose a dropped token"
    return Check(name, len(parted), len(found), note, binds or unexplained > 0)


def open_keepset(path: Path) -> KeepFile:
    """Read a keep-set file, and refuse what its own report does not say."""
    keepset, report = KeepFile.load(path), read_report(path)
    if report is None:
        return keepset
    told = TrimMap.from_dict(report.get("id_map") or {})
    if (told.rows, told.kept[: told.kept_rows]) != (keepset.ids.rows, keepset.ids.kept):
        raise LMHeadError(
            f"{path} and the report beside it do not name the same ids; one of them was changed"
        )
    return keepset
