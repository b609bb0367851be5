"""The head read from a folder is the head of the model that transformers loads from it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
)

from lmhead.errors import BadCheckpoint, UnsupportedModel
from lmhead.files.checkpoint import Checkpoint
from lmhead.head import LMHead

Tiny = Callable[..., PreTrainedModel]


def check(folder: Path, model: PreTrainedModel | None = None) -> LMHead:
    """Compare with the model that transformers loads, in every bit and every word."""
    expected = LMHead.from_model(model or AutoModelForCausalLM.from_pretrained(folder))
    head = LMHead.from_pretrained(folder)
    assert repr(head) == repr(expected)
    assert head.sha256 == expected.sha256
    for width, from_block in ((head.state_size, True), (head.hidden_size, False)):
        h = torch.randn(5, width, generator=torch.Generator().manual_seed(0))
        h = h.to(next((head.norm or head).parameters()).dtype)
        assert torch.equal(head(h, from_block=from_block), expected(h, from_block=from_block))
    return head


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    save_file(change(tensors), path, metadata={"format": "pt"})


NAMES = "bert bloom cohere deepseek_v4 electra gemma2 gemma3 gemma3_text gpt2 gpt_neox granite"
NAMES += " inkling_text llama mamba megatron-bert opt phi qwen3_moe reformer rwkv xlm xlnet"


@pytest.mark.parametrize("name", NAMES.split())
def test_every_kind(name: str, tiny: Tiny, tmp_path: Path) -> None:
    tiny(name).save_pretrained(tmp_path)
    check(tmp_path)


@pytest.mark.parametrize("name", ["gemma3_text", "hy_v4", "llama", "mamba", "opt", "zaya"])
def test_bfloat16(name: str, tiny: Tiny, tmp_path: Path) -> None:
    tiny(name).to(torch.bfloat16).save_pretrained(tmp_path)
    head = check(tmp_path)
    # hy_v4 keeps its output layer in float32 whatever the rest is.
    assert head.weight.dtype == (torch.float32 if name == "hy_v4" else torch.bfloat16)


@pytest.mark.parametrize("tied", [True, False])
def test_sharded(tied: bool, tiny: Tiny, tmp_path: Path) -> None:
    tiny("llama", tie_word_embeddings=tied).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert check(tmp_path).tied == tied


def test_gpt2_without_its_prefix(tiny: Tiny, tmp_path: Path) -> None:
    """The first GPT-2 checkpoints name their tensors wte.weight and ln_f.weight."""
    tiny("gpt2").save_pretrained(tmp_path)
    rewrite(tmp_path, lambda ts: {k.removeprefix("transformer."): t for k, t in ts.items()})
    assert "wte.weight" in load_file(tmp_path / "model.safetensors")
    check(tmp_path)


def test_multimodal_checkpoints_under_their_older_names(tiny: Tiny, tmp_path: Path) -> None:
    tiny("gemma3").save_pretrained(tmp_path)
    old = "language_model.model."
    rewrite(
        tmp_path,
        lambda ts: {k.replace("model.language_model.", old): t for k, t in ts.items()},
    )
    assert f"{old}norm.weight" in load_file(tmp_path / "model.safetensors")
    check(tmp_path)


def test_tied_but_stored_as_the_output_layer(tiny: Tiny, tmp_path: Path) -> None:
    tiny("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    rewrite(
        tmp_path, lambda ts: {k.replace("model.embed_tokens", "lm_head"): t for k, t in ts.items()}
    )
    assert check(tmp_path).tied


@pytest.mark.parametrize("equal", [True, False])
def test_tied_but_stored_twice(equal: bool, tiny: Tiny, tmp_path: Path) -> None:
    tiny("llama", tie_word_embeddings=True).save_pretrained(tmp_path)

    def twice(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        copy = tensors["model.embed_tokens.weight"].clone()
        return {**tensors, "lm_head.weight": copy if equal else copy + 1}

    rewrite(tmp_path, twice)
    assert check(tmp_path).tied == equal


def test_the_configurations_dtype_counts(tiny: Tiny, tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"dtype": "bfloat16"}))
    assert check(tmp_path).weight.dtype == torch.bfloat16
    path.write_text(json.dumps({k: v for k, v in config.items() if k != "dtype"}))
    assert check(tmp_path).weight.dtype == torch.float32


def test_a_generating_model_outside_the_causal_mapping(
    tiny_config: Callable[..., Any], tmp_path: Path
) -> None:
    vision = {"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 16}
    vision |= {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    config = LlavaConfig(text_config=tiny_config("llama").to_dict(), vision_config=vision)
    model = LlavaForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    check(tmp_path, model)


# --- nothing else is read -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", {"lm_head.weight", "model.norm.weight"}),
        ("gemma3_text", {"model.embed_tokens.weight", "model.norm.weight"}),
        ("gpt2", {"transformer.wte.weight", "transformer.ln_f.weight", "transformer.ln_f.bias"}),
    ],
)
def test_only_the_heads_tensors_are_read(
    name: str, expected: set[str], tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny(name).save_pretrained(tmp_path)
    read: list[str] = []
    original = Checkpoint.read

    def spy(checkpoint: Checkpoint, tensor: str, rows: slice | None = None) -> Tensor:
        read.append(tensor)
        return original(checkpoint, tensor, rows)

    monkeypatch.setattr(Checkpoint, "read", spy)
    LMHead.from_pretrained(tmp_path)
    assert sorted(read) == sorted(expected)


def test_a_ruined_body_does_no_harm(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny("llama")
    model.save_pretrained(tmp_path)

    def ruin(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, tensor in tensors.items():
            if "layers" in name or "embed" in name:
                tensor.fill_(torch.nan)
        return tensors

    rewrite(tmp_path, ruin)
    h = torch.ones(2, 32)
    assert torch.equal(LMHead.from_pretrained(tmp_path)(h), LMHead.from_model(model)(h))


_PEAK = """
import sys
from pathlib import Path
import torch{more}

def peak():  # not ru_maxrss, which begins with what the parent process had
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024

before = peak()
from lmhead.head import LMHead
head = LMHead.from_pretrained(sys.argv[1])
head.sha256
print((peak() - before) / head.weight.nbytes)
"""


def peak_of(folder: Path, more: str = "") -> float:
    """Measure, in a process of its own, how many times its own bytes a head takes to load."""
    if not Path("/proc/self/status").exists():
        pytest.skip("only Linux tells the peak of a process's memory in /proc")
    script = _PEAK.format(more=more)
    command = [sys.executable, "-c", script, str(folder)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_peak_memory(tiny_config: Callable[..., Any], tmp_path: Path) -> None:
    """Loading a head of 256 MB takes the head's own pages and little more."""
    config = tiny_config("llama", vocab_size=100_000, hidden_size=640, tie_word_embeddings=True)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    tensors = {"embed_tokens": torch.zeros(100_000, 640), "norm": torch.ones(640)}
    named = {f"model.{name}.weight": tensor for name, tensor in tensors.items()}
    save_file(named, tmp_path / "model.safetensors")
    # The code of the model itself takes half as much as this head, so it is there before.
    more = "\nfrom transformers import AutoModelForCausalLM, LlamaForCausalLM"
    assert 0.9 < peak_of(tmp_path, more) < 1.3


@pytest.mark.gemma
def test_peak_memory_of_gemma(gemma3: Path) -> None:
    assert 0.9 < peak_of(gemma3) < 1.3


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("auto", "name", "message"),
    [
        (AutoModelForMaskedLM, "bert", r"BertForMaskedLM.*AutoModelForCausalLM loads"),
        (AutoModel, "bert", r"BertModel.*AutoModelForCausalLM loads"),
        (AutoModel, "llama", r"LlamaModel.*AutoModelForCausalLM loads"),
        (AutoModelForMaskedLM, "distilbert", r"DistilBertForMaskedLM.*AutoModelForCausalLM loads"),
    ],
)
def test_models_without_a_generating_head(
    auto: Any, name: str, message: str, tiny_config: Callable[..., Any], tmp_path: Path
) -> None:
    auto.from_config(tiny_config(name)).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=message):
        LMHead.from_pretrained(tmp_path)


def test_nan_in_the_stored_head(tiny: Tiny, tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)

    def spoil(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors["lm_head.weight"][41, 3] = torch.nan
        return tensors

    rewrite(tmp_path, spoil)
    with pytest.raises(BadCheckpoint, match=r"weight holds 1 numbers.*row 41"):
        LMHead.from_pretrained(tmp_path)


def test_a_head_that_is_missing(tiny: Tiny, tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    rewrite(tmp_path, lambda ts: {k: t for k, t in ts.items() if k != "lm_head.weight"})
    with pytest.raises(BadCheckpoint, match=r"no tensor for the head's weight.*lm_head\.weight"):
        LMHead.from_pretrained(tmp_path)


def test_a_head_of_another_size(tiny: Tiny, tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    rewrite(tmp_path, lambda ts: ts | {"lm_head.weight": ts["lm_head.weight"][:90].clone()})
    with pytest.raises(BadCheckpoint, match=r"\[90, 32\].*expects \[99, 32\]"):
        LMHead.from_pretrained(tmp_path)


def test_a_quantised_head(tiny: Tiny, tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    rewrite(tmp_path, lambda ts: ts | {"lm_head.weight": ts["lm_head.weight"].to(torch.int8)})
    with pytest.raises(UnsupportedModel, match=r"stored as I8.*before it was quantised"):
        LMHead.from_pretrained(tmp_path)


def test_a_quantised_body_does_no_harm(tiny: Tiny, tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    expected = LMHead.from_pretrained(tmp_path)
    path = tmp_path / "config.json"
    method = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    path.write_text(json.dumps(json.loads(path.read_text()) | method))
    assert LMHead.from_pretrained(tmp_path).sha256 == expected.sha256


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "unheard_of"},
        {},
        {"model_type": "unheard_of", "auto_map": {"AutoConfig": "configuration_x.XConfig"}},
    ],
)
def test_an_unknown_architecture(config: dict[str, Any], tiny: Tiny, tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "configuration_x.py").write_text("raise SystemExit('remote code was run')")
    with pytest.raises(UnsupportedModel, match="does not know the model"):
        LMHead.from_pretrained(tmp_path)


def test_a_configuration_that_makes_no_model(tiny: Tiny, tmp_path: Path) -> None:
    tiny("gpt_neo").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"num_heads": 4', '"num_heads": 5'))
    with pytest.raises(UnsupportedModel, match=r"cannot be built from .*config\.json"):
        LMHead.from_pretrained(tmp_path)


@pytest.mark.model
def test_smollm2(smollm2: Path) -> None:
    head = check(smollm2)
    assert (head.vocab_size, head.hidden_size, head.tied) == (49_152, 576, True)
