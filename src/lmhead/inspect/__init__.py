"""Looking at a head: what it weighs, what it says, and why.

What is counted (`counts`, `reach`) needs headers and configurations alone, and no torch; it is all
that this file imports. What runs a model or reads its weights is in `lens`, `attribution`,
`reading`, `geometry` and `compare`.
"""

from lmhead.inspect.counts import Footprint, HeadReport, LogitsMemory, inspect_model
from lmhead.inspect.reach import TokenizerReach

__all__ = ["Footprint", "HeadReport", "LogitsMemory", "TokenizerReach", "inspect_model"]
