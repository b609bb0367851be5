"""The report, from each kind of source, against counts made in another way."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from lmhead.errors import BadCheckpoint, BadInput, ModelNotFound, UnsupportedModel
from lmhead.inspect import Footprint, inspect_model
from lmhead.models.known import known_names

V, D = 131, 16


# --- known names -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "vocab_size", "hidden_size", "total", "percent"),
    [
        ("gpt2", 50_257, 768, 124_439_808, 31.02),
        ("gpt-neo-1.3b", 50_257, 2_048, 1_315_575_808, 7.82),
        ("gemma-2b", 256_000, 2_048, 2_506_172_416, 20.92),
        ("gemma-7b", 256_000, 3_072, 8_537_680_896, 9.21),
        ("smollm2-135m", 49_152, 576, 134_515_008, 21.05),
        ("gemma3-270m", 262_144, 640, 268_098_176, 62.58),
        ("llama-3.2-1b", 128_256, 2_048, 1_235_814_400, 21.25),
        ("llama-3-8b", 128_256, 4_096, 8_030_261_248, 6.54),
    ],
)
def test_known_model(
    name: str,
    vocab_size: int,
    hidden_size: int,
    total: int,
    percent: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LMHEAD_CACHE", str(tmp_path))  # where a built-in model is not here
    report = inspect_model(name)
    assert (report.vocab_size, report.hidden_size) == (vocab_size, hidden_size)
    assert report.head_parameters == report.embedding_parameters == vocab_size * hidden_size
    assert report.total_parameters == total
    assert report.head_share is not None
    assert round(100 * report.head_share, 2) == percent
    assert report.tied == (name != "llama-3-8b")
    assert report.counted_from == "configuration"
    assert report.stored_bytes is None
    assert report.tokenizer is None


def test_untied_head_and_embedding_both_count_in_the_common_share() -> None:
    report = inspect_model("llama-3-8b")
    assert report.head_share is not None
    assert report.embedding_and_head_share == pytest.approx(2 * report.head_share)
    tied = inspect_model("llama-3.2-1b")
    assert tied.embedding_and_head_share == tied.head_share


def test_bytes_and_logits_of_gemma_7b() -> None:
    report = inspect_model("gemma-7b", batch=4, sequence=1000)
    head, total = 786_432_000, 8_537_680_896
    assert report.bytes == {
        "float32": Footprint(4 * head, 4 * total),
        "bfloat16": Footprint(2 * head, 2 * total),
        "float16": Footprint(2 * head, 2 * total),
        "int8": Footprint(head, total),
        "int4": Footprint(head // 2, total // 2),
    }
    assert report.logits.full == {"float32": 4_096_000_000, "bfloat16": 2_048_000_000}
    assert report.logits.one_position == {"float32": 1_024_000, "bfloat16": 512_000}


def test_what_is_done_to_the_logits() -> None:
    assert inspect_model("gemma-2-2b").softcap == 30.0
    assert inspect_model("aya-23-8b").scale == 0.0625
    biased = inspect_model("phi-2")
    assert biased.bias
    assert biased.head_parameters == 51_200 * 2_560 + 51_200
    assert inspect_model("opt-350m").hidden_size == 512  # what enters the head, not the layers


@pytest.mark.parametrize("name", known_names())
def test_every_report_is_json(name: str) -> None:
    report = inspect_model(name)
    again = json.loads(json.dumps(report.to_dict()))
    assert again["total_parameters"] == report.total_parameters
    assert again["bytes"]["int8"]["head"] == report.head_parameters


def test_unknown_name() -> None:
    with pytest.raises(ModelNotFound, match=r"is not a folder, a \.gguf file or a known model"):
        inspect_model("smolm2-135m")


@pytest.mark.parametrize("shape", [{"batch": 0}, {"sequence": -1}])
def test_wrong_batch(shape: dict[str, int]) -> None:
    with pytest.raises(BadInput, match="expected at least 1"):
        inspect_model("gpt2", **shape)


# --- folders -----------------------------------------------------------------------------------


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if tensors:
        save_file(tensors, folder / "model.safetensors")
    return folder


def llama(**rest: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": V,
        "hidden_size": D,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 24,
        **rest,
    }


@pytest.mark.parametrize(
    "config",
    [
        llama(tie_word_embeddings=True),
        llama(tie_word_embeddings=False),
        llama(model_type="phi", architectures=["PhiForCausalLM"], num_key_value_heads=2),
        llama(model_type="gemma2", head_dim=8, final_logit_softcapping=5.0),
        llama(model_type="granite", logits_scaling=4.0, tie_word_embeddings=True),
        llama(model_type="gpt_neox", tie_word_embeddings=False),
        llama(model_type="opt", ffn_dim=24, word_embed_proj_dim=8, max_position_embeddings=9),
        {"model_type": "gpt2", "vocab_size": V, "n_embd": D, "n_head": 2, "n_layer": 2,
         "n_positions": 9},
    ],
    ids=lambda c: f"{c['model_type']}-{c.get('tie_word_embeddings')}",
)  # fmt: skip
def test_folder_and_its_configuration_alone_count_what_torch_counts(
    config: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    model.save_pretrained(tmp_path)
    report = inspect_model(tmp_path)
    W = model.get_output_embeddings().weight
    bias = model.get_output_embeddings().bias
    assert (report.vocab_size, report.hidden_size) == tuple(W.shape)
    assert report.total_parameters == sum(p.numel() for p in model.parameters())
    assert report.head_parameters == W.numel() + (0 if bias is None else bias.numel())
    assert report.embedding_parameters == model.get_input_embeddings().weight.numel()
    assert report.tied == (W is model.get_input_embeddings().weight)
    assert report.bias == (bias is not None)
    assert report.dtype == "float32"
    assert report.architecture == type(model).__name__
    assert report.counted_from == "safetensors"
    assert report.stored_bytes == Footprint(4 * report.head_parameters, 4 * report.total_parameters)
    assert report.softcap == config.get("final_logit_softcapping")
    assert report.scale == (0.25 if "logits_scaling" in config else None)
    assert report.warnings == ()

    (tmp_path / "model.safetensors").unlink()
    alone = inspect_model(tmp_path)
    assert alone.counted_from == "configuration"
    for field in ("vocab_size", "hidden_size", "tied", "bias", "softcap", "scale"):
        assert getattr(alone, field) == getattr(report, field)
    assert alone.total_parameters == report.total_parameters
    assert alone.head_share == report.head_share


def test_shards_are_added_up(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**llama(tie_word_embeddings=False))).bfloat16()
    model.save_pretrained(tmp_path, max_shard_size="6KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    report = inspect_model(tmp_path)
    assert report.total_parameters == sum(p.numel() for p in model.parameters())
    assert report.dtype == "bfloat16"
    assert report.stored_bytes == Footprint(2 * V * D, 2 * report.total_parameters)


def test_tied_matrix_stored_twice_counts_once(tmp_path: Path) -> None:
    W = np.zeros((V, D), np.float16)
    tensors = {"lm_head.weight": W, "model.embed_tokens.weight": W.copy()}
    tensors["model.norm.weight"] = np.ones(D, np.float16)
    report = inspect_model(write_folder(tmp_path, llama(tie_word_embeddings=True), tensors))
    assert report.tied
    assert report.total_parameters == V * D + D
    assert report.stored_bytes == Footprint(2 * V * D, 2 * (2 * V * D + D))
    assert len(report.warnings) == 1
    assert "stored twice" in report.warnings[0]


def test_head_missing_although_the_configuration_wants_one(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": np.zeros((V, D), np.float32)}
    report = inspect_model(write_folder(tmp_path, llama(tie_word_embeddings=False), tensors))
    assert report.tied
    assert "says that the head is not tied, but no head is stored" in report.warnings[0]


def test_masks_and_rotary_frequencies_are_no_parameters(tmp_path: Path) -> None:
    tensors = {
        "wte.weight": np.zeros((V, D), np.float32),
        "wpe.weight": np.zeros((9, D), np.float32),
        "h.0.attn.bias": np.zeros((1, 1, 9, 9), np.float32),
        "h.0.attn.masked_bias": np.zeros((), np.float32),
        "h.0.attn.c_attn.bias": np.zeros(3 * D, np.float32),
        "h.0.attn.rotary_emb.inv_freq": np.zeros(4, np.float32),
        "h.0.mask": np.zeros((9, 9), np.bool_),
    }
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": V}
    report = inspect_model(write_folder(tmp_path, config, tensors))
    assert report.total_parameters == V * D + 9 * D + 3 * D


def test_configuration_of_an_unknown_kind_without_weights(tmp_path: Path) -> None:
    config = llama(model_type="mamba", architectures=["MambaForCausalLM"])
    with pytest.raises(UnsupportedModel, match=r"a MambaForCausalLM cannot be counted .* give a"):
        inspect_model(write_folder(tmp_path, config, {}))


def test_configuration_that_lacks_a_size(tmp_path: Path) -> None:
    config = llama()
    del config["intermediate_size"]
    with pytest.raises(UnsupportedModel, match="lacks 'intermediate_size'"):
        inspect_model(write_folder(tmp_path, config, {}))


def test_encoder_is_refused(tmp_path: Path) -> None:
    config = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": V}
    tensors = {
        "bert.embeddings.word_embeddings.weight": np.zeros((V, D), np.float32),
        "cls.predictions.decoder.weight": np.zeros((V, D), np.float32),
    }
    with pytest.raises(UnsupportedModel, match="BertForMaskedLM, which has no head"):
        inspect_model(write_folder(tmp_path, config, tensors))


def test_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"has no config\.json"):
        inspect_model(tmp_path)


def test_pickles_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, llama(), {})
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UnsupportedModel, match="only pickled weights"):
        inspect_model(tmp_path)


def test_shard_that_is_missing(tmp_path: Path) -> None:
    write_folder(tmp_path, llama(), {})
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadCheckpoint, match="lacks 1 of the 1 files"):
        inspect_model(tmp_path)


def test_tokenizer_with_more_ids_than_rows_is_a_warning(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": np.zeros((V, D), np.float32)}
    write_folder(tmp_path, llama(tie_word_embeddings=True), tensors)
    vocab = {f"t{i}": i for i in range(V + 3)}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    report = inspect_model(tmp_path)
    assert report.tokenizer is not None
    assert report.tokenizer.tokens_without_row == 3
    assert report.warnings == (
        f"the tokenizer has 3 ids without a row: its largest is {V + 2}, the head has {V} rows",
    )


# --- GGUF --------------------------------------------------------------------------------------


def write_gguf(path: Path, arch: str, tensors: dict[str, Any], **metadata: float) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        writer.add_float32(f"{arch}.{key}", value)
    writer.add_token_list([f"t{i}" for i in range(V - 2)] + ["[PAD129]", "[PAD130]"])
    writer.add_token_types([1] * (V - 2) + [5, 5])
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_gguf(*names: str) -> dict[str, Any]:
    shapes = {
        "token_embd.weight": (V, D),
        "output.weight": (V, D),
        "output.bias": (V,),
        "output_norm.weight": (D,),
        "rope_freqs.weight": (4,),
    }
    return {name: np.zeros(shapes[name], np.float32) for name in names}


def test_gguf_without_a_head_of_its_own_is_tied(tmp_path: Path) -> None:
    tensors = tiny_gguf("token_embd.weight", "output_norm.weight", "rope_freqs.weight")
    report = inspect_model(write_gguf(tmp_path / "a.gguf", "llama", tensors))
    assert (report.architecture, report.counted_from) == ("llama", "gguf")
    assert (report.vocab_size, report.hidden_size) == (V, D)
    assert report.tied
    assert report.total_parameters == V * D + D  # rotary factors are no parameters
    assert report.dtype == "float32"
    assert report.stored_bytes == Footprint(4 * V * D, 4 * (V * D + D + 4))
    assert report.tokenizer is not None
    assert report.tokenizer.rows_without_token == 2
    assert report.tokenizer.ranges_without_token == ((V - 2, V - 1),)


def test_gguf_with_a_head_and_a_bias(tmp_path: Path) -> None:
    tensors = tiny_gguf("token_embd.weight", "output.weight", "output.bias")
    report = inspect_model(write_gguf(tmp_path / "a.gguf", "phi2", tensors))
    assert not report.tied
    assert report.bias
    assert report.head_parameters == V * D + V
    assert report.total_parameters == 2 * V * D + V


def test_gguf_copy_of_a_head_that_is_always_tied(tmp_path: Path) -> None:
    tensors = tiny_gguf("token_embd.weight", "output.weight")
    report = inspect_model(write_gguf(tmp_path / "a.gguf", "gpt2", tensors))
    assert report.tied
    assert report.total_parameters == V * D
    assert "stored twice" in report.warnings[0]


@pytest.mark.parametrize(("arch", "factor"), [("command-r", 0.25), ("granite", 4.0)])
def test_gguf_softcap_and_scale(arch: str, factor: float, tmp_path: Path) -> None:
    tensors = tiny_gguf("token_embd.weight")
    path = write_gguf(
        tmp_path / "a.gguf", arch, tensors, logit_scale=0.25, final_logit_softcapping=30.0
    )
    report = inspect_model(path)
    assert (report.softcap, report.scale) == (30.0, factor)


def test_gguf_that_is_no_language_model(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", "clip", tiny_gguf("output_norm.weight"))
    with pytest.raises(UnsupportedModel, match=r"no matrix token_embd\.weight"):
        inspect_model(path)


def test_other_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    with pytest.raises(UnsupportedModel, match=r"not a \.gguf file"):
        inspect_model(path)


# --- all of it ---------------------------------------------------------------------------------


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": np.zeros((V, D), np.float32)}
    folder = write_folder(tmp_path / "folder", llama(tie_word_embeddings=True), tensors)
    file = write_gguf(tmp_path / "a.gguf", "llama", tiny_gguf("token_embd.weight"))
    code = (
        "import sys\n"
        "from lmhead.inspect import inspect_model\n"
        "for source in sys.argv[1:]: inspect_model(source)\n"
        "print({'torch', 'transformers', 'numpy', 'gguf', 'tokenizers'} & set(sys.modules))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, "gemma-7b", str(folder), str(file)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == "set()"


@pytest.mark.model
def test_real_smollm2(smollm2: Path, smollm2_gguf: Path) -> None:
    folder, file, name = map(inspect_model, (smollm2, smollm2_gguf, "smollm2-135m"))
    for report in (folder, file, name):
        assert report.head_parameters == 28_311_552
        assert report.total_parameters == 134_515_008
        assert report.tied
    assert folder.tokenizer == file.tokenizer
    assert folder.tokenizer is not None
    assert (folder.tokenizer.ids, folder.tokenizer.rows_without_token) == (49_152, 0)
    assert file.dtype == "Q8_0"


@pytest.mark.gemma
def test_real_gemma3(gemma3: Path, gemma3_gguf: Path) -> None:
    for source in (gemma3, gemma3_gguf):
        report = inspect_model(source)
        assert report.total_parameters == 268_098_176
        assert report.head_parameters == 167_772_160
        assert report.head_share is not None
        assert round(100 * report.head_share, 2) == 62.58
        assert report.tokenizer is not None
        assert report.tokenizer.placeholder_rows == 6_242
