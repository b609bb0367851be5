"""The header of a safetensors file: what is there is read, and nothing false gets through."""

import json
import os
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from lmhead.errors import BadCheckpoint
from lmhead.files.safetensors import open_safetensors, pack_header, read_header


def write(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_tensors_and_metadata_are_where_it_says(tmp_path: Path) -> None:
    tensors = {
        "a": np.arange(21, dtype=np.float32).reshape(7, 3),
        "b": np.arange(5, dtype=np.int64),
        "none": np.zeros((0, 4), np.float16),
    }
    file = tmp_path / "x.safetensors"
    save_file(tensors, file, {"what": "Grüße"})
    found = open_safetensors(file)
    assert found.metadata == {"what": "Grüße"}
    data = file.read_bytes()
    for name, values in tensors.items():
        header = found.tensors[name]
        assert header.shape == values.shape
        assert data[header.offset : header.offset + header.nbytes] == values.tobytes()


def test_what_we_pack_the_library_reads_and_the_same_gives_the_same(tmp_path: Path) -> None:
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.array([True, False])
    tensors = {"a": ("F32", a.shape, a.nbytes), "b": ("BOOL", b.shape, b.nbytes)}
    header = pack_header(tensors, {"y": "2", "x": "1"})
    assert header == pack_header(tensors, {"x": "1", "y": "2"})
    assert len(header) % 8 == 0
    file = tmp_path / "x.safetensors"
    file.write_bytes(header + a.tobytes() + b.tobytes())
    with safe_open(file, framework="np") as opened:
        assert opened.metadata() == {"x": "1", "y": "2"}
        np.testing.assert_array_equal(opened.get_tensor("a"), a)
        np.testing.assert_array_equal(opened.get_tensor("b"), b)
    assert list(read_header(file)) == ["a", "b"]


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


_FALSE = {
    "a list": [1],
    "a number": 1,
    "deep": b"[" * 50_000,
    "deep objects": b'{"a":' * 50_000,
    "no utf-8": b'{"\xff": 1}',
    "half a pair": {"\ud800": entry()},
    "a tensor that is a number": {"w": 1},
    "a tensor that is null": {"w": None},
    "no dtype": {"w": {"shape": [2], "data_offsets": [0, 8]}},
    "a dtype that is a list": {"w": entry(dtype=["F32"])},
    "a shape that is a text": {"w": entry(shape="22")},
    "a shape of texts": {"w": entry(shape=["2"])},
    "a shape of reals": {"w": entry(shape=[2.0])},
    "a shape of truth values": {"w": entry(shape=[True, 2])},
    "a negative shape": {"w": entry(shape=[-2])},
    "a huge shape": {"w": entry(shape=[2**62, 2**62])},
    "rows of nothing": {"w": entry(shape=[2**62, 2**62, 0], data_offsets=[0, 0])},
    "many dimensions": {"w": entry(shape=[1] * 10_000)},
    "offsets of reals": {"w": entry(data_offsets=[0.0, 8.0])},
    "offsets as texts": {"w": entry(data_offsets=["0", "8"])},
    "three offsets": {"w": entry(data_offsets=[0, 4, 8])},
    "offsets backwards": {"w": entry(data_offsets=[8, 0])},
    "offsets beyond all bounds": {"w": entry(data_offsets=[0, 10**4000])},
    "a negative offset": {"w": entry(data_offsets=[-8, 0])},
    "not what the shape takes": {"w": entry(shape=[3])},
    "an overlap": {"v": entry(), "w": entry(shape=[1], data_offsets=[4, 8])},
    "a gap": {"w": entry(shape=[1], data_offsets=[4, 8])},
    "metadata of numbers": {"__metadata__": {"a": 1}, "w": entry()},
    "metadata that is a list": {"__metadata__": ["a"], "w": entry()},
    "too long a number": b'{"w": {"dtype": "F32", "shape": [' + b"9" * 10_000 + b"]}}",
}


@pytest.mark.parametrize("header", _FALSE.values(), ids=_FALSE.keys())
def test_a_false_header_is_refused_at_once(tmp_path: Path, header: Any) -> None:
    file = write(tmp_path / "x.safetensors", header, bytes(8))
    tracemalloc.start()
    started = time.monotonic()
    with pytest.raises(BadCheckpoint) as caught:
        read_header(file)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert time.monotonic() - started < 1
    assert peak < 2**24


def test_a_header_longer_than_the_format_allows(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", 2**30))
        stream.truncate(2**31)  # no more than a name for two gigabytes of nothing
    with pytest.raises(BadCheckpoint, match="no whole header"):
        read_header(file)


def test_no_file_a_folder_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("missing", ".", "pipe"):
        with pytest.raises(BadCheckpoint, match="expected a safetensors file"):
            read_header(tmp_path / name)
