"""`lmhead inspect`: the head in numbers, without torch and without reading a weight."""

from typing import TYPE_CHECKING, Annotated

import typer

from lmhead.cli.options import Json, ModelOption, built_in_names, one_model
from lmhead.models.registry import DEFAULT_MODEL

if TYPE_CHECKING:
    from lmhead.inspect import HeadReport


def inspect(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A folder, a .gguf file, a built-in name, a well-known name such as gemma-7b, "
            "or a Hugging Face id.",
            autocompletion=built_in_names,
        ),
    ] = None,
    same_model: ModelOption = None,
    batch: Annotated[
        int, typer.Option(min=1, help="Batch size used to compute the memory for the logits.")
    ] = 8,
    sequence: Annotated[
        int, typer.Option(min=1, help="Sequence length used for the same, in tokens.")
    ] = 2048,
    json: Json = False,
) -> None:
    """Size up a head: parameters, share of the model, bytes, logits' memory, unreachable rows."""
    from lmhead.cli import render
    from lmhead.inspect import inspect_model

    name = one_model(model, same_model, DEFAULT_MODEL)
    report = inspect_model(name, batch=batch, sequence=sequence, progress=render.progress)
    if json:
        render.print_json(report.to_dict())
        return
    _show(name, report)


def _show(model: str, report: "HeadReport") -> None:
    from lmhead.cli import render

    facts = render.Facts(f"{model}: {report.architecture}")
    bias = " + bias" if report.bias else ""
    tied = "tied to the embedding" if report.tied else "not tied"
    facts("head", f"{report.vocab_size:,} x {report.hidden_size:,}{bias}, {tied}")
    if report.scale is not None:
        facts("scale", f"logits x {report.scale:g}")
    if report.softcap is not None:
        facts("softcap", f"{report.softcap:g}")
    facts("parameters of the head", _with_share(report.head_parameters, report.head_share))
    if not report.tied:
        facts("... and the embedding", render.count(report.embedding_parameters))
    if report.total_parameters is not None:
        once = ", the tied matrix counted once" if report.tied else ""
        facts("parameters in all", render.count(report.total_parameters) + once)
    if report.stored_bytes and report.stored_bytes.total is not None:
        facts(
            f"stored ({report.dtype})",
            f"{render.size(report.stored_bytes.head)} of {render.size(report.stored_bytes.total)}",
        )
    sizes = " · ".join(
        f"{dtype} {render.size(footprint.head)}"
        for dtype, footprint in report.bytes.items()
        if dtype != "float16"
    )
    facts("the head would take", sizes)
    logits = report.logits
    full = " · ".join(f"{dtype} {render.size(n)}" for dtype, n in logits.full.items())
    facts(f"logits of {logits.batch} x {logits.sequence:,} tokens", full)
    if report.tokenizer is not None:
        facts("rows without a token", render.count(report.tokenizer.rows_without_token))
    facts.print()
    for warning in report.warnings:
        render.note(f"note: {warning}")


def _with_share(count: int, share: float | None) -> str:
    from lmhead.cli import render

    if share is None:
        return render.count(count)
    return f"{render.count(count)}  {render.percent(share)}  {render.bar(share, 20)}"
