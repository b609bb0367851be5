"""Prompts in, tokens out, on any engine that has the head's verbs."""

from lmhead.generation.api import generate, stream
from lmhead.generation.engines import engine
from lmhead.generation.loop import Generation

__all__ = ["Generation", "engine", "generate", "stream"]
