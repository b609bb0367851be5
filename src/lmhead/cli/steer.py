"""`lmhead steer`: look at what a vector can do, and change the file it is in."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmhead.cli.options import Device, Dtype, Json, Model, read_prompts
from lmhead.cli.steering import Alpha, Budget, Force, noted
from lmhead.errors import BadInput
from lmhead.models.registry import DEFAULT_MODEL

if TYPE_CHECKING:
    from lmhead.loading import Model as Loaded
    from lmhead.steer import Audit, Certificate, SteeringVector

app = typer.Typer(
    name="steer",
    help="Train, check and convert steering vectors whose effect is bounded and measured.",
    no_args_is_help=True,
)


@app.command("check")
def check(
    vector: Annotated[
        Path, typer.Argument(metavar="VECTOR", help="A .safetensors vector, or a .gguf one.")
    ],
    model: Model = DEFAULT_MODEL,
    alpha: Alpha = None,
    budget: Budget = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts", help="Texts to measure on, one per line; by default 24 plain sentences."
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="Draw delta over the vocabulary into a .png (extra `plot`)."),
    ] = None,
    force: Force = False,
    device: Device = None,
    dtype: Dtype = None,
    json: Json = False,
) -> None:
    """Certify a vector, measure it on real prompts, and check it against its budget.

    The certificate holds for every possible text, but exists only for vectors at the head. The
    audit holds for the prompts that it was measured on. The exit code is 1 if the budget, given
    here or on the vector's card, is exceeded.
    """
    from lmhead.cli import render
    from lmhead.loading import load
    from lmhead.steer import HEAD, audit, certify, load_vectors
    from lmhead.steer.bound.certificate import check_budget
    from lmhead.steer.bound.steering import additions, torch_body, warn_of_other_heads, with_alpha

    vectors = with_alpha(load_vectors(vector), alpha)
    if budget is not None:
        check_budget(budget)
    if plot is not None:
        from lmhead.cli.plots import check_plot

        check_plot(plot, force)
    texts = None if prompts is None else read_prompts(prompts)
    loaded = load(model, device=device, dtype=dtype, progress=render.progress)
    added = additions(torch_body(loaded), vectors)
    with noted():
        warn_of_other_heads(loaded, vectors)
    if budget is None and len(vectors) == 1:
        budget = vectors[0].card.budget
    certificate = None
    if set(added) == {HEAD}:
        certificate = certify(loaded, vectors[0], budget=budget)
    found = audit(loaded, vectors, texts, progress=render.progress)
    verdict = _verdict(loaded, vectors, budget, certificate, found)
    if plot is not None:
        from lmhead.cli.plots import draw_check

        draw_check(plot, loaded, vector.name, vectors, budget, found)
    if json:
        render.print_json(
            {
                "vector": str(vector),
                "model": model,
                "job": vectors[0].card.job,
                "layers": [v.layer for v in vectors],
                "alpha": vectors[0].alpha,
                "budget": budget,
                "certificate": certificate and certificate.to_dict(),
                "audit": found.to_dict(),
                "within_budget": verdict.within,
                "verdict": verdict.text,
            }
        )
    else:
        _show(vector, loaded, vectors, certificate, found, verdict)
        if plot is not None:
            render.note(f"wrote {plot}")
    if verdict.within is False:
        raise typer.Exit(1)


@app.command("convert")
def convert(
    sources: Annotated[
        list[Path], typer.Argument(metavar="VECTOR...", help=".safetensors or .gguf files.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="A .gguf or a .safetensors file.")],
    layer: Annotated[
        int | None,
        typer.Option(help="Convert only the vector of this block, if a .gguf file has several."),
    ] = None,
    hint: Annotated[
        str | None, typer.Option(help="For .gguf: the model's architecture, such as llama.")
    ] = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Convert vectors to a GGUF control vector (repeng, llama.cpp), or one back to .safetensors.

    A GGUF control vector holds alpha times the direction; use it with strength 1.
    """
    from lmhead.cli import render
    from lmhead.files.whole import refuse_existing
    from lmhead.steer import load_vectors, save_control_vector

    refuse_existing(out, force=force, folder=False)
    vectors = [v for path in sources for v in load_vectors(path)]
    if layer is not None:
        there = ", ".join(str(v.layer) for v in vectors)
        vectors = [v for v in vectors if v.layer == layer]
        if not vectors:
            raise BadInput(f"there is no vector for layer {layer}; expected one of {there}")
    if out.suffix == ".gguf":
        with noted():
            save_control_vector(vectors, out, hint)
    elif len(vectors) > 1:
        there = ", ".join(str(v.layer) for v in vectors)
        raise BadInput(
            f"{out.name} can hold one vector, but there are vectors for layers {there}; choose one "
            "with --layer N"
        )
    else:
        vectors[0].save(out)
    if json:
        render.print_json(
            {"out": str(out), "vectors": [{"layer": v.layer, "size": v.size} for v in vectors]}
        )
        return
    layers = ", ".join(str(v.layer) for v in vectors)
    render.out().print(f"{out}: width {vectors[0].size}, layer {layers}")


@dataclass(frozen=True)
class _Verdict:
    within: bool | None  # None: there is no budget
    text: str


def _verdict(
    loaded: "Loaded",
    vectors: Sequence["SteeringVector"],
    budget: float | None,
    certificate: "Certificate | None",
    found: "Audit",
) -> _Verdict:
    from lmhead.steer import alpha_for
    from lmhead.steer.bound.steering import OFFERED_BUDGET, OFFERED_KL_CAP

    r = found.max_range if certificate is None else certificate.range
    if budget is None:
        if certificate is None:
            return _Verdict(None, f"no budget; --kl-cap {OFFERED_KL_CAP:g} guards a generation")
        most = alpha_for(loaded, vectors[0], OFFERED_BUDGET)
        return _Verdict(
            None, f"no budget; --budget {OFFERED_BUDGET:g} would allow alpha up to {most:.4g}"
        )
    if certificate is None:
        how = f"measured on {_texts(found)}"
        if r <= budget:
            return _Verdict(True, f"within budget: range {r:.4g} <= {budget:g}, {how}")
        return _Verdict(
            False,
            f"over budget: range {r:.4g} > {budget:g}, {how}; `generate --budget {budget:g} --fit` "
            "lowers alpha, and holds it back at every token",
        )
    if certificate.within:
        return _Verdict(True, f"within budget: range {r:.4g} <= {budget:g}, whatever the text")
    return _Verdict(
        False,
        f"over budget: range {r:.4g} > {budget:g}; alpha at most {certificate.max_alpha:.4g}",
    )


def _texts(found: "Audit") -> str:
    return "1 prompt" if found.prompts == 1 else f"{found.prompts} prompts"


def _show(
    path: Path,
    loaded: "Loaded",
    vectors: Sequence["SteeringVector"],
    certificate: "Certificate | None",
    found: "Audit",
    verdict: _Verdict,
) -> None:
    from lmhead.cli import render

    first = vectors[0]
    where = ", ".join(str(v.layer) for v in vectors)
    layers = f"layer {where}" if len(vectors) == 1 else f"layers {where}"
    strength = f"alpha {first.alpha:g}" if len({v.alpha for v in vectors}) == 1 else "own alphas"
    console = render.out()
    console.print(
        f"[bold]{path.name}[/bold] on {loaded.name}: {layers}, {strength}, made to {first.card.job}"
    )
    console.print()
    if certificate is not None:
        _show_certificate(loaded, certificate)
        console.print()
    _show_audit(found)
    console.print()
    colour = {True: "green", False: "red", None: "yellow"}[verdict.within]
    console.print(f"[bold {colour}]{verdict.text}[/bold {colour}]")


def _show_certificate(loaded: "Loaded", certificate: "Certificate") -> None:
    from rich.text import Text

    from lmhead.cli import render

    facts = render.Facts("Certificate: at most, for every possible text")
    facts("log-odds of any two tokens", f"{certificate.range:.4g} logits (the range of delta)")
    facts("KL(p || p')", f"{certificate.kl_bound:.4g} nat")
    facts("total variation", f"{certificate.tv_bound:.4g}")
    if certificate.max_alpha is not None:
        facts(f"alpha for the budget {certificate.budget:g}", f"{certificate.max_alpha:.4g}")
    facts.print()
    render.out().print()
    mean = float(certificate.shift.mean())
    table = render.table("raised most", "delta", "lowered most", "delta", title=None)
    table.columns[2].justify = "left"
    for up, down in list(zip(certificate.raised, certificate.lowered, strict=True))[:6]:
        names: list[Text] = [render.token(loaded.token_text(m.id)) for m in (up, down)]
        table.add_row(names[0], f"{up.delta:+.3f}", names[1], f"{down.delta:+.3f}")
    render.out().print(table)
    render.note(f"mean delta of all tokens: {mean:+.3f}; a shift common to all has no effect")


def _show_audit(found: "Audit") -> None:
    from rich.text import Text

    from lmhead.cli import render

    facts = render.Facts(f"Audit: measured on {_texts(found)}, {found.positions:,} positions")
    facts(
        "|delta logit|", f"max {found.max_raw_delta:.4g}, 99th percentile {found.p99_raw_delta:.4g}"
    )
    facts("... less its mean", f"max {found.max_delta:.4g}, 99th percentile {found.p99_delta:.4g}")
    facts("range of delta", f"{found.max_range:.4g}")
    facts(
        "KL(p || p') in nat",
        f"max {found.max_kl:.4g}, mean {found.mean_kl:.4g}, median {found.median_kl:.4g}",
    )
    facts("best token changed", render.percent(found.flips))
    for name, (before, after), form in (
        ("perplexity of the text", found.perplexity, ".4g"),
        ("distinct-2 of greedy text", found.distinct_2, ".3f"),
        ("4-grams repeated in it", found.repetition, ".3f"),
    ):
        facts(name, f"{before:{form}} -> {after:{form}}")
    facts(
        "direct path alpha W v",
        f"range {found.direct_range:.4g}, correlation with the mean delta "
        f"{found.direct_correlation:.2f}",
    )
    facts.print()
    if found.direct_disagrees:
        render.note(
            "warning: the direct path does not tell what the vector does; the layers above and "
            "the final norm change it"
        )
    for prompt, plain, steered in found.continuations[:2]:
        render.out().print()
        for name, said in (("unsteered", plain), ("steered  ", steered)):
            line = Text.assemble((f"  {name}  ", "dim"), prompt, (repr(said)[1:-1], "bold"))
            line.truncate(110, overflow="ellipsis")
            render.out().print(line)
