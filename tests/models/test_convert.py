"""Tiny random models are written as GGUF as llama.cpp would, converted, and must come back.

The names of the tensors come from the gguf package, not from the tables under test, and the
reference is twofold: the model that was written, and transformers' own reading of the GGUF file.
"""

import json
import math
import struct
import tempfile
import tracemalloc
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
)

from lmhead.errors import BadCheckpoint, LMHeadError, UnsupportedModel
from lmhead.files.gguf import open_gguf
from lmhead.models.convert import convert_gguf
from tiny_gguf import (
    ARCHITECTURES,
    Q,
    V,
    byte_level_vocabulary,
    gemma3,
    gpt2,
    llama,
    randomise,
    write_gguf,
)


def convert(source: Path) -> Path:
    target = source.with_suffix("")
    target.mkdir()
    convert_gguf(source, target)
    return target


def logits(model: PreTrainedModel, length: int = 30) -> torch.Tensor:
    ids = torch.arange(2 * length).reshape(2, length) * 7 % model.config.vocab_size
    with torch.no_grad():
        return model(ids).logits


def read_by_transformers(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_what_was_written_comes_back(arch: str, tied: bool, tmp_path: Path) -> None:
    original = randomise(ARCHITECTURES[arch](tie_word_embeddings=tied))
    folder = convert(write_gguf(tmp_path / "x.gguf", arch, original))
    ours = AutoModelForCausalLM.from_pretrained(folder)
    assert type(ours) is type(original)
    assert ours.dtype == torch.float32
    assert ours.config.tie_word_embeddings is tied
    if arch == "gemma3":  # 1 was added to its norms and taken away again, in float32
        torch.testing.assert_close(logits(ours), logits(original), rtol=1e-4, atol=1e-4)
    else:
        assert torch.equal(logits(ours), logits(original))
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert ("lm_head.weight" in file.keys()) is not tied  # noqa: SIM118
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("kind", [Q.F32, Q.Q4_1], ids=lambda kind: kind.name)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_same_logits_as_transformers_reading_the_gguf(arch: str, kind: Q, tmp_path: Path) -> None:
    original = randomise(ARCHITECTURES[arch]())
    path = write_gguf(tmp_path / "x.gguf", arch, original, kind)
    ours = AutoModelForCausalLM.from_pretrained(convert(path))
    theirs = read_by_transformers(path)
    assert torch.equal(logits(ours), logits(theirs))
    if kind != Q.F32:  # the quantised weights were read, and not something else
        assert not torch.equal(logits(ours), logits(original))


def test_gemma3_beyond_what_transformers_reads(tmp_path: Path) -> None:
    """Scaled rope, its own local base, another window pattern, another head size, a softcap."""
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
    }
    kinds = ["full_attention" if i % 3 == 2 else "sliding_attention" for i in range(7)]
    original = randomise(
        gemma3(
            head_dim=32,
            query_pre_attn_scalar=32,
            rope_parameters=rope,
            layer_types=kinds,
            final_logit_softcapping=4.0,
        )
    )

    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)
        writer.add_float32("gemma3.rope.freq_base_swa", 5000.0)
        writer.add_uint32("gemma3.attention.sliding_window_pattern", 3)
        writer.add_final_logit_softcapping(4.0)

    path = write_gguf(tmp_path / "x.gguf", "gemma3", original, change=change)
    ours = AutoModelForCausalLM.from_pretrained(convert(path))
    assert ours.config.layer_types == kinds
    torch.testing.assert_close(logits(ours), logits(original), rtol=1e-4, atol=1e-4)


def test_gemma3_window_pattern_given_layer_by_layer(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_array("gemma3.attention.sliding_window_pattern", [True, False] * 3 + [True])

    path = write_gguf(tmp_path / "x.gguf", "gemma3", randomise(gemma3()), change=change)
    config = json.loads((convert(path) / "config.json").read_text())
    assert [kind[0] for kind in config["layer_types"]] == list("sfsfsfs")


def test_gpt2_of_any_context_and_width(tmp_path: Path) -> None:
    original = randomise(gpt2(n_positions=48, n_inner=96))
    ours = AutoModelForCausalLM.from_pretrained(
        convert(write_gguf(tmp_path / "x.gguf", "gpt2", original))
    )
    assert ours.config.n_positions == 48
    assert torch.equal(logits(ours, 48), logits(original, 48))


def test_llama_with_linear_rope(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
    original = randomise(llama(rope_parameters=rope))

    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    path = write_gguf(tmp_path / "x.gguf", "llama", original, change=change)
    assert torch.equal(
        logits(AutoModelForCausalLM.from_pretrained(convert(path))), logits(original)
    )


def llama3_factors(head: int, theta: float, factor: float) -> np.ndarray:
    """The factors that llama.cpp's converter works out from Llama 3's configuration."""
    factors = []
    for i in range(0, head, 2):
        wavelength = 2 * math.pi * theta ** (i / head)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192 / 1:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def test_llama3_rope_is_recognised_by_its_factors(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    original = randomise(llama(head_dim=64, rope_parameters=rope, max_position_embeddings=131072))
    factors = llama3_factors(64, 500_000.0, 32.0)
    assert len(set(factors.tolist())) > 4  # the blend between the two bounds is there

    path = write_gguf(
        tmp_path / "x.gguf",
        "llama",
        original,
        change=lambda writer: writer.add_tensor("rope_freqs.weight", factors),
    )
    ours = AutoModelForCausalLM.from_pretrained(convert(path))
    assert ours.config.rope_parameters == original.config.rope_parameters
    assert torch.equal(logits(ours), logits(original))

    other = write_gguf(
        tmp_path / "y.gguf",
        "llama",
        original,
        change=lambda writer: writer.add_tensor("rope_freqs.weight", factors[::-1].copy()),
    )
    with pytest.raises(UnsupportedModel, match="rope factors"):
        convert(other)


# ---- what is refused


def expect(error: type[Exception], match: str, tmp_path: Path, **options: Any) -> None:
    arch = options.pop("arch", "llama")
    model = randomise(options.pop("model", None) or llama())
    path = write_gguf(tmp_path / "x.gguf", arch, model, **options)
    with pytest.raises(error, match=match) as caught:
        convert(path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "x" / "model.safetensors").exists()


def test_another_architecture_is_named_with_the_way_out(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=r"'mamba'.*llama, gemma3, gpt2.*safetensors"):
        convert(tmp_path / "x.gguf")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda w: w.add_expert_count(8), "expert_count = 8"),
        (lambda w: w.add_logit_scale(0.5), "logit_scale = 0.5"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), "scaling 'yarn'"),
        (lambda w: w.add_value_length(8), "different widths"),
        (lambda w: w.add_string("general.type", "adapter"), "type 'adapter'"),
        (lambda w: w.add_tensor("blk.0.attn_q.bias", np.zeros(64, np.float32)), "attn_q.bias"),
    ],
    ids=["experts", "logit scale", "yarn", "value length", "adapter", "bias"],
)
def test_what_would_be_lost_is_refused(change: Any, match: str, tmp_path: Path) -> None:
    expect(UnsupportedModel, match, tmp_path, change=change)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    match = r"lacks the tensor blk\.1\.ffn_up\.weight"
    expect(BadCheckpoint, match, tmp_path, drop=("blk.1.ffn_up.weight",))


def test_more_layers_than_there_are_is_no_endless_loop(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", "llama", randomise(llama()))
    key = b"llama.block_count" + struct.pack("<I", 4)
    content = path.read_bytes().replace(
        key + struct.pack("<I", 2), key + struct.pack("<I", 2**32 - 1)
    )
    path.write_bytes(content)
    with pytest.raises(BadCheckpoint, match=r"lacks the tensor blk\.2\."):
        convert(path)


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", "llama", randomise(llama()))
    key = b"llama.feed_forward_length" + struct.pack("<I", 4)
    content = path.read_bytes().replace(key + struct.pack("<I", 96), key + struct.pack("<I", 95))
    path.write_bytes(content)
    with pytest.raises(BadCheckpoint, match=r"shape \(96, 64\), expected \(95, 64\)"):
        convert(path)


def test_truncated_data_is_a_bad_checkpoint(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", "llama", randomise(llama()))
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(BadCheckpoint, match="truncated"):
        convert(path)
    assert not list((tmp_path / "x").iterdir())


def test_more_tokens_than_rows_is_a_bad_checkpoint(tmp_path: Path) -> None:
    expect(
        BadCheckpoint,
        "103 tokens but an embedding of 99 rows",
        tmp_path,
        tokenizer=lambda writer: byte_level_vocabulary(writer, V + 4),
    )


def test_fewer_tokens_than_rows_is_padding(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "x.gguf",
        "llama",
        randomise(llama()),
        tokenizer=lambda writer: byte_level_vocabulary(writer, V - 9),
    )
    folder = convert(path)
    assert len(AutoTokenizer.from_pretrained(folder)) == V - 9
    assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == V


# ---- how it is done


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # arithmetic on damaged numbers
def test_a_damaged_file_converts_or_is_an_error_of_ours(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", "llama", randomise(llama()))
    whole = path.read_bytes()
    header = min(tensor.offset for tensor in open_gguf(path).tensors.values())
    failed = 0
    for position in range(24, header, 5):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x81]) + whole[position + 1 :])
        with tempfile.TemporaryDirectory(dir=tmp_path) as target:
            try:
                convert_gguf(path, Path(target))
            except LMHeadError:
                failed += 1
    assert failed > header / 5 / 2


def test_memory_never_holds_the_embedding(tmp_path: Path) -> None:
    rows = 60_000
    original = llama(vocab_size=rows, pad_token_id=None)
    path = write_gguf(tmp_path / "x.gguf", "llama", original, Q.Q8_0)
    convert(path)  # imports are paid here
    again = tmp_path / "again"
    again.mkdir()
    tracemalloc.start()
    convert_gguf(path, again)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < rows * 64 * 4 / 2


def test_progress_adds_up(tmp_path: Path) -> None:
    steps: dict[str, list[int]] = {}

    @contextmanager
    def progress(title: str, total: int | None = None):  # type: ignore[no-untyped-def]
        steps[title] = [total or 0]
        yield steps[title].append

    path = write_gguf(tmp_path / "x.gguf", "llama", randomise(llama()))
    (tmp_path / "x").mkdir()
    convert_gguf(path, tmp_path / "x", progress)
    total, *parts = steps["converting the weights"]
    assert total == sum(parts) > 0
