"""What is wrong with the controls, told without a model: it takes seconds to load one."""

from collections.abc import Sequence

from lmhead.sampling.guided import check_guide
from lmhead.sampling.orders import resolve_order
from lmhead.sampling.params import SamplingParams


def check_sampling(params: SamplingParams, order: str | Sequence[str] = "hf") -> None:
    """Refuse an order that does not fit `params`, a bad grammar, and a missing extra."""
    resolve_order(order, params)
    check_guide(json_schema=params.json_schema, regex=params.regex, grammar=params.grammar)
