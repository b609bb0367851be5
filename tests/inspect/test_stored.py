"""Quantised folders: packed weights count as what they unpack to, scales as nothing."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from lmhead.inspect import inspect_model

V, D, F = 128, 64, 256
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": V,
    "hidden_size": D,
    "tie_word_embeddings": False,
}
PLAIN = {
    "model.embed_tokens.weight": np.zeros((V, D), np.float16),
    "lm_head.weight": np.zeros((V, D), np.float16),
    "model.norm.weight": np.zeros(D, np.float16),
}
WHOLE = 2 * V * D + D + F * D  # with one matrix [F, D] in a layer
UP = "model.layers.0.mlp.up_proj"


def report_of(folder: Path, how: dict[str, Any] | None, tensors: dict[str, Any]) -> Any:
    config = CONFIG | ({} if how is None else {"quantization_config": how})
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return inspect_model(folder)


GPTQ = {
    f"{UP}.qweight": np.zeros((D // 8, F), np.int32),
    f"{UP}.qzeros": np.zeros((1, F // 8), np.int32),
    f"{UP}.scales": np.zeros((1, F), np.float16),
    f"{UP}.g_idx": np.zeros(D, np.int32),
}
BITSANDBYTES = {
    f"{UP}.weight": np.zeros((F * D // 2, 1), np.uint8),
    f"{UP}.weight.absmax": np.zeros(F, np.uint8),
    f"{UP}.weight.nested_absmax": np.zeros(4, np.float32),
    f"{UP}.weight.quant_map": np.zeros(16, np.float32),
    f"{UP}.weight.quant_state.bitsandbytes__nf4": np.zeros(90, np.uint8),
}
BITSANDBYTES_8 = {
    f"{UP}.weight": np.zeros((F, D), np.int8),
    f"{UP}.SCB": np.zeros(F, np.float32),
    f"{UP}.weight_format": np.zeros((), np.uint8),
}
COMPRESSED = {
    f"{UP}.weight_packed": np.zeros((F, D // 8), np.int32),
    f"{UP}.weight_scale": np.zeros((F, 1), np.float16),
    f"{UP}.weight_shape": np.zeros(2, np.int64),
}
MXFP4 = {
    f"{UP}_blocks": np.zeros((F, D // 32, 16), np.uint8),
    f"{UP}_scales": np.zeros((F, D // 32), np.uint8),
}


@pytest.mark.parametrize(
    ("how", "layer"),
    [
        ({"quant_method": "gptq", "bits": 4}, GPTQ),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, BITSANDBYTES),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, BITSANDBYTES_8),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4}}},
            },
            COMPRESSED,
        ),
        ({"quant_method": "mxfp4"}, MXFP4),
    ],
    ids=lambda value: value.get("quant_method", ""),
)
def test_packed_layers(how: dict[str, Any], layer: dict[str, Any], tmp_path: Path) -> None:
    report = report_of(tmp_path, how, PLAIN | layer)
    assert report.total_parameters == WHOLE
    assert report.head_parameters == V * D
    assert report.dtype == "float16"
    assert report.stored_bytes.total == sum(t.nbytes for t in (PLAIN | layer).values())
    assert report.warnings == ()


def test_packed_head(tmp_path: Path) -> None:
    tensors = PLAIN | {
        "lm_head.qweight": np.zeros((D // 8, V), np.int32),
        "lm_head.scales": np.zeros((1, V), np.float16),
    }
    del tensors["lm_head.weight"]
    report = report_of(tmp_path, {"quant_method": "gptq", "bits": 4}, tensors)
    assert not report.tied
    assert (report.vocab_size, report.hidden_size) == (V, D)
    assert report.dtype == "packed 4-bit"
    assert report.stored_bytes.head == V * D // 2
    assert report.total_parameters == 2 * V * D + D


def test_packing_that_is_not_explained_is_said_and_not_guessed(tmp_path: Path) -> None:
    report = report_of(tmp_path, None, PLAIN | GPTQ)
    assert report.total_parameters is None
    assert report.head_share is None
    assert report.bytes["int8"].total is None
    assert report.head_parameters == V * D
    assert "1 packed tensors could not be counted" in report.warnings[0]
