"""Files that lie: counted, or refused by an error of ours, at once and in little memory."""

import json
import os
import time
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from lmhead.errors import BadCheckpoint, BadInput, LMHeadError
from lmhead.inspect import inspect_model
from lmhead.inspect.reach import folder_reach

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def nested(levels: int) -> dict[str, Any]:
    config = LLAMA
    for _ in range(levels):
        config = {"text_config": config}
    return config


def bounded(model: Path) -> None:
    """Inspect it: a report or an error of ours, within two seconds and 100 MB."""
    tracemalloc.start()
    started = time.monotonic()
    said = ""
    try:
        inspect_model(model)
    except LMHeadError as error:
        said = str(error)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert time.monotonic() - started < 2
    assert peak < 100 * 2**20
    assert "\n" not in said
    assert len(said) < 2000


WRONG = [-1, 0, True, 2**40, 10**400, 1.5, float("nan"), "x", None, [], [1], {}, deep(500)]


@pytest.mark.parametrize("key", sorted({*LLAMA, "head_dim", "logit_scale", "logits_scaling"}))
@pytest.mark.parametrize("value", WRONG, ids=lambda v: str(v)[:20])
def test_a_wrong_value_in_the_configuration(tmp_path: Path, key: str, value: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, key: value}))
    bounded(tmp_path)
    shape = (32, 8)
    save_file({"model.embed_tokens.weight": torch.zeros(shape)}, tmp_path / "model.safetensors")
    bounded(tmp_path)


def test_a_list_times_a_width(tmp_path: Path) -> None:
    """Found by the fuzzer: a list of 5,000 key heads, 2**31 wide, was multiplied out."""
    config = {**LLAMA, "num_key_value_heads": list(range(5000)), "head_dim": 2**31 - 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    bounded(tmp_path)


def test_a_billion_layers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 10**9}))
    with pytest.raises(BadCheckpoint, match="layers"):
        inspect_model(tmp_path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "1", '"x"', "null", "{", "\0"])
@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json"],
)
def test_json_that_is_deep_or_no_object(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    (tmp_path / name).write_text(text)
    with pytest.raises(BadCheckpoint):
        inspect_model(tmp_path)


def test_configurations_in_configurations(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(nested(400)))
    bounded(tmp_path)


def test_a_tokenizer_against_rows_without_end(tmp_path: Path) -> None:
    """2**40 rows were once made into a set."""
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 3}}}')
    started = time.monotonic()
    reach = folder_reach(tmp_path, 2**40)
    assert time.monotonic() - started < 1
    assert reach is not None
    assert reach.rows_without_token == 2**40 - 2
    assert reach.ranges_without_token == ((1, 2), (4, 2**40 - 1))


@pytest.mark.parametrize(
    "tokenizer",
    [
        {"model": {"vocab": {"a": [0]}}},
        {"model": {"vocab": {"a": 10**400}}},
        {"model": {"vocab": [[["a"], 0.0]]}},
        {"model": {"vocab": [[]]}},
        {"model": {"vocab": [1, 2]}},
        {"model": {"vocab": {"a": 0}}, "added_tokens": [{"content": ["x"], "id": 1}]},
        {"model": {"vocab": {"a": 0}}, "added_tokens": [1, "x", None]},
    ],
    ids=lambda v: str(v)[:50],
)
def test_tokenizers_of_a_wrong_shape(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    save_file({"lm_head.weight": torch.zeros(32, 8)}, tmp_path / "model.safetensors")
    bounded(tmp_path)


@pytest.mark.parametrize("decoder", [{"x": {}}, {"1": 5}, {"-1": {}}, {"9" * 400: {}}, {"1": {}}])
def test_added_tokens_of_a_wrong_shape(tmp_path: Path, decoder: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    save_file({"lm_head.weight": torch.zeros(32, 8)}, tmp_path / "model.safetensors")
    bounded(tmp_path)


@pytest.mark.parametrize(
    "how",
    [
        {"bits": 0},
        {"bits": -4},
        {"bits": 10**9},
        {"config_groups": {"a": 1, "b": {"weights": "x"}}},
    ],
    ids=str,
)
def test_quantisations_of_a_wrong_shape(tmp_path: Path, how: Any) -> None:
    config = {**LLAMA, "quantization_config": how}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {
        "model.embed_tokens.weight": torch.zeros(32, 8),
        "model.layers.0.mlp.qweight": torch.zeros(8, 8, dtype=torch.int32),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    bounded(tmp_path)


def write_gguf(path: Path, **keys: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((32, 8), np.float32))
    for name, value in keys.items():
        key = name.replace("__", ".")
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_float32(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    "keys",
    [
        {"llama__logit_scale": "x"},
        {"llama__logit_scale": float("nan")},
        {"llama__final_logit_softcapping": [1, 2]},
        {"tokenizer__ggml__tokens": "text"},
        {"tokenizer__ggml__tokens": [1, 2, 3]},
        {"tokenizer__ggml__tokens": ["a", "b"], "tokenizer__ggml__token_type": 1.0},
        {"tokenizer__ggml__tokens": ["a", "b"], "tokenizer__ggml__token_type": "x"},
        {"general__alignment": "x"},
    ],
    ids=str,
)
def test_gguf_keys_of_a_wrong_type(tmp_path: Path, keys: dict[str, Any]) -> None:
    bounded(write_gguf(tmp_path / "x.gguf", **keys))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_pipe_instead_of_a_file_is_not_waited_for(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    bounded(tmp_path)


def test_a_pipe_instead_of_a_gguf_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.gguf")
    with pytest.raises(LMHeadError):
        inspect_model(tmp_path / "x.gguf")


@pytest.mark.parametrize("model", [None, 5, b"x", ["gpt2"], object()])
def test_what_is_no_model(model: Any) -> None:
    with pytest.raises(BadInput, match="expected a path or a name"):
        inspect_model(model)


@pytest.mark.parametrize("model", ["x" * 400, "~nobody-here/x", "a\0b", ""])
def test_names_that_no_file_has(model: str) -> None:
    with pytest.raises(LMHeadError):
        inspect_model(model)


@pytest.mark.parametrize("value", [0, -1, True, 2.5, "8", 10**400])
def test_a_batch_that_is_none(value: Any) -> None:
    with pytest.raises(BadInput, match="expected at least 1"):
        inspect_model("gpt2", batch=value)
