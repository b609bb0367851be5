"""Cross-entropy through the head, without the logits, on one rank or many."""

from lmhead.loss.linear import linear_cross_entropy
from lmhead.loss.rules import Reduction
from lmhead.loss.walk import chunk_for

__all__ = ["Reduction", "chunk_for", "linear_cross_entropy"]
