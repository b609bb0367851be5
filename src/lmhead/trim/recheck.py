"""Verify whatever a trim wrote, any time later: a folder, a GGUF file or a keep-set file."""

from dataclasses import replace
from pathlib import Path

from lmhead.errors import BadInput
from lmhead.loading import load
from lmhead.models.resolve import resolve
from lmhead.progress import Progress, silent
from lmhead.trim.corpus import Corpus
from lmhead.trim.counts import survey
from lmhead.trim.folder import ModelFolder
from lmhead.trim.inputs import (
    Proof,
    ProofInputs,
    inputs_of,
    probe_inputs,
    read_report,
    recorded_inputs,
)
from lmhead.trim.verify import open_keepset, verify_keepset, verify_trim


def verify_path(
    original: str,
    trimmed: Path,
    *,
    corpus: Corpus | None = None,
    proof_prompts: int | None = None,
    max_tokens: int | None = None,
    progress: Progress = silent,
) -> tuple[Proof, bool]:
    """Compare what a trim wrote with the model `original`.

    The models run on the inputs of that trim's own proof, limited to `proof_prompts` of each kind
    and `max_tokens` if given. The second result says whether those inputs were recorded; if not,
    texts of the corpus are used, or else texts of many kinds.
    """
    if not trimmed.exists():
        raise BadInput(f"there is no {trimmed}; expected what `lmhead trim` wrote")
    is_keepset = trimmed.is_file() and trimmed.suffix == ".safetensors"
    if trimmed.is_file() and not is_keepset and trimmed.suffix.lower() != ".gguf":
        raise BadInput(
            f"{trimmed} is a file that no trim writes; expected a folder, a .gguf file, or a "
            "keep-set file that ends in .safetensors"
        )
    keepset = open_keepset(trimmed) if is_keepset else None
    report = read_report(trimmed)
    recorded = recorded_inputs(report)
    folder = ModelFolder.open(resolve(original, progress))
    if (inputs := recorded) is None:
        inputs = _inputs(folder, corpus, proof_prompts or 20, progress)
    inputs = _fewer(inputs, proof_prompts, max_tokens)
    if keepset is not None:
        model = replace(load(folder.folder, progress=progress), name=original)
        proof = verify_keepset(model, keepset, inputs, progress=progress)
        return proof, recorded is not None
    target = resolve(trimmed, progress)
    if target.resolve() == folder.folder.resolve():
        raise BadInput(
            f"{trimmed} is the original itself; give the original first, then the trimmed model"
        )
    proof = verify_trim(
        folder,
        target,
        corpus=corpus,
        inputs=inputs,
        report=report,
        whole_original=True,
        progress=progress,
    )
    return proof, recorded is not None


def _inputs(
    folder: ModelFolder, corpus: Corpus | None, prompts: int, progress: Progress
) -> ProofInputs:
    if corpus is None:
        return probe_inputs(folder)
    found = survey(folder.tokenizer, corpus, readings=folder.readings, progress=progress)
    texts = [row.tolist() for row in found.sample.texts[:prompts]]
    return inputs_of(texts, max_tokens=64, binds=False)


def _fewer(inputs: ProofInputs, prompts: int | None, max_tokens: int | None) -> ProofInputs:
    if prompts is not None:
        inputs = replace(inputs, prompts=inputs.prompts[:prompts], fresh=inputs.fresh[:prompts])
    if max_tokens is not None:  # texts longer than those observed were never promised
        promised = inputs.binds and max_tokens <= inputs.max_tokens
        inputs = replace(inputs, max_tokens=max_tokens, binds=promised)
    return inputs
