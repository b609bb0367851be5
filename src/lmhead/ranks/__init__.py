"""The ranks that share a head: what they tell each other, and how a lost one is found."""

from lmhead.ranks.checkpoint import load_checkpoint, save_checkpoint
from lmhead.ranks.group import Group, Ranks, ranks_of

__all__ = ["Group", "Ranks", "load_checkpoint", "ranks_of", "save_checkpoint"]
