"""`lmhead count`: how often each token occurs in a corpus; and the options that name a corpus."""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmhead.cli.options import Json, Model
from lmhead.models.registry import DEFAULT_MODEL

if TYPE_CHECKING:
    from lmhead.trim.corpus import Corpus


class Errors(StrEnum):
    """What to do with text that cannot be read."""

    fail = "fail"
    skip = "skip"


Field = Annotated[
    str, typer.Option("--field", help="The field of the .jsonl objects that holds the text.")
]
OnErrors = Annotated[
    Errors,
    typer.Option(
        "--errors", help="What to do with text that is not UTF-8 or not JSON: fail, or skip it."
    ),
]
OldPrompts = Annotated[int | None, typer.Option("--prompts", min=1, hidden=True)]
OldLength = Annotated[int | None, typer.Option("--length", min=1, hidden=True)]
Ray = Annotated[
    str | None,
    typer.Option(
        "--ray", metavar="ADDRESS", help="Count on this Ray cluster, or `local` (extra `ray`)."
    ),
]


def count(
    corpus: Annotated[
        list[Path],
        typer.Argument(metavar="CORPUS...", help="Text, .jsonl, .gz, .zst, folders; - for stdin."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The counts file.")],
    model: Model = DEFAULT_MODEL,
    field: Field = "text",
    errors: OnErrors = Errors.fail,
    ray: Ray = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    json: Json = False,
) -> None:
    """Count the tokens of a corpus on all cores, for `lmhead trim --counts`."""
    from lmhead.cli import render
    from lmhead.files.whole import refuse_existing, written_whole
    from lmhead.models.resolve import resolve
    from lmhead.trim.counts import count as count_tokens
    from lmhead.trim.counts import count_on_ray
    from lmhead.trim.folder import ModelFolder

    refuse_existing(out, force=force, folder=False)  # before minutes of work, not after
    with open_corpus(corpus, field, errors) as texts:
        folder = ModelFolder.open(resolve(model, render.progress))
        if ray is not None:
            first, held = count_on_ray(folder.tokenizer, texts, ray, folder.readings)
        else:
            first, held = count_tokens(
                folder.tokenizer, texts, readings=folder.readings, progress=render.progress
            )
        counts = first + held
        warn_skipped(texts)
    with written_whole(out, force=force) as staging:
        counts.save(staging)
    distinct = int((counts.counts > 0).sum())
    if json:
        render.print_json(
            {
                "out": str(out),
                "texts": counts.texts,
                "tokens": counts.tokens,
                "distinct": distinct,
                "skipped": counts.skipped,
            }
        )
        return
    render.out().print(
        f"{counts.tokens:,} tokens, {distinct:,} of them distinct, in "
        f"{render.plural(counts.texts, 'text')}: {out}",
        markup=False,
    )


@contextmanager
def open_corpus(paths: list[Path], field: str, errors: Errors) -> "Iterator[Corpus]":
    """Open the corpus that a command was given; stdin is kept in a file to be read twice."""
    from lmhead.files.whole import scratch
    from lmhead.trim.corpus import Corpus

    if Path("-") not in paths:
        yield Corpus(tuple(paths), field, errors.value)
        return
    # A place that the next run sweeps, should this one be killed; for nobody else to read.
    with scratch(Path(tempfile.gettempdir()) / "lmhead-stdin") as folder:
        folder.chmod(0o700)
        spooled = folder / "stdin"
        with spooled.open("wb") as out:
            shutil.copyfileobj(sys.stdin.buffer, out)
        found = tuple(spooled if path == Path("-") else path for path in paths)
        yield Corpus(found, field, errors.value)


def warn_skipped(corpus: "Corpus") -> None:
    """Say what of a corpus was left out."""
    from lmhead.cli import render

    if corpus.skipped:
        texts = render.plural(len(corpus.skipped), "text")
        render.note(f"{texts} skipped, the first: {corpus.skipped[0]}")
    if corpus.left_out:
        files = render.plural(len(corpus.left_out), "file")
        some = ", ".join(corpus.left_out[:5]) + (", ..." if len(corpus.left_out) > 5 else "")
        render.note(f"{files} left out, not text: {some}")
