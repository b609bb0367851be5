"""`lmhead trim`, `verify` and `count` as people call them, on smollm2-135m and tiny models."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lmhead.cli import run

LICENCE = """
Permission is hereby granted, free of charge, to any person obtaining a copy of this software and
associated documentation files, to deal in the software without restriction, including without
limitation the rights to use, copy, modify, merge, publish, distribute, sublicense, and sell copies
of the software, and to permit persons to whom the software is furnished to do so.
"""


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    import argparse
    import textwrap

    path = tmp_path / "corpus.jsonl"
    texts = [LICENCE.strip(), argparse.__doc__, textwrap.wrap.__doc__, textwrap.fill.__doc__] * 3
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), "utf-8")
    return path


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = run([str(a) for a in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.model
def test_a_real_model_from_corpus_to_proof(
    smollm2: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "small"
    few = ("--positions", 150, "--continuations", 2, "--max-tokens", 6)
    code, text, err = call(
        capsys, "trim", smollm2, "--corpus", corpus, "--out", out, *few, "--json"
    )
    assert code == 0, err
    report: dict[str, Any] = json.loads(text)
    assert report["proof"]["passed"]
    checks = {check["name"]: check for check in report["proof"]["checks"]}
    del checks["fresh prompts with other greedy text"]  # an estimate, not a promise
    assert all(check["failed"] == 0 for check in checks.values())
    rows = {price["coverage"]: price["rows"] for price in report["coverage"]["prices"]}
    assert rows[0] < 4000  # what the texts and the model's greedy choices need
    assert rows[0] <= report["kept_rows"] < 49_152 / 3
    assert report["parameters"]["before"] == 134_515_008
    assert report["coverage"]["share"] >= report["coverage"]["wanted"] == 0.99
    assert report["parameters"]["share_saved"] > 0.14

    # Plain transformers, in a process where lmhead cannot be imported, loads it and speaks.
    script = (
        "import sys; sys.modules['lmhead'] = None\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "path = sys.argv[1]\n"
        "t, m = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)\n"
        "ids = t('Permission is hereby', return_tensors='pt')\n"
        "print(t.decode(m.generate(**ids, max_new_tokens=4, do_sample=False)[0]))\n"
    )
    said = []
    for folder in (smollm2, out):
        done = subprocess.run(
            [sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert said[0].startswith("Permission is hereby ")
    assert said[0] == said[1]


@pytest.mark.model
def test_without_coverage_a_real_model_says_something_else(
    smollm2: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Why coverage exists: what is read does not hold all that is said."""
    few = ("--positions", 150, "--continuations", 8, "--max-tokens", 16)
    differing = {}
    for name, options in (("without", ("--no-coverage",)), ("with", ())):
        out = tmp_path / name
        arguments = ("--corpus", corpus, *few, *options, "--out", out, "--json")
        code, text, err = call(capsys, "trim", smollm2, *arguments)
        assert code == 0, err
        checks = {check["name"]: check for check in json.loads(text)["proof"]["checks"]}
        differing[name] = checks["prompts with other greedy text"]["failed"]
        assert checks["texts with other logits"]["failed"] == 0
    assert differing["without"] > 0
    assert differing["with"] == 0


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A tiny Llama with a byte-level tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([LICENCE, str(pytest.__doc__)] * 3, trainer)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(), hidden_size=32, intermediate_size=32,
            num_hidden_layers=1, num_attention_heads=2, eos_token_id=0, bos_token_id=0,
        )
    )  # fmt: skip
    folder = tmp_path / "tiny"
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    return folder


def test_plan_shows_a_table_and_writes_nothing(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    code, text, _ = call(capsys, "trim", tiny, "--ascii", "--plan")
    assert code == 0
    assert "rows" in text
    assert "parameters" in text
    assert ", planned" in text
    assert sorted(tmp_path.rglob("*")) == before


def test_plan_tells_the_price_of_a_coverage(
    tiny: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ("--positions", 60, "--continuations", 2, "--max-tokens", 4)
    code, text, err = call(capsys, "trim", tiny, "--corpus", corpus, "--plan", *few)
    assert code == 0, err
    for share in ("0.9 ", "0.99 ", "0.999 ", "0.9999 "):
        assert share in text


def test_quick_is_what_its_help_says_and_says_what_it_is_worth(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = tmp_path / "many.jsonl"
    words = LICENCE.split()
    texts = (" ".join(words[at % 40 : at % 40 + 30]) for at in range(480))
    corpus.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), "utf-8")
    plan = ("trim", tiny, "--corpus", corpus, "--plan", "--no-resume")
    named = ("--positions", 512, "--continuations", 8, "--max-tokens", 16, "--proof-prompts", 4)
    found = {}
    for name, options in (("whole", ()), ("quick", ("--quick",)), ("named", named)):
        code, text, err = call(capsys, *plan, *options, "--json")
        assert code == 0, err
        found[name] = json.loads(text)["coverage"]
    assert found["quick"] == found["named"]
    whole, quick = found["whole"]["estimate"], found["quick"]["estimate"]
    assert (quick["texts"], quick["max_tokens"]) == (8, 16)
    assert (whole["texts"], whole["max_tokens"]) == (32, 64)  # two thirds of the 48 held back

    code, text, _ = call(capsys, *plan, "--quick")
    assert code == 0
    assert "a first look (--quick)" in text
    code, text, _ = call(capsys, *plan, *named)
    assert code == 0
    assert "a first look" not in text


def test_an_interrupted_trim_says_that_nothing_finished_is_lost(
    tiny: Path,
    tmp_path: Path,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from lmhead.trim import observations

    monkeypatch.setenv("LMHEAD_CACHE", str(tmp_path / "cache"))
    few = ("--positions", 60, "--continuations", 2, "--max-tokens", 4)
    trim = ("trim", tiny, "--corpus", corpus, "--out", tmp_path / "out", *few)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    def again(*_: object, **__: object) -> None:
        raise AssertionError("asked again")

    with monkeypatch.context() as patch:
        patch.setattr(observations, "observe_texts", interrupted)
        code, text, err = call(capsys, *trim)
        assert (code, text) == (130, "")
        assert "the same command resumes" in err
        assert "resumes" not in call(capsys, *trim, "--no-resume")[2]
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(observations, "observe_continuations", again)
    code, text, err = call(capsys, *trim)
    assert code == 0, err
    assert ", trimmed" in text


def test_counts_in_parts_give_the_same_model_as_the_corpus(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("the rights to use")
    (tmp_path / "b.txt").write_text("copies of the software")
    for name in "ab":
        code, _, err = call(
            capsys, "count", tmp_path / f"{name}.txt", "-o", tmp_path / name, "-m", tiny
        )
        assert code == 0, err
    counts = ("--counts", tmp_path / "a", "--counts", tmp_path / "b")
    assert call(capsys, "trim", tiny, *counts, "--out", tmp_path / "one")[0] == 0
    both = "the rights to use\x00copies of the software"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(both.encode())))
    texts = ("--corpus", tmp_path / "a.txt", "--corpus", tmp_path / "b.txt", "--no-coverage")
    assert call(capsys, "trim", tiny, *texts, "--out", tmp_path / "two")[0] == 0
    for name in ("tokenizer.json", "model.safetensors", "config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    code, _, err = call(capsys, "trim", tiny, "--corpus", "-", "--plan", "--no-coverage")
    assert code == 0, err


def test_verify_says_yes_and_no(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("the rights to use")
    out = tmp_path / "out"
    texts = ("--corpus", tmp_path / "a.txt")
    assert call(capsys, "trim", tiny, *texts, "--no-coverage", "--out", out)[0] == 0
    code, text, _ = call(capsys, "verify", tiny, out, *texts, "--json", "--max-tokens", 4)
    assert code == 0
    assert json.loads(text)["passed"] is True
    weights = bytearray((out / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (out / "model.safetensors").write_bytes(weights)
    code, text, _ = call(capsys, "verify", tiny, out, *texts, "--json", "--max-tokens", 4)
    assert code == 1
    assert json.loads(text)["passed"] is False


def test_the_keep_set_form_leaves_the_model_alone(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from lmhead.head import LMHead
    from lmhead.head.trimmed import TrimmedHead
    from lmhead.loading import load

    out = tmp_path / "keep.safetensors"
    code, _, err = call(capsys, "trim", tiny, "--ascii", "--form", "head", "--out", out)
    assert code == 0, err
    head = load(tiny).head
    assert isinstance(head, LMHead)
    trimmed = TrimmedHead.from_file(head, out)
    assert 2 <= len(trimmed.kept) <= head.vocab_size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ascii",), "--out DIR"),
        (("--out", "x"), "nothing says what to keep"),
        (("--script", "latn", "--out", "x"), "did you mean 'latin'"),
        (("--corpus", "nowhere.txt", "--out", "x"), "nowhere.txt"),
        (("--ascii", "--out", "."), "lmhead did not write"),
        (("--ascii", "--coverage", "0.9", "--out", "x"), "give a corpus"),
    ],
)
def test_wrong_calls_are_one_line_and_exit_2(
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, text, err = call(capsys, "trim", tiny, *arguments)
    assert (code, text) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_text_that_is_not_utf8_is_named_with_its_line(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.txt").write_bytes(b"fine\nb\xffd\n")
    bad = ("--corpus", tmp_path / "bad.txt", "--plan", "--no-coverage")
    code, _, err = call(capsys, "trim", tiny, *bad)
    assert code == 2
    assert "bad.txt:2 is not UTF-8" in err
    code, _, err = call(capsys, "trim", tiny, *bad, "--errors", "skip")
    assert code == 0
    assert "1 text skipped" in err


def test_count_replaces_no_folder_and_a_file_only_by_force(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "word.txt").write_text("word")
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/thesis.txt").write_text("years of work")
    (tmp_path / "notes").write_text("mine")
    count = ("count", tmp_path / "word.txt", "-m", tiny, "-o")
    for more in ((), ("--force",)):
        code, _, err = call(capsys, *count, tmp_path / "precious", *more)
        assert (code, "precious is a folder" in err) == (2, True)
    code, _, err = call(capsys, *count, tmp_path / "notes")
    assert (code, "--force" in err) == (2, True)
    assert (tmp_path / "notes").read_text() == "mine"
    code, text, err = call(capsys, *count, tmp_path / "notes", "--force")
    assert code == 0, err
    assert "in 1 text:" in text
    assert "lmhead token counts" in (tmp_path / "notes").read_text()
    assert (tmp_path / "precious/thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("form", ["model", "head"])
def test_trim_replaces_no_folder_that_it_did_not_write(
    form: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/thesis.txt").write_text("years of work")
    code, _, err = call(
        capsys, "trim", tiny, "--ascii", "--force", "--form", form, "--out", tmp_path / "precious"
    )
    assert (code, "precious" in err) == (2, True)
    assert (tmp_path / "precious/thesis.txt").read_text() == "years of work"


def test_a_folder_of_documents_with_a_picture_is_a_corpus(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/trim.md").write_text("the rights to use")
    (tmp_path / "docs/plot.png").write_bytes(b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR")
    code, _, err = call(
        capsys, "trim", tiny, "--corpus", tmp_path / "docs", "--plan", "--no-coverage"
    )
    assert code == 0, err
    assert "1 file left out, not text" in err
    assert "plot.png" in err


def test_old_names_of_options_work_with_a_note(
    tiny: Path, tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    few = ("--positions", 60, "--prompts", 2, "--length", 4)
    code, text, err = call(capsys, "trim", "-m", tiny, "--corpus", corpus, "-o", out, *few)
    assert code == 0, err
    assert ", trimmed" in text
    assert "--prompts is now called --continuations" in err
    assert "--length is now called --max-tokens" in err
    assert str(tmp_path / ".out") not in err  # no names that nobody gave
    code, text, err = call(capsys, "verify", "-m", tiny, out, "--length", 2)
    assert code == 0, err
    assert "--length is now called --max-tokens" in err
    assert "not recorded" not in err
    for command in ("trim", "verify"):
        code, text, _ = call(capsys, command, "--help")
        assert "--prompts" not in text.replace("--proof-prompts", "")
