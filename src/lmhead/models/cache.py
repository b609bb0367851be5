"""An alias of `lmhead.files.cache`, until everything imports from there."""

from contextlib import AbstractContextManager
from pathlib import Path

from lmhead.files.cache import build_once, cache_root
from lmhead.files.stamp import sha256_of
from lmhead.files.whole import written_whole as _written_whole

__all__ = ["build_once", "cache_root", "sha256_of", "written_whole"]


def written_whole(path: Path) -> AbstractContextManager[Path]:
    """Give a file to write to that takes the place of `path` at the end."""
    return _written_whole(path, force=True)
