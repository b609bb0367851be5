"""A tokenizer from its files alone is the one that transformers loads."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from lmhead.trim.folder import ModelFolder, render_conversations, template_texts
from lmhead.trim.plain_tokenizer import PlainTokenizer
from lmhead.trim.tokenizer import TokenizerJson
from lmhead.trim.verify import verify_trim


def of(folder: Path) -> PlainTokenizer | None:
    return PlainTokenizer.of(folder, TokenizerJson.read(folder / "tokenizer.json"))


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece_bpe", "unigram", "wordpiece"])
def test_it_says_what_transformers_says(kind: str, make_model: Callable[..., Path]) -> None:
    folder = make_model(kind, "bert" if kind == "wordpiece" else "llama")
    plain, theirs = of(folder), AutoTokenizer.from_pretrained(folder)
    assert plain is not None
    assert set(theirs.all_special_tokens) <= set(plain.all_special_tokens)
    texts = ["The capital of France is Paris.", "<|chat|>user\nnaïve — №5\n"]
    for text in (*texts, *template_texts(theirs)):
        for special in (False, True):
            wanted = theirs(text, add_special_tokens=special)["input_ids"]
            assert plain(text, add_special_tokens=special)["input_ids"] == wanted
    assert plain.chat_template == theirs.chat_template
    assert render_conversations(plain) == render_conversations(theirs)  # type: ignore[arg-type]
    assert template_texts(plain) == template_texts(theirs)  # type: ignore[arg-type]
    required = ModelFolder.open(folder, plain=True).required_ids()
    assert required == ModelFolder.open(folder).required_ids()


def test_where_the_files_do_not_say_all_transformers_is_asked(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_model("byte_level", "llama")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    assert of(tmp_path) is not None
    config = tmp_path / "tokenizer_config.json"
    whole = config.read_text("utf-8")
    config.write_text(whole.replace('"eos_token": "<|endoftext|>"', '"eos_token": "<other>"'))
    assert of(tmp_path) is None
    config.write_text(whole.replace("TokenizersBackend", "GPT2Tokenizer"))
    assert of(tmp_path) is None
    config.write_text(whole)
    (tmp_path / "special_tokens_map.json").write_text("{}")
    assert of(tmp_path) is None


def test_a_trim_by_files_alone_imports_neither_torch_nor_transformers(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    ids = tmp_path / "ids"
    ids.write_text("\n".join(map(str, range(300, 600))))
    script = """
import sys
from pathlib import Path
from lmhead.trim.keepset import Keep
from lmhead.trim.report import TrimRequest
from lmhead.trim.run import trim_model

model, ids, out = map(Path, sys.argv[1:])
report = trim_model(TrimRequest(str(model), Keep(ids=ids), run=False), out)
assert report.proof.passed and report.proof.inputs is None
print({"torch", "transformers"} & set(sys.modules))
"""
    places = [str(make_model("byte_level", "llama")), str(ids), str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-c", script, *places], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "set()"


def test_a_ready_keep_set_is_proved_by_a_run_without_transformers(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    ids = tmp_path / "ids"
    ids.write_text("\n".join(map(str, range(300, 600))))
    script = """
import json
import sys
from pathlib import Path
from lmhead.trim.keepset import Keep
from lmhead.trim.report import TrimRequest
from lmhead.trim.run import trim_model

model, ids, out = map(Path, sys.argv[1:])
report = trim_model(TrimRequest(str(model), Keep(ids=ids)), out)
heavy = {"torch", "torch._dynamo", "transformers"}
print(json.dumps([report.proof.to_dict(), sorted(heavy & set(sys.modules))]))
"""
    places = [str(make_model("byte_level", "llama")), str(ids), str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-c", script, *places], check=True, capture_output=True, text=True
    )
    proof, imported = json.loads(done.stdout)
    assert imported == ["torch"]
    assert (proof["passed"], proof["models_ran"], proof["ran_by"]) == (True, True, "lmhead")
    # And transformers, which runs the folder as others do, finds the same.
    again = verify_trim(ModelFolder.open(Path(places[0])), Path(places[2]))
    assert again.ran_by == "transformers"
    assert again.passed
    assert [check.to_dict() for check in again.checks[-2:]] == proof["checks"][-2:]
