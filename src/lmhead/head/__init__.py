"""The engines of a head: every one has every verb of `Head`."""

from lmhead.head.answers import TopK
from lmhead.head.base import Head
from lmhead.head.dense import LMHead
from lmhead.head.edits import Edit
from lmhead.head.steps import Scale

__all__ = ["Edit", "Head", "LMHead", "Scale", "TopK"]
