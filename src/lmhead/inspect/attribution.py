"""Why the model said that: what each part of it added to the logit of a token.

A logit is linear in the state before the final norm, once the norm's one number is held (see
`frozen`), and that state is a sum (see `lmhead.body.parts`). So the logit is a sum as well: the
embedding, every attention and MLP, the biases of norm and head, and last what the softcap took
off. What the model's own arithmetic rounded is a part too, and stays a small one.

This is the direct effect alone: what a part does to later blocks counts as theirs.

Symbols: d the width of a state, V tokens, n parts.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import tanh
from typing import Any

import torch
from torch import Tensor

from lmhead import markup
from lmhead.body.parts import Parts, parts_of
from lmhead.body.units import ATTENTION, MLP, Unit
from lmhead.errors import BadInput
from lmhead.generation.prompts import Prompt, Source, encoded, listed
from lmhead.inspect.frozen import passed
from lmhead.inspect.tokens import Token, find_token
from lmhead.inspect.within import neurons_of, split_heads
from lmhead.loading import Model, load
from lmhead.models.registry import DEFAULT_MODEL
from lmhead.progress import Progress, silent

_OUTSIDE = {"position": "position embedding", "bias": "biases of the stream"}
_BIAS = 1e-5  # of the part: what is left of an attention without its heads, and no rounding


@dataclass(frozen=True)
class Reason:
    """What one part of the model added to a logit, or to the difference of two."""

    name: str  # "embedding", "block 3 attention", "block 3 head 2", "final norm", "softcap", ...
    kind: str  # embedding, position, attention, mlp, norm, bias, softcap, rounding, or its own
    block: int | None
    head: int | None  # of an attention, where heads are told apart
    value: float  # what it added to the logit of the token, less what it added to the other one
    to_token: float
    to_against: float | None


@dataclass(frozen=True)
class Neuron:
    """What one neuron of an MLP added."""

    block: int
    neuron: int
    activation: float
    value: float


@dataclass(frozen=True)
class Why:
    """The parts of a logit, or of the difference of two; they add up to `logit`."""

    model: str
    prompt: str
    ids: tuple[int, ...]
    position: int  # the token behind this one is explained
    token: Token
    against: Token | None
    logit: float  # the model's own, softcap included; less that of `against`
    token_logit: float
    against_logit: float | None
    reasons: tuple[Reason, ...]  # from the embedding up
    neurons: tuple[Neuron, ...] = ()  # of the MLP that was asked for, the highest value first

    @property
    def total(self) -> float:
        """The sum of all parts: the logit, up to the last bits of float64."""
        return sum(reason.value for reason in self.reasons)

    @property
    def rounding(self) -> float:
        """What the model's own arithmetic rounded: the part that explains nothing."""
        return sum(reason.value for reason in self.reasons if reason.kind == "rounding")

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        return asdict(self)

    def _repr_html_(self) -> str:
        largest = max((abs(r.value) for r in self.reasons), default=0.0) or 1.0
        what = repr(self.token.text) + (f" against {self.against.text!r}" if self.against else "")
        rows: list[list[str | markup.Cell]] = [
            [r.name, markup.Cell(f"{r.value:+.4f}", r.value / largest)] for r in self.reasons
        ]
        rows.append(["sum", f"{self.logit:+.4f}"])
        return markup.table(["part", "logit"], rows, caption=f"{self.model}: why {what}")


def why(
    prompt: Prompt,
    model: Source = DEFAULT_MODEL,
    *,
    token: str | int | Token | None = None,
    against: str | int | Token | None = None,
    position: int = -1,
    heads: bool = False,
    neurons: int | None = None,
    top: int = 10,
    chat: bool = False,
    tokenizer: Any = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    progress: Progress = silent,
) -> Why:
    """Explain a token's logit: what each part of the model added to it. The parts add up to it.

    - `token`: by its text or id; the model's own choice by default.
    - `against`: a second token; the difference of the two logits is then explained.
    - `position`: the position in the prompt whose next token is explained; the last by default.
    - `heads`: split each attention into its heads.
    - `neurons`: the block whose MLP is split into neurons: the `top` highest and lowest.
    - `tokenizer`, `device`, `dtype`: as in `load`.

    A model whose blocks cannot be told apart is refused, with the reason.
    """
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise BadInput(f"top is {top!r}; expected a whole number of at least 1", names=["top"])
    given = listed(prompt)
    if len(given) != 1:
        raise BadInput(f"why got {len(given)} prompts; expected one")
    loaded = load(model, tokenizer=tokenizer, device=device, dtype=dtype, progress=progress)
    text, ids = encoded(loaded, given[0], chat=chat)
    place = position + len(ids) if position < 0 else position
    if not 0 <= place < len(ids):
        raise BadInput(
            f"position is {position}; the prompt has {len(ids)} tokens, from 0 to {len(ids) - 1}",
            names=["position"],
        )
    wanted = None if token is None else find_token(loaded, token)
    other = None if against is None else find_token(loaded, against, "against")
    if other is not None and wanted is not None and other.id == wanted.id:
        raise _same(other)
    with progress("taking the state apart", total=None):
        tokens = [wanted] if other is None else [wanted, other]
        return explained(
            loaded, ids, place, tokens, text=text, heads=heads, neurons=neurons, top=top
        )


def explained(
    model: Model,
    ids: list[int],
    position: int,
    tokens: Sequence[Token | None],
    *,
    text: str = "",
    heads: bool = False,
    neurons: int | None = None,
    top: int = 10,
) -> Why:
    """Do what `why` does, for ids and one or two tokens; None is the model's own choice."""
    apart = parts_of(model.body, model.head, ids, position)
    chosen = int(apart.logits[: model.reachable].float().argmax()) if None in tokens else -1
    found = [Token.of(model, chosen) if token is None else token for token in tokens]
    if len(found) > 1 and found[0].id == found[1].id:
        raise _same(found[1])
    reasons = _reasons(model, apart, found, heads)
    z = [float(apart.logits[token.id].double()) for token in found]
    two = len(found) > 1
    return Why(
        model=model.name,
        prompt=text,
        ids=tuple(ids),
        position=position,
        token=found[0],
        against=found[1] if two else None,
        logit=z[0] - z[1] if two else z[0],
        token_logit=z[0],
        against_logit=z[1] if two else None,
        reasons=tuple(reasons),
        neurons=() if neurons is None else _neurons(model, apart, found, neurons, top),
    )


def _same(token: Token) -> BadInput:
    return BadInput(
        f"against is {token.text!r}, the token that is explained; expected another one",
        names=["against"],
    )


def _towards(model: Model, tokens: list[Token]) -> Tensor:
    """Return what a state, past the norm, is multiplied by for each token: `[d, tokens]`."""
    scale = 1.0 if model.head.scale is None else model.head.scale.factor
    rows = model.head.weight.detach()[[t.id for t in tokens]]
    return scale * rows.double().cpu().T


@torch.no_grad()
def _reasons(model: Model, apart: Parts, tokens: list[Token], heads: bool) -> list[Reason]:
    names: list[tuple[str, str, int | None, int | None]] = []
    rows: list[Tensor] = []
    rounding = apart.rounding.cpu()
    for part in apart.parts:
        block, kind = part.unit.block, part.unit.kind
        if heads and kind == ATTENTION:
            of_heads, rest = split_heads(part, model.body.model)  # [n_heads, d], [d]
            for i, row in enumerate(of_heads):
                names.append((f"block {block} head {i}", kind, block, i))
                rows.append(row)
            if bool(rest.abs().max() > _BIAS * part.value.abs().max()):
                names.append((f"block {block} attention bias", kind, block, None))
                rows.append(rest)
            else:
                rounding = rounding + rest
            continue
        names.append((_name(apart, part.unit), kind, block, None))
        rows.append(part.value.cpu())
    return _summed(model, apart, tokens, names, torch.stack([*rows, rounding]))


@torch.no_grad()
def _neurons(
    model: Model, apart: Parts, tokens: list[Token], block: int, top: int
) -> tuple[Neuron, ...]:
    """Return the neurons of a block's MLP that pushed most, up first and down last."""
    activations, rows = neurons_of(apart, model.body.model, block)
    kind = type(model.body.model).__name__
    values = passed(apart.steps, apart.x.cpu(), rows, kind).parts @ _towards(model, tokens)
    pushed = values[:, 0] - values[:, 1] if len(tokens) > 1 else values[:, 0]  # [n]
    order = pushed.argsort(descending=True).tolist()
    chosen = order if len(order) <= 2 * top else [*order[:top], *order[-top:]]
    return tuple(Neuron(block, i, float(activations[i]), float(pushed[i])) for i in chosen)


def _name(apart: Parts, unit: Unit) -> str:
    if unit.block is None:
        return _OUTSIDE.get(unit.kind, unit.kind)
    shown = {MLP: "MLP"}.get(unit.kind, unit.kind)
    alike = [p for p in apart.parts if (p.unit.block, p.unit.kind) == (unit.block, unit.kind)]
    inner = f" {unit.name.rpartition('.')[2]}" if len(alike) > 1 else ""
    return f"block {unit.block} {shown}{inner}"


def _summed(
    model: Model,
    apart: Parts,
    tokens: list[Token],
    names: list[tuple[str, str, int | None, int | None]],
    rows: Tensor,
) -> list[Reason]:
    """Turn states `[n + 1, d]`, the last of them rounding, into parts of the logits."""
    head = model.head
    kind = type(model.body.model).__name__
    through = passed(apart.steps, apart.x.cpu(), rows.cpu(), kind)
    towards = _towards(model, tokens)  # [d, tokens]
    values = through.parts @ towards  # [n + 1, tokens]
    table = [(*name, values[i]) for i, name in enumerate(names)]
    if bool(through.bias.any()):
        table.append(("final norm bias", "norm", None, None, through.bias @ towards))
    scale = 1.0 if head.scale is None else head.scale.factor
    if head.bias is not None:
        bias = head.bias.detach()[[t.id for t in tokens]].double().cpu() * scale
        table.append(("head bias", "bias", None, None, bias))
    before = torch.stack([entry[-1] for entry in table]).sum(0) + values[-1]  # [tokens]
    if head.softcap is not None:
        c = head.softcap
        capped = torch.tensor([c * tanh(float(z) / c) for z in before], dtype=torch.float64)
        table.append(("softcap", "softcap", None, None, capped - before))
        before = capped
    own = torch.stack([apart.logits[t.id].double().cpu() for t in tokens])
    table.append(("rounding", "rounding", None, None, own - before + values[-1]))
    return [
        Reason(
            name=name,
            kind=kind,
            block=block,
            head=of_head,
            value=float(v[0] - v[1]) if len(tokens) > 1 else float(v[0]),
            to_token=float(v[0]),
            to_against=float(v[1]) if len(tokens) > 1 else None,
        )
        for name, kind, block, of_head, v in table
    ]
