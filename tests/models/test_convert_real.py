"""The real models: converted, they compute what transformers' own reading of the file computes."""

import tempfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmhead.files.gguf import GGUFArray, open_gguf
from lmhead.models.convert import convert_gguf

Q = gguf.GGMLQuantizationType


def without_vocabulary(source: Path, target: Path) -> Path:
    """Copy the model without its tokenizer, on which transformers spends most of its reading."""
    file = open_gguf(source)
    arch = file.metadata["general.architecture"]
    writer = gguf.GGUFWriter(target, arch)
    for key, value in file.metadata.items():
        if key.startswith(("tokenizer.", "general.")) or isinstance(value, GGUFArray):
            continue
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(key, value)
    if f"{arch}.vocab_size" not in file.metadata:
        writer.add_vocab_size(file.tensors["token_embd.weight"].shape[0])
    data = np.memmap(source, np.uint8, "r")
    for tensor in file.tensors.values():
        raw = data[tensor.offset : tensor.offset + tensor.nbytes]
        kind = Q[tensor.type]
        if kind == Q.F32:
            writer.add_tensor(tensor.name, raw.view(np.float32).reshape(tensor.shape))
        else:
            writer.add_tensor(tensor.name, raw.reshape(*tensor.shape[:-1], -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def same_as_transformers(folder: Path, source: Path, length: int) -> None:
    ours = AutoModelForCausalLM.from_pretrained(folder)
    assert ours.dtype == torch.float32
    ids = torch.arange(length)[None] * 977 % ours.config.vocab_size
    with tempfile.TemporaryDirectory() as place:  # large: gone at once, not when pytest cleans up
        without_vocabulary(source, Path(place) / "x.gguf")
        theirs = AutoModelForCausalLM.from_pretrained(
            place, gguf_file="x.gguf", dtype=torch.float32
        ).eval()
    with torch.no_grad():  # the last positions have seen all the others
        z = ours(ids, logits_to_keep=20).logits
        assert torch.equal(z, theirs(ids, logits_to_keep=20).logits)
    assert z.std() > 1


@pytest.mark.model
def test_smollm2_has_the_logits_of_transformers_own_reading(
    smollm2: Path, smollm2_gguf: Path
) -> None:
    same_as_transformers(smollm2, smollm2_gguf, 40)


@pytest.mark.model
def test_the_cached_folder_is_what_the_conversion_writes(smollm2: Path, smollm2_gguf: Path) -> None:
    """Fails when convert_gguf changes and CONVERSION does not: old caches would stay in use."""
    with tempfile.TemporaryDirectory() as place:
        convert_gguf(smollm2_gguf, Path(place))
        for made in Path(place).iterdir():
            if made.suffix == ".json":
                assert made.read_bytes() == (smollm2 / made.name).read_bytes()


@pytest.mark.model
def test_smollm2_knows_the_capital_of_france(smollm2: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    with torch.no_grad():
        z = model(**tokenizer("The capital of France is", return_tensors="pt")).logits[0, -1]
    p, id_ = z.softmax(-1).max(-1)
    assert tokenizer.decode(id_) == " Paris"
    assert abs(p.item() - 0.77) < 0.01


@pytest.mark.gemma
def test_gemma3_has_the_logits_of_transformers_own_reading(gemma3: Path, gemma3_gguf: Path) -> None:
    same_as_transformers(gemma3, gemma3_gguf, 530)  # longer than its sliding window of 512
