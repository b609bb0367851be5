"""Memory that grows in place gives the numbers of memory that is copied."""

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from lmhead.body import State, TorchBody
from lmhead.body.growing import grow_in_place

SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


@pytest.fixture(params=["llama", "gemma3"])
def body(request: pytest.FixtureRequest) -> TorchBody:
    torch.manual_seed(0)
    if request.param == "llama":
        return TorchBody(LlamaForCausalLM(LlamaConfig(**SMALL)).eval())
    config = Gemma3TextConfig(**SMALL, sliding_window=8, layer_types=[
        "sliding_attention", "full_attention", "sliding_attention"])  # fmt: skip
    return TorchBody(Gemma3ForCausalLM(config).eval())


@pytest.mark.parametrize("room", [0, 1, 64])
def test_states_are_bit_equal_also_when_rows_leave(body: TorchBody, room: int) -> None:
    ids = torch.randint(97, (5, 40), generator=torch.Generator().manual_seed(1))
    found = []
    for grows in (False, True):
        h, state = body.run(ids[:, :7], State())
        if grows:
            grow_in_place(state.past, room)
            assert any("update" in vars(layer) for layer in state.past.layers)
        states, rows = [h[:, -1]], list(range(5))
        for at in range(7, 40):
            if at in (12, 20):
                rows = rows[1:]
                state.select(list(range(1, len(rows) + 1)))
            h, state = body.run(ids[rows, at : at + 1], state)
            states.append(h[:, -1])
        found.append(states)
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
