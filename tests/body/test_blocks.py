"""Blocks: found in any family, looked into, left out from below, and added to."""

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from lmhead.body import TorchBody
from lmhead.body.adding import adding
from lmhead.body.blocks import Blocks

Net = Callable[[str], PreTrainedModel]
FAMILIES = ("llama", "gpt2", "gemma3")
IDS = torch.randint(1, 90, (2, 11), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_the_model_reports(net: Net, family: str) -> None:
    body = TorchBody(net(family))
    states = Blocks(body).states(IDS)
    with torch.no_grad():
        reported = body.model(IDS, output_hidden_states=True, use_cache=False).hidden_states
    assert (
        len(states) == len(reported) == 4
    )  # there the embedding comes first, here the head's input
    for i in (0, 1):  # the last one that the model reports has passed the final norm
        assert torch.equal(states[i], reported[i + 1])
    assert torch.equal(states[-1], reported[-1])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_the_blocks_above_give_the_same_bits(net: Net, family: str, layer: int) -> None:
    blocks = Blocks(TorchBody(net(family)))
    states = blocks.states(IDS)
    with torch.no_grad():
        assert torch.equal(blocks.above(layer, states[layer]), states[-1])
    x = states[layer].clone().requires_grad_()
    blocks.above(layer, x).square().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert float(x.grad.norm()) > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_adding_to_some_rows_leaves_the_others_alone(net: Net, family: str) -> None:
    body = TorchBody(net(family))
    v = torch.ones(24)
    with torch.no_grad():
        plain, _ = body(IDS, use_cache=False)
        with adding(body.model, {1: v}, slice(1, None)):
            some, _ = body(IDS, use_cache=False)
        with adding(body.model, {1: v}):
            every, _ = body(IDS, use_cache=False)
        blocks = Blocks(body)
        expected = blocks.above(1, blocks.states(IDS)[1] + v)
        after, _ = body(IDS, use_cache=False)
    assert torch.equal(some[0], plain[0])
    assert torch.equal(some[1], every[1])
    assert torch.equal(every, expected)  # at every position, the first included
    assert torch.equal(after, plain)  # nothing stays behind
