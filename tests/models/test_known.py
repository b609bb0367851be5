"""The known configurations against published totals, and the formula against transformers."""

from collections import Counter
from math import prod
from pathlib import Path

import pytest
import torch

from lmhead.errors import ModelNotFound
from lmhead.inspect.shapes import parameter_shapes
from lmhead.models.known import is_known, known_config, known_names

# Totals in public use for the real weights, a tied head counted once.
PUBLISHED = {
    "aya-23-8b": 8_028_033_024,
    "bloom-1b1": 1_065_314_304,
    "bloom-560m": 559_214_592,
    "bloom-7b1": 7_069_016_064,
    "command-r": 34_980_831_232,
    "distilgpt2": 81_912_576,
    "gemma-2-27b": 27_227_128_320,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2b": 2_506_172_416,
    "gemma-3-1b": 999_885_952,
    "gemma-3-270m": 268_098_176,
    "gemma-7b": 8_537_680_896,
    "gpt-j-6b": 6_050_882_784,
    "gpt-neo-1.3b": 1_315_575_808,
    "gpt-neo-125m": 125_198_592,
    "gpt-neo-2.7b": 2_651_307_520,
    "gpt-neox-20b": 20_554_567_680,
    "gpt2": 124_439_808,
    "gpt2-large": 774_030_080,
    "gpt2-medium": 354_823_168,
    "gpt2-xl": 1_557_611_200,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-2-7b": 6_738_415_616,
    "llama-3-70b": 70_553_706_496,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo": 12_247_782_400,
    "opt-1.3b": 1_315_758_080,
    "opt-125m": 125_239_296,
    "opt-2.7b": 2_651_596_800,
    "opt-350m": 331_196_416,
    "opt-6.7b": 6_658_473_984,
    "phi-1.5": 1_418_270_720,
    "phi-2": 2_779_683_840,
    "phi-3-mini": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "pythia-1.4b": 1_414_647_808,
    "pythia-12b": 11_846_072_320,
    "pythia-160m": 162_322_944,
    "pythia-1b": 1_011_781_632,
    "pythia-2.8b": 2_775_208_960,
    "pythia-410m": 405_334_016,
    "pythia-6.9b": 6_857_302_016,
    "pythia-70m": 70_426_624,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "smollm2-1.7b": 1_711_376_384,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm3-3b": 3_075_098_624,
    "tinyllama-1.1b": 1_100_048_384,
}


def test_every_known_model_has_its_published_total() -> None:
    counted = {
        name: sum(map(prod, parameter_shapes(known_config(name), name).values()))
        for name in known_names()
    }
    assert counted == PUBLISHED


@pytest.mark.parametrize("name", known_names())
def test_shapes_are_those_that_transformers_builds(name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = dict(known_config(name))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert type(model).__name__ in config["architectures"]

    shapes = Counter(tuple(p.shape) for p in model.parameters())  # each shared tensor once
    assert Counter(parameter_shapes(config, name).values()) == shapes

    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied == config["tie_word_embeddings"]


# Switches that no known model turns on, but a folder without weights may.
@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
        {"model_type": "llama", "num_key_value_heads": None},
        {"model_type": "granite", "attention_bias": True, "logits_scaling": 8.0},
        {"model_type": "cohere", "use_qk_norm": True},
        {"model_type": "qwen3", "attention_bias": True, "head_dim": 16},
        {"model_type": "phi", "qk_layernorm": True},
        {"model_type": "gpt_neox", "attention_bias": False},
        {"model_type": "opt", "ffn_dim": 96, "enable_bias": False, "word_embed_proj_dim": 32},
        {"model_type": "opt", "ffn_dim": 96, "layer_norm_elementwise_affine": False},
        {"model_type": "gpt2", "n_inner": 80, "n_embd": 32, "n_layer": 2, "n_positions": 16},
        {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_positions": 16,
         "tie_word_embeddings": False},
    ],
    ids=lambda c: "-".join(str(v) for v in c.values()),
)  # fmt: skip
def test_rare_switches_are_counted_as_transformers_builds_them(config: dict[str, object]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    whole = {
        "vocab_size": 131,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
        "word_embed_proj_dim": 64,
        **config,
    }
    if config["model_type"] == "gpt2":  # its configuration would take these as second names
        whole = {"vocab_size": 131, "n_head": 4, **config}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**whole))
    shapes = Counter(tuple(p.shape) for p in model.parameters())
    assert Counter(parameter_shapes(whole, "tiny").values()) == shapes


def test_names_are_forgiving_about_case_and_the_registry_spelling() -> None:
    assert known_config("GPT2") is known_config("gpt2")
    assert known_config("gemma3-270m") is known_config("gemma-3-270m")
    assert is_known("gemma3-270m")
    assert not is_known("gemma-270b")


def test_a_near_miss_names_the_nearest() -> None:
    with pytest.raises(ModelNotFound, match=r"'gemma-7n' .* did you mean 'gemma-7b'"):
        known_config("gemma-7n")


def test_a_far_miss_lists_what_is_known() -> None:
    with pytest.raises(ModelNotFound, match=r"known are .*gpt2, .*tinyllama"):
        known_config("zzzzzz")


def test_ids_of_the_hub_are_known_without_a_network() -> None:
    assert known_config("google/gemma-7b") is known_config("gemma-7b")
    assert known_config("Google/Gemma-7B-it") is known_config("gemma-7b")
    assert known_config("meta-llama/Llama-3.1-8B") is known_config("llama-3.1-8b")
    assert known_config("mistralai/Mistral-7B-v0.1") is known_config("mistral-7b")
    assert not is_known("somebody/gemma-7b")  # a tune may have other rows


def test_every_id_is_one_of_a_known_model() -> None:
    from lmhead.models import known

    assert set(known._IDS.values()) <= set(known.KNOWN)
    without = set(known.KNOWN) - set(known._IDS.values())
    assert without == set()


def test_inspect_takes_what_the_command_line_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In Python as on the command line, offline: names, ids, and ids that the hub's cache holds."""
    import json

    from huggingface_hub import constants

    import lmhead
    from lmhead.cli import run

    report = lmhead.inspect_model("google/gemma-7b")
    assert report.source == "google/gemma-7b"
    assert report.vocab_size == 256_000
    assert run(["inspect", "-m", "google/gemma-7b", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["vocab_size"] == 256_000

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for owner, rows in (("someone--tiny", 97), ("google--gemma-7b", 101)):
        snapshot = tmp_path / f"models--{owner}" / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        config = {**known_config("gpt2"), "vocab_size": rows}
        (snapshot / "config.json").write_text(json.dumps(config))
        refs = tmp_path / f"models--{owner}" / "refs"
        refs.mkdir()
        (refs / "main").write_text("0" * 40)
    assert lmhead.inspect_model("someone/tiny").vocab_size == 97
    assert lmhead.inspect_model("google/gemma-7b").vocab_size == 101  # the real one is here
