"""The next token of a prompt: every number that the head gives for the last position."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lmhead.errors import BadInput
from lmhead.loading import Model
from lmhead.sampling import Sampler, SamplingParams, Trace


@dataclass(frozen=True)
class NextToken:
    """One candidate for the next token."""

    id: int
    token: str
    logit: float
    probability: float
    cumulative: float


@dataclass(frozen=True)
class NextTokens:
    """The most probable next tokens of a prompt, and what is left for the others."""

    model: str
    prompt: str
    prompt_ids: tuple[int, ...]
    tokens: tuple[NextToken, ...]
    rest: float  # probability mass of all other tokens
    rest_count: int
    trace: Trace | None = None  # what each sampling filter did, where it was asked for

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        result = asdict(self)
        result["trace"] = self.trace.to_dict() if self.trace else None
        return result


def next_tokens(
    model: Model,
    prompt: str,
    *,
    top: int = 10,
    chat: bool = False,
    params: SamplingParams | None = None,
    order: str | Sequence[str] = "hf",
) -> NextTokens:
    """Return the `top` most probable next tokens of `prompt`.

    Rows of the head that no token belongs to take no part, as in generation. With `params` the
    result also tells what each sampling filter, in that `order`, leaves and cuts.
    """
    if top < 1:
        raise BadInput(f"top is {top}; expected at least 1")
    ids = model.encode(prompt, chat=chat)
    with torch.inference_mode():
        logits = model.head(model.last_hidden(ids)).float()  # [V]
    trace = None
    if params is not None:
        sampler = Sampler.from_params(
            params, order, vocab_size=model.reachable, tokenizer=model.tokenizer
        )
        trace = sampler.trace(logits.unsqueeze(0), [sampler.start(ids)], top=top)[0]
    z = logits[: model.reachable]
    best = torch.topk(z, min(top, len(z)))
    p = torch.softmax(z.double(), dim=-1)[best.indices]  # [top]
    columns = (best.indices, best.values, p, p.cumsum(0))
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return NextTokens(
        model=model.name,
        prompt=prompt,
        prompt_ids=tuple(ids),
        tokens=tuple(
            NextToken(i, model.token_text(i), logit, probability, min(cumulative, 1.0))
            for i, logit, probability, cumulative in rows
        ),
        rest=max(0.0, 1.0 - float(p.sum())),
        rest_count=len(z) - len(p),
        trace=trace,
    )
