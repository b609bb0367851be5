"""The proof that a trimmed model is its original on what was kept.

Tokens, bytes and ids are compared in `proof`; here both models run, one after the other, so that
memory holds one at a time: logits over the kept ids must be equal to the last bit, and greedy
continuations the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmhead.files.jsons import read_json
from lmhead.loading import Model, load
from lmhead.progress import Progress, silent
from lmhead.trim.corpus import Corpus, Text
from lmhead.trim.coverage import continue_greedily, cut_prompts
from lmhead.trim.folder import ModelFolder
from lmhead.trim.idmap import TrimMap
from lmhead.trim.proof import (
    PROBES,
    Check,
    check_corpus,
    check_ids,
    check_other_text,
    check_weights,
    id_map,
)
from lmhead.trim.publish import MARKER

REPORT = MARKER
LOGIT_TEXTS, LOGIT_TOKENS = 4, 64


@dataclass(frozen=True)
class Proof:
    """Every check of a trimmed model against its original."""

    checks: tuple[Check, ...]

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
        return {"passed": self.passed, "checks": [check.to_dict() for check in self.checks]}


def verify_trim(
    original: ModelFolder,
    trimmed_folder: Path,
    *,
    corpus: Corpus | None = None,
    samples: Sequence[Sequence[int]] | None = None,
    length: int = 64,
    prompts: int = 20,
    model: Model | None = None,
    greedy_binds: bool | None = None,
    progress: Progress = silent,
) -> Proof:
    """Compare a trimmed folder with its original.

    `samples` are texts, as ids, to run the models on; spread over the corpus if not given. `model`
    is the original where it is loaded already. Greedy text can differ only where the original
    chooses a dropped token; whether that is a failure (`greedy_binds`) is by default what the trim
    promised.
    """
    trimmed = ModelFolder.open(trimmed_folder)
    ids, checked = id_map(original, trimmed)
    checks = [checked]
    before, after = original.readings, trimmed.readings
    if not checked.passed or len(before) != len(after):
        return Proof(tuple(checks))
    checks.append(check_weights(original, trimmed, ids, progress))
    checks.append(check_ids(original, trimmed, ids))
    checks.append(check_other_text(before, after))
    if corpus is not None:
        checks.append(check_corpus(before, after, ids, corpus, progress))
    if not all(check.passed for check in checks):
        return Proof(tuple(checks))  # models that are known to differ need not run

    if samples is None:
        texts = [text.text for text in spread(corpus, prompts)] if corpus is not None else []
        samples = [e.ids for e in before[0].encode_batch(texts)]
    inside = [row for row in samples if ids_inside(row, ids)]
    if not inside:
        rows = [e.ids for e in before[0].encode_batch(list(PROBES))]
        inside = [row for row in rows if ids_inside(row, ids)] or [list(ids.kept[:8])]
    starts = cut_prompts(inside[:prompts])
    if greedy_binds is None:
        greedy_binds = promises_greedy(trimmed_folder)
    checks += _compare(original, trimmed_folder, ids, inside, starts, length, model, greedy_binds,
                       progress)  # fmt: skip
    return Proof(tuple(checks))


def ids_inside(row: Sequence[int], ids: TrimMap) -> bool:
    """Tell whether a text can be given to both models: all its tokens kept, and with a row."""
    return bool(row) and all(i in ids and i < ids.rows for i in row)


def promises_greedy(folder: Path) -> bool:
    """Tell whether a trimmed folder was made with coverage of what the model says."""
    path = folder / REPORT
    return not path.is_file() or read_json(path).get("coverage") is not None


def spread(corpus: Corpus, count: int, texts: int | None = None) -> list[Text]:
    """Return `count` texts spread evenly over a corpus of `texts` texts."""
    if texts is None:
        texts = sum(1 for _ in corpus)
    wanted = {at * texts // count for at in range(min(count, texts))} if texts else set()
    if texts <= count:
        wanted = set(range(texts))
    return [text for at, text in enumerate(corpus) if at in wanted]


def _compare(
    original: ModelFolder,
    trimmed_folder: Path,
    ids: TrimMap,
    texts: Sequence[Sequence[int]],
    prompts: Sequence[Sequence[int]],
    length: int,
    model: Model | None,
    greedy_binds: bool,
    progress: Progress,
) -> list[Check]:
    short = [list(row[:LOGIT_TOKENS]) for row in texts[:LOGIT_TEXTS]]
    kept = torch.from_numpy(ids.row_ids)
    first = model or load(original.folder, progress=progress)
    z = [_logits(first, row)[:, kept] for row in short]
    old = continue_greedily(first, prompts, length, progress=progress)
    del first, model
    second = load(trimmed_folder, progress=progress)
    z_new = [_logits(second, ids.to_trimmed(row)) for row in short]
    starts = [ids.to_trimmed(row) for row in prompts]
    new = continue_greedily(second, starts, length, progress=progress)
    return [
        _check_logits(z, z_new),
        _check_greedy(old, new, ids, length, greedy_binds),
    ]


def _logits(model: Model, row: Sequence[int]) -> Tensor:
    """Return the logits `[T, V]` as the whole model gives them."""
    with torch.inference_mode():
        z: Tensor = model.body.model(input_ids=torch.tensor([list(row)]), use_cache=False).logits[0]
    return z


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


def _check_greedy(
    old: list[list[int]], new: list[list[int]], ids: TrimMap, length: int, binds: bool
) -> Check:
    differ, unexplained, first = 0, 0, ""
    for at, (a, b) in enumerate(zip(old, new, strict=True)):
        back = ids.to_original(b)
        if back == a:
            continue
        differ += 1
        step = next((i for i, (x, y) in enumerate(zip(a, back, strict=False)) if x != y), 0)
        unexplained += a[step] in ids
        first = first or f"prompt {at + 1} from its token {step + 1} on"
    note = f"{length} tokens each" + (f"; {first}" if first else "")
    if differ and not unexplained:
        note += "; the original chose a dropped token"
    return Check("prompts with other greedy text", len(old), differ, note, binds or unexplained > 0)
