"""A patched call runs in inference mode, and nobody can tell by a tensor that they hold."""

from typing import Any

import pytest
import torch
import transformers as tf
from tests.patched_models import MODELS, PROMPTS, SMALL, V, tiny
from torch import Tensor

from lmhead import patch_generate


def modes_of(model: Any) -> list[bool]:
    """Note at every pass of the first block's MLP whether it is in inference mode."""
    seen: list[bool] = []
    mlp = model.model.layers[0].mlp
    forward = mlp.forward

    def noting(x: Tensor) -> Tensor:
        seen.append(torch.is_inference_mode_enabled())
        result: Tensor = forward(x)
        return result

    mlp.forward = noting
    return seen


def train(model: Any, h: Tensor | None = None) -> None:
    model(PROMPTS, labels=PROMPTS).loss.backward()
    if h is not None:
        torch.nn.Linear(h.shape[-1], 1)(h).sum().backward()


@pytest.mark.parametrize("name", sorted(MODELS))
def test_ids_and_model_are_as_usable_as_ever(name: str) -> None:
    model = patch_generate(tiny(name))
    ids = model.generate(PROMPTS, max_new_tokens=4)
    assert not ids.is_inference()
    ids += 1
    train(model)
    assert model.lmhead_stats.steps == 4


def test_a_plain_call_is_in_inference_mode() -> None:
    model = patch_generate(tiny("llama"))
    seen = modes_of(model)
    model.generate(PROMPTS, max_new_tokens=3)
    assert seen == [True] * 3
    train(model)
    assert seen == [True] * 3 + [False]


def test_states_that_a_hook_keeps_can_be_trained_on() -> None:
    model, kept = patch_generate(tiny("llama")), []
    seen = modes_of(model)
    handle = model.model.norm.register_forward_hook(lambda _m, _i, out: kept.append(out))
    model.generate(PROMPTS, max_new_tokens=3)
    assert not any(seen)
    assert len(kept) == 3
    train(model, kept[-1])
    handle.remove()
    model.generate(PROMPTS, max_new_tokens=2)
    assert seen[-2:] == [True] * 2


def test_a_cache_of_the_caller_goes_on() -> None:
    plain, model = tiny("llama"), patch_generate(tiny("llama"))
    cache = tf.DynamicCache(config=model.config)
    seen = modes_of(model)
    ids = model.generate(PROMPTS[1:], max_new_tokens=3, past_key_values=cache)
    assert not any(seen)
    assert not cache.layers[0].keys.is_inference()
    longer = torch.cat([ids, torch.tensor([[5, 6]])], 1)
    more = model.generate(longer, max_new_tokens=3, past_key_values=cache)
    assert torch.equal(more, plain.generate(longer, max_new_tokens=3))


@pytest.mark.parametrize(
    "settings",
    [
        {"return_dict_in_generate": True},
        {"cache_implementation": "static", "disable_compile": True},
        {"custom": True},
    ],
)
def test_what_outlives_the_call_is_made_as_ever(settings: dict[str, Any]) -> None:
    class Stop(tf.StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: Tensor, scores: Any, **_kwargs: Any) -> Tensor:
            assert not input_ids.is_inference()
            return torch.zeros(len(input_ids), dtype=torch.bool)

    model = patch_generate(tiny("llama"))
    seen = modes_of(model)
    if settings.pop("custom", False):
        settings = {"stopping_criteria": [Stop()]}
    found = model.generate(PROMPTS, max_new_tokens=3, **settings)
    assert len(seen) == 3
    assert not any(seen)
    if isinstance(found, dict):
        assert not found.past_key_values.layers[0].keys.is_inference()
    model.generate(PROMPTS, max_new_tokens=3)
    assert seen[3:] == [True] * 3
    train(model)


def test_what_a_module_computes_for_itself_can_be_trained_with() -> None:
    """RoPE of the dynamic kind writes new frequencies into a buffer as the text grows."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = tf.LlamaConfig(**(SMALL | {"max_position_embeddings": 12}), rope_parameters=rope)
    torch.manual_seed(0)
    model = patch_generate(tf.LlamaForCausalLM(config).eval())
    before = model.model.rotary_emb.inv_freq.clone()
    ids = model.generate(PROMPTS[1:], max_new_tokens=30, eos_token_id=V - 1)
    assert ids.shape[1] > 12
    assert not torch.equal(before, model.model.rotary_emb.inv_freq)
    assert not any(b.is_inference() for b in model.buffers())
    train(model)
