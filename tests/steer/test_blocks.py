"""Blocks: found in any family, looked into, left out from below, and added to."""

from collections.abc import Callable

import pytest
import torch

from lmhead.body.adding import adding
from lmhead.body.blocks import Blocks
from lmhead.errors import BadInput
from lmhead.loading import Model
from lmhead.steer import HEAD, SteeringVector
from lmhead.steer.bound.steering import additions

Tiny = Callable[[str], Model]
FAMILIES = ("llama", "gpt2", "gemma3")
IDS = torch.randint(1, 90, (2, 11), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_the_model_reports(tiny: Tiny, family: str) -> None:
    body = tiny(family).body
    states = Blocks(body).states(IDS)
    with torch.no_grad():
        told = body.model(IDS, output_hidden_states=True, use_cache=False).hidden_states
    assert len(states) == len(told) == 4  # there the embedding comes first, here the head's input
    for i in (0, 1):  # the last one that the model reports has passed the final norm
        assert torch.equal(states[i], told[i + 1])
    assert torch.equal(states[-1], told[-1])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_the_blocks_above_give_the_same_bits(tiny: Tiny, family: str, layer: int) -> None:
    blocks = Blocks(tiny(family).body)
    states = blocks.states(IDS)
    with torch.no_grad():
        assert torch.equal(blocks.above(layer, states[layer]), states[-1])
    x = states[layer].clone().requires_grad_()
    blocks.above(layer, x).square().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert float(x.grad.norm()) > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_adding_to_some_rows_leaves_the_others_alone(tiny: Tiny, family: str) -> None:
    body = tiny(family).body
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


def test_layers_and_widths_that_do_not_fit(tiny: Tiny) -> None:
    body = tiny("llama").body
    with pytest.raises(BadInput, match=r"the layer is 3, but the model has 3 blocks; expected 0"):
        additions(body, [SteeringVector(torch.ones(24), 3)])
    for layer in (1, HEAD):
        with pytest.raises(BadInput, match=r"width 23, but the model's states .* have 24"):
            additions(body, [SteeringVector(torch.ones(23), layer)])


def test_several_vectors_add_up(tiny: Tiny) -> None:
    v = SteeringVector(torch.ones(24), 1, 2.0)
    w = SteeringVector(torch.ones(24), HEAD, 0.5)
    total = additions(tiny("llama").body, [v, w, v])
    assert set(total) == {1, HEAD}
    assert torch.equal(total[1], torch.full((24,), 4.0))
    assert torch.equal(total[HEAD], torch.full((24,), 0.5))
