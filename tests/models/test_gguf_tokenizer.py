"""Tokenizers rebuilt from GGUF arrays must cut text as the ones that the arrays came from.

Byte-level BPE is compared with a tokenizer trained on the spot, in the form in which its makers
publish it; SentencePiece BPE with a plain transcription of its algorithm.
"""

import heapq
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer

from lmhead.errors import BadCheckpoint, UnsupportedModel
from lmhead.files.gguf import open_gguf
from lmhead.models.gguf_tokenizer import build_tokenizer

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6

TEXTS = [
    "The capital of France is Paris.",
    "In 2024, 1234567 people paid 12.50 for 3½ units; ٣٤ more, Ⅻ times.",
    "don't DON'T we'll I'm you've they'd",
    "def f(x):\n    return x\n\n\n        y = 1\t\t# tabs",
    "naïve café, 日本語のテキスト, Ελληνικά, العربية, हिन्दी 🎉👩‍👩‍👧",
    "a  b   c" + " " * 30 + "d" + " " * 31 + "e\r\nf\n \n g",
    "<|start|>user\nHi<|end|>\n<table><b>x</b>",
    "e\u0301 and é",
    " leading and trailing ",
    "  two",
    "",
]


def write(path: Path, build: Callable[[gguf.GGUFWriter], None], arch: str = "llama") -> Path:
    writer = gguf.GGUFWriter(path, arch)
    build(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# ---- byte-level BPE

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES_ONLY = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
PUBLISHED = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    ),
    "llama-bpe": pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), BYTES_ONLY]
    ),
    "qwen2": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3.replace("{1,3}", "")), "isolated"),
            BYTES_ONLY,
        ]
    ),
}


def trained(rule: str) -> Tokenizer:
    tokenizer = Tokenizer(BPE(ignore_merges=rule == "llama-bpe"))
    tokenizer.pre_tokenizer = PUBLISHED[rule]
    tokenizer.decoder = decoders.ByteLevel()
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    trainer = BpeTrainer(
        vocab_size=600,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|pad|>", "<|start|>", "<|end|>"],
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


def byte_level(tokenizer: Tokenizer, rule: str | None, **flags: Any) -> Callable[..., None]:
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)

    def build(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        if rule is not None:
            writer.add_tokenizer_pre(rule)
        writer.add_token_list(tokens)
        writer.add_token_types([CONTROL] * 3 + [NORMAL] * (len(tokens) - 3))
        writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_pad_token_id(0)
        for key, value in flags.items():
            writer.add_bool(f"tokenizer.ggml.{key}", value)

    return build


@pytest.mark.parametrize("rule", PUBLISHED)
def test_byte_level_bpe_cuts_as_published(rule: str, tmp_path: Path) -> None:
    reference = trained(rule)
    path = write(tmp_path / "x.gguf", byte_level(reference, rule, add_bos_token=False))
    ours = build_tokenizer(open_gguf(path)).tokenizer
    assert ours.get_vocab() == reference.get_vocab()
    for text in TEXTS:
        encoded = ours.encode(text)
        assert encoded.ids == reference.encode(text).ids, text
        expected = ours.normalizer.normalize_str(text) if ours.normalizer else text
        assert ours.decode(encoded.ids, skip_special_tokens=False) == expected


def test_the_rules_differ_where_they_should(tmp_path: Path) -> None:
    words = {}
    for rule in (*PUBLISHED, "default"):
        path = write(tmp_path / f"{rule}.gguf", byte_level(trained("gpt-2"), rule))
        cut = build_tokenizer(open_gguf(path)).tokenizer.pre_tokenizer.pre_tokenize_str("x=12345")
        words[rule] = [word for word, _ in cut]
    assert words == {
        "gpt-2": ["x", "=", "12345"],
        "smollm": ["x", "=", "1", "2", "3", "4", "5"],
        "llama-bpe": ["x", "=", "123", "45"],
        "qwen2": ["x", "=", "1", "2", "3", "4", "5"],
        "default": ["x", "=", "123", "45"],
    }


def test_bos_is_what_the_file_says_or_else_what_the_rule_implies(tmp_path: Path) -> None:
    def first(rule: str, **flags: bool) -> tuple[bool, list[int]]:
        path = write(tmp_path / "x.gguf", byte_level(trained(rule), rule, **flags))
        built = build_tokenizer(open_gguf(path))
        return built.add_bos, built.tokenizer.encode("").ids

    assert first("gpt-2") == (False, [])
    assert first("gpt-2", add_bos_token=True) == (True, [1])
    assert first("gpt-2", add_bos_token=True, add_eos_token=True) == (True, [1, 2])
    assert first("llama-bpe") == (True, [1])
    assert first("llama-bpe", add_bos_token=False) == (False, [])


def test_pairs_have_both_ends_around_each_text(tmp_path: Path) -> None:
    flags = {"add_bos_token": True, "add_eos_token": True}
    path = write(tmp_path / "x.gguf", byte_level(trained("gpt-2"), "gpt-2", **flags))
    encoded = build_tokenizer(open_gguf(path)).tokenizer.encode("", "")
    assert encoded.ids == [1, 2, 1, 2]
    assert encoded.type_ids == [0, 0, 1, 1]


def test_an_old_gpt2_file_names_no_rule(tmp_path: Path) -> None:
    reference = trained("gpt-2")
    path = write(tmp_path / "x.gguf", byte_level(reference, None), "gpt2")
    assert build_tokenizer(open_gguf(path)).tokenizer.encode(TEXTS[1]).ids == (
        reference.encode(TEXTS[1]).ids
    )
    path = write(tmp_path / "y.gguf", byte_level(reference, None), "llama")
    with pytest.raises(UnsupportedModel, match="rule None"):
        build_tokenizer(open_gguf(path))


# ---- SentencePiece BPE

PIECES = ["▁", *"abcdehlnorstw.,▁"[:-1], "▁t", "he", "▁the", "in", "er", "ab", "bc", "abc", "ca"]
PIECES += ["▁a", "th", "the", "▁w", "or", "ld", "▁wor", "▁world", "aa", "aaa", "ll", "el", "lo"]
SPECIAL = ["<unk>", "<s>", "</s>", "<turn>"]
DEFINED = ["  ", "   ", "\n", "\n\n", "<b>"]  # as GGUF writes them: with real spaces


def sentencepiece(writer: gguf.GGUFWriter, prefix: bool | None = False, missing: int = 0) -> None:
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    pieces = list(dict.fromkeys(PIECES))
    tokens = [*SPECIAL, *DEFINED, *bytes_, *pieces]
    types = [UNKNOWN, *[CONTROL] * 3, *[USER] * 5, *[BYTE] * 256, *[NORMAL] * len(pieces)]
    # Not in the order of the ids: the scores alone decide.
    scores = [0.0] * (len(tokens) - len(pieces)) + [
        -((i * 7) % len(pieces)) for i in range(len(pieces))
    ]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_scores([float(score) for score in scores[missing:]])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if prefix is not None:
        writer.add_add_space_prefix(prefix)


class SentencePiece:
    """SentencePiece's BPE as it is defined, without control tokens or a space put in front.

    User-defined pieces are taken out first, the longest at each place; then the adjacent pair whose
    joint piece scores highest is joined, the leftmost of equals, until there is none; what is no
    piece is spelt in bytes.
    """

    def __init__(self, path: Path) -> None:
        metadata = open_gguf(path).metadata
        keys = ("tokens", "scores", "token_type")
        rows = zip(*(metadata[f"tokenizer.ggml.{key}"] for key in keys), strict=True)
        self.ids: dict[str, int] = {}
        self.joins: dict[str, float] = {}
        self.frozen: set[str] = set()
        for id_, (token, score, kind) in enumerate(rows):
            piece = token.replace(" ", "▁") if kind == USER else token
            self.ids[piece] = id_
            if kind == NORMAL:
                self.joins[piece] = score
            elif kind == USER:
                self.frozen.add(piece)
        self.longest = max(map(len, self.frozen))

    def encode(self, text: str) -> list[int]:
        text = text.replace(" ", "▁")
        symbols: list[str | None] = []
        position = 0
        while position < len(text):
            parts = (text[position : position + n] for n in range(self.longest, 0, -1))
            symbol = next((part for part in parts if part in self.frozen), text[position])
            symbols.append(symbol)
            position += len(symbol)
        self._join(symbols)
        result = []
        for symbol in symbols:
            if symbol in self.ids:
                result.append(self.ids[symbol])
            elif symbol is not None:
                result += [self.ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
        return result

    def _join(self, symbols: list[str | None]) -> None:
        after = list(range(1, len(symbols) + 1))
        before = list(range(-1, len(symbols) - 1))
        queue: list[tuple[float, int, int, str]] = []

        def offer(left: int, right: int) -> None:
            if left < 0 or right >= len(symbols) or {symbols[left], symbols[right]} & self.frozen:
                return
            joint = f"{symbols[left]}{symbols[right]}"
            if joint in self.joins:
                heapq.heappush(queue, (-self.joins[joint], left, right, joint))

        for left in range(len(symbols) - 1):
            offer(left, left + 1)
        while queue:
            _, left, right, joint = heapq.heappop(queue)
            if None in (symbols[left], symbols[right]) or after[left] != right:
                continue
            if f"{symbols[left]}{symbols[right]}" != joint:
                continue
            symbols[left], symbols[right] = joint, None
            after[left] = after[right]
            if after[left] < len(symbols):
                before[after[left]] = left
            offer(before[left], left)
            offer(left, after[left])


@pytest.fixture(scope="module")
def spiece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("spiece") / "x.gguf", sentencepiece)


def test_sentencepiece_bpe_is_that_of_its_scores(spiece: Path) -> None:
    reference = SentencePiece(spiece)
    tokenizer = build_tokenizer(open_gguf(spiece)).tokenizer

    @settings(max_examples=500, deadline=None)
    @given(st.lists(st.sampled_from([*"abcdehlnorstw., \né🎉▁", "<b>", "   ", " the"])))
    def check(parts: list[str]) -> None:
        text = "".join(parts)
        encoded = tokenizer.encode(text)
        assert encoded.ids == [1, *reference.encode(text)]
        assert tokenizer.decode(encoded.ids) == text.replace("▁", " ")

    check()


@pytest.mark.parametrize("prefix", [True, None])
def test_a_space_is_put_in_front_where_the_file_does_not_say_no(
    prefix: bool | None, tmp_path: Path
) -> None:
    path = write(tmp_path / "x.gguf", lambda writer: sentencepiece(writer, prefix))
    tokenizer = build_tokenizer(open_gguf(path)).tokenizer
    expected = {
        "the a": ["▁the", "▁a"],
        " the": ["▁", "▁the"],
        "a  the": ["▁a", "  ", "▁the"],  # found before the space is put there, as in llama.cpp
        "": [],
    }
    for text, tokens in expected.items():
        encoded = tokenizer.encode(text, add_special_tokens=False)
        assert encoded.tokens == tokens
    assert tokenizer.decode(tokenizer.encode("the a").ids) == "the a"
    assert tokenizer.decode(tokenizer.encode(" the").ids) == " the"


def test_runs_of_spaces_are_single_tokens(spiece: Path) -> None:
    tokenizer = build_tokenizer(open_gguf(spiece)).tokenizer
    tokens = tokenizer.encode("a     the  a", add_special_tokens=False).tokens
    assert tokens == ["a", "▁▁▁", "▁▁", "the", "▁▁", "a"]


def test_control_tokens_are_one_id_and_special(spiece: Path) -> None:
    tokenizer = build_tokenizer(open_gguf(spiece)).tokenizer
    encoded = tokenizer.encode("<turn>the</s><b>", add_special_tokens=False)
    assert encoded.tokens == ["<turn>", "the", "</s>", "<b>"]
    assert tokenizer.decode(encoded.ids) == "the<b>"
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == "<turn>the</s><b>"


def test_ids_that_sentencepiece_files_leave_unsaid(tmp_path: Path) -> None:
    def bare(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["<unk>", "<s>", "</s>", "▁", "a"])
        writer.add_token_types([UNKNOWN, CONTROL, CONTROL, NORMAL, NORMAL])
        writer.add_token_scores([0.0] * 5)

    built = build_tokenizer(open_gguf(write(tmp_path / "x.gguf", bare)))
    assert built.special == {"unk": 0, "bos": 1, "eos": 2}
    assert built.tokenizer.encode("a?").ids == [1, 3, 4, 0]  # no bytes in the vocabulary: unknown


def test_what_ends_a_text(tmp_path: Path) -> None:
    def build(writer: gguf.GGUFWriter) -> None:
        sentencepiece(writer)
        writer.add_eot_token_id(3)
        writer.add_chat_template("{{ messages }}")

    built = build_tokenizer(open_gguf(write(tmp_path / "x.gguf", build)))
    assert built.end_ids == [2, 3]
    assert built.token("eot") == "<turn>"
    assert built.token("pad") is None
    assert built.chat_template == "{{ messages }}"


# ---- what is refused


def byte_vocabulary(writer: gguf.GGUFWriter, **changes: Any) -> None:
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["a", "b", "ab"],
        "types": [NORMAL] * 3,
        "merges": ["a b"],
    } | changes
    writer.add_tokenizer_model(values["model"])
    writer.add_tokenizer_pre(values["pre"])
    writer.add_token_list(values["tokens"])
    writer.add_token_types(values["types"])
    writer.add_token_merges(values["merges"])
    if "eos" in values:
        writer.add_eos_token_id(values["eos"])
    if "add_eos" in values:
        writer.add_add_eos_token(values["add_eos"])
    if "add_bos" in values:
        writer.add_add_bos_token(values["add_bos"])


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"pre": "chatglm-bpe"}, UnsupportedModel, "'chatglm-bpe'.*expected one of gpt-2, smollm"),
        ({"model": "bert"}, UnsupportedModel, "kind 'bert'"),
        ({"types": [NORMAL] * 2}, BadCheckpoint, "3 tokens but 2 token types"),
        ({"tokens": ["a", "b", "a"]}, BadCheckpoint, "twice"),
        ({"tokens": [1, 2, 3]}, BadCheckpoint, "not an array of str"),
        ({"merges": ["a c"]}, BadCheckpoint, "merge 'a c'"),
        ({"eos": 3}, BadCheckpoint, "eos token has the id 3, expected one of 0 to 2"),
        ({"add_bos": True}, BadCheckpoint, "names none"),
        (
            {"tokens": ["a", "b", "a:0"], "merges": [], "eos": 2, "add_eos": True},
            UnsupportedModel,
            "a:0",
        ),
    ],
)
def test_a_tokenizer_that_cannot_be_built_says_why(
    changes: dict[str, Any], error: type[Exception], match: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "x.gguf", lambda writer: byte_vocabulary(writer, **changes))
    with pytest.raises(error, match=match) as caught:
        build_tokenizer(open_gguf(path))
    assert "\n" not in str(caught.value)


def test_scores_must_match_the_tokens(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", lambda writer: sentencepiece(writer, missing=2))
    with pytest.raises(BadCheckpoint, match="scores"):
        build_tokenizer(open_gguf(path))


def test_no_tokenizer_at_all(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", lambda writer: None)
    with pytest.raises(UnsupportedModel, match="no tokenizer"):
        build_tokenizer(open_gguf(path))


# ---- the real ones, as transformers loads them


def both(folder: Path) -> tuple[Any, Tokenizer]:
    return AutoTokenizer.from_pretrained(folder), Tokenizer.from_file(
        str(folder / "tokenizer.json")
    )


def source_text() -> str:
    return Path(__file__).read_text(encoding="utf-8")


@pytest.mark.model
def test_smollm2_through_transformers_is_the_file_itself(smollm2: Path) -> None:
    auto, raw = both(smollm2)
    assert len(auto) == 49_152
    for text in (*TEXTS, source_text()):
        ids = raw.encode(text).ids
        assert auto(text)["input_ids"] == ids
        assert auto.decode(ids) == text  # no BOS in front, and nothing cleaned up


@pytest.mark.model
def test_smollm2_splits_digits(smollm2: Path) -> None:
    _, raw = both(smollm2)
    assert raw.encode("in 2024").tokens == ["in", "Ġ", "2", "0", "2", "4"]
    assert raw.encode("x٣٤½").tokens == raw.encode("x").tokens + (
        raw.encode("٣").tokens + raw.encode("٤").tokens + raw.encode("½").tokens
    )


@pytest.mark.model
def test_smollm2_chat_markers_are_single_ids(smollm2: Path) -> None:
    auto, _ = both(smollm2)
    message = [{"role": "user", "content": "Hi"}]
    ids = auto.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    assert ids.count(1) == 3  # system, user, assistant: <|im_start|>
    assert ids.count(2) == 2  # <|im_end|> twice: the answer is open
    assert (auto.bos_token, auto.eos_token, auto.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert auto.model_max_length == 8192
    assert "token_type_ids" not in auto("Hi")


@pytest.mark.gemma
def test_gemma3_through_transformers_is_the_file_itself(gemma3: Path) -> None:
    auto, raw = both(gemma3)
    assert len(auto) == 262_144
    for text in (*TEXTS, source_text().replace("▁", "_")):
        ids = raw.encode(text).ids
        assert ids[0] == 2  # BOS, without which Gemma is lost
        assert ids.count(2) == 1
        assert auto(text)["input_ids"] == ids
        assert auto.decode(ids[1:]) == text
    assert raw.encode("<start_of_turn>user", add_special_tokens=False).ids[0] == 105


@pytest.mark.gemma
def test_gemma3_cuts_as_sentencepiece_does(gemma3: Path, gemma3_gguf: Path) -> None:
    _, raw = both(gemma3)
    reference = SentencePiece(gemma3_gguf)
    source = source_text().replace("<", "(")  # no control tokens, which are not SentencePiece's
    for text in (*TEXTS, source, " " * 40 + "x\n" + "\t" * 40):
        assert raw.encode(text, add_special_tokens=False).ids == reference.encode(text)


@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize("lengths", [[400_000], [4000] * 1000], ids=["one", "many"])
def test_tokens_beyond_all_bounds_are_refused_at_once(
    tmp_path: Path, model: str, lengths: list[int]
) -> None:
    """One of 400,000 letters took 24 seconds: every cut of it was looked up."""
    import time

    def build(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model(model)
        writer.add_tokenizer_pre("gpt-2")
        tokens = [f"{i}{'x' * length}" for i, length in enumerate(lengths)]
        writer.add_token_list(["<unk>", "<s>", "</s>", *tokens])
        writer.add_token_scores([0.0] * (3 + len(tokens)))
        writer.add_token_types([1] * (3 + len(tokens)))
        writer.add_token_merges([])

    path = write(tmp_path / "x.gguf", build)
    started = time.monotonic()
    with pytest.raises(BadCheckpoint, match="characters"):
        build_tokenizer(open_gguf(path))
    assert time.monotonic() - started < 2
