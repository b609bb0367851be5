"""Two heads side by side: a model and its fine-tune, its trim, or its quantisation.

Rows are compared token by token; a trim renumbers its tokens, and its `lmhead_trim.json` says how.
With a text, both models read it, and what they would say next is compared at every position.

Symbols: V rows, d the width of a row, A and B the weights `[V, d]`, z logits.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmhead import markup
from lmhead.errors import BadCheckpoint, BadInput
from lmhead.files.jsons import read_json
from lmhead.inspect.geometry import CHUNK, Spectrum, spectrum_of
from lmhead.inspect.tokens import Token
from lmhead.loading import HeadOnly, Model, load, load_head
from lmhead.progress import Progress, silent

_REPORT = "lmhead_trim.json"
_LOGITS_AT_ONCE = 1 << 23


@dataclass(frozen=True)
class MovedRow:
    """A token whose row is not the same in both heads."""

    id: int  # in A
    text: str
    distance: float  # |b - a| / |a|
    cosine: float


@dataclass(frozen=True)
class Disagreement:
    """A position at which the two would say something else."""

    position: int
    before: str  # the token it stands behind
    a: Token
    b: Token
    kl: float


@dataclass(frozen=True)
class OnText:
    """What the two made of a text."""

    positions: int
    disagreements: int  # positions at which the most probable tokens differ
    mean_kl: float  # KL(A || B) over the tokens that both have, in nats
    max_kl: float
    worst: tuple[Disagreement, ...]  # the largest KL first


@dataclass(frozen=True)
class Comparison:
    """Two heads side by side: rows that changed, both spectra, where their choices differ."""

    a: str
    b: str
    rows_a: int
    rows_b: int
    common: int  # tokens that have a row in both
    equal: int  # of these, how many rows are the same, bit by bit
    mean_distance: float
    mean_cosine: float
    moved: tuple[MovedRow, ...]  # the largest distance first
    spectrum_a: Spectrum
    spectrum_b: Spectrum
    on_text: OnText | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        return asdict(self)

    def _repr_html_(self) -> str:
        rows: list[list[str | markup.Cell]] = [
            [
                row.text,
                markup.Cell(f"{row.distance:.4g}", -min(1.0, row.distance)),
                f"{row.cosine:.4f}",
            ]
            for row in self.moved
        ]
        caption = f"{self.a} and {self.b}: {self.equal:,} of {self.common:,} rows are equal"
        return markup.table(["moved most", "distance", "cosine"], rows, caption=caption)


def compare(
    a: str | Path | Model,
    b: str | Path | Model,
    *,
    text: str | None = None,
    top: int = 10,
    progress: Progress = silent,
) -> Comparison:
    """Compare the heads of two models: rows that changed most, spectra, and what they say on a
    text.

    - `text`: both models read it, and their next tokens are compared at every position; without it
      only the heads are read.
    - `top`: how many rows and positions to report.

    One may be a trim of the other: its ids are mapped to the original's through `lmhead_trim.json`.
    """
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise BadInput(f"top is {top!r}; expected a whole number of at least 1", names=["top"])
    if text is not None and not text:
        raise BadInput("the text is empty; expected some text", names=["text"])
    held = [load_head(model, progress=progress) for model in (a, b)]
    widths = [h.head.hidden_size for h in held]
    if widths[0] != widths[1]:
        raise BadInput(
            f"the rows of {held[0].name} are {widths[0]} wide and those of {held[1].name} "
            f"{widths[1]}; expected two heads of one model"
        )
    in_a, in_b, canonical = _common(*held)
    weights = [h.head.weight.detach()[: h.head.vocab_size] for h in held]
    with progress("comparing the rows", total=len(in_a)) as advance:
        distance, cosine, equal = _moves(weights, in_a, in_b, advance)
    order = torch.topk(distance, min(top, len(distance))).indices.tolist()
    moved = tuple(
        MovedRow(
            int(in_a[i]), held[0].token_text(int(in_a[i])), float(distance[i]), float(cosine[i])
        )
        for i in order
        if distance[i] > 0
    )
    one, other = (
        spectrum_of(W, progress, f"reading {h.name}") for W, h in zip(weights, held, strict=True)
    )
    return Comparison(
        a=held[0].name,
        b=held[1].name,
        rows_a=len(weights[0]),
        rows_b=len(weights[1]),
        common=len(in_a),
        equal=equal,
        mean_distance=float(distance.mean()),
        mean_cosine=float(cosine.mean()),
        moved=moved,
        spectrum_a=one,
        spectrum_b=other,
        on_text=None
        if text is None
        else _on_text(a, b, text, in_a, in_b, canonical, top, progress),
    )


def _common(a: HeadOnly, b: HeadOnly) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Return the rows `[n]` in A and in B of the tokens that both have, and both id maps."""
    maps = tuple(_canonical(h) for h in (a, b))
    places = [{int(c): row for row, c in enumerate(m.tolist())} for m in maps]
    shared = [c for c in places[0] if c in places[1]]
    if not shared:
        raise BadInput(f"{a.name} and {b.name} have no token in common; expected one model's heads")
    rows = [torch.tensor([place[c] for c in shared]) for place in places]
    return rows[0], rows[1], (maps[0], maps[1])


def _canonical(held: HeadOnly) -> Tensor:
    """Return the canonical id of every row that has a token."""
    report = None if held.folder is None else held.folder / _REPORT
    if report is None or not report.is_file():
        return torch.arange(held.reachable)
    try:
        kept = [int(i) for i in read_json(report)["id_map"]["kept"]]
    except (KeyError, TypeError, ValueError) as error:
        raise BadCheckpoint(
            f"{report} holds no id map ({error!r}); trim the model again"
        ) from error
    return torch.tensor(kept[: held.head.vocab_size])


def _moves(
    weights: list[Tensor], in_a: Tensor, in_b: Tensor, advance: Any
) -> tuple[Tensor, Tensor, int]:
    """Return how far each row moved, `[n]`, the cosines `[n]`, and how many rows are equal."""
    distances, cosines, equal = [], [], 0
    step = max(1, CHUNK // weights[0].shape[1])
    for start in range(0, len(in_a), step):
        at = slice(start, start + step)
        x, y = (W[i[at]].float().cpu() for W, i in zip(weights, (in_a, in_b), strict=True))
        equal += int((x == y).all(1).sum())
        distances.append((y - x).norm(dim=1) / x.norm(dim=1).clamp_min(1e-30))
        cosines.append(torch.nn.functional.cosine_similarity(x, y))
        advance(len(x))
    return torch.cat(distances), torch.cat(cosines), equal


@torch.inference_mode()
def _on_text(
    a: str | Path | Model,
    b: str | Path | Model,
    text: str,
    in_a: Tensor,
    in_b: Tensor,
    canonical: tuple[Tensor, Tensor],
    top: int,
    progress: Progress,
) -> OnText:
    models = [load(model, progress=progress) for model in (a, b)]
    ids = [model.encode(text) for model in models]
    read = [
        [int(c[i]) if i < len(c) else -1 for i in own]
        for c, own in zip(canonical, ids, strict=True)
    ]
    if read[0] != read[1]:
        raise BadInput(
            f"{models[0].name} reads the text as {len(ids[0])} tokens and {models[1].name} as "
            f"{len(ids[1])} different ones; expected a text that both read as the same tokens (a "
            "trimmed model does so only with tokens that it kept)",
            names=["text"],
        )
    states = []
    for model, own in zip(models, ids, strict=True):
        with progress(f"running {model.name}", total=None):
            states.append(model.body(torch.tensor([own]), use_cache=False)[0][0])  # [T, d]
    T = len(ids[0])
    found: list[tuple[int, int, float]] = []
    step = max(1, _LOGITS_AT_ONCE // max(len(in_a), 1))
    for start in range(0, T, step):
        lp, best = [], []
        for model, h, rows, names in zip(models, states, (in_a, in_b), canonical, strict=True):
            z = model.head(h[start : start + step])[..., : model.reachable].float().cpu()
            best.append(names[z.argmax(-1)])  # of all that it can say
            lp.append(z[:, rows].log_softmax(-1))
        kl = (lp[0].exp() * (lp[0] - lp[1])).sum(-1).clamp_min(0)
        found += zip(*(values.tolist() for values in (*best, kl)), strict=True)
    kls = torch.tensor([kl for _, _, kl in found])
    places = [dict(zip(c.tolist(), range(len(c)), strict=True)) for c in canonical]
    differ = [i for i, (x, y, _) in enumerate(found) if x != y]
    differ.sort(key=lambda i: -found[i][2])
    worst = tuple(
        Disagreement(
            position=i,
            before=models[0].token_text(ids[0][i]),
            a=Token.of(models[0], places[0][found[i][0]]),
            b=Token.of(models[1], places[1][found[i][1]]),
            kl=found[i][2],
        )
        for i in differ[:top]
    )
    return OnText(T, len(differ), float(kls.mean()), float(kls.max()), worst)
