"""Everything below the head: the protocol of a body, the tap, torch and MAX bodies, blocks, states.

A body turns ids `[B, T]` into h `[B, T, d]`, what enters the head. `TorchBody` runs any causal
model of transformers, `max_body.MaxBody` a GPT-2 as a MAX graph.
"""

from lmhead.body.base import HEAD, Additions, Body
from lmhead.body.state import State
from lmhead.body.torch_body import TorchBody

__all__ = ["HEAD", "Additions", "Body", "State", "TorchBody"]
