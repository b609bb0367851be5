"""Kept states belong to one body, one head and the texts; another body never reads them."""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from lmhead.body import TorchBody
from lmhead.body.blocks import Blocks
from lmhead.body.states import Encoded, States, states_of
from lmhead.head import LMHead

Net = Callable[[str], PreTrainedModel]
TEXTS: list[Encoded] = [([5, 9, 2, 40], 1), ([8, 3], 1), ([90, 1, 7], 2)]


def read(model: PreTrainedModel, cache: Path) -> States:
    return states_of(Blocks(TorchBody(model)), LMHead.from_model(model), TEXTS, cache=cache)


@torch.no_grad()
def test_another_body_under_the_same_head_has_states_of_its_own(net: Net, tmp_path: Path) -> None:
    model, other = net("llama"), net("llama")
    first = read(model, tmp_path)
    assert torch.equal(read(other, tmp_path).last, first.last)  # the same weights
    assert len(list(tmp_path.iterdir())) == 1
    other.model.layers[1].mlp.down_proj.weight.mul_(2)  # the head is the same
    assert LMHead.from_model(other).sha256 == LMHead.from_model(model).sha256
    changed = read(other, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    assert torch.equal(changed.at(0), first.at(0))
    assert not torch.allclose(changed.at(1), first.at(1))


@torch.no_grad()
def test_the_number_of_a_body_follows_weights_and_configuration(net: Net) -> None:
    model = net("llama")
    body = TorchBody(model)
    first = body.sha256
    assert body.sha256 == first == TorchBody(net("llama")).sha256
    weight = model.model.layers[2].self_attn.q_proj.weight
    weight.add_(1)
    assert (changed := body.sha256) != first
    model.config.rms_norm_eps = 0.5
    assert TorchBody(model).sha256 not in (first, changed)
    assert TorchBody(net("gpt2")).sha256 != first
    assert TorchBody(model.to(torch.bfloat16)).sha256 != first
