"""Looking at a head: what it weighs, from headers and configurations alone."""

from lmhead.inspect.counts import Footprint, HeadReport, LogitsMemory, inspect_model
from lmhead.inspect.reach import TokenizerReach

__all__ = ["Footprint", "HeadReport", "LogitsMemory", "TokenizerReach", "inspect_model"]
