"""Steering: a model whose states have vectors added to them, at every position.

The result is a model like any other: `generate`, `next_tokens` and every engine take it.
"""

import warnings
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from lmhead.body import Additions, TorchBody
from lmhead.body.adding import adding, blocks_of, check_layer
from lmhead.body.llama_cpp import LlamaBody
from lmhead.body.torch_body import sha256_with
from lmhead.errors import BadInput, UnsupportedModel
from lmhead.head import Head
from lmhead.loading import Model, load
from lmhead.steer.bound.certificate import alpha_for, certify, check_budget, share_within
from lmhead.steer.bound.rows import RowsBody
from lmhead.steer.control import load_vectors
from lmhead.steer.vector import HEAD, SteeringVector, SteeringWarning, check_alpha

OFFERED_BUDGET = 2.0  # logits: the odds of two tokens change by a factor of 7.4 at most
OFFERED_KL_CAP = 0.5  # nat

# Vectors, or the file that holds them.
Vectors = SteeringVector | Sequence[SteeringVector] | str | Path


class SteeredBody(TorchBody):
    """A body that adds to its states, at every position; `added` gives `[d]` for each layer."""

    def __init__(self, body: TorchBody, added: Mapping[int | str, Tensor]) -> None:
        super().__init__(body.model)
        self._body, self.added = body, added

    @property
    def sha256(self) -> str:
        """What the body is, and what it adds, as one hexadecimal number."""
        return sha256_with(self._body.sha256, self.added)

    def __call__(self, input_ids: Tensor, **inputs: Any) -> tuple[Tensor, Any]:
        """Run `[B, T]` ids; return the steered h `[B, T, d]`, and the model's output."""
        with adding(self.model, self.added):
            h, output = self._body(input_ids, **inputs)
        if HEAD in self.added:
            h = h + self.added[HEAD].to(h.dtype)
        return h, output


@dataclass(frozen=True, eq=False)
class Added:
    """The steering of one request to the generation engine: vectors, without a limit."""

    added: Mapping[int | str, Tensor]

    @property
    def rows(self) -> tuple[Additions, ...]:
        """What is added to the one row that the body runs for a sequence."""
        return (self.added,)

    @property
    def law(self) -> object:
        """What sequences that are steered alike share."""
        return self.added

    def answer(self, head: Head, h: Tensor, alike: Sequence[Any]) -> None:
        """Let the head answer."""

    def alone(self) -> "Added":
        """Return the same for another request."""
        return self


def steer_model(
    model: str | Path | Model,
    vectors: Vectors,
    alpha: float | None = None,
    budget: float | None = None,
) -> Model:
    """Return the model with the vectors added; it shares everything else with `model`.

    - `alpha` replaces the strength of every vector.
    - `budget` lowers what is added at the layer `"head"` until the certified range of delta is
      within it, for every context. If neither it nor `alpha` is given, the budgets on the vectors'
      cards apply. Below the head nothing can be certified; use `guard` to keep a budget there.

        steered = lmhead.steer_model("smollm2-135m", "honest.safetensors", budget=2)
        lmhead.generate("The capital of Peru is", steered)
    """
    model = load(model)
    chosen = with_alpha(vectors, alpha)
    body = steerable(model)
    added = additions(body, chosen)
    if budget is not None:
        check_budget(budget)
        if set(added) != {HEAD}:
            raise BadInput(
                f"a budget of {budget:g} is given for a vector at a block, where nothing can be "
                "certified beforehand; guard the model: that keeps it at every token"
            )
    warn_of_other_heads(model, chosen)
    on_cards = _on_cards(chosen) if set(added) == {HEAD} else None
    limit = on_cards if budget is None else budget
    if limit is not None:
        share = share_within(model, added[HEAD], limit)
        if share < 1 and budget is None:
            r = certify(model, added[HEAD]).range
            lowered = "" if alpha is not None else "; lowered until it is kept"
            _warn(f"the range of delta is {r:.3g}, above the budget {limit:g} on the card{lowered}")
        if share < 1 and (budget is not None or alpha is None):
            added = {HEAD: added[HEAD] * share}
    elif any(v.card.job == "detect" and v.card.budget is None for v in chosen):
        _offer(model, added)
    if isinstance(body, LlamaBody):
        return replace(model, body=RowsBody(body, added))
    return replace(model, body=SteeredBody(body, added))


def with_alpha(vectors: Vectors, alpha: float | None) -> list[SteeringVector]:
    """Return the vectors as a list, each with `alpha` where it is given."""
    if isinstance(vectors, str | Path):
        vectors = load_vectors(vectors)
    chosen = [vectors] if isinstance(vectors, SteeringVector) else list(vectors)
    if not chosen:
        raise BadInput("there is no vector to steer with; expected at least one")
    if alpha is None:
        return chosen
    check_alpha(alpha)
    return [replace(v, alpha=alpha) for v in chosen]


def torch_body(model: Model) -> TorchBody:
    """Return the model's body, which must be one whose blocks can be reached."""
    if not isinstance(model.body, TorchBody):
        raise UnsupportedModel(
            f"{model.name} runs as one {type(model.body).__name__} whose states cannot be "
            "reached; expected a model that runs in torch: load it with body='torch', or leave "
            "out the engine 'max'"
        )
    return model.body


def steerable(model: Model) -> TorchBody | LlamaBody:
    """Return the model's body, which must be one that vectors can be added to."""
    return model.body if isinstance(model.body, LlamaBody) else torch_body(model)


def additions(
    body: TorchBody | LlamaBody, vectors: Sequence[SteeringVector]
) -> dict[int | str, Tensor]:
    """Sum what is added at every layer, `[d]` each; check layers and widths."""
    total: dict[int | str, Tensor] = {}
    blocks: Sized = ()
    if any(v.layer != HEAD for v in vectors):
        blocks = range(body.layers) if isinstance(body, LlamaBody) else blocks_of(body.model)
    for vector in vectors:
        check_layer(vector.layer, blocks)
        if isinstance(body, LlamaBody):
            body.check_layer(vector.layer)
        width = _width(body, vector.layer)
        if vector.size != width:
            raise BadInput(
                f"the vector has width {vector.size}, but the model's states at layer "
                f"{vector.layer} have {width}; expected a vector made for this model"
            )
        total[vector.layer] = total.get(vector.layer, 0) + vector.added
    return total


def _width(body: TorchBody | LlamaBody, layer: int | str) -> int:
    if isinstance(body, LlamaBody):
        return body.model.width
    if layer == HEAD:
        return int(body.model.get_output_embeddings().weight.shape[1])
    return int(body.config.hidden_size)


def warn_of_other_heads(model: Model, vectors: Sequence[SteeringVector]) -> None:
    """Say, for every vector made for another head, what holds for this one."""
    for v in vectors:
        if v.card.head_sha256 in (None, model.head.sha256):
            continue
        message = f"the vector was made for the head {str(v.card.head_sha256)[:12]}"
        message += f" of {v.card.model}" if v.card.model else ""
        message += f", but {model.name} has {model.head.sha256[:12]}"
        if v.layer == HEAD:
            found = certify(model, v)
            before = (v.card.certificate or {}).get("range")
            message += f"; certified again: the range of delta is {found.range:.3g}"
            message += f", not {before:.3g}" if isinstance(before, int | float) else ""
        else:
            message += "; what its card says was measured elsewhere: `lmhead steer check` measures"
        _warn(message)


def _on_cards(vectors: Sequence[SteeringVector]) -> float | None:
    budgets = [v.card.budget for v in vectors if v.card.budget is not None]
    # Ranges add up at most, so vectors that keep their budgets keep the sum of them together.
    return sum(budgets) if len(budgets) == len(vectors) else None


def _offer(model: Model, added: Mapping[int | str, Tensor]) -> None:
    message = "the vector was made to detect, not to generate with, and it has no budget; "
    if set(added) == {HEAD}:
        most = alpha_for(model, added[HEAD], OFFERED_BUDGET)
        message += f"--budget {OFFERED_BUDGET:g} would keep {min(most, 1.0):.3g} of its strength"
    else:
        message += f"--kl-cap {OFFERED_KL_CAP:g} would hold it back at every token"
    _warn(message)


def _warn(message: str) -> None:
    warnings.warn(message, SteeringWarning, stacklevel=3)
