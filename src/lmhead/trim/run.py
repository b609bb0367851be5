"""Trim a model from beginning to end: choose, cut, prove, publish."""

from dataclasses import replace
from pathlib import Path

from lmhead.errors import LMHeadError
from lmhead.files.whole import folder_whole, refuse_existing, scratch, written_whole
from lmhead.progress import Progress, silent
from lmhead.trim.card import card, write_card
from lmhead.trim.checkpoint import published, write_json, write_trimmed
from lmhead.trim.inputs import REPORT, Proof
from lmhead.trim.keepfile import KeepFile
from lmhead.trim.plan import Work
from lmhead.trim.report import LISTS, Form, Saving, TrimReport, TrimRequest
from lmhead.trim.verify import Tensors, verify_keepset, verify_trim


def plan_trim(
    request: TrimRequest, form: Form = "model", progress: Progress = silent
) -> TrimReport:
    """Tell what a trim would keep and save; nothing is written."""
    return Work(request, progress, plain=request.coverage is None).report(form)


def output_path(out: Path, form: Form) -> Path:
    """Return where a form is written: a GGUF file is found by its ending."""
    if form == "gguf" and out.suffix.lower() != ".gguf":
        return out.with_name(f"{out.name}.gguf")
    return out


def refuse_output(out: Path, form: Form, force: bool) -> None:
    """Refuse a place where something is that must not be replaced."""
    refuse_existing(out, force=force, folder=form == "model")
    if form != "model":
        for path in (_beside(out), _card_beside(out)):
            refuse_existing(path, force=force, folder=False)


def trim_model(
    request: TrimRequest,
    out: Path,
    *,
    form: Form = "model",
    force: bool = False,
    progress: Progress = silent,
) -> TrimReport:
    """Trim a model, prove it, and only then publish it at `out`."""
    out = output_path(out, form)
    refuse_output(out, form, force)
    # Where the original need not run, transformers need not be imported.
    work = Work(request, progress, plain=request.coverage is None and form != "head")
    # What cannot be done is said before minutes of work.
    if form == "model":
        published(work.folder)
    elif form == "gguf":
        _ = work.gguf
    report = work.report(form)
    if form == "model":
        with folder_whole(out, force=force) as staging:
            write_trimmed(
                work.folder,
                report.ids,
                staging,
                progress,
                link=request.link,
            )
            done = replace(report, proof=_prove(work, report, staging, progress), out=out)
            write_json(staging / REPORT, done.to_dict(whole=True), LISTS)
            write_card(staging, done)
        return done
    # A file cannot hold a second one; what was done goes beside it.
    with (
        written_whole(_beside(out), force=force) as report_file,
        written_whole(_card_beside(out), force=force) as shown,
        written_whole(out, force=force) as staging,
    ):
        write = _write_gguf if form == "gguf" else _write_keepset
        done = write(work, replace(report, out=out), staging, progress)
        write_json(report_file, done.to_dict(whole=True), LISTS)
        shown.write_text(card(done), "utf-8")
    return done


def _beside(out: Path) -> Path:
    return out.with_name(f"{out.name}.{REPORT}")


def _card_beside(out: Path) -> Path:
    return out.with_name(f"{out.name}.md")


def _prove(
    work: Work,
    report: TrimReport,
    folder: Path,
    progress: Progress,
    weights: tuple[Tensors, Tensors] | None = None,
    *,
    blocks_of_original: bool = False,
) -> Proof:
    """Verify a trimmed folder; a failure stops everything."""
    proof = verify_trim(
        work.folder,
        folder,
        corpus=work.request.corpus,
        inputs=work.inputs(report),
        model=work.loaded,
        greedy=work.greedy,
        weights=weights,
        blocks_of_original=blocks_of_original,
        run=work.request.run,
        progress=progress,
    )
    return _passed(proof)


def _passed(proof: Proof) -> Proof:
    if not proof.passed:
        raise LMHeadError(
            "the trimmed model differs from the original, so nothing was published: "
            f"{proof.failures}"
        )
    return proof


def _write_gguf(work: Work, report: TrimReport, target: Path, progress: Progress) -> TrimReport:
    from lmhead.files.gguf import open_gguf
    from lmhead.models.convert import convert_gguf
    from lmhead.trim.gguf import tensors_of, write_trimmed_gguf

    write_trimmed_gguf(work.gguf, report.ids, target, progress)
    with scratch(report.out or target) as folder:
        # The weights are compared as they are quantised. What is equal there need not be
        # dequantised, but for transformers, which runs whole folders only.
        ends = not work.request.run or (work.loaded is None and _runs_plain(work))
        convert_gguf(target, folder, progress, head_only=ends)
        files = (tensors_of(work.gguf), tensors_of(open_gguf(target))) if ends else None
        proof = _prove(work, report, folder, progress, files, blocks_of_original=ends)
    nbytes = Saving(report.nbytes.before, target.stat().st_size)
    return replace(report, proof=proof, nbytes=nbytes)


def _runs_plain(work: Work) -> bool:
    from lmhead.trim.plain_model import is_plain

    return is_plain(work.folder)


def _write_keepset(work: Work, report: TrimReport, target: Path, progress: Progress) -> TrimReport:
    keepset = KeepFile(report.ids, report.model, work.model.head.sha256)
    keepset.save(target)
    proof = verify_keepset(
        work.model,
        KeepFile.load(target),
        work.inputs(report),
        greedy=work.greedy,
        run=work.request.run,
        progress=progress,
    )
    return replace(report, proof=_passed(proof))
