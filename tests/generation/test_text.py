"""Streaming: whole characters only, stop strings never shown, and nothing lost on the way."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmhead.generation.text import TextStream


def decode_bytes(ids: list[int]) -> str:
    """A tokenizer whose ids are bytes: the hardest case for characters cut in halves."""
    return bytes(ids).decode("utf-8", errors="replace")


def decode_words(ids: list[int]) -> str:
    """A tokenizer that drops the leading space of what it decodes, as SentencePiece's do."""
    return "".join(f" w{i}" for i in ids).removeprefix(" ")


def run(
    decode: Callable[[list[int]], str], ids: list[int], stop: tuple[str, ...] = ()
) -> list[str]:
    stream = TextStream(decode, stop)
    pieces = []
    for i in ids:
        pieces.append(stream.push(i))
        if stream.stopped_by is not None:
            break
    pieces.append(stream.finish())
    assert "".join(pieces) == stream.text
    return pieces


@given(st.text())
def test_the_pieces_are_the_text(text: str) -> None:
    assert "".join(run(decode_bytes, list(text.encode()))) == text


@given(st.text(alphabet="aé☃😀\u200d", min_size=1))
def test_no_character_is_split(text: str) -> None:
    for piece in run(decode_bytes, list(text.encode())):
        assert "\ufffd" not in piece


def test_an_unfinished_character_is_shown_at_the_end() -> None:
    assert "".join(run(decode_bytes, list("é".encode())[:1])) == "\ufffd"


def test_leading_spaces_survive() -> None:
    assert "".join(run(decode_words, [1, 2, 3])) == "w1 w2 w3"


@given(st.text(alphabet="ab", max_size=30), st.lists(st.text("ab", min_size=1), max_size=3))
def test_text_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    found = [(text.find(s), s) for s in stops if s in text]
    got = "".join(run(decode_bytes, list(text.encode()), tuple(stops)))
    if not found:
        assert got == text
        return
    # The stream ends as soon as one stop string is whole: the one that is complete first.
    end = min(i + len(s) for i, s in found)
    whole = text[:end]
    assert got == whole[: min(whole.find(s) for s in stops if s in whole)]


@given(st.text(alphabet="ab", max_size=30))
def test_no_part_of_a_stop_string_is_ever_shown(text: str) -> None:
    shown = ""
    stream = TextStream(decode_bytes, ("abab",))
    for i in text.encode():
        shown += stream.push(i)
        assert "abab" not in shown
        if stream.stopped_by:
            break
    if stream.stopped_by:
        assert shown == text[: text.find("abab")]


@pytest.mark.parametrize("stop", ["\n", "END", "é"])
def test_what_stopped_it_is_told(stop: str) -> None:
    stream = TextStream(decode_bytes, (stop,))
    for i in f"some text{stop}more".encode():
        stream.push(i)
        if stream.stopped_by:
            break
    assert (stream.text, stream.stopped_by) == ("some text", stop)
