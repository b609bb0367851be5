"""Texts from files: plain, JSON lines, compressed, folders, as a stream that never holds them all.

What is one text: a line's field in a `.jsonl` (or `.ndjson`) file, a plain file otherwise. A plain
file longer than `CHUNK` is cut at line ends into several, so that a file may be of any size.
"""

import dataclasses
import gzip
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast

from lmhead.errors import BadInput, MissingExtra

CHUNK = 2**18  # bytes
_JSON_LINES = (".jsonl", ".ndjson")

Errors = Literal["fail", "skip"]


@dataclass(frozen=True)
class Text:
    """One text and where it stands."""

    text: str
    where: str  # file:line


@dataclass
class Corpus:
    """The texts of some files and folders; iterate as often as needed.

    `field` names what to read in a JSON line that is an object. `errors` says what to do with text
    that is not UTF-8 and lines that are not what they should be: fail at the first, or skip and
    count them in `skipped`.
    """

    paths: tuple[Path, ...]
    field: str = "text"
    errors: Errors = "fail"
    skipped: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        for path in self.paths:
            if not path.exists():
                raise BadInput(f"there is no corpus file or folder {path}; check the path")

    @property
    def files(self) -> list[Path]:
        """All files, those of folders in the order of their names; hidden ones are left out."""
        found: list[Path] = []
        for path in self.paths:
            if not path.is_dir():
                found.append(path)
                continue
            below = (p for p in sorted(path.rglob("*")) if p.is_file())
            found += [p for p in below if not any(_hidden(q) for q in p.relative_to(path).parts)]
        return found

    @property
    def characters(self) -> int | None:
        """About how much text there is, None where a compressed file hides it."""
        files = self.files
        if any(file.suffix.lower() in (".gz", ".zst") for file in files):
            return None
        return sum(file.stat().st_size for file in files)

    def __iter__(self) -> Iterator[Text]:
        self.skipped.clear()
        for file in self.files:
            yield from self._texts(file)

    def _texts(self, file: Path) -> Iterator[Text]:
        plain_name = file.name.lower().removesuffix(".gz").removesuffix(".zst")
        try:
            with _open(file) as stream:
                if plain_name.endswith(_JSON_LINES):
                    yield from self._json_lines(file, stream)
                else:
                    yield from self._chunks(file, stream)
        except (OSError, EOFError) as error:
            self._wrong(f"cannot read {file}: {error}")

    def _json_lines(self, file: Path, stream: IO[bytes]) -> Iterator[Text]:
        for number, line in enumerate(stream, 1):
            where = f"{file}:{number}"
            text = self._decode(line, file, number)
            if text is None or not text.strip():
                continue
            try:
                value: Any = json.loads(text)
            except ValueError as error:
                self._wrong(f"{where} is not JSON ({error})")
                continue
            if isinstance(value, dict):
                value = value.get(self.field)
            if isinstance(value, str):
                yield Text(value, where)
            else:
                self._wrong(
                    f"{where} has no text in the field {self.field!r}; name another with --field"
                )

    def _chunks(self, file: Path, stream: IO[bytes]) -> Iterator[Text]:
        number = 1
        while lines := stream.readlines(CHUNK):
            block = b"".join(lines)
            try:
                yield Text(block.decode("utf-8"), f"{file}:{number}")
            except UnicodeDecodeError:
                good = (self._decode(line, file, number + i) for i, line in enumerate(lines))
                yield Text("".join(line for line in good if line is not None), f"{file}:{number}")
            number += len(lines)

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
            raise BadInput(f"{what}; mend it, or leave such text out with --errors skip")
        self.skipped.append(what)


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
        import io

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
