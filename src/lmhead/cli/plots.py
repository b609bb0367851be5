"""Pictures of results; asked for before anything is computed, and written whole."""

import io
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmhead.errors import BadInput, MissingExtra, how_to_install

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lmhead.inspect.attribution import Why
    from lmhead.inspect.geometry import Geometry
    from lmhead.inspect.lens import Lens
    from lmhead.loading import Model as Loaded
    from lmhead.steer import Audit, SteeringVector
    from lmhead.steer.judge.frontier import Frontier

_RED, _BLUE, _GREY = "#c8442f", "#2b6cb0", "#8a8f98"
_NAMED = 5
_BARS = 10
_POSITIONS = 24  # of a lens, the last ones
_PARTS = 70  # of a logit, the largest ones


def check_plot(path: Path, force: bool) -> None:
    """Refuse a picture that cannot be drawn, before anything is computed for it."""
    if path.suffix != ".png":
        raise BadInput(f"the picture's file is {path.name}; expected a name that ends in .png")
    if find_spec("matplotlib") is None:
        raise MissingExtra(f"--plot needs matplotlib; install it with: {how_to_install('plot')}")
    from lmhead.files.whole import refuse_existing

    refuse_existing(path, force=force, folder=False)


def save_picture(figure: "Figure", path: Path) -> None:
    """Write a figure as a `.png` file."""
    from lmhead.files.whole import written_whole

    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150)
    with written_whole(path, force=True) as staging:
        staging.write_bytes(content.getvalue())


def draw_check(
    path: Path,
    loaded: "Loaded",
    name: str,
    vectors: Sequence["SteeringVector"],
    budget: float | None,
    found: "Audit",
) -> None:
    """Draw delta where the vector did most harm, as it is and as a budget leaves it."""
    import matplotlib

    matplotlib.use("Agg")
    import torch
    from matplotlib import pyplot

    from lmhead.steer.bound.steering import OFFERED_BUDGET

    worst = found.worst
    limit = OFFERED_BUDGET if budget is None else budget
    delta = worst.delta - worst.delta.mean()
    spread = float(delta.max() - delta.min())
    m = min(1.0, limit / spread) if spread else 1.0
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(12, 4.8), width_ratios=(1.7, 1), layout="constrained"
    )
    where = ", ".join(str(v.layer) for v in vectors)
    figure.suptitle(
        f"{name} on {loaded.name}, layer {where}, alpha {vectors[0].alpha:g}", x=0.01, ha="left"
    )
    ids = torch.arange(len(delta))
    left.scatter(ids, delta, s=2, c=_RED, alpha=0.35, linewidths=0, rasterized=True)
    if m < 1:
        left.scatter(ids, m * delta, s=2, c=_BLUE, alpha=0.5, linewidths=0, rasterized=True)
    left.axhspan(float(m * delta.min()), float(m * delta.max()), color=_BLUE, alpha=0.07)
    _name_tokens(left, loaded, delta)
    left.set(xlabel="token id", ylabel="delta logit, less its mean", xlim=(0, len(delta)))
    left.margins(y=0.12)
    left.set_ylim(top=float(delta.max()) + 0.3 * spread)  # room for the legend
    left.set_title("delta over the vocabulary, where it does most", loc="left", fontsize=10)
    _legend(
        left,
        [(f"as it is: range {spread:.3g}", _RED)]
        + ([(f"with --budget {limit:g}", _BLUE)] if m < 1 else []),
    )
    _bars(right, loaded, worst.z, worst.delta, m, limit)
    context = worst.context if len(worst.context) < 30 else "..." + worst.context[-27:]
    right.set_title(f"next token after “{_plain(context)}”", loc="left", fontsize=10)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    try:
        save_picture(figure, path)
    finally:
        pyplot.close(figure)


def _name_tokens(axes: Any, loaded: "Loaded", delta: Any) -> None:
    import torch

    V = len(delta)
    step = float(delta.max() - delta.min()) * 0.05
    taken: list[tuple[int, float]] = []
    for largest in (True, False):
        best = torch.topk(delta, min(_NAMED, V), largest=largest)
        for i, y in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            place = y
            while any(abs(i - x) < 0.15 * V and abs(place - other) < step for x, other in taken):
                place += step if largest else -step  # so that no name hides another
            taken.append((i, place))
            on_left = i > 0.8 * V
            axes.annotate(
                _plain(loaded.token_text(i)),
                (i, y),
                (i - 0.012 * V if on_left else i + 0.012 * V, place),
                fontsize=8,
                ha="right" if on_left else "left",
                va="center",
                arrowprops={"arrowstyle": "-", "color": _GREY, "lw": 0.5},
            )


def _bars(axes: Any, loaded: "Loaded", z: Any, delta: Any, m: float, limit: float) -> None:
    import torch

    rows = [
        ("unsteered", torch.softmax(z, -1), _GREY),
        ("steered", torch.softmax(z + delta, -1), _RED),
    ]
    if m < 1:
        rows.append((f"with --budget {limit:g}", torch.softmax(z + m * delta, -1), _BLUE))
    k = min(_BARS // 2, len(z))
    chosen = list(
        dict.fromkeys(
            [*torch.topk(z, k).indices.tolist(), *torch.topk(z + delta, k).indices.tolist()]
        )
    )
    height = 0.8 / len(rows)
    for j, (name, p, colour) in enumerate(rows):
        at = [i + (j - (len(rows) - 1) / 2) * height for i in range(len(chosen))]
        axes.barh(at, p[chosen].tolist(), height, color=colour, label=name)
    axes.set_yticks(range(len(chosen)), [_plain(loaded.token_text(i)) for i in chosen], fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="probability")
    axes.legend(frameon=False, fontsize=8, loc="lower right")


def _legend(axes: Any, entries: Sequence[tuple[str, str]]) -> None:
    for name, colour in entries:
        axes.scatter([], [], s=20, c=colour, label=name)
    axes.legend(frameon=False, fontsize=8, loc="upper right")


def _plain(text: str) -> str:
    """Return a text with what a plot's font or its formulas cannot show made visible."""
    shown = repr(text)[1:-1].replace("$", r"\$")
    return "".join(c if ord(c) < 0x250 else f"U+{ord(c):04X}" for c in shown)


def draw_frontier(result: "Frontier", path: Path) -> None:
    """Draw effect against harm into a `.png` file."""
    check_plot(path, force=True)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for point in result.means():
        at = (max(point.max_kl, 1e-4), point.effect)
        axes.scatter(*at)
        axes.annotate(point.name, at, textcoords="offset points", xytext=(5, 4), fontsize=8)
    axes.set_xscale("log")
    axes.set_xlabel("harm: largest KL on neutral text (nat)")
    axes.set_ylabel(f"effect: {result.measure}")
    axes.set_title(f"what safety costs, layer {result.layer}")
    axes.grid(alpha=0.3)
    save_picture(figure, path)


def draw_lens(result: "Lens", path: Path) -> None:
    """Draw blocks against positions: the best token of every cell, coloured by its probability."""
    from matplotlib.figure import Figure

    rows, T = result.rows, len(result.ids)
    shown = min(T, _POSITIONS)
    texts = T - shown
    figure = Figure(figsize=(1.6 + 0.85 * shown, 1.2 + 0.24 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    shares = [
        [
            c.top[0].probability if result.token is None else c.token_probability or 0.0
            for c in r.cells
        ]
        for r in rows
    ]
    image = axes.imshow(
        [row[texts:] for row in shares], aspect="auto", origin="lower", cmap="Blues", vmin=0, vmax=1
    )
    for y, row in enumerate(rows):
        for x, cell in enumerate(row.cells[texts:]):
            dark = shares[y][texts + x] > 0.55
            axes.text(
                x, y, _plain(cell.top[0].text.strip(" ") or "·")[:9], fontsize=6,
                ha="center", va="center", color="white" if dark else "#222222",
            )  # fmt: skip
    axes.set_xticks(range(shown), [_plain(t)[:10] for t in result.tokens[texts:]], fontsize=7)
    axes.tick_params(axis="x", rotation=45)
    every = max(1, len(rows) // 16)
    marks = range(0, len(rows), every)
    axes.set_yticks(marks, [rows[i].name for i in marks], fontsize=7)
    of = "of the best token" if result.token is None else f"of “{_plain(result.token.text)}”"
    figure.colorbar(image, ax=axes, label=f"probability {of}", shrink=0.6)
    axes.set_title(f"{result.model}: what each block would say next", loc="left", fontsize=10)
    save_picture(figure, path)


def draw_why(result: "Why", path: Path) -> None:
    """Draw what each part added, from the embedding up, as bars that end in the logit."""
    from matplotlib.figure import Figure

    reasons = [r for r in result.reasons if r.kind != "rounding"]
    if len(reasons) > _PARTS:
        most = sorted(reasons, key=lambda r: -abs(r.value))[:_PARTS]
        left = sum(r.value for r in reasons if r not in most)
        reasons = [r for r in reasons if r in most]
    else:
        left = 0.0
    names = [r.name for r in reasons] + (["all others"] if left else [])
    values = [r.value for r in reasons] + ([left] if left else [])
    figure = Figure(figsize=(8, 1.4 + 0.19 * (len(values) + 1)), layout="constrained")
    axes = figure.add_subplot()
    colours = [_BLUE if v > 0 else _RED for v in values]
    axes.barh(range(len(values)), values, color=colours, height=0.75)
    axes.barh([len(values)], [result.logit], color=_GREY, height=0.75)
    end = "sum: the logit" if result.against is None else "sum: the difference"
    axes.set_yticks(range(len(values) + 1), [*names, end], fontsize=7)
    axes.set_ylim(len(values) + 0.8, -0.8)
    axes.axvline(0, color="#444444", lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    what = f"the logit of “{_plain(result.token.text)}”"
    if result.against is not None:
        what += f" less that of “{_plain(result.against.text)}”"
    axes.set(xlabel=what)
    axes.set_title(f"{result.model}: why “{_plain(result.token.text)}”", loc="left", fontsize=10)
    save_picture(figure, path)


def draw_geometry(result: "Geometry", path: Path) -> None:
    """Draw the lengths of the rows, and the shares of the squared singular values."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.hist(result.norms, bins=120, color=_BLUE)
    left.axvline(result.norm_quantiles[2], color=_RED, lw=1, label="median")
    left.set(xlabel="row norm", ylabel="rows")
    left.legend(frameon=False, fontsize=8)
    left.set_title(f"{result.rows:,} rows of {result.model}", loc="left", fontsize=10)
    squares = [s * s for s in result.spectrum.singular_values]
    total = sum(squares) or 1.0
    right.plot(range(1, len(squares) + 1), [s / total for s in squares], color=_BLUE, lw=1.2)
    right.axvline(
        result.spectrum.effective_rank, color=_RED, lw=1,
        label=f"effective rank {result.spectrum.effective_rank:.1f}",
    )  # fmt: skip
    right.axvline(
        result.spectrum.centred_effective_rank, color=_GREY, lw=1, ls="--",
        label=f"centred {result.spectrum.centred_effective_rank:.1f}",
    )  # fmt: skip
    right.set(xscale="log", yscale="log", xlabel="direction", ylabel="share of the squares")
    right.legend(frameon=False, fontsize=8)
    right.set_title("spectrum", loc="left", fontsize=10)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    save_picture(figure, path)
