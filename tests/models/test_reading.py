"""Folders that transformers and tokenizers would fail on in their own ways are refused in ours."""

import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from lmhead import loading
from lmhead.errors import BadCheckpoint, BadInput, LMHeadError
from lmhead.files.checkpoint import open_checkpoint
from lmhead.head.find.pretrained import causal_config
from lmhead.loading import load
from lmhead.models.reading import first_line, has_odd_sizes, read_tokenizer, refusing


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Any]) -> Path:
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("whole")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tiny("llama", vocab_size=256).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="!").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    for path in whole.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def refused(run: Callable[[], object]) -> str:
    with pytest.raises(LMHeadError) as found:
        run()
    assert "\n" not in str(found.value)
    return str(found.value)


@pytest.mark.parametrize(
    "values",
    [
        {"hidden_size": "32"},  # strict validation: four lines of another class
        {"num_attention_heads": 0},  # ZeroDivisionError
        {"num_attention_heads": 5},
        {"id2label": 7},  # AttributeError
        {"rope_parameters": 7},
        {"layer_types": ["nope"]},
    ],
)
def test_a_configuration_that_transformers_refuses(folder: Path, values: dict[str, Any]) -> None:
    change(folder / "config.json", **values)
    refused(lambda: causal_config(open_checkpoint(folder)))


@pytest.mark.parametrize(
    "values",
    [
        {"vocab_size": -1},  # RuntimeError
        {"text_config": 7},
        {"pad_token_id": 10**8},  # AssertionError
        {"intermediate_size": 2**40},  # other shapes than the files have
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
    ],
)
def test_a_model_that_transformers_cannot_build(folder: Path, values: dict[str, Any]) -> None:
    change(folder / "config.json", **values)
    refused(lambda: load(folder))


@pytest.mark.parametrize("value", [7, 0.5, "x", {"a": 1}, [7], []])
def test_architectures_that_are_no_list_of_names(folder: Path, value: Any) -> None:
    change(folder / "config.json", architectures=value)
    causal_config(open_checkpoint(folder))  # the model type tells as much


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_experts"])
def test_a_billion_layers_are_not_built(folder: Path, key: str) -> None:
    change(folder / "config.json", **{key: 10**9})
    started = time.process_time()
    assert "1,000,000,000" in refused(lambda: load(folder))
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 10**6),
        ("intermediate_size", 10**8),
        ("head_dim", 10**7),
        ("vocab_size", 10**7),
    ],
)
def test_sizes_that_no_tensor_has_take_no_memory(
    folder: Path, key: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would take the memory of such tensors before it compares shapes."""
    monkeypatch.setattr(loading, "model_of", lambda *_: pytest.fail("it went to transformers"))
    change(folder / "config.json", **{key: value})
    assert "tensors have other shapes" in refused(lambda: load(folder))


@pytest.mark.parametrize(
    ("changed", "odd"),
    [
        ({}, False),
        ({"max_position_embeddings": 8192, "bos_token_id": 49_000, "rope_theta": 1e6}, False),
        ({"max_position_embeddings": 10**6}, True),
        ({"intermediate_size": 1537}, True),
        ({"hidden_size": 49_152}, True),  # a size that a tensor has, in the place of another
    ],
)
def test_sizes_are_held_against_the_files(changed: dict[str, Any], odd: bool) -> None:
    config = {"vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, **changed}
    assert has_odd_sizes(config, [(49_152, 576), (1536, 576), (576,)]) == odd


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "7"])
@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"]
)
def test_json_beside_a_tokenizer_that_is_no_object(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    assert name in refused(lambda: read_tokenizer(folder))


@pytest.mark.parametrize("text", ["[" * 100_000, "[]"])
def test_a_generation_config_that_is_no_object(folder: Path, text: str) -> None:
    (folder / "generation_config.json").write_text(text)
    assert "generation_config.json" in refused(lambda: load(folder))


def charsmap(data: bytes) -> dict[str, str]:
    table = base64.b64encode(data).decode()
    return {"type": "Precompiled", "precompiled_charsmap": table}


@pytest.mark.parametrize("data", [b"", b"\0\0\0", b"\xff\xff\xff\xff", b"\xf0\xff\xff\xff1234"])
def test_a_charsmap_that_claims_more_than_it_holds(folder: Path, data: bytes) -> None:
    change(folder / "tokenizer.json", normalizer=charsmap(data))
    assert "charsmap" in refused(lambda: read_tokenizer(folder))


PANIC = """
import sys
from pathlib import Path
from lmhead.errors import LMHeadError
from lmhead.models.reading import read_tokenizer
try:
    read_tokenizer(Path(sys.argv[1]))
except LMHeadError as error:
    print(error)
print("afterwards", file=sys.stderr)
"""


def test_a_panic_of_rust_is_one_line(folder: Path) -> None:
    """It derives from BaseException, and writes up to 234 lines to stderr."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    model |= {"merges": [["a", "b"]], "continuing_subword_prefix": "#####"}
    model["vocab"]["ab"] = 256
    change(folder / "tokenizer.json", model=model)
    done = subprocess.run(
        [sys.executable, "-c", PANIC, str(folder)],
        env=os.environ | {"RUST_BACKTRACE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert len(done.stdout.splitlines()) == 1
    assert "no tokenizer that transformers can load" in done.stdout
    assert done.stderr == "afterwards\n"  # and stderr is there again


def test_a_tokenizer_that_fails_on_a_text(folder: Path) -> None:
    change(folder / "tokenizer.json", model={"type": "WordLevel", "vocab": {"a": 0}} | UNKNOWN)
    model = load(folder)
    assert "cannot read this text" in refused(lambda: model.encode("b"))


UNKNOWN = {"unk_token": "zz"}


def test_half_a_surrogate_pair_is_no_prompt(whole: Path) -> None:
    with pytest.raises(BadInput, match="surrogate"):
        load(whole).encode("a\ud800")


def test_ctrl_c_and_our_own_errors_pass() -> None:
    def what(reason: str) -> LMHeadError:
        return BadCheckpoint(reason)

    for error in (KeyboardInterrupt(), SystemExit(3), BadInput("ours")):
        with pytest.raises(type(error)), refusing(what):
            raise error
    with pytest.raises(BadCheckpoint, match="why it is so"), refusing(what):
        raise ZeroDivisionError("Validation error for 'x':\n   why it is so")
    assert first_line(ValueError()) == "ValueError"
