"""The shape of a head: how long its rows are, how they lie, and which of them look untrained.

W is read in chunks of rows, memory-mapped, and never copied whole: its d x d Gram matrix says
everything about its spectrum.

- Effective rank: exp of the entropy of the shares of the squared singular values (Roy and
  Vetterli, 2007).
- Anisotropy: the mean cosine between two rows.
- Untrained-looking: rows that nothing pulled apart still point the same way. The direction is found
  from rows that are nearly equal to another one and from rows without a token, and whatever points
  there too is told (Land and Bartolo, 2024, seed it by hand). It is a suspicion: markers that were
  added after the training, such as those of a chat template, look the same.

Symbols: V rows, d the width of a row, W `[V, d]`, h a state.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmhead import markup
from lmhead.errors import BadInput
from lmhead.inspect.reach import folder_reach
from lmhead.inspect.tokens import Token, find_token
from lmhead.loading import HeadOnly, Model, load_head
from lmhead.models.registry import DEFAULT_MODEL
from lmhead.progress import Advance, Progress, silent

CHUNK = 1 << 23  # numbers of W that are held in float32 at once
NEARLY_EQUAL = 0.999  # cosine of two rows that nothing told apart
LOOKS_UNTRAINED = 0.95  # cosine to the direction of the untrained
_TABLES, _BITS = 2, 16
_APART = 0.2  # on a random axis; that of two rows at a cosine of 0.999 is 0.045 in the mean


@dataclass(frozen=True)
class RowToken:
    """A row of the head, and a number that is told of it."""

    id: int
    text: str
    value: float


@dataclass(frozen=True)
class Spectrum:
    """What the singular values of W say."""

    singular_values: tuple[float, ...]  # descending, min(V, d) of them
    effective_rank: float
    centred_effective_rank: float  # with the mean row taken out
    first_share: float  # of the sum of squares, what the first direction holds
    mean_cosine: float  # between two rows: the anisotropy


@dataclass(frozen=True)
class Geometry:
    """The shape of a head: norms, spectrum, effective rank, and the rows that stand out."""

    model: str
    rows: int
    width: int
    dtype: str
    tied: bool
    norm_quantiles: tuple[float, float, float, float, float]  # least, quarter, median, ..., most
    norms: tuple[float, ...]  # of every row
    shortest: tuple[RowToken, ...]  # by norm
    longest: tuple[RowToken, ...]
    spectrum: Spectrum
    untrained_count: int  # special tokens apart
    untrained_special: int  # special tokens that look so too: markers, seldom in the training text
    untrained: tuple[RowToken, ...]  # cosine to the direction of the untrained; closest first
    rows_without_token: int | None  # None: the tokenizer is of no kind we read
    placeholder_rows: int | None
    duplicate_rows: int  # rows that are equal, bit by bit, to one before them
    duplicates: tuple[tuple[Token, ...], ...]  # the largest groups of equal rows
    near: tuple[RowToken, ...] = ()  # cosine to the row that was asked for
    near_to: Token | None = None
    raised: tuple[RowToken, ...] = ()  # delta logits of the vector that was asked for
    lowered: tuple[RowToken, ...] = ()

    def to_dict(self, *, norms: bool = False) -> dict[str, Any]:
        """Return the JSON object, with or without the norm of every row."""
        result = asdict(self)
        if not norms:
            del result["norms"]
        return result

    def _repr_html_(self) -> str:
        rows = [
            ("rows x width", f"{self.rows:,} x {self.width:,}"),
            ("row norm, median", f"{self.norm_quantiles[2]:.4g}"),
            ("effective rank", f"{self.spectrum.effective_rank:.1f}"),
            ("effective rank, centred", f"{self.spectrum.centred_effective_rank:.1f}"),
            ("first direction", f"{100 * self.spectrum.first_share:.1f} %"),
            ("mean cosine", f"{self.spectrum.mean_cosine:.3f}"),
            ("rows that look untrained", f"{self.untrained_count:,}"),
            ("rows equal to one before", f"{self.duplicate_rows:,}"),
        ]
        return markup.table(["", ""], rows, caption=f"the head of {self.model}")


def geometry(
    model: str | Path | Model = DEFAULT_MODEL,
    *,
    near: str | int | Token | None = None,
    vector: Tensor | None = None,
    from_block: bool = False,
    top: int = 10,
    progress: Progress = silent,
) -> Geometry:
    """Describe the rows of a head; only its tensors are read, in chunks.

    - `near`: a token, by its text or id; the rows closest to it in direction are listed.
    - `vector`: `[d]`, something added to h; the tokens that it raises and lowers most are listed.
      `from_block=True` adds it before the final norm: its direct effect is that of the vector
      times the norm's own weight, up to one factor, which is left out.
    - `top`: how many rows each list has.
    """
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise BadInput(f"top is {top!r}; expected a whole number of at least 1", names=["top"])
    held = load_head(model, progress=progress)
    head, V = held.head, held.head.vocab_size
    W = head.weight.detach()[:V]
    about = None if near is None else find_token(held, near, "near")
    push = None if vector is None else _push(held, vector, from_block)
    towards = [W[about.id].float()] if about else []
    with progress("reading the rows", total=V) as advance:
        seen = _Rows(W, towards, push, advance)
    reach = folder_reach(held.folder, V) if held.folder is not None else None
    untrained = _untrained(held, W, seen, progress)
    added = held.tokenizer.added_tokens_decoder
    marks = [i for i, token in added.items() if token.special and i < V]
    special = int((untrained[marks] > LOOKS_UNTRAINED).sum()) if marks else 0
    ordinary = untrained.index_fill(0, torch.tensor(marks, dtype=torch.long), -1.0)
    quantiles = torch.quantile(seen.norms, torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0]).double())
    texts = _Texts(held)
    groups = sorted(_equal(W, seen), key=lambda ids: (-len(ids), ids))
    return Geometry(
        model=held.name,
        rows=V,
        width=W.shape[1],
        dtype=str(W.dtype).removeprefix("torch."),
        tied=head.tied,
        norm_quantiles=tuple(quantiles.tolist()),
        norms=tuple(seen.norms.tolist()),
        shortest=texts.ends(seen.norms, top, largest=False),
        longest=texts.ends(seen.norms, top),
        spectrum=seen.spectrum(),
        untrained_count=int((untrained > LOOKS_UNTRAINED).sum()) - special,
        untrained_special=special,
        untrained=tuple(t for t in texts.ends(ordinary, top) if t.value > LOOKS_UNTRAINED),
        rows_without_token=None if reach is None else reach.rows_without_token,
        placeholder_rows=None if reach is None else reach.placeholder_rows,
        duplicate_rows=sum(len(ids) - 1 for ids in groups),
        duplicates=tuple(tuple(map(texts.token, ids[:top])) for ids in groups[:top]),
        near=texts.ends(seen.cosines, top, without=about.id) if about else (),
        near_to=about,
        raised=() if push is None else texts.ends(seen.pushed, top),
        lowered=() if push is None else texts.ends(seen.pushed, top, largest=False),
    )


def spectrum_of(
    W: Tensor, progress: Progress = silent, title: str = "reading the rows"
) -> Spectrum:
    """Return what the singular values of W `[V, d]` say, read in chunks."""
    with progress(title, total=len(W)) as advance:
        return _Rows(W, [], None, advance).spectrum()


class _Rows:
    """Everything that one pass over W gives."""

    def __init__(
        self, W: Tensor, towards: list[Tensor], push: Tensor | None, advance: Advance
    ) -> None:
        V, d = W.shape
        self.V = V
        self.norms = torch.empty(V, dtype=torch.float64)
        self.gram = torch.zeros(d, d, dtype=torch.float64)
        self.total = torch.zeros(d, dtype=torch.float64)
        self.units = torch.zeros(d, dtype=torch.float64)
        self.cosines, self.pushed = torch.empty(V), torch.empty(V)
        generator = torch.Generator().manual_seed(0)
        planes = torch.randn(d, _TABLES * (_BITS + 1), generator=generator)
        self.hashes = torch.empty(V, _TABLES, dtype=torch.int64)
        self.places = torch.empty(V, _TABLES)
        self.bits = torch.empty(V, dtype=torch.int64)  # equal rows have equal bits
        powers = 2 ** torch.arange(_BITS)
        self.mixed = torch.randint(-(2**62), 2**62, (d,), generator=generator)
        for at, rows in chunks(W):
            norms = rows.norm(dim=1)
            unit = rows / norms.clamp_min(1e-30).unsqueeze(1)
            self.norms[at] = norms.double()
            self.gram += (rows.T @ rows).double()
            self.total += rows.sum(0).double()
            self.units += unit.sum(0).double()
            sides = (unit @ planes).view(-1, _TABLES, _BITS + 1)
            self.hashes[at] = ((sides[..., :_BITS] > 0).long() * powers).sum(-1)
            self.places[at] = sides[..., _BITS]
            self.bits[at] = (rows.contiguous().view(torch.int32).long() * self.mixed).sum(1)
            if towards:
                self.cosines[at] = unit @ (towards[0] / towards[0].norm().clamp_min(1e-30))
            if push is not None:
                self.pushed[at] = rows @ push
            advance(len(rows))

    def spectrum(self) -> Spectrum:
        """Return what the Gram matrix says."""
        V, mean = self.V, self.total / self.V
        squares = torch.linalg.eigvalsh(self.gram).flip(0).clamp_min(0)
        centred = torch.linalg.eigvalsh(self.gram - V * torch.outer(mean, mean)).clamp_min(0)
        pairs = V * (V - 1.0)
        lengths = float((self.norms > 0).sum())
        return Spectrum(
            singular_values=tuple(squares.sqrt()[: min(V, len(squares))].tolist()),
            effective_rank=_effective_rank(squares),
            centred_effective_rank=_effective_rank(centred),
            first_share=float(squares[0] / squares.sum().clamp_min(1e-300)),
            mean_cosine=(float(self.units.square().sum()) - lengths) / pairs if V > 1 else 1.0,
        )


class _Texts:
    def __init__(self, held: HeadOnly) -> None:
        self._held = held

    def token(self, i: int) -> Token:
        text = self._held.token_text(i) if i < self._held.reachable else "(no token)"
        return Token(i, text)

    def ends(
        self, values: Tensor, top: int, *, largest: bool = True, without: int | None = None
    ) -> tuple[RowToken, ...]:
        best = torch.topk(values, min(top + 1, len(values)), largest=largest)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        found = [RowToken(i, self.token(i).text, v) for i, v in pairs if i != without]
        return tuple(found[:top])


def chunks(W: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield W `[V, d]` a few rows at a time, as float32."""
    step = max(1, CHUNK // W.shape[1])
    for start in range(0, len(W), step):
        rows = W[start : start + step].float().cpu()
        yield slice(start, start + len(rows)), rows


def _effective_rank(squares: Tensor) -> float:
    shares = squares / squares.sum().clamp_min(1e-300)
    shares = shares[shares > 0]
    return float((-(shares * shares.log()).sum()).exp())


def _push(held: HeadOnly, vector: Tensor, from_block: bool) -> Tensor:
    """Return what the rows are multiplied by, `[d]`, for the direct effect of a vector."""
    d = held.head.hidden_size
    if vector.shape != (d,):
        raise BadInput(
            f"the vector has shape {list(vector.shape)}; the head of {held.name} takes [{d}]"
        )
    v = vector.detach().double().cpu()
    if from_block and held.head.norm is not None:
        from lmhead.inspect.frozen import passed

        norm = held.head.norm
        steps = list(norm) if isinstance(norm, torch.nn.Sequential) else [norm]
        v = passed(steps, v, v.unsqueeze(0), held.name).parts[0]
        size = vector.double().norm() / v.norm().clamp_min(1e-30)  # the norm's one number
        v = v * size
    scale = 1.0 if held.head.scale is None else held.head.scale.factor
    return (scale * v).float()


def _equal(W: Tensor, seen: _Rows) -> list[list[int]]:
    """Return the groups of rows that are equal, bit by bit."""
    order = torch.argsort(seen.bits, stable=True)
    codes = seen.bits[order]
    edges = torch.cat([torch.tensor([True]), codes[1:] != codes[:-1]])
    counts = torch.diff(torch.cat([edges.nonzero().flatten(), torch.tensor([len(codes)])]))
    starts = edges.nonzero().flatten()[counts > 1].tolist()
    sizes = counts[counts > 1].tolist()
    groups = [order[s : s + n] for s, n in zip(starts, sizes, strict=True)]
    # a sum of bits says that rows may be equal; only the rows themselves say that they are
    same = [ids[(W[ids] == W[ids[0]]).all(1).to(ids.device)] for ids in groups]
    return [ids.tolist() for ids in same if len(ids) > 1]


def _untrained(held: HeadOnly, W: Tensor, seen: _Rows, progress: Progress) -> Tensor:
    """Return every row's cosine to the direction of the untrained; -1 where there is none."""
    V = len(W)
    seeds = torch.zeros(V, dtype=torch.bool)
    seeds[held.reachable :] = True
    with progress("looking for rows that nothing told apart", total=2 * _TABLES) as advance:
        for table in range(_TABLES):
            order = torch.argsort(seen.places[:, table])
            order = order[torch.argsort(seen.hashes[order, table], stable=True)]
            for apart in (1, 2):
                one, other = order[:-apart], order[apart:]
                # nearly equal rows share their hash, and lie together on every axis
                near = (seen.hashes[one, table] == seen.hashes[other, table]) & (
                    (seen.places[one] - seen.places[other]).abs() < _APART
                ).all(1)
                _mark(W, one[near], other[near], seeds)
                advance(1)
    seeds &= seen.norms > 0
    ids = seeds.nonzero().flatten()
    if len(ids) < 3:
        return torch.full((V,), -1.0)
    rows = W[ids].float().cpu()
    rows /= rows.norm(dim=1, keepdim=True)
    direction = rows.mean(0)
    for _ in range(3):  # pairs that are alike for another reason stay out of it
        close = rows @ (direction / direction.norm().clamp_min(1e-30))
        direction = rows[close >= close.median()].mean(0)
    direction /= direction.norm().clamp_min(1e-30)
    cosines = torch.empty(V)
    for at, some in chunks(W):
        cosines[at] = (some @ direction) / seen.norms[at].float().clamp_min(1e-30)
    return cosines


def _mark(W: Tensor, one: Tensor, other: Tensor, seeds: Tensor) -> None:
    """Mark the rows of pairs that are nearly equal."""
    step = max(1, CHUNK // W.shape[1])
    for start in range(0, len(one), step):
        a, b = one[start : start + step], other[start : start + step]
        cosine = torch.nn.functional.cosine_similarity(W[a].float(), W[b].float())
        alike = (cosine > NEARLY_EQUAL).cpu()
        seeds[a[alike]] = True
        seeds[b[alike]] = True
