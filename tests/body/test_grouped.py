"""Heads that share keys attend as they do in transformers, without copies of the keys."""

from unittest.mock import patch

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM
from transformers.integrations import sdpa_attention

from lmhead.body import TorchBody
from lmhead.body.grouped import grouped_attention

SMALL = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_states_are_those_of_transformers_and_nothing_is_copied(kind: str) -> None:
    torch.manual_seed(0)
    if kind == "llama":
        body = TorchBody(LlamaForCausalLM(LlamaConfig(**SMALL)).eval())
    else:
        config = Gemma3TextConfig(**SMALL, sliding_window=8, layer_types=[
            "sliding_attention", "full_attention", "sliding_attention"])  # fmt: skip
        body = TorchBody(Gemma3ForCausalLM(config).eval())
    ids = torch.randint(97, (4, 30), generator=torch.Generator().manual_seed(1))
    prompts = [ids[at, : 3 + 4 * at].tolist() for at in range(4)]  # of several lengths: padded

    def run() -> tuple[list[torch.Tensor], int]:
        h, state = body.prefill(prompts)
        states = [h]
        with patch.object(
            sdpa_attention, "repeat_kv", side_effect=sdpa_attention.repeat_kv
        ) as copies:
            for at in range(15, 30):
                h, state = body.run(ids[:, at : at + 1], state)
                states.append(h[:, -1])
        return states, copies.call_count

    with torch.inference_mode():
        expected, copied = run()
        with grouped_attention(body):
            found, still_copied = run()
        again, _ = run()  # and it is gone when the block has ended
    assert copied > 0
    assert still_copied == 0
    for a, b, c in zip(expected, found, again, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert torch.equal(a, c)
