"""The proof that a trimmed model is its original on what was kept.

Tokens, bytes and ids are compared in `proof`, what needs a model to run in `greedy`. Without such a
run neither torch nor a model is loaded.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmhead.errors import LMHeadError
from lmhead.files.safetensors import TensorHeader
from lmhead.progress import Progress, silent, titled
from lmhead.trim.corpus import Corpus
from lmhead.trim.folder import ModelFolder
from lmhead.trim.idmap import TrimMap
from lmhead.trim.inputs import (
    Greedy,
    Proof,
    ProofInputs,
    probe_inputs,
    read_report,
    recorded_inputs,
)
from lmhead.trim.keepfile import KeepFile
from lmhead.trim.proof import (
    Check,
    check_corpus,
    check_ids,
    check_other_text,
    check_weights,
    id_map,
)

if TYPE_CHECKING:
    from lmhead.loading import Model

Tensors = Mapping[str, TensorHeader]


def verify_trim(
    original: ModelFolder,
    trimmed_folder: Path,
    *,
    corpus: Corpus | None = None,
    inputs: ProofInputs | None = None,
    model: "Model | None" = None,
    greedy: Greedy | None = None,
    whole_original: bool = False,
    report: Mapping[str, Any] | None = None,
    weights: tuple[Tensors, Tensors] | None = None,
    blocks_of_original: bool = False,
    run: bool = True,
    progress: Progress = silent,
) -> Proof:
    """Compare a trimmed folder with its original.

    `inputs` are what the models run on; those that the report of the trim names, if not given, or
    else texts of many kinds. `model` is the original where it is loaded already: then whole models
    are compared on the texts; with `whole_original` it is loaded for that. `greedy` is how the
    original goes on, where that is known already. `report` is what the trim said of itself, and is
    checked too. `weights` are those to compare, where they do not lie in the folders; with
    `blocks_of_original` the trimmed folder lacks its blocks, and runs with those of the original,
    which `weights` found equal. Without `run` no model runs. Where the original was opened `plain`
    and its files say all, lmhead runs the trimmed model by itself; else transformers does.
    """
    trimmed = ModelFolder.open(trimmed_folder, plain=original.plain)
    ids, checked = id_map(original, trimmed, report)
    checks = [checked]
    before, after = original.readings, trimmed.readings
    if not checked.passed or len(before) != len(after):
        return Proof(tuple(checks))
    old, new = weights or (original.checkpoint.tensors, trimmed.checkpoint.tensors)
    checks.append(check_weights(old, new, ids, progress))
    checks.append(check_ids(original, trimmed, ids))
    checks.append(check_other_text(before, after))
    if corpus is not None:
        checks.append(check_corpus(before, after, ids, corpus, progress))
    if not run or not all(check.passed for check in checks):
        return Proof(tuple(checks))  # models that are known to differ need not run

    from lmhead.loading import load
    from lmhead.trim.greedy import both_logits, check_greedy, check_logits, partings, whole_head
    from lmhead.trim.plain_model import plain_model

    if inputs is None:
        inputs = recorded_inputs(report) or probe_inputs(original)
    inside = inputs.inside(ids)
    if model is None and whole_original:
        title = titled(progress, "loading the original")
        model = load(original.folder, tokenizer=original.read_already, progress=title)
    blocks = original.checkpoint if blocks_of_original else None
    plain = plain_model(trimmed, blocks) if model is None else None
    if plain is None:
        title = titled(progress, "loading the trimmed model")
        second = load(trimmed_folder, tokenizer=trimmed.read_already, progress=title)
    else:
        second = plain
    whole = whole_head(original, model, second)
    checks.append(check_logits(*both_logits(inside.texts, ids, whole, second, model)))
    reachable = min(max(original.tokenizer.names) + 1, original.rows)
    parted = partings(
        inside, ids, whole, second, greedy or {}, reachable=reachable, progress=progress
    )
    checks += check_greedy(inside, parted)
    return Proof(tuple(checks), inputs, "transformers" if plain is None else "lmhead")


def verify_keepset(
    model: "Model",
    keepset: KeepFile,
    inputs: ProofInputs,
    *,
    greedy: Greedy | None = None,
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
    import torch

    from lmhead.head.trimmed import TrimmedHead
    from lmhead.trim.greedy import check_greedy, check_logits, partings

    kept = torch.from_numpy(ids.row_ids)
    trimmed = TrimmedHead(head, kept)
    inside = inputs.inside(ids)
    old, new = [], []
    with torch.inference_mode():
        for row in inside.texts:
            h, _ = model.body(torch.tensor([list(row)]), use_cache=False)
            old.append(head(h[0])[:, kept])
            new.append(trimmed(h[0])[:, kept])
    checks.append(check_logits(old, new))
    parted = partings(
        inside,
        ids,
        head,
        model,
        greedy or {},
        reachable=model.reachable,
        kept=trimmed,
        progress=progress,
    )
    checks += check_greedy(inside, parted)
    return Proof(tuple(checks), inputs)


def open_keepset(path: Path) -> KeepFile:
    """Read a keep-set file, and refuse what its own report does not say."""
    keepset, report = KeepFile.load(path), read_report(path)
    if report is None:
        return keepset
    recorded = TrimMap.from_dict(report.get("id_map") or {})
    if (recorded.rows, recorded.kept[: recorded.kept_rows]) != (keepset.ids.rows, keepset.ids.kept):
        raise LMHeadError(
            f"{path} and the report beside it do not name the same ids; one of them was changed"
        )
    return keepset
