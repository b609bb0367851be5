"""The tap on every causal language model that transformers has: h bit by bit, and nothing left."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lmhead.body import TorchBody

# What cannot be built, or does not read ids: see tests/head/find/test_architectures.py.
LEFT_OUT = {"gemma3n", "musicgen", "musicgen_melody", "gemma4_assistant"}
LEFT_OUT |= {"gemma4_unified_assistant"}
NAMES = [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in LEFT_OUT]
IDS = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10]])


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_h_is_what_enters_the_output_layer(name: str, tiny: Callable[..., Any]) -> None:
    model: PreTrainedModel = tiny(name)
    entered: list[torch.Tensor] = []
    layer = model.get_output_embeddings()
    handle = layer.register_forward_pre_hook(lambda _layer, args: entered.append(args[0]))
    torch.manual_seed(0)  # reformer draws its hashes
    logits = model(IDS, use_cache=False).logits
    handle.remove()
    torch.manual_seed(0)
    h, _ = TorchBody(model)(IDS, use_cache=False)
    assert torch.equal(h, entered[0])
    torch.manual_seed(0)
    assert torch.equal(model(IDS, use_cache=False).logits, logits)


def test_as_many_as_stated() -> None:
    assert len(NAMES) >= 178
