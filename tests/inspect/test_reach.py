"""Rows without a token, tokens without a row."""

import json
from pathlib import Path
from typing import Any

import pytest

from lmhead.errors import BadCheckpoint
from lmhead.inspect.reach import TokenizerReach, folder_reach, gguf_reach


def write(folder: Path, **files: Any) -> Path:
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder


def bpe(vocab: dict[str, int], added: dict[str, int] | None = None) -> dict[str, Any]:
    return {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": text} for text, i in (added or {}).items()],
        "model": {"type": "BPE", "vocab": vocab, "merges": [["a", "b"]]},
    }


def test_every_row_has_its_token(tmp_path: Path) -> None:
    write(tmp_path, tokenizer=bpe({"a": 0, "b": 1, "ab": 2}))
    assert folder_reach(tmp_path, 3) == TokenizerReach(3, 2, 0, (), 0, 0)


def test_padded_rows_and_holes(tmp_path: Path) -> None:
    write(tmp_path, tokenizer=bpe({"a": 0, "b": 1, "ab": 4}, added={"<eos>": 6}))
    reach = folder_reach(tmp_path, 16)
    assert reach is not None
    assert reach.ids == 4
    assert reach.rows_without_token == 12
    assert reach.ranges_without_token == ((2, 3), (5, 5), (7, 15))
    assert reach.tokens_without_row == 0


def test_only_the_first_few_ranges_are_listed(tmp_path: Path) -> None:
    write(tmp_path, tokenizer=bpe({f"t{i}": 2 * i for i in range(50)}))
    reach = folder_reach(tmp_path, 100)
    assert reach is not None
    assert reach.rows_without_token == 50
    assert reach.ranges_without_token == ((1, 1), (3, 3), (5, 5), (7, 7), (9, 9))


def test_more_ids_than_rows(tmp_path: Path) -> None:
    write(tmp_path, tokenizer=bpe({"a": 0, "b": 1}, added={"<eos>": 2, "<pad>": 9}))
    reach = folder_reach(tmp_path, 2)
    assert reach is not None
    assert (reach.tokens_without_row, reach.largest_id, reach.rows_without_token) == (2, 9, 0)


def test_added_token_that_is_in_the_vocabulary_too_counts_once(tmp_path: Path) -> None:
    write(tmp_path, tokenizer=bpe({"a": 0, "<eos>": 1}, added={"<eos>": 1}))
    reach = folder_reach(tmp_path, 2)
    assert reach is not None
    assert reach.ids == 2


def test_tokens_that_look_like_the_file_s_own_keys(tmp_path: Path) -> None:
    vocab = {'"vocab": {': 0, "vocab": 1, "merges": 2, '"merges": [': 3, "added_tokens": 4, "\\": 5}
    write(tmp_path, tokenizer=bpe(vocab, added={'"vocab": [': 6}))
    reach = folder_reach(tmp_path, 7)
    assert reach is not None
    assert (reach.ids, reach.rows_without_token) == (7, 0)


def test_keys_in_another_order(tmp_path: Path) -> None:
    turned = {
        "model": {"merges": [["a", "b"]], "vocab": {"a": 0, "b": 1}, "type": "BPE"},
        "added_tokens": [{"id": 2, "content": "<eos>"}],
    }
    write(tmp_path, tokenizer=turned)
    reach = folder_reach(tmp_path, 3)
    assert reach is not None
    assert reach.ids == 3


def test_unigram_lists_its_tokens(tmp_path: Path) -> None:
    vocab = [["<unk>", 0.0], ["a", -1.5], ["ä", -2.5]]
    write(tmp_path, tokenizer={"model": {"type": "Unigram", "unk_id": 0, "vocab": vocab}})
    reach = folder_reach(tmp_path, 4)
    assert reach is not None
    assert (reach.ids, reach.ranges_without_token) == (3, ((3, 3),))


def test_a_real_tokenizer_of_each_kind_has_as_many_ids_as_the_library_says(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    text = ["the quick brown fox jumps over the lazy dog 0123456789 äöü"] * 3
    kinds = [
        (models.BPE(), trainers.BpeTrainer(special_tokens=["<s>"], show_progress=False)),
        (
            models.Unigram(),
            trainers.UnigramTrainer(
                vocab_size=60, special_tokens=["<s>"], unk_token="<s>", show_progress=False
            ),
        ),
        (
            models.WordPiece(unk_token="<s>"),
            trainers.WordPieceTrainer(special_tokens=["<s>"], show_progress=False),
        ),
        (models.WordLevel(unk_token="<s>"), trainers.WordLevelTrainer(special_tokens=["<s>"])),
    ]
    for model, trainer in kinds:
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.train_from_iterator(text, trainer)
        tokenizer.add_tokens(["<|extra_0|>", "new"])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        size = tokenizer.get_vocab_size(with_added_tokens=True)
        reach = folder_reach(tmp_path, size + 5)
        assert reach == TokenizerReach(size, size - 1, 5, ((size, size + 4),), 0, 1)


def test_slow_tokenizer_and_tokens_added_beside_it(tmp_path: Path) -> None:
    write(
        tmp_path,
        vocab={"a": 0, "b": 1},
        added_tokens={"<eos>": 2},
        tokenizer_config={"added_tokens_decoder": {"3": {"content": "<pad>"}}},
    )
    reach = folder_reach(tmp_path, 5)
    assert reach is not None
    assert (reach.ids, reach.ranges_without_token) == (4, ((4, 4),))


@pytest.mark.parametrize(
    ("text", "is_placeholder"),
    [
        ("<unused7>", True),
        ("[unused12]", True),
        ("<|reserved_special_token_3|>", True),
        ("<|extra_0|>", True),
        ("[control_8]", True),
        ("<SPECIAL_20>", True),
        ("<0x0A>", False),
        ("<|im_start|>", False),
        ("<div>", False),
        ("[1]", False),
        ("unused7", False),
    ],
)
def test_placeholders(text: str, is_placeholder: bool, tmp_path: Path) -> None:
    write(tmp_path, tokenizer=bpe({"a": 0, text: 1}))
    reach = folder_reach(tmp_path, 2)
    assert reach is not None
    assert reach.placeholder_rows == is_placeholder


def test_no_tokenizer(tmp_path: Path) -> None:
    assert folder_reach(tmp_path, 4) is None
    assert gguf_reach({}, 4) is None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{}", "has no vocabulary"),
        (b'{"model": {"vocab": {"a": 0, "b"', "is damaged"),
        (b'{"model": {"vocab": {"a": "x"}}}', "not integers"),
        (b'{"added_tokens": [{"content": "b"}], "model": {"vocab": {"a": 0}}}', "not integers"),
        (b'{"model": {"vocab": {"\xff": 0}}}', "is damaged"),
    ],
)
def test_damaged_tokenizer(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(data)
    with pytest.raises(BadCheckpoint, match=message):
        folder_reach(tmp_path, 4)


def test_gguf_rows_that_the_converter_filled(tmp_path: Path) -> None:
    metadata = {
        "tokenizer.ggml.tokens": ["a", "<unused0>", "[PAD2]", "[PAD3]"],
        "tokenizer.ggml.token_type": [1, 3, 5, 5],
    }
    assert gguf_reach(metadata, 4) == TokenizerReach(2, 1, 2, ((2, 3),), 0, 1)
