"""The orders in which filters run: three that people know, or any list of names.

An order decides what is kept. On 50,000 Gaussian logits (sd 3) with top_p 0.95 and temperature
0.5, `hf` (temperature first) keeps a handful of tokens, `llama.cpp` (temperature last) thousands.

Each named order puts the filters that its system has in that system's order. Filters it does not
have stand where they do least harm: penalties beside penalties, truncations after its own, but
top_n_sigma, which measures the spread of all logits, before them. Two things are not a matter of
order. llama.cpp counts penalties over the last 64 tokens: set
`penalty_last_n`. And with mirostat it runs nothing but temperature and mirostat: set only those.
"""

from collections.abc import Iterable, Sequence

from lmhead.errors import BadInput
from lmhead.sampling.params import FILTERS, SamplingParams, nearest

ORDERS: dict[str, tuple[str, ...]] = {
    "hf": (
        "logit_bias",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "no_repeat_ngram",
        "dry",
        "banned_ids",
        "min_tokens",
        "allowed_ids",
        "guided",
        "temperature",
        "top_n_sigma",
        "top_k",
        "top_p",
        "min_p",
        "typical_p",
        "epsilon",
        "eta",
        "xtc",
        "mirostat",
    ),
    "vllm": (
        "guided",
        "allowed_ids",
        "banned_ids",
        "min_tokens",
        "logit_bias",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "no_repeat_ngram",
        "dry",
        "temperature",
        "top_n_sigma",
        "min_p",
        "top_k",
        "top_p",
        "typical_p",
        "epsilon",
        "eta",
        "xtc",
        "mirostat",
    ),
    "llama.cpp": (
        "logit_bias",
        "guided",
        "allowed_ids",
        "banned_ids",
        "min_tokens",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "no_repeat_ngram",
        "dry",
        "top_n_sigma",
        "top_k",
        "typical_p",
        "top_p",
        "min_p",
        "epsilon",
        "eta",
        "xtc",
        "temperature",
        "mirostat",
    ),
}


def resolve_order(order: str | Sequence[str], params: SamplingParams) -> tuple[str, ...]:
    """Give the names of the filters that params switch on, in the order asked for.

    A filter that is switched on but missing from the list is an error: it would silently do
    nothing.
    """
    if isinstance(order, str):
        if order not in ORDERS:
            raise BadInput(
                f"order {order!r} is unknown; {nearest(order, ORDERS)}, or a list of filters",
                names=["order"],
            )
        names = ORDERS[order]
    elif isinstance(order, Iterable):
        names = tuple(order)
    else:
        raise BadInput(
            f"order is {order!r}; expected {', '.join(ORDERS)}, or a list of filters",
            names=["order"],
        )
    for name in names:
        if name not in FILTERS:
            raise BadInput(
                f"order holds {name!r}, which is not a filter; {nearest(str(name), FILTERS)}",
                names=["order"],
            )
        if names.count(name) > 1:
            raise BadInput(
                f"order holds {name!r} {names.count(name)} times; expected once", names=["order"]
            )
    if params.greedy and "temperature" not in names:
        names = (*names, "temperature")  # the choice of the best needs no place of its own
    active = params.active()
    missing = [name for name in active if name not in names]
    if missing:
        raise BadInput(
            f"{', '.join(missing)} is set, but the order {', '.join(names) or '(empty)'} has no "
            f"place for it: add it to the order, or leave it unset"
        )
    return tuple(name for name in names if name in active)
