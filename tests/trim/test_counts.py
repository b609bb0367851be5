"""Counting: against the plain loop, in parts, through files."""

import socket
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmhead.errors import BadInput, MissingExtra
from lmhead.trim import counts as counts_module
from lmhead.trim import workers
from lmhead.trim.corpus import Corpus
from lmhead.trim.counts import Counts, count, count_on_ray
from lmhead.trim.tokenizer import TokenizerJson

Make = Callable[[str], dict[str, Any]]


@pytest.fixture
def tokenizer(make_tokenizer: Make) -> TokenizerJson:
    return TokenizerJson.of(make_tokenizer("byte_level"))


@pytest.fixture
def corpus(docstrings: tuple[str, ...], tmp_path: Path) -> Corpus:
    for i, text in enumerate(docstrings[:105]):
        (tmp_path / f"{i:03}.txt").write_text(text, "utf-8")
    return Corpus((tmp_path,))


def test_counts_are_those_of_a_plain_loop(
    tokenizer: TokenizerJson, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = counts_module.batches
    monkeypatch.setattr(counts_module, "batches", lambda texts: real(texts, 3000))  # many batches
    first, held = count(tokenizer, corpus)
    expected, expected_held = Counter[int](), Counter[int]()
    for i, text in enumerate(corpus):
        ids = tokenizer.built.encode(text.text).ids
        (expected_held if i % 10 == 9 else expected).update(ids)
    for found, wanted in ((first, expected), (held, expected_held)):
        assert {i: int(n) for i, n in enumerate(found.counts) if n} == dict(wanted)
    assert (first.texts, held.texts) == (95, 10)


def test_parts_add_up_byte_for_byte(
    tokenizer: TokenizerJson, corpus: Corpus, tmp_path: Path
) -> None:
    whole = sum(count(tokenizer, corpus)[1:], count(tokenizer, corpus)[0])
    files = corpus.files
    parts = []
    for i, some in enumerate((files[:50], files[50:])):
        first, held = count(tokenizer, Corpus(tuple(some)))
        (first + held).save(tmp_path / f"part{i}")
        parts.append(Counts.load(tmp_path / f"part{i}"))
    (parts[0] + parts[1]).save(tmp_path / "sum")
    whole.save(tmp_path / "whole")
    assert (tmp_path / "sum").read_bytes() == (tmp_path / "whole").read_bytes()


def test_texts_of_a_part_are_held_back_by_their_place_in_the_whole(
    tokenizer: TokenizerJson, corpus: Corpus
) -> None:
    whole = count(tokenizer, corpus)
    cut = 33
    one = count(tokenizer, Corpus(tuple(corpus.files[:cut])))
    two = count(tokenizer, Corpus(tuple(corpus.files[cut:])), before=cut)
    for a, b, c in zip(one, two, whole, strict=True):
        assert np.array_equal((a + b).counts, c.counts)
        assert a.texts + b.texts == c.texts


def test_counts_of_another_tokenizer_are_refused(tokenizer: TokenizerJson, corpus: Corpus) -> None:
    first, _ = count(tokenizer, corpus)
    other = Counts("other", np.zeros_like(first.counts), 1)
    with pytest.raises(BadInput, match="different tokenizers"):
        first + other


@pytest.mark.parametrize("content", ["", "{}\n", '{"kind": "x"}\n', "no json"])
def test_a_file_of_something_else_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_text(content)
    with pytest.raises(BadInput, match="not a counts file"):
        Counts.load(tmp_path / "f")


HEAD = '{"kind": "lmhead token counts", "tokenizer": "x", "texts": 1, "skipped": 0, '


@pytest.mark.parametrize(
    "content",
    [
        '"ids": 1099511627776, "tokens": 0}\n',
        '"ids": -1, "tokens": 0}\n',
        '"ids": 3, "tokens": 4}\n[0, 5]\n[1, -1]\n',
        '"ids": 3, "tokens": 4}\n[-1, 4]\n',
        '"ids": 3, "tokens": 4}\n[3, 4]\n',
        '"ids": 3, "tokens": 4}\n[1, 2]\n[1, 4]\n',
        '"ids": 3, "tokens": 4}\n[1, 4.0]\n',
        '"ids": 3, "tokens": 1}\n[1, true]\n',
        '"ids": 3, "tokens": 4}\n[1, 99999999999999999999]\n',
        '"ids": 3, "tokens": 0}\n[0, 9223372036854775807]\n[1, 9223372036854775807]\n[2, 2]\n',
        '"ids": 3, "tokens": 4}\n' + "[" * 60_000 + "\n",
    ],
)
def test_counts_that_cannot_be_are_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_text(HEAD + content)
    with pytest.raises(BadInput, match="not a counts file"):
        Counts.load(tmp_path / "f")


def test_a_file_cut_short_is_refused(
    tokenizer: TokenizerJson, corpus: Corpus, tmp_path: Path
) -> None:
    first, _ = count(tokenizer, corpus)
    first.save(tmp_path / "f")
    lines = (tmp_path / "f").read_text().splitlines()
    (tmp_path / "f").write_text("\n".join(lines[:-5]) + "\n")
    with pytest.raises(BadInput, match="cut short"):
        Counts.load(tmp_path / "f")


@pytest.mark.bare
def test_without_ray_you_are_told_what_to_install(tokenizer: TokenizerJson, corpus: Corpus) -> None:
    if find_spec("ray"):
        pytest.skip("Ray is installed: test_workers.py counts with it")
    with pytest.raises(MissingExtra, match="ray"):
        count_on_ray(tokenizer, corpus, "auto")


def test_an_address_that_is_none_is_refused_in_one_line() -> None:
    pytest.importorskip("ray", reason="needs the extra `ray`")
    refused = pytest.raises(BadInput, match="no Ray cluster can be joined at 'nonsense'")
    with refused as reported, workers.joined("nonsense"):
        pass
    assert "\n" not in str(reported.value)


def test_a_cluster_that_does_not_answer_is_said_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: no one answers
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(BadInput, match=f"no Ray cluster answers at {address}"):
            workers.refuse_dead(address)
    for word in ("local", "auto"):
        workers.refuse_dead(word)
