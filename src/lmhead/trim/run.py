"""Trim a model from beginning to end: choose, cut, prove, publish."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lmhead.errors import BadInput, LMHeadError
from lmhead.models.fetch import folder_of
from lmhead.models.registry import BUILT_IN
from lmhead.models.resolve import resolve
from lmhead.progress import Progress, silent
from lmhead.trim import coverage as cover
from lmhead.trim.checkpoint import published, vocabulary_tensors, write_json, write_trimmed
from lmhead.trim.counts import HELD_BACK, Counts, count, count_on_ray, fingerprint
from lmhead.trim.folder import ModelFolder
from lmhead.trim.idmap import TrimMap
from lmhead.trim.keepset import BLOCK, KeepSet, choose, rounded, tail, wanted
from lmhead.trim.publish import refuse_existing, staged
from lmhead.trim.report import Coverage, Form, Price, Saving, TrimReport, TrimRequest
from lmhead.trim.verify import REPORT, Proof, verify_trim

if TYPE_CHECKING:
    from lmhead.loading import Model

PRICED = (0.0, 0.9, 0.99, 0.999, 0.9999)  # coverages that a report tells the price of


class _Work:
    """What planning and trimming share: the opened folder, the loaded model, the counts."""

    def __init__(self, request: TrimRequest, progress: Progress) -> None:
        self.request, self.progress = request, progress
        self.folder = ModelFolder.open(resolve(request.model, progress))

    @cached_property
    def model(self) -> "Model":
        from lmhead.loading import load

        return replace(load(self.folder.folder, progress=self.progress), name=self.request.model)

    @cached_property
    def readings(self) -> list[Any]:
        return list(self.folder.readings)

    @cached_property
    def counts(self) -> tuple[Counts | None, Counts | None]:
        """Counts to build on, and those of the texts held back."""
        request, tokenizer = self.request, self.folder.tokenizer
        first = held = None
        if request.corpus is not None and request.ray is not None:
            first, held = count_on_ray(tokenizer, request.corpus, request.ray, self.readings)
        elif request.corpus is not None:
            first, held = count(
                tokenizer, request.corpus, readings=self.readings, progress=self.progress
            )
        for path in request.counts:
            more = Counts.load(path)
            if more.tokenizer != fingerprint(tokenizer):
                raise BadInput(
                    f"{path} was counted with another tokenizer than that of {request.model}; "
                    "count again with `lmhead count -m`"
                )
            first = more if first is None else first + more
        return first, held

    def texts(self, held_back: bool, count: int) -> list[list[int]]:
        """Return `count` texts of the corpus as ids, spread over it, of one window at most."""
        corpus = self.request.corpus
        if corpus is None:
            return []
        first, held = self.counts
        whole = first if held is None else held if held_back else first
        total = whole.texts if whole is not None else 0
        wanted_at = {at * total // count for at in range(count)}
        chosen, at = [], 0
        for index, text in enumerate(corpus):
            is_held = held is not None and index % HELD_BACK == HELD_BACK - 1
            if is_held == held_back:
                if at in wanted_at:
                    chosen.append(text.text)
                at += 1
        encoded = self.readings[0].encode_batch(chosen)
        return [e.ids[: cover.WINDOW] for e in encoded if e.ids]

    def heard(
        self, held_back: bool, positions: int, prompts: int
    ) -> tuple[cover.Listening, list[list[int]]]:
        """Run the model over texts of the corpus, and over its own continuations of them."""
        starts = cover.cut_prompts(self.texts(held_back, prompts))
        if not starts:
            raise BadInput("the corpus has too few texts to run the model on; give more")
        part = self.counts[int(held_back)] or self.counts[0]
        mean = part.tokens // max(1, part.texts) if part is not None else 1
        count = -(-positions // max(1, min(mean, cover.WINDOW)))
        texts, left = [], positions
        for ids in self.texts(held_back, count):
            texts.append(ids[:left])
            left -= len(texts[-1])
            if left <= 0:
                break
        read = cover.listen(self.model, texts, progress=self.progress)
        said, continuations = cover.listen_to_continuations(
            self.model, starts, self.request.length, progress=self.progress
        )
        return read + said, continuations

    def keepset(self) -> tuple[KeepSet, Coverage | None]:
        """Choose the ids to keep."""
        request, tokenizer = self.request, self.folder.tokenizer
        last, rest = tail(tokenizer, self.folder.rows)
        required = self.folder.required_ids() | last
        first, held = self.counts
        whole = first if held is None or first is None else first + held

        def chosen(
            counts: Counts | None, said: cover.Listening | None = None, share: float = 0.0
        ) -> KeepSet:
            parts = wanted(tokenizer, request.keep, None if counts is None else counts.counts)
            useful = None if counts is None else counts.counts.astype(np.float64)
            if said is not None:
                base = tokenizer.closure(required.union(*parts.values()))
                parts["model"] = cover.covering(said, base, share)
                if useful is not None:
                    useful[: len(said.mass)] += said.mass.numpy()
            if (size := request.keep.size) is not None:
                size -= (size - rest) % BLOCK  # room for whole blocks only
            kept = choose(tokenizer, required, parts, size=size, usefulness=useful)
            return rounded(tokenizer, kept, self.folder.rows, useful)

        if request.coverage is None:
            return chosen(whole), None
        heard, _ = self.heard(False, request.positions, request.prompts)
        known, held_heard = heard, None
        continuations: list[list[int]] = []
        if held is not None and held.texts:
            part = max(1, request.prompts // 2)
            held_heard, continuations = self.heard(True, request.positions // 4, part)
            heard = heard + held_heard

        def price(share: float) -> tuple[KeepSet, Price]:
            final = chosen(whole, heard, share)
            estimate = None
            if held_heard is not None:
                # The keep-set that knows nothing of the texts held back; the final one is larger.
                blind = chosen(first, known, share)
                estimate = cover.estimate(held_heard, continuations, blind.ids, request.length)
            return final, Price(share, sum(i < self.folder.rows for i in final.ids), estimate)

        final, paid = price(request.coverage)
        # Where a size decides, a coverage has no price of its own.
        others = () if request.keep.size is not None else PRICED
        return final, Coverage(
            wanted=request.coverage,
            share=heard.share(final.ids),
            positions=heard.positions,
            added=final.reasons.get("model", 0),
            estimate=paid.estimate,
            prices=tuple(
                paid if share == request.coverage else price(share)[1]
                for share in sorted({*others, request.coverage})
            ),
        )

    def report(self, form: Form) -> TrimReport:
        """Choose what to keep, and tell what that saves."""
        kept, coverage = self.keepset()
        if form == "gguf":
            kept = self._closed_for_gguf(kept)
        ids = TrimMap.of(kept.ids, self.folder.rows)
        first, held = self.counts
        parts = [part for part in (first, held) if part is not None]
        # With --form head the model itself stays whole.
        cut = {} if form == "head" else vocabulary_tensors(self.folder)
        tensors = self.folder.checkpoint.tensors.values()
        gone = ids.rows - ids.kept_rows
        parameters = sum(t.size for t in tensors)
        nbytes = sum(t.nbytes for t in tensors)
        return TrimReport(
            model=self.request.model,
            form=form,
            ids=ids,
            reasons=kept.reasons,
            texts=sum(part.texts for part in parts),
            tokens=sum(part.tokens for part in parts),
            skipped=sum(part.skipped for part in parts),
            parameters=Saving(
                parameters, parameters - gone * sum(t.size // ids.rows for t in cut.values())
            ),
            nbytes=Saving(nbytes, nbytes - gone * sum(t.nbytes // ids.rows for t in cut.values())),
            head_seconds=self._time_head(ids),
            coverage=coverage,
            dropped_examples=self._dropped_examples(ids),
        )

    def gguf(self) -> Path:
        """Return the GGUF file that is to be trimmed."""
        name = self.request.model
        path = folder_of(name) / BUILT_IN[name].gguf if name in BUILT_IN else Path(name)
        if path.suffix.lower() != ".gguf" or not path.is_file():
            raise BadInput(
                f"--form gguf needs a .gguf file, got {name}; for a folder use --form model"
            )
        return path.expanduser()

    def _closed_for_gguf(self, kept: KeepSet) -> KeepSet:
        from lmhead.files.gguf import open_gguf
        from lmhead.trim.gguf import closure

        ids = closure(open_gguf(self.gguf()), self.folder.tokenizer, kept.ids)
        return rounded(self.folder.tokenizer, KeepSet(ids, kept.reasons), self.folder.rows)

    def _time_head(self, ids: TrimMap) -> Saving:
        """Measure the projection of one state, before and after."""
        import time

        import torch

        from lmhead.models.architecture import find_head

        checkpoint = self.folder.checkpoint
        shapes = {name: header.shape for name, header in checkpoint.tensors.items()}
        W = checkpoint.read(find_head(shapes, checkpoint.config, str(checkpoint.folder)).weight)
        if not W.is_floating_point():
            return Saving(0.0, 0.0)
        h = torch.ones(1, W.shape[1], dtype=W.dtype)

        weights = (W, W[torch.from_numpy(ids.row_ids)])
        best = [float("inf"), float("inf")]
        with torch.inference_mode():
            for _ in range(10):  # turn by turn, so that both see the same machine
                for which, weight in enumerate(weights):
                    start = time.perf_counter()
                    torch.nn.functional.linear(h, weight)
                    best[which] = min(best[which], time.perf_counter() - start)
        return Saving(*best)

    def _dropped_examples(self, ids: TrimMap, most: int = 12) -> tuple[str, ...]:
        """Spell some dropped tokens, spread over the vocabulary."""
        gone = [i for i in sorted(self.folder.tokenizer.names) if i not in ids]
        some = gone[:: max(1, len(gone) // most)][:most]
        decode = self.readings[0].decode
        return tuple(decode([i]) or self.folder.tokenizer.names[i] for i in some)


def plan_trim(
    request: TrimRequest, form: Form = "model", progress: Progress = silent
) -> TrimReport:
    """Tell what a trim would keep and save; nothing is written."""
    return _Work(request, progress).report(form)


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
    refuse_existing(out, force, folder=form == "model")
    beside = out.with_name(f"{out.name}.{REPORT}")
    if form != "model":  # a file cannot hold a second one; what was done goes beside it
        refuse_existing(beside, force)
    work = _Work(request, progress)
    if form == "model":
        published(work.folder)  # what cannot be published is said before minutes of work
    if form == "gguf":
        work.gguf()
    report = work.report(form)
    if form == "head":
        return _write_keepset(work, report, out, force)
    if form == "model":
        with staged(out, force=force, folder=True) as staging:
            return _write_folder(work, report, out, staging, progress)
    with staged(beside, force=force) as told, staged(out, force=force) as staging:
        done = replace(report, proof=_write_gguf(work, report, staging, progress), out=out)
        write_json(told, done.to_dict(id_map=True))
    return done


def output_path(out: Path, form: Form) -> Path:
    """Return where a form is written: a GGUF file is found by its ending."""
    if form == "gguf" and out.suffix.lower() != ".gguf":
        return out.with_name(f"{out.name}.gguf")
    return out


def _write_folder(
    work: _Work, report: TrimReport, out: Path, staging: Path, progress: Progress
) -> TrimReport:
    tokenizer = work.folder.tokenizer.cut(report.ids)
    write_trimmed(work.folder, report.ids, tokenizer, staging, progress, link=work.request.link)
    done = replace(report, proof=_prove(work, report, staging, progress), out=out)
    write_json(staging / REPORT, done.to_dict(id_map=True))
    return done


def _prove(work: _Work, report: TrimReport, folder: Path, progress: Progress) -> Proof:
    """Verify a trimmed folder; a failure stops everything."""
    samples = _samples(work)
    proof = verify_trim(
        work.folder,
        folder,
        corpus=work.request.corpus,
        samples=samples,
        # Without a corpus nothing is known of what will be said; a few steps show that it runs.
        length=work.request.length if samples else 4,
        prompts=20 if samples else 4,
        model=work.__dict__.get("model"),
        greedy_binds=report.coverage is not None and report.reasons.get("size") is None,
        progress=progress,
    )
    if not proof.passed:
        raise LMHeadError(
            f"the trimmed model is not its original, nothing was published: {proof.failures}"
        )
    return proof


def _samples(work: _Work) -> list[Sequence[int]] | None:
    """Return texts as ids that the model was heard on, so that its choices there are kept."""
    if work.request.corpus is None:
        return None
    return list(work.texts(False, work.request.prompts))


def _write_gguf(work: _Work, report: TrimReport, target: Path, progress: Progress) -> Proof:
    from lmhead.models.convert import convert_gguf
    from lmhead.trim.gguf import write_trimmed_gguf

    write_trimmed_gguf(work.gguf(), report.ids, target, progress)
    scratch = target.with_name(target.name + "-proof")
    scratch.mkdir()
    try:
        convert_gguf(target, scratch, progress)
        return _prove(work, report, scratch, progress)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write_keepset(work: _Work, report: TrimReport, out: Path, force: bool) -> TrimReport:
    from lmhead.trim.keepfile import KeepFile

    head = work.model.head
    with staged(out, force=force) as staging:
        KeepFile(report.ids, report.model, head.sha256).save(staging)
    return replace(report, out=out)
