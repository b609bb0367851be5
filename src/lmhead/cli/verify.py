"""`lmhead verify`: the proof that a trimmed model is its original on what was kept."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmhead.cli.count import Errors, Field, OnErrors, open_corpus, warn_skipped
from lmhead.cli.options import Json

if TYPE_CHECKING:
    from lmhead.trim.verify import Proof


def verify(
    original: Annotated[str, typer.Argument(metavar="ORIGINAL", help="The model before.")],
    trimmed: Annotated[Path, typer.Argument(metavar="TRIMMED", help="The trimmed folder.")],
    corpus: Annotated[
        list[Path] | None, typer.Option("--corpus", help="Texts to compare; may be repeated.")
    ] = None,
    field: Field = "text",
    errors: OnErrors = Errors.fail,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts to continue greedily.")] = 20,
    length: Annotated[int, typer.Option(min=1, help="By how many tokens.")] = 64,
    json: Json = False,
) -> None:
    """Compare a trimmed model with its original: tokens, weights, ids, logits, greedy text.

    The exit code is 1 if anything differs that should not.
    """
    from lmhead.cli import render
    from lmhead.models.resolve import resolve
    from lmhead.trim.folder import ModelFolder
    from lmhead.trim.verify import verify_trim

    folder = ModelFolder.open(resolve(original, render.progress))
    target = resolve(trimmed, render.progress)
    with open_corpus(corpus or [], field, errors) as texts:
        proof = verify_trim(
            folder,
            target,
            corpus=texts if corpus else None,
            prompts=prompts,
            length=length,
            progress=render.progress,
        )
        warn_skipped(texts)
    if json:
        render.print_json({"original": original, "trimmed": str(trimmed), **proof.to_dict()})
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
