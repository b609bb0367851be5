"""Choosing the next token: filters in an order you choose, exact, then a draw.

Logits `[B, V]` go through the filters of `SamplingParams` in one of the named orders of `ORDERS`
or in any other; each sequence has its own `SequenceState` and its own generator.
"""

from lmhead.sampling.build import Filter
from lmhead.sampling.candidates import Candidates, NothingLeft
from lmhead.sampling.check import check_sampling
from lmhead.sampling.drawing import draw, next_probs
from lmhead.sampling.guided import Guide, GuideState, compile_guide
from lmhead.sampling.logprobs import Logprobs, top_logprobs
from lmhead.sampling.orders import ORDERS
from lmhead.sampling.params import FILTERS, RANGES, SamplingParams
from lmhead.sampling.pipeline import Drawn, Sampler
from lmhead.sampling.state import SequenceState
from lmhead.sampling.trace import FilterStep, TokenProb, Trace

__all__ = [
    "FILTERS",
    "ORDERS",
    "RANGES",
    "Candidates",
    "Drawn",
    "Filter",
    "FilterStep",
    "Guide",
    "GuideState",
    "Logprobs",
    "NothingLeft",
    "Sampler",
    "SamplingParams",
    "SequenceState",
    "TokenProb",
    "Trace",
    "check_sampling",
    "compile_guide",
    "draw",
    "next_probs",
    "top_logprobs",
]
