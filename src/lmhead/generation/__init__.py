"""Prompts in, tokens out, on any engine that has the head's verbs."""

from lmhead.generation.api import generate, stream
from lmhead.generation.engines import engine
from lmhead.generation.loop import Generation
from lmhead.generation.next import NextToken, NextTokens, next_tokens

__all__ = [
    "Generation",
    "NextToken",
    "NextTokens",
    "engine",
    "generate",
    "next_tokens",
    "stream",
]
