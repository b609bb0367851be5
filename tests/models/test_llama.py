"""A Llama from its files alone has the bits of the one that transformers loads."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lmhead.body import TorchBody
from lmhead.files.checkpoint import open_checkpoint
from lmhead.models.llama import Llama

SIZES = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
}


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Path]:
    def make(dtype: torch.dtype = torch.float32, **settings: object) -> Path:
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_key_value_heads": 2, **settings}))
        model.to(dtype).save_pretrained(tmp_path)
        return tmp_path

    return make


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "settings",
    [
        {"tie_word_embeddings": True},
        {"tie_word_embeddings": False, "num_key_value_heads": 6},
        {"rope_theta": 123_456.0, "rms_norm_eps": 1e-3},
        {"head_dim": 16},
    ],
)
def test_it_has_the_bits_of_transformers(
    dtype: torch.dtype, settings: dict[str, object], made: Callable[..., Path]
) -> None:
    folder = made(dtype, **settings)
    ours = Llama.of(open_checkpoint(folder))
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert ours is not None
    ids = torch.randint(0, 211, (3, 20), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)
        # Prompts of several lengths, and two steps behind them.
        prompts = [ids[0].tolist(), ids[1, :7].tolist(), ids[2, :1].tolist()]
        bodies = TorchBody(ours), TorchBody(theirs)
        (h, state), (wanted, memory) = (body.prefill(prompts, whole=True) for body in bodies)
        for row, prompt in enumerate(prompts):
            assert torch.equal(h[row, -len(prompt) :], wanted[row, -len(prompt) :])
        for step in (ids[:, :1], ids[:, 1:2]):
            h, state = bodies[0].run(step, state)
            wanted, memory = bodies[1].run(step, memory)
            assert torch.equal(h, wanted)


def test_blocks_may_lie_elsewhere(made: Callable[..., Path]) -> None:
    whole = open_checkpoint(made())
    ends = {name: t for name, t in whole.tensors.items() if "layers" not in name}
    without = type(whole)(whole.folder, whole.config, ends)
    assert Llama.of(without) is None
    model, expected = Llama.of(without, whole), Llama.of(whole)
    assert model is not None
    assert expected is not None
    ids = torch.arange(9)[None]
    assert torch.equal(model(ids).logits, expected(ids).logits)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "mistral"},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "factor": 2.0}},
        {"rope_parameters": None, "rope_theta": None},
        {"quantization_config": {"bits": 4}},
        {"something_new": 1},
        {"num_hidden_layers": 2},
        {"num_key_value_heads": 4},
        {"num_attention_heads": 0},
        {"hidden_size": "48"},
        {"vocab_size": 210},
        {"vocab_size": None},
        {"dtype": "bfloat16"},
        {"tie_word_embeddings": True},
    ],
)
def test_what_it_does_not_know_is_left_to_transformers(
    change: dict[str, object], made: Callable[..., Path]
) -> None:
    path = made() / "config.json"
    config = json.loads(path.read_text("utf-8"))
    assert Llama.of(open_checkpoint(path.parent)) is not None
    path.write_text(json.dumps({**config, **change}), "utf-8")
    assert Llama.of(open_checkpoint(path.parent)) is None
