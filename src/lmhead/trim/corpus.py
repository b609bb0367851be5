"""Texts from files: plain, JSON lines, compressed, folders, as a stream that never holds them all.

What is one text: a line's field in a `.jsonl` (or `.ndjson`) file, a plain file otherwise. A plain
file longer than `CHUNK` is cut at line ends into several (where a line has no end, between words),
so that a file may be of any size. Of a folder the text files are taken; others are named in
`left_out`.
"""

import dataclasses
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast

from lmhead.errors import BadInput, MissingExtra
from lmhead.files.jsons import is_unicode

CHUNK = 2**18  # bytes
LONG = 2**20  # characters; a longer text of a JSON line is cut between words
LINE = 2**26  # bytes; no honest JSON line is longer
RATIO, UNPACKED = 250, 2**28  # a file that unpacks to this many times, and bytes, is a trap
_START = 2**13  # bytes that tell text from anything else
_CONTROL = bytes(set(range(32)) - set(b"\t\n\r\f\v\b\x1b"))
_JSON_LINES = (".jsonl", ".ndjson")

Errors = Literal["fail", "skip"]


@dataclass(frozen=True)
class Text:
    """One text and where it stands."""

    text: str
    where: str  # file:line


@dataclass
class Corpus:
    """The texts in some files and folders; it can be iterated as often as needed.

    `field` names the field to read in JSON lines that are objects. `errors` says what to do with
    text that is not UTF-8 and with malformed lines: fail at the first, or skip them and count them
    in `skipped`.
    """

    paths: tuple[Path, ...]
    field: str = "text"
    errors: Errors = "fail"
    skipped: list[str] = dataclasses.field(default_factory=list)
    left_out: list[str] = dataclasses.field(default_factory=list)  # of folders: no text files

    def __post_init__(self) -> None:
        for path in self.paths:
            if not path.exists():
                raise BadInput(f"there is no corpus file or folder {path}; check the path")
            if not path.is_dir() and not path.is_file():
                raise BadInput(
                    f"the corpus {path} is a pipe or a device, which can be read only once; "
                    "expected files or folders, or - for stdin"
                )

    @property
    def files(self) -> list[Path]:
        """All files, those in folders ordered by name; hidden ones are left out."""
        return [file for file, _ in self._found()]

    def text_files(self) -> list[Path]:
        """Return the files that hold text; those of folders that do not are put in `left_out`."""
        self.left_out.clear()
        files: list[Path] = []
        for file, in_folder in self._found():
            if in_folder:
                try:
                    with _open(file) as stream:
                        start = stream.read(_START)
                except (OSError, EOFError, zlib.error):
                    start = b""  # whoever reads it will say why it cannot be read
                if not is_text(start):
                    self.left_out.append(str(file))
                    continue
            files.append(file)
        return files

    def _found(self) -> list[tuple[Path, bool]]:
        """Return all files, and whether each was found in a folder rather than named."""
        found: list[tuple[Path, bool]] = []
        for path in self.paths:
            if not path.is_dir():
                found.append((path, False))
                continue
            below = (p for p in sorted(path.rglob("*")) if p.is_file())
            shown = (p for p in below if not any(_hidden(q) for q in p.relative_to(path).parts))
            found += [(p, True) for p in shown]
        return found

    @property
    def characters(self) -> int | None:
        """About how much text there is; None if a compressed file hides it."""
        files = self.files
        if any(file.suffix.lower() in (".gz", ".zst") for file in files):
            return None
        return sum(file.stat().st_size for file in files)

    def __iter__(self) -> Iterator[Text]:
        self.skipped.clear()
        self.left_out.clear()
        for file, in_folder in self._found():
            yield from self._texts(file, in_folder)

    def _texts(self, file: Path, in_folder: bool) -> Iterator[Text]:
        plain_name = file.name.lower().removesuffix(".gz").removesuffix(".zst")
        try:
            with _open(file) as stream:
                start = stream.read(min(_START, CHUNK))
                if in_folder and not is_text(start):
                    self.left_out.append(str(file))
                    return
                reader = _Reader(file, stream, start)
                if plain_name.endswith(_JSON_LINES):
                    yield from self._json_lines(file, reader)
                else:
                    yield from self._chunks(file, reader)
        except (OSError, EOFError, zlib.error, _Trap) as error:
            self._wrong(f"cannot read {file}: {error}")

    def _json_lines(self, file: Path, stream: "_Reader") -> Iterator[Text]:
        number = 0
        while line := stream.line(LINE):
            number += 1
            where = f"{file}:{number}"
            if len(line) == LINE and not line.endswith(b"\n"):
                while (more := stream.line(LINE)) and not more.endswith(b"\n"):
                    pass
                self._wrong(f"{where} is longer than {LINE:,} bytes")
                continue
            text = self._decode(line, file, number)
            if text is None or not text.strip():
                continue
            try:
                value: Any = json.loads(text)
            except (ValueError, RecursionError) as error:
                self._wrong(f"{where} is not JSON ({error})")
                continue
            if isinstance(value, dict):
                value = value.get(self.field)
            if not isinstance(value, str):
                self._wrong(
                    f"{where} has no text in the field {self.field!r}; name another with --field"
                )
            elif not is_unicode(value):
                self._wrong(f"{where} holds half of a surrogate pair, which is not a character")
            else:
                yield from (Text(piece, where) for piece in _cut(value))

    def _chunks(self, file: Path, stream: "_Reader") -> Iterator[Text]:
        number = 1
        while block := stream.chunk():
            try:
                yield Text(block.decode("utf-8"), f"{file}:{number}")
            except UnicodeDecodeError:
                lines = io.BytesIO(block).readlines()
                good = (self._decode(line, file, number + i) for i, line in enumerate(lines))
                yield Text("".join(line for line in good if line is not None), f"{file}:{number}")
            number += block.count(b"\n")

    def _decode(self, line: bytes, file: Path, number: int) -> str | None:
        try:
            return line.decode("utf-8")
        except UnicodeDecodeError as error:
            self._wrong(
                f"{file}:{number} is not UTF-8 (byte {error.start} of the line is "
                f"0x{line[error.start]:02X})"
            )
            return None

    def _wrong(self, what: str) -> None:
        if self.errors == "fail":
            raise BadInput(f"{what}; fix it, or skip such text with --errors skip")
        self.skipped.append(what)


class _Trap(Exception):
    """A compressed file that unpacks to far more than any text does."""


class _Reader:
    """Reads lines and chunks of bounded size from a stream whose start was read already."""

    def __init__(self, file: Path, stream: IO[bytes], start: bytes) -> None:
        self.stream, self.held, self.read = stream, start, len(start)
        packed = file.name.lower().endswith((".gz", ".zst"))
        self.most = max(UNPACKED, RATIO * file.stat().st_size) if packed else None

    def line(self, most: int) -> bytes:
        """Return a line with its end, or the first `most` bytes of it; nothing at the end."""
        if (end := self.held.find(b"\n") + 1) or len(self.held) >= most:
            end = min(end or most, most)
            line, self.held = self.held[:end], self.held[end:]
            return line
        line, self.held = self.held, b""
        return line + self._count(self.stream.readline(most - len(line)))

    def chunk(self) -> bytes:
        """Return about `CHUNK` bytes of whole lines, or where a line has no end, of words."""
        block = self.held + self._count(self.stream.read(CHUNK - len(self.held)))
        self.held = b""
        if len(block) < CHUNK or block.endswith(b"\n"):
            return block
        block += self._count(self.stream.readline(CHUNK))
        if len(block) < 2 * CHUNK or block.endswith(b"\n"):
            return block
        end = 1 + max(block.rfind(space, CHUNK) for space in (b" ", b"\t", b"\r"))
        if not end:
            end = len(block)
            while end > len(block) - 4 and block[end - 1] & 0xC0 == 0x80:
                end -= 1  # not within a character
            end -= block[end - 1] >= 0xC0
        block, self.held = block[:end], block[end:]
        return block

    def _count(self, more: bytes) -> bytes:
        self.read += len(more)
        if self.most is not None and self.read > self.most:
            raise _Trap(f"it unpacks to more than {RATIO} times its size")
        return more


def is_text(start: bytes) -> bool:
    """Tell by its first bytes whether a file is text, be it in UTF-8 or not."""
    if b"\0" in start or start.startswith(b"%PDF-"):
        return False
    control = len(start) - len(start.translate(None, _CONTROL))
    return control <= len(start) // 10


def _cut(text: str) -> Iterator[str]:
    while len(text) > LONG:
        end = 1 + max(text.rfind(space, LONG // 2, LONG) for space in "\n ")
        yield text[: end or LONG]
        text = text[end or LONG :]
    yield text


def batches(texts: Iterable[Text], size: int = 2**21) -> Iterator[list[Text]]:
    """Group texts into batches of about `size` characters."""
    batch: list[Text] = []
    held = 0
    for text in texts:
        batch.append(text)
        held += len(text.text) + 64  # many tiny texts are a large batch too
        if held >= size:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def _hidden(name: str) -> bool:
    return name.startswith(".")


@contextmanager
def _open(file: Path) -> Iterator[IO[bytes]]:
    name = file.name.lower()
    if name.endswith(".gz"):
        with gzip.open(file, "rb") as stream:
            yield cast("IO[bytes]", stream)
    elif name.endswith(".zst"):
        with _open_zst(file) as stream:
            yield stream
    else:
        with file.open("rb") as stream:
            yield stream


def _open_zst(file: Path) -> Any:
    try:
        from compression import zstd  # type: ignore[import-not-found,unused-ignore]

        return zstd.open(file, "rb")
    except ImportError:
        pass
    try:
        import zstandard  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise MissingExtra(
            f"{file} is compressed with zstd, which Python reads from 3.14 on; before that, "
            "`pip install zstandard`, or decompress it first"
        ) from None
    # Frames may stand one behind the other, as parallel compressors write them.
    return io.BufferedReader(
        zstandard.ZstdDecompressor().stream_reader(file.open("rb"), read_across_frames=True)
    )
