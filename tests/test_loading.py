"""From a MODEL to body, head and tokenizer: folders, models in memory, wrong arguments, prompts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import lmhead
from lmhead.body import TorchBody
from lmhead.errors import BadInput, LMHeadError, LMHeadWarning, UnsupportedModel
from lmhead.head import LMHead
from lmhead.inspect import inspect_model
from lmhead.loading import Model, load

V = 97
CONFIG = LlamaConfig(
    vocab_size=V,
    hidden_size=24,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=0,
    eos_token_id=0,
    pad_token_id=0,
)


@pytest.fixture(scope="module")
def net() -> LlamaForCausalLM:
    torch.manual_seed(0)
    made: LlamaForCausalLM = AutoModelForCausalLM.from_config(CONFIG).eval()
    with torch.no_grad():
        for p in made.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return made


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    vocab = {"<eos>": 0, **{chr(31 + i): i for i in range(1, V - 4)}}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>")


@pytest.fixture
def folder(net: LlamaForCausalLM, tokenizer: Any, tmp_path: Path) -> Path:
    net.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def model(net: LlamaForCausalLM, tokenizer: Any) -> Model:
    return load(net, tokenizer=tokenizer)


def test_a_model_in_memory_is_taken_as_it_is(model: Model, net: Any, folder: Path) -> None:
    assert model.body.model is net
    assert model.head.weight is net.lm_head.weight
    assert model.folder is None
    assert model.name == "LlamaForCausalLM"
    stored = load(folder)
    assert stored.folder == folder
    for text in ("one.", "a longer text."):
        assert torch.equal(model.last_hidden(text), stored.last_hidden(text))
    made = lmhead.generate("one.", model, max_tokens=5)[0]
    assert made.ids == lmhead.generate("one.", stored, max_tokens=5)[0].ids


def test_a_tokenizer_may_be_a_folder(net: Any, folder: Path, tokenizer: Any) -> None:
    assert load(net, tokenizer=folder).encode("one") == tokenizer("one")["input_ids"]
    other = load(folder, tokenizer=tokenizer)
    assert other.tokenizer is tokenizer
    assert load(other, tokenizer=tokenizer).body is other.body
    assert load(other) is other


def test_a_model_in_training_mode_is_told(net: Any, tokenizer: Any) -> None:
    net.train()
    try:
        with pytest.warns(LMHeadWarning, match=r"training mode.*model\.eval\(\)"):
            load(net, tokenizer=tokenizer)
        assert net.training  # it is the caller's
    finally:
        net.eval()


@pytest.mark.parametrize(
    ("given", "options", "said"),
    [
        (None, {}, "the model is a NoneType; expected a folder"),
        (7, {}, "the model is a int; expected a folder"),
        ("memory", {}, "a LlamaForCausalLM without its tokenizer"),
        ("memory", {"tokenizer": 5}, "the tokenizer is a int; expected one of transformers"),
        ("memory", {"tokenizer": "/nowhere"}, "no tokenizer folder /nowhere"),
        ("memory", {"body": "max"}, "in memory already"),
        ("memory", {"device": "cpu"}, "device cannot be given: the LlamaForCausalLM is in memory"),
        ("loaded", {"dtype": "bfloat16"}, "dtype cannot be given: .* is already loaded"),
        ("loaded", {"body": "max"}, "already loaded with another body"),
        ("folder", {"body": "jax"}, "body is 'jax'; expected one of auto, torch, llama.cpp, max"),
        ("folder", {"body": "max", "dtype": "float32"}, "float32 on the CPU"),
        ("folder", {"dtype": "int7"}, "dtype is 'int7'; expected one of float32, bfloat16"),
        ("folder", {"dtype": torch.int8}, "dtype is torch.int8; expected one of"),
        ("folder", {"device": "toaster"}, "device is 'toaster', which torch cannot use here"),
        ("folder", {"device": "meta"}, "device is 'meta'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    model: Model, net: Any, folder: Path, given: Any, options: dict[str, Any], said: str
) -> None:
    known = {"memory": net, "loaded": model, "folder": folder}
    with pytest.raises(BadInput, match=said):
        load(known.get(given, given) if isinstance(given, str) else given, **options)


def test_a_module_that_is_no_language_model_is_refused(tokenizer: Any) -> None:
    with pytest.raises(UnsupportedModel, match="Linear has no configuration"):
        load(torch.nn.Linear(3, 3), tokenizer=tokenizer)


def test_dtype_and_device(folder: Path) -> None:
    half = load(folder, dtype="bfloat16", device="cpu")
    assert half.head.weight.dtype == torch.bfloat16
    assert half.last_hidden("one.").dtype == torch.bfloat16
    assert load(folder, dtype=torch.float32).head.weight.dtype == torch.float32


def test_prompts_may_be_ids(model: Model) -> None:
    assert model.encode([5, 6]) == [5, 6]
    assert model.encode(torch.tensor([5, 6])) == [5, 6]  # type: ignore[arg-type]
    for wrong, said in (
        ([], "holds no token"),
        ([5, V], "the prompt holds the id 97; .* has ids from 0 to 96"),
        ([-1], "holds the id -1"),
        ([1.5], r"the prompt is \[1.5\]; expected a text, or a list of ids"),
        ([True], "expected a text, or a list of ids"),
        (None, "the prompt is None"),
        ([1] * 65, "65 tokens"),
    ):
        with pytest.raises(BadInput, match=said):
            model.encode(wrong)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="chat wraps a text"):
        model.encode([5], chat=True)


def test_last_hidden_of_several_prompts(model: Model) -> None:
    texts = ["one.", "a longer text.", "b", "so it is."]
    each = torch.stack([model.last_hidden(text) for text in texts])
    for prompts in (texts, tuple(texts), [model.encode(text) for text in texts]):
        found = model.last_hidden(prompts)
        assert found.shape == (4, 24)
        torch.testing.assert_close(found, each, atol=1e-5, rtol=1e-4)
    assert model.last_hidden(["b"]).shape == (1, 24)
    assert model.last_hidden([7]).shape == (24,)  # one prompt of one id
    with pytest.raises(BadInput, match="the prompt is None"):
        model.last_hidden(["b", None])  # type: ignore[list-item]


def rewrite(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize(
    "value", ["org/repo:fn", "org/repo", "flash_attention_2", {"": "org/repo"}]
)
def test_a_configuration_chooses_no_code(
    folder: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: Any
) -> None:
    from transformers import modeling_utils

    reached: list[str] = []

    def loader(implementation: str, **_: Any) -> None:
        reached.append(implementation)
        raise AssertionError(f"the kernel loader was asked for {implementation}")

    monkeypatch.setattr(modeling_utils, "lazy_import_flash_attention", loader)
    monkeypatch.setattr(modeling_utils, "is_kernels_available", lambda: True)
    expected = load(folder).last_hidden("one.")
    rewrite(folder, **{key: value})
    assert torch.equal(load(folder).last_hidden("one."), expected)
    LMHead.from_pretrained(folder)
    assert reached == []


def test_a_configuration_inside_another_chooses_no_code() -> None:
    from transformers import Gemma3Config

    from lmhead.models.settings import keep_own_code

    config = keep_own_code(
        Gemma3Config(
            text_config={"attn_implementation": "org/repo:fn", "experts_implementation": "x/y"},
            attn_implementation={"vision_config": "org/other"},
        )
    )
    for part in (config, config.text_config, config.vision_config):
        assert part._attn_implementation is None
        assert part._experts_implementation is None
    kept = keep_own_code(LlamaConfig(attn_implementation="eager"))
    assert kept._attn_implementation == "eager"


@pytest.mark.parametrize("reader", [load, LMHead.from_pretrained, inspect_model])
def test_an_adapter_changes_nothing_silently(
    folder: Path, reader: Callable[[Path], object]
) -> None:
    about = {"peft_type": "LORA", "base_model_name_or_path": "someone/else", "r": 1}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    with pytest.raises(LMHeadError, match=r"adapter_config\.json belongs to an adapter.*merge"):
        reader(folder)


def test_all_readers_take_the_same_weights(folder: Path) -> None:
    """A folder with one whole file and an index of others: transformers takes the former."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({n: t * 2 for n, t in tensors.items()}, folder / "b.safetensors", {"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "b.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(LMHead.from_pretrained(folder).weight, load(folder).head.weight)
    config = json.loads((folder / "config.json").read_text())
    config["transformers_weights"] = "b.safetensors"
    (folder / "config.json").write_text(json.dumps(config))
    for reader in (load, LMHead.from_pretrained, inspect_model):
        with pytest.raises(LMHeadError, match="names other weights"):
            reader(folder)


def test_a_tokenizer_is_refused_before_the_weights_are_read(folder: Path) -> None:
    """Both are bad; with gigabytes of weights it matters which one is said first."""
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(LMHeadError, match="lacks 1 of the tensors"):
        load(folder)
    (folder / "tokenizer.json").write_text('{"model": 7}')
    with pytest.raises(LMHeadError, match="no tokenizer that transformers can load"):
        load(folder)
    with pytest.raises(LMHeadError, match="no tokenizer folder /nowhere"):
        load(folder, tokenizer="/nowhere")


def test_bodies_are_torch_unless_asked(model: Model) -> None:
    assert isinstance(model.body, TorchBody)
