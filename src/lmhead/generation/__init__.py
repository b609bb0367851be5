"""Prompts in, tokens out, on any engine that has the head's verbs."""

from lmhead.generation.api import generate, stream
from lmhead.generation.engines import engine
from lmhead.generation.loop import Generation
from lmhead.generation.next import NextToken, NextTokens, next_tokens
from lmhead.generation.score import TextScore, perplexity, score_text

__all__ = [
    "Generation",
    "NextToken",
    "NextTokens",
    "TextScore",
    "engine",
    "generate",
    "next_tokens",
    "perplexity",
    "score_text",
    "stream",
]
