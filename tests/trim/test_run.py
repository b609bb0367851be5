"""Whole trims of tiny models: every tokenizer, tied and not, biased, sharded; and their proof."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmhead.errors import BadInput, LMHeadError
from lmhead.progress import Advance
from lmhead.trim.corpus import Corpus
from lmhead.trim.folder import ModelFolder
from lmhead.trim.idmap import TrimMap
from lmhead.trim.inputs import REPORT
from lmhead.trim.keepset import Keep
from lmhead.trim.observing import CONTINUING, READING
from lmhead.trim.report import TrimRequest
from lmhead.trim.run import plan_trim, trim_model
from lmhead.trim.verify import verify_trim

MakeModel = Callable[..., Path]
FEW = {"positions": 600, "continuations": 20, "max_tokens": 8}


def request(
    model: Path, corpus: Path, coverage: float | None = None, **more: object
) -> TrimRequest:
    return TrimRequest(str(model), corpus=Corpus((corpus,)), coverage=coverage, **{**FEW, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "arch", "tied"),
    [
        ("byte_level", "gpt2", True),
        ("byte_level", "gptj", False),
        ("sentencepiece_bpe", "llama", False),
        ("unigram", "llama", True),
        ("wordpiece", "bert", True),
    ],
)
def test_a_trimmed_model_is_its_original_on_the_kept_ids(
    kind: str, arch: str, tied: bool, make_model: MakeModel, corpus_file: Path, tmp_path: Path
) -> None:
    source = make_model(kind, arch, tied)
    report = trim_model(request(source, corpus_file, coverage=0.9), tmp_path / "out")
    assert report.proof is not None
    *checks, fresh = report.proof.checks
    assert (fresh.name, fresh.passed) == ("fresh prompts with other greedy text", True)
    assert {check.name: check.failed for check in checks} == {
        "id map": 0,
        "weights that differ": 0,
        "ids that do not agree": 0,
        "other texts that decode worse": 0,
        "corpus texts with other tokens": 0,
        "texts with other logits": 0,
        "prompts with other greedy text": 0,
    }
    assert report.ids.kept_rows < 0.9 * report.ids.rows

    # And once more without any of our code, as a user of transformers sees it.
    before = AutoModelForCausalLM.from_pretrained(source)
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    old = AutoTokenizer.from_pretrained(source)
    new = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = TrimMap.from_dict(json.loads((tmp_path / "out" / REPORT).read_text())["id_map"])
    texts = (json.loads(line)["text"] for line in corpus_file.read_text("utf-8").splitlines())
    text = next(text for text in texts if 100 < len(text) < 300)  # whole: a cut makes new words
    a, b = old(text, return_tensors="pt"), new(text, return_tensors="pt")
    assert ids.to_original(b["input_ids"][0].tolist()) == a["input_ids"][0].tolist()
    with torch.inference_mode():
        z = before(input_ids=a["input_ids"]).logits[..., list(ids.kept)]
        z_new = after(input_ids=b["input_ids"]).logits
    assert torch.equal(z, z_new)
    assert after.config.vocab_size == len(ids) == after.get_input_embeddings().weight.shape[0]
    assert ids.to_original([after.config.eos_token_id]) == [before.config.eos_token_id]


def test_every_stage_has_a_bar_of_its_own_one_after_the_other(
    make_model: MakeModel, corpus_file: Path, tmp_path: Path
) -> None:
    """A bar that opens below another shows two estimates of the time left; one of them is wrong."""
    source = make_model("byte_level", "llama", False)
    stages: list[tuple[str, int | None]] = []
    done: dict[str, int] = {}
    opened: list[str] = []

    @contextmanager
    def progress(title: str, total: int | None = None) -> Iterator[Advance]:
        assert not opened, f"{title!r} opened below {opened[0]!r}"
        stages.append((title, total))
        opened.append(title)

        def advance(n: int) -> None:
            done[title] = done.get(title, 0) + n

        yield advance
        opened.pop()

    asked = request(source, corpus_file, coverage=0.9, resume=False)
    trim_model(asked, tmp_path / "out", progress=progress)
    assert [title for title, _ in stages] == [
        "counting tokens",
        f"loading {source}",
        CONTINUING,
        READING,
        "writing the weights",
        "comparing the weights",
        "comparing the tokens of every text",
        "loading the trimmed model",
    ]
    for title, total in stages:
        assert total is None or 0 < done[title] <= total, title
    assert done[CONTINUING] == dict(stages)[CONTINUING]


def test_coverage_is_what_keeps_greedy_text_the_same(
    make_model: MakeModel, corpus_file: Path, tmp_path: Path
) -> None:
    source = make_model("byte_level", "llama", False)  # a tied random model repeats its input
    without = trim_model(request(source, corpus_file), tmp_path / "without")
    with_it = trim_model(request(source, corpus_file, coverage=0.9), tmp_path / "with")

    def differing(report: object) -> int:
        checks = report.proof.checks  # type: ignore[attr-defined]
        return next(c.failed for c in checks if c.name == "prompts with other greedy text")

    assert differing(without) > 0
    assert differing(with_it) == 0
    assert with_it.reasons["model"] > 0
    assert with_it.coverage is not None
    assert with_it.coverage.share >= 0.9
    assert with_it.coverage.estimate is not None
    assert with_it.coverage.estimate.texts > 0


@pytest.mark.parametrize("share", [0.0, 0.97, 0.9999])
def test_a_coverage_is_literally_that_share_of_all_probability(
    share: float, make_model: MakeModel, corpus_file: Path
) -> None:
    source = make_model("byte_level", "llama", False)
    report = plan_trim(request(source, corpus_file, share, positions=1500))
    coverage = report.coverage
    assert coverage is not None
    assert (coverage.wanted, coverage.share >= share) == (share, True)
    if share == 0.97:  # and not much more than that
        assert coverage.share < 0.98
    rows = {price.coverage: price.rows for price in coverage.prices}
    assert {0.0, 0.9, 0.99, 0.999, 0.9999, share} == set(rows)
    assert rows[share] == report.ids.kept_rows
    assert [rows[at] for at in sorted(rows)] == sorted(rows.values())
    left = [p.estimate.steps_left for p in coverage.prices if p.estimate is not None]
    assert len(left) == len(rows)
    assert left == sorted(left, reverse=True)
    assert left[0] > left[-1]


def test_only_shards_with_vocabulary_rows_change(
    make_model: MakeModel, corpus_file: Path, tmp_path: Path
) -> None:
    source = make_model("byte_level", "llama", False, 3)
    shards = sorted(p.name for p in source.glob("*.safetensors"))
    assert len(shards) >= 3
    trim_model(request(source, corpus_file), tmp_path / "out")
    trim_model(request(source, corpus_file, link=True), tmp_path / "linked")
    index = json.loads((source / "model.safetensors.index.json").read_text())
    new_index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    with_rows = {
        index["weight_map"][name] for name in ("lm_head.weight", "model.embed_tokens.weight")
    }
    assert len(with_rows) < len(shards)
    for name in shards:
        same = (source / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
        assert same == (name not in with_rows)
        assert not os.path.samefile(source / name, tmp_path / "out" / name)  # noqa: PTH121
        assert os.path.samefile(source / name, tmp_path / "linked" / name) == same  # noqa: PTH121
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    total = sum(p.numel() for p in loaded.parameters())
    assert new_index["metadata"]["total_parameters"] == total
    assert new_index["metadata"]["total_size"] == 4 * total
    assert new_index["weight_map"] == index["weight_map"]


def test_the_chat_template_keeps_its_tokens_in_every_branch(
    make_model: MakeModel, corpus_file: Path, tmp_path: Path
) -> None:
    source = make_model("byte_level", "llama")
    trim_model(request(source, corpus_file, keep=Keep(min_count=50)), tmp_path / "out")
    old, new = (AutoTokenizer.from_pretrained(p) for p in (source, tmp_path / "out"))
    for messages in (
        [{"role": "user", "content": ""}],  # brings the default system message
        [{"role": "system", "content": ""}, {"role": "user", "content": ""}],
    ):
        a, b = (
            t.tokenize(t.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
            for t in (old, new)
        )
        assert a == b


def test_a_failed_proof_publishes_nothing(
    make_model: MakeModel, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmhead.trim.bpe import Merges

    # A closure that forgets the trees: tokens that can no longer be made.
    monkeypatch.setattr(Merges, "closure", lambda self, ids, names: set(ids))
    with pytest.raises(LMHeadError, match=r"nothing was published.*corpus\.jsonl:"):
        trim_model(request(make_model("byte_level", "llama"), corpus_file), tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["corpus.jsonl"]


def test_verify_finds_a_changed_weight(
    make_model: MakeModel, corpus_file: Path, tmp_path: Path
) -> None:
    source = make_model("byte_level", "llama")
    out = tmp_path / "out"
    trim_model(request(source, corpus_file), out)
    data = bytearray((out / "model.safetensors").read_bytes())
    data[-3] ^= 1
    (out / "model.safetensors").write_bytes(data)
    proof = verify_trim(ModelFolder.open(source), out)
    assert not proof.passed
    assert "weights that differ: 1" in proof.failures


def test_verify_finds_a_changed_tokenizer(
    make_model: MakeModel, corpus_file: Path, tmp_path: Path
) -> None:
    source = make_model("byte_level", "llama")
    out = tmp_path / "out"
    trim_model(request(source, corpus_file), out)
    data = json.loads((out / "tokenizer.json").read_text())
    data["model"]["merges"] = data["model"]["merges"][1:]
    (out / "tokenizer.json").write_text(json.dumps(data))
    proof = verify_trim(ModelFolder.open(source), out, corpus=Corpus((corpus_file,)))
    assert not proof.passed
    assert "corpus.jsonl:" in proof.failures


def test_min_count_and_size_drop_tokens_of_the_corpus_but_no_text(
    make_model: MakeModel, corpus_file: Path, tmp_path: Path
) -> None:
    source = make_model("byte_level", "llama")
    whole = plan_trim(request(source, corpus_file))
    rare = trim_model(request(source, corpus_file, keep=Keep(min_count=5)), tmp_path / "rare")
    sized = trim_model(request(source, corpus_file, keep=Keep(size=530)), tmp_path / "sized")
    assert sized.ids.kept_rows == 512  # whole blocks
    assert sized.ids.kept_rows < rare.ids.kept_rows < whole.ids.kept_rows
    for report in (rare, sized):
        assert report.proof is not None
        note = next(c.note for c in report.proof.checks if c.name.startswith("corpus"))
        assert "spelled with others" in note


def test_a_plan_writes_nothing(make_model: MakeModel, corpus_file: Path, tmp_path: Path) -> None:
    report = plan_trim(request(make_model("byte_level", "llama"), corpus_file))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["corpus.jsonl"]
    assert report.proof is None
    assert 0 < report.parameters.share < 1
    assert report.dropped_examples


def test_what_cannot_be_done_is_said_before_work_begins(
    make_model: MakeModel, corpus_file: Path, tmp_path: Path
) -> None:
    source = make_model("byte_level", "llama")
    (tmp_path / "there").mkdir()
    with pytest.raises(BadInput, match="--force"):
        trim_model(request(source, corpus_file), tmp_path / "there")
    with pytest.raises(BadInput, match="nothing says what to keep"):
        TrimRequest(str(source))
    with pytest.raises(BadInput, match="give a corpus"):
        TrimRequest(str(source), Keep(ascii=True), coverage=0.9)
    with pytest.raises(BadInput, match="takes 3") as reported:
        plan_trim(TrimRequest(str(source), Keep(size=20)))
    (fewest,) = re.findall(r"rows ([\d,]+); give at least that", str(reported.value))
    assert plan_trim(TrimRequest(str(source), Keep(size=int(fewest)))).ids.kept_rows == int(fewest)
    with pytest.raises(BadInput, match=f"rows {fewest}; give at least"):
        plan_trim(TrimRequest(str(source), Keep(size=int(fewest) - 1)))
    (tmp_path / "ids").write_text("1\n99999\n")
    with pytest.raises(BadInput, match="99999"):
        plan_trim(TrimRequest(str(source), Keep(ids=tmp_path / "ids")))


def test_force_replaces_and_leaves_nothing_beside(
    make_model: MakeModel, corpus_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("old")
    asked = request(make_model("byte_level", "llama"), corpus_file)
    with pytest.raises(BadInput, match="lmhead did not write"):
        trim_model(asked, out, force=True)
    assert (out / "old").read_text() == "old"
    (out / REPORT).write_text("{}")
    trim_model(asked, out, force=True)
    assert not (out / "old").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["corpus.jsonl", "out"]


@pytest.mark.parametrize(
    "name", ["LICENSE", "NOTES.txt", "tokenizer_config.json", "additional_chat_templates", "index"]
)
def test_nothing_from_outside_of_the_folder_is_published(
    name: str, make_model: MakeModel, corpus_file: Path, tmp_path: Path
) -> None:
    source = tmp_path / "model"
    shutil.copytree(make_model("byte_level", "llama", False, 3), source)
    (tmp_path / "secret").mkdir()
    secret = tmp_path / "secret" / "id_rsa.jinja"
    if name == "index":
        index = json.loads((source / "model.safetensors.index.json").read_text())
        shard = next(iter(index["weight_map"].values()))
        (source / shard).rename(tmp_path / shard)
        weights = {n: f"../{s}" if s == shard else s for n, s in index["weight_map"].items()}
        text = json.dumps({**index, "weight_map": weights})
        (source / "model.safetensors.index.json").write_text(text)
    elif name == "additional_chat_templates":
        secret.write_text("private")
        (source / name).symlink_to(tmp_path / "secret")
    else:
        secret.write_text("{}" if name.endswith("json") else "private")
        (source / name).unlink(missing_ok=True)
        (source / name).symlink_to(secret)
    with pytest.raises(LMHeadError, match="outside"):
        trim_model(request(source, corpus_file), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_hugging_face_cache_and_links_inside_are_followed(
    make_model: MakeModel, corpus_file: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "models--a--b"
    snapshot = cache / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    shutil.copytree(make_model("byte_level", "llama"), cache / "blobs")
    (cache / "blobs" / "LICENSE").write_text("free")
    for blob in (cache / "blobs").iterdir():
        (snapshot / blob.name).symlink_to(f"../../blobs/{blob.name}")
    (snapshot / "COPYING").symlink_to("LICENSE")
    trim_model(request(snapshot, corpus_file), tmp_path / "out")
    for name in ("LICENSE", "COPYING"):
        assert (tmp_path / "out" / name).read_text() == "free"
        assert not (tmp_path / "out" / name).is_symlink()


def test_a_template_that_never_ends_stops_a_trim(
    make_model: MakeModel, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmhead.models.templates.SECONDS", 0.5)
    source = tmp_path / "model"
    shutil.copytree(make_model("byte_level", "llama"), source)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (source / "chat_template.jinja").write_text(loop)
    with pytest.raises(LMHeadError, match="chat template"):
        plan_trim(request(source, corpus_file))
