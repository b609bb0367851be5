"""`lmhead screen`: make the int8 copy that lets a head answer from a quarter of its bytes."""

from typing import Annotated

import typer

from lmhead.cli.options import Json, ModelArgument, ModelOption, one_model
from lmhead.models.registry import DEFAULT_MODEL


def screen(
    model: ModelArgument = None,
    same_model: ModelOption = None,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Make the copy again even if it exists.")
    ] = False,
    json: Json = False,
) -> None:
    """Make an int8 copy of a head, for faster and still exact answers (the screened engine).

    The copy is stored next to the model, or in the cache if that folder is not writable. The loops
    that read it are compiled too, so that the first answer does not have to wait for them.
    """
    from lmhead.cli import render
    from lmhead.head import LMHead
    from lmhead.head.screened import ScreenedHead
    from lmhead.head.screening.warming import compile_loops
    from lmhead.models.resolve import resolve

    name = one_model(model, same_model, DEFAULT_MODEL)
    folder = resolve(name, render.progress)
    head = LMHead.from_pretrained(folder)
    screened = ScreenedHead.from_head(
        head, folder, save=True, rebuild=rebuild, progress=render.progress
    )
    if screened.compiled:
        compile_loops(screened, render.progress)
    whole = head.vocab_size * head.hidden_size * 4
    result = {
        "model": name,
        "path": str(screened.path),
        "head_sha256": head.sha256,
        "vocab_size": head.vocab_size,
        "hidden_size": head.hidden_size,
        "copy_bytes": screened.screen.nbytes,
        "share_of_float32": screened.screen.nbytes / whole,
        "kernels": "numba" if screened.compiled else "torch",
    }
    if json:
        render.print_json(result)
        return
    render.out().print(
        f"{name}: {head.vocab_size:,} x {head.hidden_size:,} in "
        f"{render.size(screened.screen.nbytes)}, "
        f"{render.percent(screened.screen.nbytes / whole)} of the float32 head\n{screened.path}"
    )
    if not screened.compiled:
        render.note("numba is not installed, so it will be slow: pip install numba")
