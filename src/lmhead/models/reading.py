"""What transformers and tokenizers read of a folder that somebody else wrote.

Both raise whatever comes up: a validation error of four lines, a ZeroDivisionError, a panic of Rust
code, which is not even an `Exception`. Here each becomes an error of ours, in one line. What would
take them hours or end the process is refused before they see it.
"""

import base64
import math
import os
import re
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmhead.errors import BadCheckpoint, LMHeadError
from lmhead.files import limits
from lmhead.files.checkpoint import refuse_odd_files
from lmhead.files.jsons import read_bytes, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PARTS = re.compile(r"(layers?|blocks|depth|experts?)$")  # keys that count modules to be built
_PLACES = re.compile(r"position|ctx|seq|length|window|token")  # keys that count places, or name one
_FACTORS = re.compile(r"theta|base|factor|scal(e|ar|ing)|eps")  # keys that are no sizes
_OBJECTS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_CHARSMAP = re.compile(rb'"precompiled_charsmap"\s*:\s*"([^"]*)"')
_stderr = threading.Lock()


@contextmanager
def refusing(what: Callable[[str], LMHeadError], *, quiet: bool = False) -> Iterator[None]:
    """Turn whatever a library raises into the error that `what` makes of its first line.

    With `quiet`, what Rust code writes to stderr when it panics is left out.
    """
    try:
        with _without_panics() if quiet else nullcontext():
            yield
    except LMHeadError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise  # Ctrl-C and the like
        raise what(first_line(error)) from error


def is_panic(error: BaseException) -> bool:
    """Tell whether Rust code gave up: that is no `Exception`, and its class cannot be imported."""
    return type(error).__name__ == "PanicException"


def first_line(error: BaseException) -> str:
    """Return the line of an error's text that says most, or its kind."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if lines[0].endswith(":") and len(lines) > 1:  # "Validation error for field 'x':", and then why
        return lines[1][:300]
    return lines[0][:300]


def refuse_endless(config: Mapping[str, Any], tensors: int, where: Path) -> None:
    """Refuse a configuration of more layers or experts than the files could have tensors for.

    transformers builds every one of them before it looks at a file.
    """
    most = max(limits.SHARED_LAYERS, tensors)
    for key, value in _numbers(config):
        if _PARTS.search(key) and value > most:
            raise BadCheckpoint(
                f"{where} says {key} {value:,}, but the model has {tensors:,} tensors in all; "
                "expected no more layers than that: fetch the model again"
            )


def has_odd_sizes(config: Mapping[str, Any], shapes: Sequence[Sequence[int]]) -> bool:
    """Tell whether the numbers of a configuration may make tensors that the files do not have.

    So may a size that no tensor has, and two sizes whose product is far above the largest tensor:
    one may stand in the place of another. Small numbers do no harm; nor do positions and ids up to
    the largest size.
    """
    sizes = {size for shape in shapes for size in shape}
    largest = max(sizes, default=0)
    given = [
        value
        for key, value in _numbers(config)
        if value > limits.SMALL
        and not (_PLACES.search(key) and value <= largest)
        and not _FACTORS.search(key)
    ]
    most = max(map(math.prod, shapes), default=0)
    return not sizes.issuperset(given) or math.prod(sorted(given)[-2:]) > 8 * most


def _numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    stack: list[Mapping[str, Any]] = [config]
    while stack:
        for key, value in stack.pop().items():
            if isinstance(value, dict):
                stack.append(value)
            elif isinstance(value, int | float):
                with suppress(ValueError, OverflowError):  # NaN, infinity
                    yield key, int(value)


def read_tokenizer(folder: Path, config: Any = None) -> "PreTrainedTokenizerBase":
    """Return the tokenizer of a folder as transformers loads it, without any code of the folder."""
    refuse_odd_files(folder)
    for name in _OBJECTS:
        if (path := folder / name).exists():
            read_json(path, limits.TOKENIZER_JSON)
    if (path := folder / "tokenizer.json").exists():
        try:
            refuse_charsmap(read_bytes(path, limits.TOKENIZER_JSON))
        except (OSError, ValueError) as error:
            raise BadCheckpoint(f"cannot read {path}: {error}; fetch it again") from error

    def refused(reason: str) -> LMHeadError:
        return BadCheckpoint(
            f"{folder} has no tokenizer that transformers can load ({reason}); "
            "expected a tokenizer.json"
        )

    with refusing(refused, quiet=True):
        from transformers import AutoTokenizer

        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, config=config, local_files_only=True, trust_remote_code=False
        )
    return tokenizer


def refuse_charsmap(data: bytes) -> None:
    """Raise ValueError for a table of character replacements that claims more than it holds.

    tokenizers reserves what is claimed, and ends the process where there is not as much memory.
    """
    for found in _CHARSMAP.finditer(data):
        table = base64.b64decode(found[1], validate=True)
        claimed = struct.unpack_from("<I", table)[0] if len(table) >= 4 else 0
        if claimed % 4 or not 0 < claimed <= len(table) - 4:
            raise ValueError(f"its precompiled_charsmap claims {claimed:,} of {len(table):,} bytes")


@contextmanager
def _without_panics() -> Iterator[None]:
    """Hold back stderr, and drop it if the block ends in a panic.

    The lines come from Rust and know nothing of `sys.stderr`. One thread at a time holds it back.
    """
    if not _stderr.acquire(blocking=False):
        yield
        return
    try:
        with suppress(AttributeError, OSError, ValueError):
            sys.stderr.flush()
        with tempfile.TemporaryFile() as held:
            try:
                saved = os.dup(2)
            except OSError:  # closed by whoever started us
                yield
                return
            os.dup2(held.fileno(), 2)
            panic = False
            try:
                yield
            except BaseException as error:
                panic = is_panic(error)
                raise
            finally:
                os.dup2(saved, 2)
                os.close(saved)
                if not panic:
                    held.seek(0)
                    while block := held.read(2**16):
                        os.write(2, block)
    finally:
        _stderr.release()
