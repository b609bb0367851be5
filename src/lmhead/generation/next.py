"""The next token of a prompt: every number that the head gives for the last position."""

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lmhead.errors import BadInput
from lmhead.generation.prompts import Prompt, Source, encoded, listed
from lmhead.head import Head
from lmhead.loading import Model, load
from lmhead.models.registry import DEFAULT_MODEL
from lmhead.progress import Progress, silent
from lmhead.sampling import Sampler, SamplingParams, Trace, check_sampling


@dataclass(frozen=True)
class NextToken:
    """One candidate for the next token."""

    id: int
    token: str
    logit: float
    probability: float
    cumulative: float
    after: float | None = None  # its probability after the sampling filters, where there are any


@dataclass(frozen=True)
class NextTokens:
    """The most probable next tokens of a prompt, and what is left for the others."""

    model: str
    prompt: str
    prompt_ids: tuple[int, ...]
    tokens: tuple[NextToken, ...]
    rest: float  # probability mass of all other tokens
    rest_count: int
    rest_after: float | None = None  # the same after the sampling filters
    trace: Trace | None = None  # what each sampling filter did, where there are any

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        result = asdict(self)
        result["trace"] = self.trace.to_dict() if self.trace else None
        return result


def next_tokens(
    prompt: Prompt | Model,
    model: Source = DEFAULT_MODEL,
    *,
    top: int = 10,
    chat: bool = False,
    params: SamplingParams | None = None,
    order: str | Sequence[str] = "hf",
    head: Head | None = None,
    tokenizer: Any = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    body: str | None = None,
    progress: Progress = silent,
    **controls: Any,
) -> NextTokens:
    """Return the `top` most probable next tokens of `prompt` (a text, or the ids of one).

    >>> [row.token for row in next_tokens("The capital of France is", top=3).tokens]
    [' Paris', ' the', ' London']

    - Rows of the head without a token are ignored, as in generation.
    - `params`, or `controls` (the fields of SamplingParams: top_p, banned_ids, ...): the result
      also gives each token's probability after these filters, in that `order`, and what each filter
      keeps and cuts. The temperature is 1 by default. The tokens are ordered by their probability
      after the filters; those that were cut come last.
    - `head`: an engine to use instead of the model's own head.
    - `tokenizer`, `device`, `dtype`, `body`: as in `load`.
    """
    prompt, model = _in_order(prompt, model)
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise BadInput(f"top is {top!r}; expected a whole number of at least 1", names=["top"])
    given = listed(prompt)
    if len(given) != 1:
        raise BadInput(f"next_tokens got {len(given)} prompts; expected one")
    if params is not None and controls:
        raise BadInput(
            f"params is given together with {', '.join(controls)}; give one or the other"
        )
    if controls:
        params = SamplingParams.from_dict(controls)
    if params is not None:
        check_sampling(params, order)
    loaded = load(
        model, tokenizer=tokenizer, device=device, dtype=dtype, body=body, progress=progress
    )
    text, ids = encoded(loaded, given[0], chat=chat)
    with torch.inference_mode():
        logits = (head or loaded.head)(loaded.last_hidden(ids)).float().cpu()  # [V]
    z = logits[: loaded.reachable]
    p = torch.softmax(z.double(), dim=-1)
    after = trace = None
    if params is None:
        best = torch.topk(z, min(top, len(z))).indices
    else:
        after, trace = _filtered(loaded, logits, ids, params, order, top)
        by_probability = torch.sort(p, descending=True, stable=True).indices
        again = torch.sort(after[by_probability], descending=True, stable=True).indices
        best = by_probability[again[:top]]
    columns: list[list[Any]] = [c.tolist() for c in (best, z[best], p[best], p[best].cumsum(0))]
    columns.append([None] * len(best) if after is None else after[best].tolist())
    return NextTokens(
        model=loaded.name,
        prompt=text,
        prompt_ids=tuple(ids),
        tokens=tuple(
            NextToken(i, loaded.token_text(i), logit, probability, min(cumulative, 1.0), left)
            for i, logit, probability, cumulative, left in zip(*columns, strict=True)
        ),
        rest=max(0.0, 1.0 - float(p[best].sum())),
        rest_count=len(z) - len(best),
        rest_after=None if after is None else max(0.0, 1.0 - float(after[best].sum())),
        trace=trace,
    )


def _filtered(
    model: Model,
    logits: Tensor,
    ids: list[int],
    params: SamplingParams,
    order: str | Sequence[str],
    top: int,
) -> tuple[Tensor, Trace]:
    """Give what the filters make of logits `[V]`: probabilities `[reachable]`, and the trace."""
    params = replace(params, stop_ids=(*model.stop_ids, *params.stop_ids))  # as in generation
    sampler = Sampler.from_params(
        params, order, vocab_size=model.reachable, tokenizer=model.tokenizer
    )
    state, row = sampler.start(ids), logits.unsqueeze(0)
    trace = sampler.trace(row, [state], top=top)[0]
    after = sampler.probs(row, [state])[0, : model.reachable]
    return after.double(), trace


def _in_order(prompt: Prompt | Model, model: Source) -> tuple[Prompt, Source]:
    if not isinstance(prompt, Model):
        return prompt, model
    warnings.warn(
        "next_tokens(model, prompt) is now next_tokens(prompt, model); the old order goes with "
        "the next release",
        DeprecationWarning,
        stacklevel=3,
    )
    if not isinstance(model, str):
        raise BadInput(f"the prompt is {model!r}; expected a text: next_tokens(prompt, model)")
    return model, prompt
