"""Exact tokenizer surgery, for every type of tokenizer and against the tokenizers library."""

import json
import random
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from tokenizers import Tokenizer

from lmhead.errors import BadInput, UnsupportedModel
from lmhead.trim.bpe import Merges, byte_token, merge_all, result_of, split_rule
from lmhead.trim.idmap import TrimMap
from lmhead.trim.tokenizer import TokenizerJson

KINDS = ("byte_level", "sentencepiece_bpe", "unigram", "wordpiece", "word_end_bpe")
Make = Callable[[str], dict[str, Any]]


def tokens_of(tokenizer: Tokenizer, texts: tuple[str, ...]) -> list[list[str]]:
    return [e.tokens for e in tokenizer.encode_batch(list(texts))]


def used_ids(tokenizer: Tokenizer, texts: tuple[str, ...]) -> set[int]:
    return {i for e in tokenizer.encode_batch(list(texts)) for i in e.ids}


def trim(whole: TokenizerJson, ids: set[int]) -> tuple[TokenizerJson, TrimMap]:
    kept = TrimMap.of(whole.closure(ids), len(whole.vocab))
    return whole.cut(kept), kept


@pytest.mark.parametrize("kind", KINDS)
def test_every_text_of_the_corpus_encodes_to_the_same_tokens(
    kind: str, make_tokenizer: Make, docstrings: tuple[str, ...]
) -> None:
    whole = TokenizerJson.of(make_tokenizer(kind))
    corpus = docstrings[::9]
    trimmed, kept = trim(whole, used_ids(whole.built, corpus))
    assert len(kept) < 0.95 * len(whole.vocab)  # or there would be nothing to prove
    before, after = whole.built, trimmed.built
    assert tokens_of(after, corpus) == tokens_of(before, corpus)
    for a, b in zip(
        before.encode_batch(list(corpus)), after.encode_batch(list(corpus)), strict=True
    ):
        assert kept.to_trimmed(a.ids) == b.ids
        assert kept.to_original(b.ids) == a.ids


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_texts_keep_their_tokens_whatever_else_is_dropped(
    kind: str, make_tokenizer: Make, docstrings: tuple[str, ...]
) -> None:
    # Small keep-sets are the hard case: nearly every merge that might lead astray is gone or stays.
    whole = TokenizerJson.of(make_tokenizer(kind))
    rng = random.Random(7)
    for _ in range(12):
        corpus = tuple(rng.sample(docstrings, 3))
        trimmed, _ = trim(whole, used_ids(whole.built, corpus))
        assert tokens_of(trimmed.built, corpus) == tokens_of(whole.built, corpus)


@pytest.mark.parametrize("kind", KINDS)
def test_other_text_decodes_as_well_as_before(
    kind: str, make_tokenizer: Make, docstrings: tuple[str, ...], other_text: tuple[str, ...]
) -> None:
    whole = TokenizerJson.of(make_tokenizer(kind))
    trimmed, kept = trim(whole, used_ids(whole.built, docstrings[:20]))
    assert len(kept) < len(whole.vocab) / 1.5
    before, after = whole.built, trimmed.built
    for text in (*other_text, *docstrings[20:300]):
        assert after.decode(after.encode(text).ids) == before.decode(before.encode(text).ids)


def test_the_first_rule_is_not_the_canonical_one(
    make_tokenizer: Make, docstrings: tuple[str, ...]
) -> None:
    """Why the tree is found by encoding: keeping each token's first rule changes texts."""
    data = make_tokenizer("sentencepiece_bpe")
    whole = TokenizerJson.of(data)
    rules: dict[str, list[tuple[str, str]]] = {}
    for merge in data["model"]["merges"]:
        left, right = split_rule(merge)
        rules.setdefault(result_of(left, right, ""), []).append((left, right))
    assert sum(len(r) > 1 for r in rules.values()) > 1000

    corpus = docstrings[:150]
    used = used_ids(whole.built, corpus)
    keep = {whole.names[i] for i in used} | {whole.names[i] for i in whole.always}
    todo = list(keep)
    while todo:
        for part in rules.get(todo.pop(), [()])[0]:
            if part not in keep:
                keep.add(part)
                todo.append(part)
    model = dict(data["model"])
    model["merges"] = [m for m in model["merges"] if {*split_rule(m), "".join(m)} <= keep]
    names = [t for t in whole.vocab if t in keep]
    model["vocab"] = {t: i for i, t in enumerate(sorted(names, key=whole.vocab.__getitem__))}
    naive = Tokenizer.from_str(json.dumps({**data, "model": model, "post_processor": None}))
    whole_tokens = [
        e.tokens for e in whole.built.encode_batch(list(corpus), add_special_tokens=False)
    ]
    assert tokens_of(naive, corpus) != whole_tokens

    trimmed, _ = trim(whole, used)
    assert tokens_of(trimmed.built, corpus) == tokens_of(whole.built, corpus)


def test_the_tree_of_every_kept_token_is_kept(make_tokenizer: Make) -> None:
    for kind in ("byte_level", "sentencepiece_bpe", "word_end_bpe"):
        whole = TokenizerJson.of(make_tokenizer(kind))
        rng = random.Random(0)
        some = set(rng.sample(sorted(whole.model_vocab.values()), 50))
        trimmed, _ = trim(whole, some)
        after, before = trimmed.built.model, whole.built.model
        reached = 0
        for i in some:
            text = whole.names[i].removesuffix("</w>")
            if [t.value for t in before.tokenize(text)] == [whole.names[i]]:
                assert [t.value for t in after.tokenize(text)] == [whole.names[i]]
                reached += 1
        assert reached > 20


def test_trees_by_their_last_rule_are_those_of_all_merges(make_tokenizer: Make) -> None:
    for kind in ("byte_level", "sentencepiece_bpe", "word_end_bpe"):
        whole = TokenizerJson.of(make_tokenizer(kind))
        quick, slow = whole.merges, Merges.of(whole.model)
        assert (quick.comes_out is None) == (kind == "word_end_bpe")
        ids = sorted(whole.model_names)[::3]
        trees = {i: slow.closure([i], whole.model_names) for i in ids}
        assert trees == {i: quick.closure([i], whole.model_names) for i in ids}
        assert max(map(len, trees.values())) > 5
        some = sorted(trees)[::7]
        assert quick.closure(some, whole.model_names) == set().union(*(trees[i] for i in some))
    # A rule that another one comes before makes a token that never comes out of its merges.
    data = make_tokenizer("byte_level")
    data["model"]["vocab"] = {"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4, "abc": 5}
    data["model"]["merges"] = [["b", "c"], ["a", "b"], ["ab", "c"]]
    data["added_tokens"], data["post_processor"] = [], None
    odd = TokenizerJson.of(data)
    assert odd.merges.closure([5], odd.model_names) == {5}
    assert odd.merges.closure([4, 3], odd.model_names) == {0, 1, 2, 3, 4}


def test_ids_are_renumbered_wherever_they_stand(make_tokenizer: Make) -> None:
    data = make_tokenizer("wordpiece")
    padding = {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None}
    data["padding"] = {**padding, "pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"}
    # Special tokens at the end, so that their ids must move.
    order = sorted(data["model"]["vocab"], key=lambda t: (t[0] == "[", data["model"]["vocab"][t]))
    vocab = data["model"]["vocab"] = {t: i for i, t in enumerate(order)}
    for token in data["added_tokens"]:
        token["id"] = vocab[token["content"]]
    data["post_processor"]["sep"][1] = vocab["[SEP]"]
    data["post_processor"]["cls"][1] = vocab["[CLS]"]
    data["padding"]["pad_id"] = vocab["[PAD]"]

    whole = TokenizerJson.of(data)
    trimmed, _ = trim(whole, used_ids(whole.built, ("the file",)))
    new = trimmed.data["model"]["vocab"]
    assert new["[SEP]"] < vocab["[SEP]"]
    assert trimmed.data["post_processor"]["sep"] == ["[SEP]", new["[SEP]"]]
    assert trimmed.data["padding"]["pad_id"] == new["[PAD]"]
    assert {t["id"] for t in trimmed.data["added_tokens"]} == {
        new[t] for t in ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
    }
    assert trimmed.built.encode("the file").tokens == ["[CLS]", "the", "file", "[SEP]"]
    assert whole.data["post_processor"]["sep"][1] == vocab["[SEP]"]  # the original is untouched


def test_template_ids_and_added_tokens_behind_the_vocabulary(make_tokenizer: Make) -> None:
    whole = TokenizerJson.of(make_tokenizer("byte_level"))
    trimmed, kept = trim(whole, set())
    assert trimmed.built.encode("<|chat|>lmhead").tokens == [
        "<|endoftext|>",
        "<|chat|>",
        "lmhead",
    ]
    assert trimmed.vocab["<|chat|>"] == len(trimmed.data["model"]["vocab"])
    assert len(kept) == 256 + 3


def test_all_bytes_stay_with_byte_fallback(make_tokenizer: Make) -> None:
    trimmed, _ = trim(TokenizerJson.of(make_tokenizer("sentencepiece_bpe")), set())
    assert {byte_token(b) for b in range(256)} <= set(trimmed.vocab)


def test_missing_byte_symbols_are_no_reason_to_fail(
    make_tokenizer: Make, docstrings: tuple[str, ...], other_text: tuple[str, ...]
) -> None:
    # Some real vocabularies lack byte symbols and lose such bytes; a trim must be no worse.
    data = make_tokenizer("byte_level")
    dropped = {"À", "ý", "þ"}
    model = data["model"]
    model["merges"] = [m for m in model["merges"] if not any(c in "".join(m) for c in dropped)]
    keep = [t for t in model["vocab"] if not any(c in t for c in dropped)]
    model["vocab"] = {t: i for i, t in enumerate(keep)}
    for at, token in enumerate(data["added_tokens"]):
        token["id"] = at and len(keep) + at - 1
    whole = TokenizerJson.of(data)
    trimmed, _ = trim(whole, used_ids(whole.built, docstrings[:5]))
    before, after = whole.built, trimmed.built
    for text in other_text:
        assert after.decode(after.encode(text).ids) == before.decode(before.encode(text).ids)


def test_ignore_merges_takes_whole_words_from_the_vocabulary(
    make_tokenizer: Make, docstrings: tuple[str, ...]
) -> None:
    data = make_tokenizer("byte_level")
    data["model"]["ignore_merges"] = True
    merges = data["model"]["merges"]
    data["model"]["merges"] = merges[: len(merges) // 2]  # the rest is reached as whole words only
    whole = TokenizerJson.of(data)
    corpus = docstrings[:100]
    trimmed, kept = trim(whole, used_ids(whole.built, corpus))
    assert len(kept) < len(whole.vocab)
    assert tokens_of(trimmed.built, corpus) == tokens_of(whole.built, corpus)


def test_unigram_keeps_the_score_of_the_unknown(make_tokenizer: Make) -> None:
    """The penalty of an unknown character is 10 below the lowest score of all pieces."""
    data = make_tokenizer("unigram")
    # Without "[min]" the unknown's score would rise from -510 to about -20, above "ʘʘ" with -300.
    data["model"]["vocab"] += [["[min]", -500.0], ["ʘʘ", -300.0]]
    whole = TokenizerJson.of(data)
    ids = used_ids(whole.built, ("ʘʘ",))
    assert whole.vocab["ʘʘ"] in ids
    trimmed, _ = trim(whole, ids)
    assert trimmed.built.encode("ʘʘ").tokens == whole.built.encode("ʘʘ").tokens
    assert "[min]" in trimmed.vocab


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda d: d["model"].update(type="WordLevel"), "unknown token"),
        (lambda d: d["model"].update(dropout=0.1), "random"),
        (lambda d: d.update(post_processor={"type": "Novel"}), "'Novel'"),
    ],
)
def test_what_cannot_be_exact_is_refused(
    change: Callable[[dict[str, Any]], None], why: str, make_tokenizer: Make
) -> None:
    data = make_tokenizer("byte_level")
    change(data)
    with pytest.raises(UnsupportedModel, match=why):
        TokenizerJson.of(data)


def test_a_keep_set_must_fit_the_tokenizer(make_tokenizer: Make) -> None:
    whole = TokenizerJson.of(make_tokenizer("byte_level"))
    with pytest.raises(BadInput, match="999999"):
        whole.closure({999_999})
    with pytest.raises(BadInput, match="not closed"):
        whole.cut(TrimMap.of(range(10), len(whole.vocab)))


def test_a_long_token_is_walked_in_no_time() -> None:
    """One token of 60,000 letters; pair by pair from the start it took half an hour."""
    vocab = {"a": 0, **{"a" * 2**n: n for n in range(1, 16)}}
    ranks = {(n, n): (n, n + 1) for n in range(15)}
    start = time.perf_counter()
    tokens, made = merge_all([0] * 60_000, ranks.get)
    assert time.perf_counter() - start < 5
    names = {i: token for token, i in vocab.items()}
    assert "".join(names[i] for i in tokens) == "a" * 60_000
    assert made == sorted(made)  # lowest rank first
    assert all(one.of == (one.token - 1, one.token - 1) for one in made)


def test_merges_fire_lowest_rank_first_and_leftmost() -> None:
    rng = random.Random(0)
    for _ in range(200):
        rules = {
            (rng.randrange(6), rng.randrange(6)): (rng.randrange(4), rng.randrange(6))
            for _ in range(9)
        }
        symbols = [rng.randrange(6) for _ in range(rng.randrange(1, 14))]
        tokens, made = list(symbols), []
        while pairs := [(rules[p][0], at) for at, p in enumerate(pairwise(tokens)) if p in rules]:
            _, at = min(pairs)
            pair = (tokens[at], tokens[at + 1])
            made.append((rules[pair][1], pair))
            tokens[at : at + 2] = [rules[pair][1]]
        assert merge_all(symbols, rules.get) == (tokens, made)


def test_few_symbols_are_merged_as_many_are() -> None:
    from lmhead.trim.bpe import _merge_few, _merge_many

    rng = random.Random(0)
    for _ in range(300):
        pairs = {(rng.randrange(9), rng.randrange(9)): rng.randrange(9) for _ in range(40)}
        ranks = {pair: (rng.randrange(12), new) for pair, new in pairs.items()}
        symbols = [rng.randrange(9) for _ in range(rng.randrange(1, 30))]
        assert _merge_few(symbols, ranks.get) == _merge_many(symbols, ranks.get)


@pytest.mark.parametrize("seed", range(30))
def test_the_closure_of_a_token_is_all_that_its_merges_make(seed: int) -> None:
    """With several rules for most tokens, as in files that came from SentencePiece."""
    rng = random.Random(seed)
    vocab = {"a": 0, "b": 1, "c": 2}
    merges: list[list[str]] = []
    for _ in range(60):
        left, right = rng.choice(list(vocab)), rng.choice(list(vocab))
        if len(left + right) < 12:
            vocab.setdefault(left + right, len(vocab))
    for token in vocab:
        merges += [
            [token[:k], token[k:]]
            for k in range(1, len(token))
            if token[:k] in vocab and token[k:] in vocab
        ]
    rng.shuffle(merges)
    model = {"type": "BPE", "vocab": vocab, "merges": merges}
    whole = TokenizerJson.of({"model": model, "version": "1.0"})
    plain = Merges.of(model)  # without the library's help
    names = {i: token for token, i in vocab.items()}
    for token, i in vocab.items():
        tokens, made = merge_all([vocab[char] for char in token], plain.ranks.get)
        tree = (
            {i, *(vocab[c] for c in token), *(one.token for one in made)} if tokens == [i] else {i}
        )
        assert plain.closure({i}, names) == tree
        assert whole.merges.closure({i}, names) == tree
