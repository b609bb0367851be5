"""Prompts in, tokens out, on any engine that has the head's verbs."""

from lmhead.generation.api import generate, stream
from lmhead.generation.choose import Choice, choose
from lmhead.generation.engine import Engine
from lmhead.generation.next import NextToken, NextTokens, next_tokens
from lmhead.generation.request import Event, Generation, Request
from lmhead.generation.score import TextScore, perplexity, score_text

__all__ = [
    "Choice",
    "Engine",
    "Event",
    "Generation",
    "NextToken",
    "NextTokens",
    "Request",
    "TextScore",
    "choose",
    "generate",
    "next_tokens",
    "perplexity",
    "score_text",
    "stream",
]
