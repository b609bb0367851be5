"""`lmhead trim`: a smaller vocabulary, with proof that nothing you need has changed."""

from collections.abc import Callable
from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmhead.cli.count import (
    Errors,
    Field,
    OldLength,
    OldPrompts,
    OnErrors,
    open_corpus,
    warn_skipped,
)
from lmhead.cli.options import Json, ModelArgument, ModelOption, one_model, renamed
from lmhead.errors import BadInput
from lmhead.models.registry import DEFAULT_MODEL

if TYPE_CHECKING:
    from rich.table import Table

    from lmhead.trim.report import Coverage, Saving, TrimReport

_DEFAULT_COVERAGE = 0.99
QUICK = {"positions": 512, "continuations": 8, "max_tokens": 16, "proof_prompts": 4}


class Form(StrEnum):
    """What a trim writes."""

    model = "model"
    gguf = "gguf"
    head = "head"


def trim(
    model: ModelArgument = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="DIR", help="Where to write the result.")
    ] = None,
    corpus: Annotated[
        list[Path] | None,
        typer.Option(
            "--corpus",
            help="Keep what these texts encode to: text, .jsonl, .gz, .zst, folders, - for stdin; "
            "may be repeated.",
        ),
    ] = None,
    field: Field = "text",
    errors: OnErrors = Errors.fail,
    counts: Annotated[
        list[Path] | None,
        typer.Option("--counts", help="A file written by `lmhead count`; repeat to add counts up."),
    ] = None,
    min_count: Annotated[
        int, typer.Option(min=1, help="Keep tokens that occur at least this often in the corpus.")
    ] = 1,
    script: Annotated[
        str, typer.Option(metavar="NAMES", help="Keep tokens in these scripts: latin,greek,...")
    ] = "",
    language: Annotated[
        str, typer.Option(metavar="CODES", help="Keep the scripts of these languages: en,el,...")
    ] = "",
    ascii_: Annotated[
        bool, typer.Option("--ascii", help="Keep tokens that are all ASCII.")
    ] = False,
    ids: Annotated[
        Path | None, typer.Option(help="Keep these ids: one per line, a JSON list, or a keep-set.")
    ] = None,
    tokens: Annotated[
        Path | None, typer.Option(help="Keep these tokens: one per line, as the vocabulary has it.")
    ] = None,
    size: Annotated[
        int | None, typer.Option(min=2, help="Keep at most this many rows, the most useful ones.")
    ] = None,
    coverage: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Run the model over the corpus and keep its top choice at every step, and this "
            f"share of all its probability ({_DEFAULT_COVERAGE} with a corpus; --plan shows what "
            "other shares would cost).",
        ),
    ] = None,
    no_coverage: Annotated[
        bool,
        typer.Option(
            "--no-coverage",
            help="Keep only what the corpus contains, not what the model would say.",
        ),
    ] = False,
    positions: Annotated[
        int, typer.Option(min=1, help="The most tokens of the corpus to run the model on.")
    ] = 20_000,
    continuations: Annotated[
        int,
        typer.Option(
            min=1,
            help="The most texts of the corpus to continue, and as many again that are held back.",
        ),
    ] = 48,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", min=1, help="Tokens in each continuation.")
    ] = 64,
    proof_prompts: Annotated[
        int, typer.Option(min=1, help="How many prompts the proof compares greedy text on.")
    ] = 20,
    form: Annotated[
        Form,
        typer.Option(
            help="A Hugging Face folder, a .gguf file, or a keep-set file for the head alone."
        ),
    ] = Form.model,
    plan: Annotated[
        bool, typer.Option("--plan", help="Show what would be kept and saved; write nothing.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a previous trim or file at DIR.")
    ] = False,
    link: Annotated[
        bool,
        typer.Option(
            "--link", help="Hard-link weight files that do not change instead of copying them."
        ),
    ] = False,
    no_run: Annotated[
        bool,
        typer.Option("--no-run", help="Prove by comparing files only, without running a model."),
    ] = False,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="A first look in seconds: the model reads at most "
            f"{QUICK['positions']} tokens and continues {QUICK['continuations']} texts by "
            f"{QUICK['max_tokens']}, and the proof runs on {QUICK['proof_prompts']} prompts, so "
            "more of what it would say may be missing.",
        ),
    ] = False,
    no_resume: Annotated[
        bool,
        typer.Option(
            "--no-resume",
            help="Run the model again, even if the cache has its answers from an earlier run.",
        ),
    ] = False,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Count, and run the model, on this Ray cluster, or `local` (extra `ray`).",
        ),
    ] = None,
    model_option: ModelOption = None,
    prompts: OldPrompts = None,
    length: OldLength = None,
    json: Json = False,
) -> None:
    """Cut a model's vocabulary down to what you need, and prove it before writing anything.

    Every text of the corpus still encodes to the same tokens, and kept logits stay bit-equal.
    Bytes, special and added tokens, the chat template's tokens and the pieces of kept tokens always
    stay.
    """
    from lmhead.cli import render

    model = one_model(model, model_option, DEFAULT_MODEL)
    continuations = renamed("--prompts", prompts, "--continuations", continuations)
    max_tokens = renamed("--length", length, "--max-tokens", max_tokens)
    if quick:
        positions = min(positions, QUICK["positions"])
        continuations = min(continuations, QUICK["continuations"])
        max_tokens = min(max_tokens, QUICK["max_tokens"])
        proof_prompts = min(proof_prompts, QUICK["proof_prompts"])
    if not plan and out is None:
        raise BadInput("--out is missing; give --out DIR to write a trim, or --plan for a preview")
    if no_coverage and coverage is not None:
        raise BadInput("--coverage and --no-coverage exclude each other; give one")
    if coverage is None and corpus and not no_coverage:
        coverage = _DEFAULT_COVERAGE

    from lmhead.trim import run
    from lmhead.trim.keepset import Keep
    from lmhead.trim.report import TrimRequest

    if out is not None and not plan:
        # before minutes of work, not after
        run.refuse_output(run.output_path(out, form.value), form.value, force)
    keep = Keep(min_count, _words(script), _words(language), ascii_, ids, tokens, size)
    with open_corpus(corpus, field, errors) if corpus else nullcontext() as texts:
        request = TrimRequest(
            model,
            keep,
            texts,
            tuple(counts or ()),
            coverage,
            positions,
            continuations,
            max_tokens,
            proof_prompts,
            run=not no_run,
            resume=not no_resume,
            ray=ray,
            link=link,
        )
        try:
            if plan or out is None:
                report = run.plan_trim(request, form.value, render.progress)
            else:
                report = run.trim_model(
                    request, out, form=form.value, force=force, progress=render.progress
                )
        except KeyboardInterrupt:
            if coverage is not None and request.resume:
                render.note("interrupted; the same command resumes after the last finished stage")
            raise
        if texts is not None:
            warn_skipped(texts)
    if json:
        render.print_json(report.to_dict())
    else:
        _show(report, quick=quick)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def _show(report: "TrimReport", *, quick: bool) -> None:
    from lmhead.cli import render
    from lmhead.cli.verify import show_proof

    ids = report.ids
    done = "planned" if report.out is None else "trimmed"
    render.say(f"{report.model}, {done}")  # a table's title would be cut to the table's width
    table = render.table("", "before", "after", "saved")
    rows = 1 - ids.kept_rows / ids.rows
    table.add_row("rows", f"{ids.rows:,}", f"{ids.kept_rows:,}", render.percent(rows))
    if report.form != "head":  # which leaves the model as it is
        _add(table, "parameters", report.parameters, lambda n: f"{n:,.0f}")
        _add(table, "bytes", report.nbytes, render.size)
    render.out().print(table)

    reasons = ", ".join(f"{name} {count:,}" for name, count in report.reasons.items())
    render.out().print(f"kept: {reasons}")
    if report.texts:
        texts, tokens = (
            render.plural(report.texts, "text"),
            render.plural(report.tokens, "token"),
        )
        render.out().print(f"corpus: {texts}, {tokens}")
    if report.coverage:
        _show_coverage(report.coverage, prices=report.out is None)
        if quick:
            render.out().print(
                "a first look (--quick): the model ran on little text, so the intervals are wide, "
                "and it may leave the keep-set more often than after a whole run"
            )
    if report.dropped_examples:
        render.out().print(
            "dropped, for example: " + " ".join(repr(text) for text in report.dropped_examples),
            markup=False,
        )
    if report.proof:
        show_proof(report.proof)
        if report.proof.inputs is None:
            render.out().print("no model was run for this proof (--no-run); `lmhead verify` does")
    if report.out:
        render.out().print(f"wrote {report.out}", markup=False)


def _show_coverage(coverage: "Coverage", *, prices: bool) -> None:
    from lmhead.cli import render

    render.out().print(
        f"coverage: the model's choice at {coverage.positions:,} positions, and "
        f"{render.percent(coverage.share)} of all its probability there"
    )
    news = coverage.new_choices
    render.out().print(
        f"while it read, {render.percent(news.rate)} of its choices were not among what would have "
        f"been kept by then (95 %: {render.percent(news.low)} to {render.percent(news.high)})"
    )
    if found := coverage.estimate:
        render.out().print(
            f"on texts held back: {found.texts_left} of {found.texts} continuations of "
            f"{found.max_tokens} tokens would leave the keep-set (95 %: "
            f"{render.percent(found.low)} to {render.percent(found.high)}), "
            f"{render.percent(found.step_rate)} of {found.steps:,} steps"
        )
    if prices:
        table = render.table("coverage", "rows", "steps that leave", "texts that leave")
        for price in coverage.prices:
            held = price.estimate
            left = (render.percent(held.step_rate), render.percent(held.text_rate)) if held else ()
            table.add_row(f"{price.coverage:g}", f"{price.rows:,}", *left)
        render.out().print(table)


def _add(table: "Table", name: str, saving: "Saving", show: Callable[[float], str]) -> None:
    from lmhead.cli import render

    if saving.before:
        share = render.percent(saving.share)
        table.add_row(name, show(saving.before), show(saving.after), share)
