"""A patched transformers model trains as before: same loss, same gradients, no logits."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lmhead.errors import BadInput, UnsupportedModel
from lmhead.patch import patch_loss, unpatch_loss

V = 131
SMALL = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL)),
    "llama tied": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "gemma": lambda: tf.GemmaForCausalLM(tf.GemmaConfig(**SMALL)),
    "gemma2 softcap": lambda: tf.Gemma2ForCausalLM(
        tf.Gemma2Config(**SMALL, final_logit_softcapping=0.5, query_pre_attn_scalar=8)
    ),
    "gemma3": lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**SMALL)),
    "gpt2": lambda: tf.GPT2LMHeadModel(
        tf.GPT2Config(vocab_size=V, n_positions=64, n_embd=24, n_layer=2, n_head=4)
    ),
    "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**SMALL)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**SMALL)),
    "granite scaled": lambda: tf.GraniteForCausalLM(tf.GraniteConfig(**SMALL, logits_scaling=0.3)),
    "cohere scaled": lambda: tf.CohereForCausalLM(tf.CohereConfig(**SMALL, logit_scale=3.0)),
    "phi bias": lambda: tf.PhiForCausalLM(tf.PhiConfig(**SMALL)),
}


def tiny(name: str, seed: int = 0) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = MODELS[name]()
        for p in model.parameters():
            if p.ndim == 1:
                torch.nn.init.normal_(p, 1.0 if p.mean() > 0.5 else 0.0, 0.2)
            else:
                torch.nn.init.normal_(p, 0.0, 0.3)  # wide enough for a softcap to bend the logits
    return model.eval()


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let 8 tokens at most go through the head at once, so that a test can see it."""
    monkeypatch.setattr("lmhead.loss.walk.chunk_for", lambda *_: 8)


def batch(B: int = 3, T: int = 17, seed: int = 1) -> dict[str, Tensor]:
    ids = torch.randint(3, V, (B, T), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, :5] = -100
    labels[-1, 10:] = -100
    return {"input_ids": ids, "labels": labels}


def step(model: Any, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


class Widest(TorchDispatchMode):
    """Notes the most rows of logits that any operation gives."""

    rows = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, Tensor) and x.ndim >= 2 and x.shape[-1] == V and x.is_floating_point():
                self.rows = max(self.rows, x.numel() // V)
        return out


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "extra", [{}, {"num_items_in_batch": torch.tensor(29)}, {"num_items_in_batch": 29}], ids=str
)
@pytest.mark.usefixtures("short_chunks")
def test_same_loss_and_gradients(name: str, extra: dict[str, Any]) -> None:
    model = tiny(name)
    loss, grads = step(model, **batch(), **extra)
    patch_loss(model)
    with Widest() as seen:
        patched_loss, patched_grads = step(model, **batch(), **extra)
    assert seen.rows <= 32  # W^T, [d, V], is no logits; those would be 3 * 17 rows
    torch.testing.assert_close(patched_loss, loss, rtol=1e-6, atol=1e-6)
    assert patched_grads.keys() == grads.keys()
    for n, g in grads.items():
        assert (patched_grads[n] - g).norm() <= 1e-5 * g.norm(), n
    unpatch_loss(model)
    with Widest() as seen:
        unpatched_loss, unpatched_grads = step(model, **batch(), **extra)
    assert seen.rows == 3 * 17  # the instrument does see them
    assert torch.equal(unpatched_loss, loss)
    assert all(torch.equal(g, grads[n]) for n, g in unpatched_grads.items())


def test_shifted_labels_positional_labels_and_another_ignore_index() -> None:
    model = tiny("llama")
    inputs = batch()
    shifted = torch.cat([inputs["labels"][:, 1:], torch.full((3, 1), -100)], 1)
    ids = inputs["input_ids"]
    calls: list[Callable[[], Tensor]] = [
        lambda: model(**inputs, shift_labels=shifted).loss,
        lambda: model(ids, None, None, None, None, inputs["labels"]).loss,
        lambda: model(ids, labels=ids, ignore_index=int(ids[0, 3])).loss,
        lambda: model(**inputs, return_dict=False)[0],
        lambda: model(ids, labels=torch.full_like(ids, -100)).loss,
    ]
    expected = [call() for call in calls]
    patch_loss(model)
    got = [call() for call in calls]
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_undoing_leaves_no_trace() -> None:
    model = tiny("gpt2").train()

    def traces() -> dict[str, str]:
        return {f"{n}.{k}": repr(v) for n, m in model.named_modules() for k, v in vars(m).items()}

    before = traces()
    assert patch_loss(model) is model
    assert traces() != before
    patch_loss(model, eval_logits=False)  # once more: no second layer
    assert unpatch_loss(model) is model
    assert traces() == before
    unpatch_loss(model)
    assert traces() == before
    model.loss_function = model.loss_function  # set by hand: stays set
    before = traces()
    unpatch_loss(patch_loss(model))
    assert traces() == before


def test_calls_without_labels_and_generation_are_not_touched() -> None:
    model = tiny("gemma2 softcap")
    ids = batch()["input_ids"]
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    logits, text = model(ids).logits, model.generate(ids, **options)
    patch_loss(model, eval_logits=False)
    assert torch.equal(model(ids).logits, logits)
    assert torch.equal(model.generate(ids, **options), text)
    assert model(**batch()).logits.shape == (3, 0, V)
    assert torch.equal(model(ids).logits, logits)  # also after a call with labels


def test_training_and_evaluation_mode() -> None:
    model = tiny("gpt2")
    with torch.no_grad():
        expected = model(**batch())
    for patched_in in ("train", "eval"):
        patch_loss(getattr(model, patched_in)())
        assert model.train()(**batch()).logits.shape[1] == 0
        assert model.eval()(**batch()).logits.shape[1] == 0
        with torch.no_grad():
            got = model(**batch())
        assert torch.equal(got.logits, expected.logits)  # metrics read them
        assert torch.equal(got.loss, expected.loss)
        patch_loss(model, eval_logits=False)
        with torch.no_grad():
            got = model(**batch())
        assert got.logits.shape == (3, 0, V)
        torch.testing.assert_close(got.loss, expected.loss)


@pytest.mark.usefixtures("short_chunks")
def test_a_copy_is_patched_on_its_own() -> None:
    model = patch_loss(tiny("llama tied"))
    twin = copy.deepcopy(model)
    through_a_file = pickle.load(io.BytesIO(pickle.dumps(model)))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    loss, _ = step(unpatch_loss(tiny("llama tied")), **batch())
    for other in (twin, through_a_file):
        with Widest() as seen:
            got, _ = step(other, **batch())
        torch.testing.assert_close(got, loss)
        assert seen.rows <= 32
    unpatch_loss(twin)
    assert twin(**batch()).logits.shape[1] == 17
    assert model(**batch()).logits.shape[1] == 0


def test_an_error_in_the_model_leaves_the_patch_sound() -> None:
    model = patch_loss(tiny("llama"))
    inputs = batch()
    with pytest.raises(BadInput, match=r"targets have shape \[3, 16\], but h has \[3, 17, 32\]"):
        model(inputs["input_ids"], labels=inputs["labels"][:, :-1])
    with pytest.raises(IndexError):
        model(inputs["input_ids"] + V, labels=inputs["labels"])
    assert model(inputs["input_ids"]).logits.shape == (3, 17, V)


@pytest.mark.usefixtures("short_chunks")
def test_a_resized_and_frozen_head_follows() -> None:
    model = patch_loss(tiny("llama"))
    model.resize_token_embeddings(V + 9, mean_resizing=False)
    model.get_output_embeddings().requires_grad_(False)
    inputs = batch()
    inputs["labels"][1, 4] = V + 8
    out = model(**inputs)
    assert out.logits.shape == (3, 0, V + 9)
    loss = out.loss
    loss.backward()
    assert model.get_output_embeddings().weight.grad is None
    torch.testing.assert_close(loss, unpatch_loss(model)(**inputs).loss)


def test_a_replaced_output_layer_is_left_alone() -> None:
    """As adapters do: the loss is right, if not frugal."""
    model = patch_loss(tiny("llama"))
    loss = model(**batch()).loss
    model.lm_head = torch.nn.Sequential(model.lm_head)
    out = model(**batch())
    assert out.logits.shape == (3, 17, V)
    torch.testing.assert_close(out.loss, loss)


def test_bfloat16_is_no_less_exact() -> None:
    exact = tiny("llama").double()
    model = tiny("llama").bfloat16()
    exact.load_state_dict(model.state_dict())
    oracle = exact(**batch()).loss
    plain = model(**batch()).loss
    patched = patch_loss(model)(**batch()).loss
    assert patched.dtype == torch.float32
    assert abs(patched - oracle) <= abs(plain - oracle) + 1e-3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.nn.Linear(2, 2), "Linear does not call"),
        (lambda: tf.GPT2Model(tf.GPT2Config(n_embd=8, n_layer=1, n_head=1)), "does not call"),
        (
            lambda: tf.BertForMaskedLM(
                tf.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
            ),
            "BertForMaskedLM",
        ),
    ],
)
def test_other_models_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        patch_loss(make())


def test_a_loss_of_ones_own_is_refused() -> None:
    model = tiny("llama")
    model.loss_function = torch.nn.functional.cross_entropy
    with pytest.raises(UnsupportedModel, match="has the loss cross_entropy"):
        patch_loss(model)


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {k: v[i % 3] for k, v in batch(seed=i).items()}


def trained(folder: Path, patched: bool) -> tuple[list[float], float]:
    """Train a tiny Llama for 20 steps; return the logged losses and the evaluation's."""
    model = tiny("llama")
    if patched:
        patch_loss(model)
    arguments = tf.TrainingArguments(
        str(folder),
        max_steps=20,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=3,
    )
    trainer = tf.Trainer(model, arguments, train_dataset=Rows(), eval_dataset=Rows())
    trainer.train()
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    return losses, float(trainer.evaluate()["eval_loss"])


def test_trainer_runs_unchanged_with_the_same_losses(tmp_path: Path) -> None:
    losses, evaluated = trained(tmp_path / "plain", patched=False)
    got, got_evaluated = trained(tmp_path / "patched", patched=True)
    assert len(losses) == len(got) == 20
    assert losses[-1] < losses[0] - 0.5
    assert max(abs(a - b) for a, b in zip(losses, got, strict=True)) < 1e-5
    assert abs(evaluated - got_evaluated) < 1e-5
