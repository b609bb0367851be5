"""Verifying later, on what the trim's own proof ran on: every form, and whatever was changed."""

import json
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from lmhead.errors import BadInput, LMHeadError
from lmhead.trim.corpus import Corpus
from lmhead.trim.folder import ModelFolder
from lmhead.trim.inputs import REPORT, ProofInputs
from lmhead.trim.keepfile import KeepFile
from lmhead.trim.keepset import Keep
from lmhead.trim.recheck import verify_path
from lmhead.trim.report import TrimRequest
from lmhead.trim.run import trim_model
from lmhead.trim.verify import verify_trim

MakeModel = Callable[..., Path]
FEW = {"positions": 600, "continuations": 20, "max_tokens": 8}


@pytest.fixture(scope="module")
def source(make_model: MakeModel) -> Path:
    return make_model("byte_level", "llama", False)  # a tied random model repeats its input


@pytest.fixture(scope="module")
def corpus(docstrings: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in docstrings[:60]), "utf-8")
    return path


@pytest.fixture(scope="module")
def trimmed(source: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trimmed") / "out"
    trim_model(TrimRequest(str(source), corpus=Corpus((corpus,)), coverage=0.5, **FEW), out)  # type: ignore[arg-type]
    return out


def test_a_right_trim_is_right_without_its_corpus(source: Path, trimmed: Path) -> None:
    report = json.loads((trimmed / REPORT).read_text())
    proof, recorded = verify_path(str(source), trimmed)
    assert (proof.passed, recorded) == (True, True)
    made = {check["name"]: check for check in report["proof"]["checks"]}
    for check in proof.checks[-3:]:  # the same logits, the same prompts
        assert check.to_dict() == made[check.name]
    fresh = made["fresh prompts with other greedy text"]
    assert fresh["tested"] == 10
    assert fresh["failed"] > 0  # told, and explained: no promise was made of these
    assert "dropped token" in fresh["note"]


def test_a_trimmed_folder_is_none_that_llama_cpps_converter_knows(
    source: Path, trimmed: Path, docstrings: tuple[str, ...]
) -> None:
    """It knows a tokenizer by the hash of a text's ids: the tokens are the same, the ids others."""
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (source, trimmed))
    for text in docstrings[:5]:
        assert before.tokenize(text) == after.tokenize(text)
        hashes = {sha256(str(t.encode(text)).encode()).hexdigest() for t in (before, after)}
        assert len(hashes) == 2
    docs = Path(__file__).parents[2] / "docs"
    for name in ("llama_cpp.md", "trim.md"):  # and what to do instead is said
        text = (docs / name).read_text("utf-8")
        assert "converter" in text
        assert "--form gguf" in text


def test_where_nothing_is_recorded_greedy_text_is_told_and_does_not_count(
    source: Path, corpus: Path, trimmed: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(trimmed, out)
    (out / REPORT).unlink()
    proof, recorded = verify_path(str(source), out, corpus=Corpus((corpus,)), proof_prompts=12)
    assert (proof.passed, recorded) == (True, False)
    assert proof.checks[-1].tested == 12


def falsify(name: str, report: dict[str, Any]) -> None:
    kept = report["id_map"]["kept"]
    match name:
        case "another id":
            kept[5] = next(i for i in range(kept[5] + 1, 10**6) if i not in kept)
            kept.sort()
        case "one less":
            del kept[7]
        case "one more":
            kept.append(kept[-1] + 1)
        case "two exchanged":
            kept[3], kept[4] = kept[4], kept[3]
        case "negative":
            kept[0] = -1
        case "another number of rows":
            report["id_map"]["rows"] += 1
        case "not numbers":
            report["id_map"]["kept"] = [float(i) for i in kept]
        case "none":
            del report["id_map"]
        case "another count":
            report["kept_rows"] += 64


@pytest.mark.parametrize(
    "name",
    ["another id", "one less", "one more", "two exchanged", "negative", "another number of rows",
     "not numbers", "none", "another count"],
)  # fmt: skip
def test_a_falsified_id_map_is_found(
    name: str, source: Path, trimmed: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(trimmed, out)
    report = json.loads((out / REPORT).read_text())
    falsify(name, report)
    (out / REPORT).write_text(json.dumps(report))
    proof, _ = verify_path(str(source), out)
    assert not proof.passed
    assert proof.failures.startswith("id map: 1 of")
    assert "lmhead_trim.json" in proof.failures


@pytest.mark.parametrize("key", ["rope_theta", "rms_norm_eps", "num_attention_heads"])
def test_another_setting_of_the_body_is_found(
    key: str, source: Path, trimmed: Path, tmp_path: Path
) -> None:
    """The states below the head are equal only where all settings are."""
    out = tmp_path / "out"
    shutil.copytree(trimmed, out)
    config = json.loads((out / "config.json").read_text())
    config[key] = 2.0 if key == "rms_norm_eps" else 2
    (out / "config.json").write_text(json.dumps(config))
    proof, _ = verify_path(str(source), out)
    assert "settings of config.json" in proof.failures


def test_another_original_is_said(
    source: Path, trimmed: Path, make_model: MakeModel, tmp_path: Path
) -> None:
    proof, _ = verify_path(str(make_model("byte_level", "gpt2")), trimmed)
    assert "is the original the model that this one was trimmed from?" in proof.failures
    proof, _ = verify_path(str(make_model("sentencepiece_bpe", "llama", False)), trimmed)
    assert f"it was made from {str(source)[:40]}" in proof.failures
    with pytest.raises(BadInput, match="the original itself"):
        verify_path(str(source), source)
    with pytest.raises(BadInput, match="there is no"):
        verify_path(str(source), tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(BadInput, match="expected a folder"):
        verify_path(str(source), tmp_path / "notes.txt")


def test_a_keep_set_is_proved_published_and_verified(
    source: Path, corpus: Path, make_model: MakeModel, tmp_path: Path
) -> None:
    out = tmp_path / "keep.safetensors"
    request = TrimRequest(str(source), corpus=Corpus((corpus,)), coverage=0.5, **FEW)  # type: ignore[arg-type]
    report = trim_model(request, out, form="head")
    assert report.proof is not None
    checks = {check.name: check for check in report.proof.checks}
    assert checks["texts with other logits"].failed == 0
    assert checks["prompts with other greedy text"].failed == 0
    assert checks["fresh prompts with other greedy text"].failed > 0
    reported = json.loads((tmp_path / f"keep.safetensors.{REPORT}").read_text())
    assert reported["proof"]["passed"]
    again, recorded = verify_path(str(source), out)
    assert recorded
    assert again.checks[1:] == report.proof.checks[1:]
    other, _ = verify_path(str(make_model("byte_level", "gpt2")), out)
    assert "it was made for the head" in other.failures
    reported["id_map"]["kept"] = reported["id_map"]["kept"][:-1]
    (tmp_path / f"keep.safetensors.{REPORT}").write_text(json.dumps(reported))
    with pytest.raises(LMHeadError, match="do not name the same ids"):
        verify_path(str(source), out)


@pytest.mark.parametrize("name", ["kept", "d2t", "t2d"])
@pytest.mark.parametrize("how", ["gone", "rank", "dtype", "value"])
def test_a_falsified_keep_set_file_is_refused(name: str, how: str, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    from lmhead.trim.idmap import TrimMap

    path = tmp_path / "keep.safetensors"
    KeepFile(TrimMap.of([1, 3, 4, 9], 20), "tiny", "0" * 64).save(path)
    assert KeepFile.load(path).ids.kept == (1, 3, 4, 9)
    tensors = load_file(path)
    metadata = {"kind": "lmhead keep-set", "model": "tiny", "rows": "20", "head_sha256": "0" * 64}
    if how == "gone":
        del tensors[name]
    elif how == "rank":
        tensors[name] = tensors[name].reshape(1, -1)
    elif how == "dtype":
        tensors[name] = tensors[name].astype(np.float32) + 0.5
    else:
        tensors[name] = tensors[name][::-1].copy()
    save_file(tensors, path, metadata)
    with pytest.raises(BadInput, match="not a keep-set file"):
        KeepFile.load(path)


@pytest.mark.parametrize(
    "change",
    [
        {"texts": "x"},
        {"prompts": [[1, -2]]},
        {"prompts": [[1] * 100_000]},
        {"fresh": [[]]},
        {"texts": [[True]]},
        {"max_tokens": 10**9},
        {"max_tokens": "8"},
        {"binds": 1},
    ],
)
def test_inputs_that_lmhead_did_not_write_are_refused(change: dict[str, Any]) -> None:
    good = ProofInputs(((1, 2),), ((1,),), ((2,),), 8, True)
    assert ProofInputs.from_dict(json.loads(json.dumps(good.to_dict()))) == good
    earlier = good.to_dict()
    earlier["unheard"] = earlier.pop("fresh")
    assert ProofInputs.from_dict(earlier) == good
    with pytest.raises(BadInput, match="proof_inputs"):
        ProofInputs.from_dict({**good.to_dict(), **change})


def test_without_runs_the_report_says_so(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = trim_model(TrimRequest(str(source), Keep(ascii=True), run=False), out)
    assert report.proof is not None
    assert len(report.proof.checks) == 4
    ran = trim_model(TrimRequest(str(source), Keep(ascii=True)), tmp_path / "ran")
    assert ran.proof is not None
    assert ran.proof.checks[4].tested == 4  # of the texts of many kinds, those that were kept
    reported = json.loads((out / REPORT).read_text())
    assert (reported["proof"]["models_ran"], reported["proof_inputs"]) == (False, None)
    proof, recorded = verify_path(str(source), out)
    assert (proof.passed, recorded, len(proof.checks)) == (True, False, 6)


def test_the_corpus_is_read_once_to_choose_and_once_to_prove(
    source: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = 0
    real = Corpus.__iter__

    def counted(self: Corpus) -> Any:
        nonlocal readings
        readings += 1
        return real(self)

    monkeypatch.setattr(Corpus, "__iter__", counted)
    request = TrimRequest(str(source), corpus=Corpus((corpus,)), coverage=0.5, **FEW)  # type: ignore[arg-type]
    trim_model(request, tmp_path / "out")
    assert readings == 2


def test_texts_with_tokens_that_have_no_row_are_not_run(source: Path, trimmed: Path) -> None:
    rows = ModelFolder.open(source).rows
    inputs = ProofInputs(((rows, 1),), ((1, rows + 5),), (), 4, False)
    proof = verify_trim(ModelFolder.open(source), trimmed, inputs=inputs)
    assert proof.passed
