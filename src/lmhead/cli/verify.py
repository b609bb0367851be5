"""`lmhead verify`: the proof that a trimmed model is its original on what was kept."""

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
from lmhead.cli.options import Json, ModelOption, renamed
from lmhead.errors import BadInput
from lmhead.files.cache import with_home

if TYPE_CHECKING:
    from lmhead.trim.inputs import Proof


def verify(
    original: Annotated[
        str | None,
        typer.Argument(metavar="ORIGINAL", help="The original model.", show_default=False),
    ] = None,
    trimmed: Annotated[
        str | None,
        typer.Argument(
            metavar="TRIMMED",
            help="What a trim wrote: a folder, a .gguf file or a keep-set file.",
            show_default=False,
        ),
    ] = None,
    corpus: Annotated[
        list[Path] | None, typer.Option("--corpus", help="Texts to compare on; may be repeated.")
    ] = None,
    field: Field = "text",
    errors: OnErrors = Errors.fail,
    proof_prompts: Annotated[
        int | None,
        typer.Option(
            min=1, help="Prompts to compare greedy text on; by default those of the trim's proof."
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            "-n",
            min=1,
            help="Tokens of each greedy text; by default as in the trim's proof.",
        ),
    ] = None,
    model_option: ModelOption = None,
    prompts: OldPrompts = None,
    length: OldLength = None,
    json: Json = False,
) -> None:
    """Compare a trimmed model with its original: tokens, weights, ids, logits, greedy text.

    The models run on the same inputs as in the trim's own proof. The exit code is 1 if anything
    differs that should not.
    """
    from lmhead.cli import render

    if model_option is not None and trimmed is None:
        original, trimmed = model_option, original
    if original is None or trimmed is None:
        raise BadInput("ORIGINAL or TRIMMED is missing; give the original, then the trimmed model")
    proof_prompts = renamed("--prompts", prompts, "--proof-prompts", proof_prompts)
    max_tokens = renamed("--length", length, "--max-tokens", max_tokens)
    from lmhead.trim.recheck import verify_path

    with open_corpus(corpus or [], field, errors) as texts:
        proof, recorded = verify_path(
            original,
            with_home(trimmed, "TRIMMED"),
            corpus=texts if corpus else None,
            proof_prompts=proof_prompts,
            max_tokens=max_tokens,
            progress=render.progress,
        )
        warn_skipped(texts)
    if not recorded:
        render.note(
            "the inputs of the trim's own proof were not recorded, so nothing is promised about "
            "greedy text: differences where the original chose a dropped token are reported but "
            "do not count"
        )
    if json:
        render.print_json({"original": original, "trimmed": trimmed, **proof.to_dict()})
    else:
        show_proof(proof)
    if not proof.passed:
        raise typer.Exit(1)


def show_proof(proof: "Proof") -> None:
    """Print the checks of a proof as a table."""
    from lmhead.cli import render

    table = render.table("proof", "failed", "of", "", "", title=None)
    table.columns[-2].justify = table.columns[-1].justify = "left"
    table.columns[-1].no_wrap = False  # a long note takes a second line, not the figures' room
    for check in proof.checks:
        mark = "[green]ok[/green]" if check.failed == 0 else "[yellow]differs[/yellow]"
        table.add_row(
            check.name,
            render.count(check.failed),
            render.count(check.tested),
            mark if check.passed else "[red]WRONG[/red]",
            check.note,
        )
    render.out().print(table)
    if any(check.failed and check.passed for check in proof.checks):
        render.out().print(
            "differs: allowed, for the reason given; any other difference would be WRONG and fail "
            "the proof"
        )
