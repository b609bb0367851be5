"""Prompts in, tokens out, on any engine that has the head's verbs."""

from lmhead.generation.api import generate, stream
from lmhead.generation.engine import Engine
from lmhead.generation.next import NextToken, NextTokens, next_tokens
from lmhead.generation.request import Event, Generation, Request
from lmhead.generation.score import TextScore, perplexity, score_text

__all__ = [
    "Engine",
    "Event",
    "Generation",
    "NextToken",
    "NextTokens",
    "Request",
    "TextScore",
    "generate",
    "next_tokens",
    "perplexity",
    "score_text",
    "stream",
]
