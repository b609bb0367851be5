"""Everything below the head: the protocol of a body, the tap, three bodies, blocks, states.

A body turns ids `[B, T]` into h `[B, T, d]`, what enters the head. `TorchBody` runs any causal
model of transformers, `llama_cpp.LlamaBody` a GGUF file by llama.cpp, `max_body.MaxBody` a GPT-2 as
a MAX graph.
"""

from lmhead.body.base import HEAD, Additions, Body, Memory
from lmhead.body.state import State
from lmhead.body.torch_body import TorchBody

__all__ = ["HEAD", "Additions", "Body", "Memory", "State", "TorchBody"]
