"""The engines of a head: every one answers `head(h)`, `topk` and `sample` in the same words."""

from lmhead.head.base import Head, TopK
from lmhead.head.dense import LMHead
from lmhead.head.screening.edits import Edit
from lmhead.head.steps import Scale

__all__ = ["Edit", "Head", "LMHead", "Scale", "TopK"]
