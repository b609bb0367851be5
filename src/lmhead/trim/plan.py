"""What a trim would keep: the corpus is read once, the model runs once."""

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lmhead.errors import BadInput
from lmhead.files.cache import with_home
from lmhead.files.gguf import GGUFFile, open_gguf
from lmhead.models.fetch import folder_of
from lmhead.models.registry import BUILT_IN
from lmhead.models.resolve import resolve
from lmhead.progress import Progress, titled
from lmhead.trim.checkpoint import vocabulary_tensors
from lmhead.trim.counts import Counts, Survey, fingerprint, survey, survey_on_ray
from lmhead.trim.folder import ModelFolder
from lmhead.trim.idmap import TrimMap
from lmhead.trim.inputs import Greedy, ProofInputs, inputs_of, probe_inputs
from lmhead.trim.keepset import BLOCK, KeepSet, choose, minimum, rounded, tail, wanted
from lmhead.trim.report import Coverage, Form, Price, Saving, TrimReport, TrimRequest
from lmhead.trim.sample import Sampled
from lmhead.trim.workers import OnRay, joined

if TYPE_CHECKING:
    from lmhead.loading import Model
    from lmhead.trim.coverage import Observed
    from lmhead.trim.observations import Observations

Parts = dict[str, set[int]]
PRICED = (0.0, 0.9, 0.99, 0.999, 0.9999)  # coverages that a report tells the price of


class Work:
    """What planning and trimming share: the opened folder, the loaded model, the corpus as read."""

    def __init__(self, request: TrimRequest, progress: Progress, *, plain: bool = False) -> None:
        self.request, self.progress = request, progress
        self.folder = ModelFolder.open(resolve(request.model, progress), plain=plain)
        self.continued_count = self.held_count = 0
        self.greedy: Greedy = {}

    @cached_property
    def model(self) -> "Model":
        """The original, loaded."""
        from lmhead.loading import load

        title = titled(self.progress, f"loading {self.request.model}")
        found = load(self.folder.folder, tokenizer=self.folder.read_already, progress=title)
        return replace(found, name=self.request.model)

    @property
    def loaded(self) -> "Model | None":
        """The original if it is loaded already."""
        return self.__dict__.get("model")

    @cached_property
    def readings(self) -> list[Any]:
        """The tokenizers that people get from the folder."""
        return list(self.folder.readings)

    @cached_property
    def survey(self) -> Survey | None:
        """Counts and samples of the corpus, None where none is given."""
        request, tokenizer = self.request, self.folder.tokenizer
        if request.corpus is None:
            return None
        if request.ray is not None:
            return survey_on_ray(tokenizer, request.corpus, request.ray, self.readings)
        return survey(tokenizer, request.corpus, readings=self.readings, progress=self.progress)

    @cached_property
    def counts(self) -> tuple[Counts | None, Counts | None]:
        """Counts to build on, and those of the texts held back."""
        found = self.survey
        first, held = (None, None) if found is None else (found.counts, found.held)
        for path in self.request.counts:
            more = Counts.load(path)
            if more.tokenizer != fingerprint(self.folder.tokenizer):
                raise BadInput(
                    f"{path} was counted with another tokenizer than that of {self.request.model}; "
                    "count again with `lmhead count -m`"
                )
            first = more if first is None else first + more
        return first, held

    @cached_property
    def samples(self) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
        """Texts of the corpus as ids, in a random order; those held back; more for the proof.

        Rows are chosen by the first ones only.
        """
        if self.survey is None:
            return [], [], []
        texts = self._readable(self.survey.sample)
        held = [] if self.request.coverage is None else self._readable(self.survey.held_sample)
        lacking = max(0, self.request.proof_prompts // 2 - len(held))
        reserve = min(lacking, len(texts) // 4)
        return texts[: len(texts) - reserve], held, texts[len(texts) - reserve :]

    def _readable(self, sample: Sampled) -> list[list[int]]:
        """Return the texts that the model can read: a tokenizer may know ids that have no row."""
        return [row.tolist() for row in sample.texts if int(row.max()) < self.folder.rows]

    def _observed(self, kept_anyway: frozenset[int]) -> "Observations":
        """Run the model over texts of the corpus, and over its own continuations of them."""
        from lmhead.trim.observations import Question, observe

        request = self.request
        texts, held, fresh = self.samples
        question = Question(
            texts,
            held,
            fresh,
            kept_anyway,
            1.0 if request.coverage is None else request.coverage,
            request.positions,
            request.continuations,
            request.max_tokens,
            request.proof_prompts,
        )
        self.continued_count, self.held_count = question.continued_count, len(question.held_prompts)
        return observe(
            self.folder,
            lambda: self.model,
            question,
            resume=request.resume,
            workers=None if request.ray is None else OnRay(self.folder.folder),
            progress=self.progress,
        )

    def keepset(self) -> tuple[KeepSet, Coverage | None]:
        """Choose the ids to keep."""
        request, tokenizer = self.request, self.folder.tokenizer
        last, rest = tail(tokenizer, self.folder.rows)
        required = self.folder.required_ids() | last
        if (size := request.keep.size) is not None:
            minimum(tokenizer, required, rest, size)  # said before minutes of work
            size -= (size - rest) % BLOCK  # room for whole blocks only
        first, held = self.counts
        whole = first if held is None or first is None else first + held

        def asked(counts: Counts | None) -> tuple[Counts | None, Parts, frozenset[int]]:
            """Return counts with the ids that are asked for beside what the model says."""
            parts = wanted(tokenizer, request.keep, None if counts is None else counts.counts)
            return counts, parts, tokenizer.closure(required.union(*parts.values()))

        def chosen(
            of: tuple[Counts | None, Parts, frozenset[int]],
            said: "Observed | None" = None,
            share: float = 0.0,
        ) -> KeepSet:
            counts, parts, base = of
            useful = None if counts is None else counts.counts.astype(np.float64)
            if said is not None:
                from lmhead.trim.coverage import covering

                parts = {**parts, "model": covering(said, base, share)}
                if useful is not None:
                    useful[: len(said.mass)] += said.mass.numpy()
            kept = choose(tokenizer, required, parts, size=size, usefulness=useful)
            return rounded(tokenizer, kept, self.folder.rows, useful)

        of_all = asked(whole)
        if request.coverage is None:
            return chosen(of_all), None
        of_first = asked(first)
        seen = self._observed(of_first[2])
        self.greedy = seen.greedy

        from lmhead.trim.coverage import estimate as estimated

        def price(share: float) -> tuple[KeepSet, Price]:
            final = chosen(of_all, seen.known, share)
            estimate = None
            if seen.held is not None:
                # The keep-set that knows nothing of the texts held back; the final one has their
                # tokens too.
                blind = chosen(of_first, seen.known, share)
                estimate = estimated(seen.held, seen.continuations, blind.ids, request.max_tokens)
            return final, Price(share, sum(i < self.folder.rows for i in final.ids), estimate)

        final, paid = price(request.coverage)
        # Where a size decides, a coverage has no price of its own.
        others = () if request.keep.size is not None else PRICED
        return final, Coverage(
            wanted=request.coverage,
            share=seen.known.share(final.ids),
            positions=seen.known.positions,
            added=final.reasons.get("model", 0),
            new_choices=seen.news,
            estimate=paid.estimate,
            prices=tuple(
                paid if share == request.coverage else price(share)[1]
                for share in sorted({*others, request.coverage})
            ),
        )

    def inputs(self, report: TrimReport) -> ProofInputs:
        """Choose what the proof runs on."""
        if self.request.corpus is None:
            return probe_inputs(self.folder)
        texts, held, others = self.samples
        count, steps = self.request.proof_prompts, self.request.max_tokens
        if report.coverage is None:
            return inputs_of(texts[:count], max_tokens=steps, binds=False)
        binds = report.reasons.get("size") is None
        seen = texts[: min(-(-count // 2), self.continued_count)]
        fresh = [*held[: min(count // 2, self.held_count)], *others]
        return inputs_of(seen, fresh, max_tokens=steps, binds=binds)

    def report(self, form: Form) -> TrimReport:
        """Choose what to keep, and tell what that saves."""
        with joined(self.request.ray):
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
        saved = gone * sum(t.nbytes // ids.rows for t in cut.values())
        if form == "gguf":
            from lmhead.trim.gguf import row_bytes

            nbytes = self.gguf.path.stat().st_size
            saved = gone * row_bytes(self.gguf, ids.rows)
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
            nbytes=Saving(nbytes, nbytes - saved),
            coverage=coverage,
            dropped_examples=self._dropped_examples(ids),
        )

    @cached_property
    def gguf(self) -> GGUFFile:
        """The GGUF file that is to be trimmed."""
        name = self.request.model
        path = folder_of(name) / BUILT_IN[name].gguf if name in BUILT_IN else Path(name)
        path = with_home(path, "the model")
        if path.suffix.lower() != ".gguf" or not path.is_file():
            raise BadInput(
                f"--form gguf needs a .gguf file, got {name}; for a folder use --form model"
            )
        return open_gguf(path)

    def _closed_for_gguf(self, kept: KeepSet) -> KeepSet:
        from lmhead.trim.gguf import closure

        ids = closure(self.gguf, self.folder.tokenizer, kept.ids)
        return rounded(self.folder.tokenizer, KeepSet(ids, kept.reasons), self.folder.rows)

    def _dropped_examples(self, ids: TrimMap, most: int = 12) -> tuple[str, ...]:
        """Spell some dropped tokens, spread over the vocabulary."""
        gone = [i for i in sorted(self.folder.tokenizer.names) if i not in ids]
        some = gone[:: max(1, len(gone) // most)][:most]
        decode = self.readings[0].decode
        return tuple(decode([i]) or self.folder.tokenizer.names[i] for i in some)
