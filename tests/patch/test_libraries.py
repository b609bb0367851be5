"""A patched model under the real libraries: Trainer, PEFT, save and reload."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from lmhead.patch import explain_generate, patch_generate, patch_loss, unpatch_generate
from patched_models import PROMPTS, ids_of, tiny

DRAW = {"do_sample": True, "top_k": 0, "top_p": 0.9}


def same(model: Any, plain: Any) -> None:
    for settings in ({}, DRAW):
        assert torch.equal(ids_of(model, settings), ids_of(plain, settings))


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, n: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(3, 600, (12,), generator=torch.Generator().manual_seed(n))
        return {"input_ids": ids, "labels": ids}


def trained(model: Any, folder: Path) -> Any:
    arguments = tf.TrainingArguments(
        str(folder), max_steps=2, per_device_train_batch_size=4, learning_rate=0.01, seed=0,
        report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    tf.Trainer(model, arguments, train_dataset=Texts()).train()
    return model.eval()


def test_trainer_with_both_patches(tmp_path: Path) -> None:
    """The weights move under the screen; what is generated then is of the new ones."""
    plain, model = tiny("llama"), patch_generate(patch_loss(tiny("llama")))
    first = ids_of(model, {})
    trained(plain, tmp_path), trained(model, tmp_path)
    moved = (model.lm_head.weight - tiny("llama").lm_head.weight).abs().max()
    assert moved > 1e-3
    torch.testing.assert_close(model.lm_head.weight, plain.lm_head.weight, atol=1e-4, rtol=1e-3)
    same(model, unpatch_generate(copy.deepcopy(model)))
    assert model.lmhead_stats.dense == 0
    assert not torch.equal(ids_of(model, {}), first)


def test_saved_and_reloaded(tmp_path: Path) -> None:
    model = patch_generate(tiny("llama tied").bfloat16())
    model.save_pretrained(tmp_path)
    loaded = tf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    same(model, loaded)
    same(patch_generate(loaded), unpatch_generate(model))
    assert loaded.lmhead_stats.screened == 2


@pytest.mark.parametrize("patched_first", [True, False])
def test_peft_adapters_on_other_layers(patched_first: bool) -> None:
    peft = pytest.importorskip("peft")
    plain, model = tiny("llama"), tiny("llama")
    if patched_first:
        patch_generate(model)
    config = {"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    wrapped = []
    for one in (plain, model):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            adapted = peft.get_peft_model(one, peft.LoraConfig(**config)).eval()
            for name, p in adapted.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(p, 0.0, 0.3)  # at first it is 0, and changes nothing
        wrapped.append(adapted)
    if not patched_first:
        patch_generate(model)
    same(wrapped[1], wrapped[0])
    assert model.lmhead_stats.screened == 2
    assert not torch.equal(ids_of(wrapped[1], {}), ids_of(tiny("llama"), {}))
    merged = wrapped[1].merge_and_unload()
    same(merged, wrapped[0].merge_and_unload())


def test_peft_adapter_on_the_output_layer_is_dense() -> None:
    peft = pytest.importorskip("peft")
    model = patch_generate(tiny("llama"))
    config = peft.LoraConfig(r=4, target_modules=["lm_head"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config).eval()
    path = explain_generate(model, input_ids=PROMPTS[1:])
    assert not path.screened
    same(adapted, unpatch_generate(copy.deepcopy(model)))
