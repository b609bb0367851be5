"""Reading texts: plain, JSON lines, compressed, folders, and what cannot be read."""

import gzip
import json
from pathlib import Path

import pytest

from lmhead.errors import BadInput, MissingExtra
from lmhead.trim import corpus as corpus_module
from lmhead.trim.corpus import Corpus, Text, batches


def texts(*paths: Path, **options: object) -> list[str]:
    return [text.text for text in Corpus(paths, **options)]  # type: ignore[arg-type]


def test_a_plain_file_is_one_text_with_its_line_ends(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("one\r\ntwo\n\nthrée".encode())
    assert texts(tmp_path / "a.txt") == ["one\r\ntwo\n\nthrée"]


def test_a_long_file_is_cut_at_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "CHUNK", 50)
    lines = [f"line {i} ü\n" for i in range(40)]
    (tmp_path / "a.txt").write_text("".join(lines), "utf-8")
    found = list(Corpus((tmp_path / "a.txt",)))
    assert len(found) > 5
    assert "".join(text.text for text in found) == "".join(lines)
    assert all(text.text.endswith("\n") for text in found)
    assert found[1].where == f"{tmp_path / 'a.txt'}:{found[0].text.count(chr(10)) + 1}"


def test_json_lines_with_a_field_and_bare_strings(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\\nb", "body": "c"}\n\n"d"\n')
    assert texts(path) == ["a\nb", "d"]
    path.write_text('{"text": "a\\nb", "body": "c"}\n')
    assert texts(path, field="body") == ["c"]


def test_gzip_and_folders_in_order_without_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b/2.txt").write_text("two")
    with gzip.open(tmp_path / "b/1.jsonl.gz", "wt") as stream:
        stream.write('{"text": "one"}\n')
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden/x.txt").write_text("no")
    (tmp_path / "b/.x").write_text("no")
    assert texts(tmp_path) == ["one", "two"]


def test_zst(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.zst"
    try:
        from compression import zstd  # type: ignore[import-not-found]

        path.write_bytes(zstd.compress(b"one\n"))
    except ImportError:
        try:
            import zstandard

            path.write_bytes(zstandard.compress(b"one\n"))
        except ImportError:
            path.write_bytes(b"")
            with pytest.raises(MissingExtra, match="pip install zstandard"):
                texts(path)
            return
    assert texts(path) == ["one\n"]


@pytest.mark.parametrize(
    ("name", "content", "where", "rest"),
    [
        ("a.txt", b"good\nb\xffd\nfine\n", ":2 is not UTF-8", ["good\nfine\n"]),
        ("a.jsonl", b'"good"\n"b\xffd"\n"fine"\n', ":2 is not UTF-8", ["good", "fine"]),
        ("a.jsonl", b'"good"\n{bad\n"fine"\n', ":2 is not JSON", ["good", "fine"]),
        ("a.jsonl", b'{"text": 5}\n"fine"\n', ":1 has no text in the field 'text'", ["fine"]),
        ("a.txt.gz", b"no gzip", "cannot read", []),
    ],
)
def test_what_cannot_be_read_is_named_or_skipped(
    name: str, content: bytes, where: str, rest: list[str], tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(BadInput, match=where):
        texts(path)
    skipping = Corpus((path,), errors="skip")
    assert [text.text for text in skipping] == rest
    assert len(skipping.skipped) == 1
    assert name in skipping.skipped[0]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="nowhere"):
        Corpus((tmp_path / "nowhere.txt",))


def test_batches_hold_everything_once() -> None:
    all_texts = [Text("x" * n, json.dumps(n)) for n in (5, 3000, 1, 1, 4000, 2)]
    found = list(batches(all_texts, size=1000))
    assert [t for batch in found for t in batch] == all_texts
    assert len(found) == 3


PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x00\x01"


def test_a_folder_gives_its_texts_and_names_what_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("text \x1b[1mbold\x1b[0m")
    (tmp_path / "b.png").write_bytes(PNG)
    (tmp_path / "c.pdf").write_bytes(b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n")
    (tmp_path / "d.dat.gz").write_bytes(gzip.compress(PNG))
    (tmp_path / "e.txt").write_text("")
    corpus = Corpus((tmp_path,))
    for _ in range(2):
        assert [text.text for text in corpus] == ["text \x1b[1mbold\x1b[0m"]
        assert [Path(p).name for p in corpus.left_out] == ["b.png", "c.pdf", "d.dat.gz"]
    with pytest.raises(BadInput, match="not UTF-8"):
        texts(tmp_path / "b.png")  # named by hand, it is meant
    (tmp_path / "latin1.txt").write_bytes("Käse".encode("latin-1"))
    with pytest.raises(BadInput, match=r"latin1\.txt:1 is not UTF-8"):
        texts(tmp_path)  # text, and somebody should know that it cannot be read


@pytest.mark.parametrize("unit", ["ü", "word ", "x"])
def test_a_file_without_line_ends_is_read_in_pieces(unit: str, tmp_path: Path) -> None:
    whole = unit * (3 * corpus_module.CHUNK)
    (tmp_path / "a.txt").write_text(whole, "utf-8")
    found = texts(tmp_path / "a.txt")
    assert "".join(found) == whole
    assert all(len(text.encode()) <= 2 * corpus_module.CHUNK for text in found)
    if unit == "word ":
        assert all(text.endswith(" ") for text in found)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": whole}), "utf-8")
    found = texts(tmp_path / "a.jsonl")
    assert "".join(found) == whole
    assert all(len(text) <= corpus_module.LONG for text in found)


def test_a_file_that_unpacks_to_far_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "UNPACKED", 2**20)
    with gzip.open(tmp_path / "trap.gz", "wb") as stream:
        for _ in range(64):
            stream.write(b" " * 2**20)
    with pytest.raises(BadInput, match="unpacks to more than 250 times its size"):
        texts(tmp_path / "trap.gz")
    skipping = Corpus((tmp_path,), errors="skip")
    assert sum(len(text.text) for text in skipping) < 20 * 2**20
    assert "trap.gz" in skipping.skipped[0]


def test_a_line_without_end_is_named_and_the_next_one_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "LINE", 1000)
    (tmp_path / "a.jsonl").write_text('"' + "x" * 12_000 + '"\n"fine"\n')
    with pytest.raises(BadInput, match=":1 is longer than 1,000 bytes"):
        texts(tmp_path / "a.jsonl")
    assert texts(tmp_path / "a.jsonl", errors="skip") == ["fine"]


@pytest.mark.parametrize("line", [r'"\ud800"', "[" * 100_000, '{"text": "\\udfff x"}'])
def test_json_that_is_no_text_is_skipped(line: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(line + '\n"fine"\n')
    with pytest.raises(BadInput, match=":1 "):
        texts(tmp_path / "a.jsonl")
    assert texts(tmp_path / "a.jsonl", errors="skip") == ["fine"]


def test_a_damaged_gzip_is_skipped(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(b"some text that is long enough\n" * 50))
    data[20:40] = b"\xff" * 20
    (tmp_path / "a.gz").write_bytes(data)
    with pytest.raises(BadInput, match="cannot read"):
        texts(tmp_path / "a.gz")
    assert texts(tmp_path / "a.gz", errors="skip") == []
