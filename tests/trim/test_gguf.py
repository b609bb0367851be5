"""GGUF to GGUF: rows as they are quantised, a smaller tokenizer, nothing else changed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from lmhead.errors import BadInput, LMHeadError, UnsupportedModel
from lmhead.files.gguf import GGUFFile, open_gguf
from lmhead.models.convert import convert_gguf
from lmhead.trim.corpus import Corpus
from lmhead.trim.gguf import closure, read_tokenizer, write_trimmed_gguf
from lmhead.trim.idmap import TrimMap
from lmhead.trim.keepset import Keep
from lmhead.trim.recheck import verify_path
from lmhead.trim.report import TrimRequest
from lmhead.trim.run import plan_trim, trim_model

Make = Callable[[str], dict[str, Any]]
D, LAYERS = 64, 1


def write_gguf(path: Path, data: dict[str, Any], kind: str, *, per_layer: bool = False) -> Path:
    """Write a tiny Llama with a Q8_0 embedding and head around a tokenizer."""
    vocab = data["model"]["vocab"]
    names = {**vocab, **{t["content"]: t["id"] for t in data["added_tokens"]}}
    tokens = sorted(names, key=names.__getitem__)
    special = {t["content"] for t in data["added_tokens"]}
    V = len(tokens)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(D)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(V)
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    types = [3 if t in special else 6 if t.startswith("<0x") else 1 for t in tokens]
    writer.add_token_types(types)
    if kind == "gpt2":
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_merges([" ".join(m) for m in data["model"]["merges"]])
        writer.add_eos_token_id(names["<|endoftext|>"])
    else:
        writer.add_token_scores([-float(i) for i in range(V)])
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
    rng = np.random.default_rng(0)

    def add(name: str, *shape: int, quantised: bool = False) -> None:
        x = rng.standard_normal(shape).astype(np.float32)
        if quantised:
            kind_ = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(x, kind_), raw_dtype=kind_)
        else:
            writer.add_tensor(name, x)

    add("token_embd.weight", V, D, quantised=True)
    add("output_norm.weight", D)
    add("output.weight", V, D, quantised=True)
    if per_layer:
        add("per_layer_token_embd.weight", V, D)
    for name, shape in {
        "attn_norm": (D,), "ffn_norm": (D,), "attn_q": (D, D), "attn_k": (D, D), "attn_v": (D, D),
        "attn_output": (D, D), "ffn_gate": (96, D), "ffn_up": (96, D), "ffn_down": (D, 96),
    }.items():  # fmt: skip
        add(f"blk.0.{name}.weight", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(params=["gpt2", "llama"])
def source(request: pytest.FixtureRequest, make_tokenizer: Make, tmp_path: Path) -> Path:
    kind = {"gpt2": "byte_level", "llama": "sentencepiece_bpe"}[request.param]
    return write_gguf(tmp_path / "whole.gguf", make_tokenizer(kind), request.param)


def test_rows_are_the_same_bytes_and_the_rest_is_untouched(source: Path, tmp_path: Path) -> None:
    file = open_gguf(source)
    tokenizer = read_tokenizer(file)
    rows = file.tensors["token_embd.weight"].shape[0]
    ids = TrimMap.of(closure(file, tokenizer, range(800, 1200)), rows)
    write_trimmed_gguf(open_gguf(source), ids, tmp_path / "out.gguf")

    # Read by the format's own library.
    old, new = gguf.GGUFReader(source), gguf.GGUFReader(tmp_path / "out.gguf")
    assert [t.name for t in old.tensors] == [t.name for t in new.tensors]
    for a, b in zip(old.tensors, new.tensors, strict=True):
        assert a.tensor_type == b.tensor_type
        if a.name in ("token_embd.weight", "output.weight"):
            assert np.array_equal(a.data[list(ids.kept)], b.data)
        else:
            assert np.array_equal(a.data, b.data)
    assert set(old.fields) == set(new.fields)
    tokens = open_gguf(tmp_path / "out.gguf").metadata["tokenizer.ggml.tokens"]
    before = file.metadata["tokenizer.ggml.tokens"]
    assert list(tokens) == [before[i] for i in ids.kept]
    changed = ("tokens", "token_type", "scores", "merges", "token_id", "vocab_size")
    for name in old.fields:
        if not name.startswith("GGUF.") and not name.endswith(changed):
            assert old.fields[name].contents() == new.fields[name].contents()


def test_a_ready_keep_set_dequantises_no_block(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = tmp_path / "ids"
    ids.write_text("\n".join(map(str, range(800, 1200))))
    plan_trim(TrimRequest(str(source), Keep(ids=ids)))  # the original is in the cache now
    folders: list[bool] = []

    def converted(*arguments: Any, head_only: bool = False) -> None:
        folders.append(head_only)
        convert_gguf(*arguments, head_only=head_only)

    monkeypatch.setattr("lmhead.models.convert.convert_gguf", converted)
    request = TrimRequest(str(source), Keep(ids=ids))
    report = trim_model(request, tmp_path / "out.gguf", form="gguf")
    assert folders == [True]
    assert report.proof is not None
    assert report.proof.ran_by == "lmhead"
    # Whole folders, run by transformers, have the same logits and the same greedy text.
    again, _ = verify_path(str(source), tmp_path / "out.gguf")
    assert (again.passed, again.ran_by) == (True, "transformers")
    assert again.checks[-2:] == report.proof.checks[-2:]


def test_a_trimmed_gguf_is_proved_like_any_model(
    source: Path, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    from lmhead.models.resolve import resolve

    monkeypatch.setenv("LMHEAD_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "small.gguf"
    request = TrimRequest(
        str(source), corpus=Corpus((corpus_file,)), coverage=0.9,
        positions=400, continuations=8, max_tokens=6,
    )  # fmt: skip
    report = trim_model(request, tmp_path / "small", form="gguf")  # the ending is added
    assert report.out == out
    assert report.proof is not None
    assert report.proof.passed
    assert [c.failed for c in report.proof.checks[:7]] == [0] * 7
    assert (report.nbytes.before, report.nbytes.after) == (
        source.stat().st_size,
        out.stat().st_size,
    )
    planned = plan_trim(request, "gguf").nbytes
    assert planned.before == source.stat().st_size
    assert planned.after == pytest.approx(out.stat().st_size, rel=0.15)  # but for the tokenizer
    again, recorded = verify_path(str(source), out)
    assert recorded
    assert again.checks[-2:] == report.proof.checks[-2:]  # the same prompts
    assert again.passed
    assert out.stat().st_size < 0.8 * source.stat().st_size
    assert json.loads((tmp_path / "small.gguf.lmhead_trim.json").read_text())["form"] == "gguf"

    whole = AutoModelForCausalLM.from_pretrained(resolve(source))
    small = AutoModelForCausalLM.from_pretrained(resolve(out))
    before = whole.get_input_embeddings().weight[list(report.ids.kept)]
    assert before.equal(small.get_input_embeddings().weight)

    # And as transformers itself reads a GGUF file, without any code of ours.
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=out.name)
    assert before.equal(plain.get_input_embeddings().weight)
    head = whole.get_output_embeddings().weight[list(report.ids.kept)]
    assert head.equal(plain.get_output_embeddings().weight)
    assert plain.config.vocab_size == report.ids.kept_rows


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.0.ffn_up.weight"])
def test_without_a_run_every_byte_is_compared_as_it_is_quantised(
    name: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMHEAD_CACHE", str(tmp_path / "cache"))
    request = TrimRequest(str(source), Keep(ascii=True), run=False)
    report = trim_model(request, tmp_path / "small.gguf", form="gguf")
    assert report.proof is not None
    [weights] = [c for c in report.proof.checks if c.name == "weights that differ"]
    tensors = open_gguf(tmp_path / "small.gguf").tensors
    assert (weights.tested, weights.failed) == (len(tensors), 0)
    assert weights.note == f"{sum(t.nbytes for t in tensors.values()):,} bytes"

    def spoiled(file: GGUFFile, ids: TrimMap, target: Path, *more: Any) -> None:
        write_trimmed_gguf(file, ids, target, *more)
        at = open_gguf(target).tensors[name].offset + 5
        data = bytearray(target.read_bytes())
        data[at] ^= 1
        target.write_bytes(data)

    monkeypatch.setattr("lmhead.trim.gguf.write_trimmed_gguf", spoiled)
    with pytest.raises(LMHeadError, match=f"weights that differ: 1 of .*{name}"):
        trim_model(request, tmp_path / "spoiled.gguf", form="gguf")
    assert not (tmp_path / "spoiled.gguf").exists()


def test_what_is_no_gguf_and_what_has_more_embeddings_is_refused(
    make_model: Callable[..., Path], make_tokenizer: Make, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=r"\.gguf"):
        trim_model(
            TrimRequest(str(make_model()), Keep(ascii=True)), tmp_path / "x.gguf", form="gguf"
        )
    source = write_gguf(tmp_path / "w.gguf", make_tokenizer("byte_level"), "gpt2", per_layer=True)
    rows = open_gguf(source).tensors["token_embd.weight"].shape[0]
    with pytest.raises(UnsupportedModel, match="per_layer"):
        write_trimmed_gguf(open_gguf(source), TrimMap.of(range(500), rows), tmp_path / "o.gguf")
