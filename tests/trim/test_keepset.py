"""Choosing ids: scripts, lists, sizes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmhead.errors import BadInput
from lmhead.trim.idmap import TrimMap
from lmhead.trim.keepfile import KeepFile
from lmhead.trim.keepset import Keep, choose, minimum, read_ids, wanted
from lmhead.trim.scripts import LANGUAGES, SCRIPTS, is_written_in, script_of, scripts_of
from lmhead.trim.tokenizer import TokenizerJson

Make = Callable[[str], dict[str, Any]]


@pytest.fixture
def tokenizer(make_tokenizer: Make) -> TokenizerJson:
    return TokenizerJson.of(make_tokenizer("byte_level"))


@pytest.mark.parametrize(
    ("char", "script"),
    [
        ("a", "latin"), ("ß", "latin"), ("Ω", "greek"), ("ж", "cyrillic"), ("漢", "cjk"),
        ("あ", "hiragana"), ("ア", "katakana"), ("한", "hangul"), ("क", "devanagari"),
        ("ا", "arabic"), ("א", "hebrew"), ("A", "latin"), ("5", None), (" ", None), ("€", None),
        ("—", None), ("\u0301", None), ("🙂", None), ("\n", None),
    ],
)  # fmt: skip
def test_script_of_a_character(char: str, script: str | None) -> None:
    assert script_of(char) == script


def test_texts_in_scripts() -> None:
    assert is_written_in("naïve, 5 €", scripts_of(["latin"]))
    assert not is_written_in("naïve Ω", scripts_of(["latin"]))
    assert is_written_in("naïve Ω", scripts_of(["latin"], ["el"]))
    assert is_written_in("漢字かな交じりカナー", scripts_of([], ["ja"]))
    assert scripts_of(["han"]) == {"cjk"}
    assert all(
        s in SCRIPTS or "-" in s or s == "ideographic" for v in LANGUAGES.values() for s in v
    )


def test_unknown_names_get_a_hint() -> None:
    with pytest.raises(BadInput, match="'latin'"):
        Keep(scripts=("latn",))
    with pytest.raises(BadInput, match="there is no language 'klingon'"):
        Keep(languages=("klingon",))


def test_scripts_and_ascii_choose_by_text(tokenizer: TokenizerJson) -> None:
    parts = wanted(tokenizer, Keep(scripts=("greek",), ascii=True), None)
    decode = tokenizer.built.decode
    assert all(decode([i]).isascii() for i in parts["ascii"])
    assert any("α" in decode([i]) for i in parts["scripts"])
    assert not any("a" in decode([i]) for i in parts["scripts"])
    assert len(parts["ascii"]) > 1500


def test_a_size_takes_the_most_useful_with_what_they_are_made_of(tokenizer: TokenizerJson) -> None:
    useful = np.zeros(len(tokenizer.vocab))
    useful[2000:2100] = np.arange(100, 0, -1)
    kept = choose(tokenizer, (), {}, size=400, usefulness=useful)
    assert len(kept.ids) == 400
    assert tokenizer.closure(kept.ids) == kept.ids
    assert set(range(2000, 2020)) <= kept.ids
    with pytest.raises(BadInput, match="takes 259 rows"):
        minimum(tokenizer, (), 0, 200)
    assert minimum(tokenizer, (), 0, 400) == 320  # 259 in whole blocks of 64


def test_reasons_add_up(tokenizer: TokenizerJson) -> None:
    kept = choose(tokenizer, (), {"a": {1000, 1001}, "b": {1000, 1500}})
    assert sum(kept.reasons.values()) == len(kept.ids)
    assert {1000, 1001, 1500} <= kept.ids


def test_ids_and_tokens_from_files(tokenizer: TokenizerJson, tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("5\n7\n")
    (tmp_path / "list").write_text("[5, 7]")
    assert read_ids(tmp_path / "lines") == read_ids(tmp_path / "list") == {5, 7}
    KeepFile(TrimMap.of([5, 7], 10), "m", "0").save(tmp_path / "k.safetensors")
    assert read_ids(tmp_path / "k.safetensors") == {5, 7}
    (tmp_path / "tokens").write_text("Ġthe\n" + json.dumps("<|chat|>") + "\n", "utf-8")
    found = wanted(tokenizer, Keep(tokens=tmp_path / "tokens"), None)["tokens"]
    assert found == {tokenizer.vocab["Ġthe"], tokenizer.vocab["<|chat|>"]}


@pytest.mark.parametrize("content", ["x", "[1, null]", "-4", "[[1]]"])
def test_what_is_no_id_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "ids").write_text(content)
    with pytest.raises(BadInput, match="id"):
        read_ids(tmp_path / "ids")


def test_a_token_that_is_none_is_named_with_its_line(
    tokenizer: TokenizerJson, tmp_path: Path
) -> None:
    (tmp_path / "tokens").write_text("Ġthe\nno such token\n", "utf-8")
    with pytest.raises(BadInput, match="tokens:2"):
        wanted(tokenizer, Keep(tokens=tmp_path / "tokens"), None)


def test_the_keep_file_has_the_maps_of_draft_heads(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    kept = TrimMap.of([2, 5, 9], 12)
    KeepFile(kept, "m", "abc").save(tmp_path / "k")
    tensors = load_file(tmp_path / "k")
    new = np.arange(3)
    assert (new + tensors["d2t"]).tolist() == [2, 5, 9]  # an offset, not an id
    assert np.flatnonzero(tensors["t2d"]).tolist() == [2, 5, 9]
    assert tensors["t2d"].shape == (12,)
    assert KeepFile.load(tmp_path / "k") == KeepFile(kept, "m", "abc")
    first = (tmp_path / "k").read_bytes()
    for _ in range(8):
        KeepFile(kept, "m", "abc").save(tmp_path / "again")
        assert (tmp_path / "again").read_bytes() == first
    (tmp_path / "no").write_bytes(b"x")
    with pytest.raises(BadInput, match="not a keep-set file"):
        KeepFile.load(tmp_path / "no")
