import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize

from lmhead.errors import BadCheckpoint, LMHeadError, UnsupportedModel
from lmhead.files.gguf import TENSOR_TYPES, open_gguf

Q = gguf.GGMLQuantizationType


def write(path: Path, **options: object) -> Path:
    """A small file with every kind of metadata and tensors of several types."""
    writer = gguf.GGUFWriter(path, "llama", **options)
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -5)
    writer.add_uint16("a.u16", 65000)
    writer.add_int16("a.i16", -300)
    writer.add_uint32("a.u32", 4_000_000_000)
    writer.add_int32("a.i32", -70_000)
    writer.add_uint64("a.u64", 2**63)
    writer.add_int64("a.i64", -(2**40))
    writer.add_float32("a.f32", 0.5)
    writer.add_float64("a.f64", 1e-300)
    writer.add_bool("a.bool", True)
    writer.add_string("a.text", "Grüße, 世界")
    writer.add_array("a.texts", ["", "▁the", "🎉", "x" * 300])
    writer.add_array("a.numbers", [3, -1, 2])
    writer.add_array("a.reals", [0.25, -4.0])
    values = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
    writer.add_tensor("plain", values)
    writer.add_tensor("half", values[0].astype(np.float16))
    writer.add_tensor("quantised", quantize(values, Q.Q8_0), raw_dtype=Q.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "small.gguf")


def test_reads_every_kind_of_metadata(small: Path) -> None:
    metadata = open_gguf(small).metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["a.u8"] == 200
    assert metadata["a.i8"] == -5
    assert metadata["a.u16"] == 65000
    assert metadata["a.i16"] == -300
    assert metadata["a.u32"] == 4_000_000_000
    assert metadata["a.i32"] == -70_000
    assert metadata["a.u64"] == 2**63
    assert metadata["a.i64"] == -(2**40)
    assert metadata["a.f32"] == 0.5
    assert metadata["a.f64"] == 1e-300
    assert metadata["a.bool"] is True
    assert metadata["a.text"] == "Grüße, 世界"
    assert list(metadata["a.texts"]) == ["", "▁the", "🎉", "x" * 300]
    assert metadata["a.texts"][1] == "▁the"
    assert len(metadata["a.texts"]) == 4
    assert list(metadata["a.numbers"]) == [3, -1, 2]
    assert list(metadata["a.reals"]) == [0.25, -4.0]


def test_agrees_with_the_gguf_package(small: Path) -> None:
    ours = open_gguf(small)
    theirs = gguf.GGUFReader(small)
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert mine.size == tensor.n_elements
        assert mine.type == tensor.tensor_type.name
        assert (mine.offset, mine.nbytes) == (tensor.data_offset, tensor.n_bytes)
        expected = dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(ours.read(tensor.name), expected.reshape(mine.shape))


def test_the_table_of_types_is_that_of_the_gguf_package() -> None:
    for kind, (block, block_bytes) in gguf.GGML_QUANT_SIZES.items():
        assert TENSOR_TYPES[kind.value] == (kind.name, block, block_bytes)


@pytest.mark.parametrize("name", [name for name, _, _ in TENSOR_TYPES.values()])
def test_reads_every_type_that_the_gguf_package_can(name: str, tmp_path: Path) -> None:
    plain = {"F64": np.float64, "I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64}
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    random = np.random.default_rng(1)
    if name in plain:
        values = random.integers(-100, 100, (3, 256)).astype(plain[name])
        writer.add_tensor("w", values)
        expected = values.astype(np.float32)
    else:
        _, block_bytes = gguf.GGML_QUANT_SIZES[Q[name]]
        # Small bytes keep every half-precision scale finite, whichever bytes hold it.
        raw = random.integers(0, 0x38, (3, 256 // gguf.GGML_QUANT_SIZES[Q[name]][0] * block_bytes))
        raw = raw.astype(np.uint8)
        writer.add_tensor("w", raw, raw_shape=raw.shape, raw_dtype=Q[name])
        try:
            expected = dequantize(raw, Q[name])
        except NotImplementedError:
            expected = None
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = open_gguf(tmp_path / "x.gguf")
    assert file.tensors["w"].shape == (3, 256)
    if expected is None:
        with pytest.raises(UnsupportedModel, match=f"stored as {name}"):
            file.read("w")
    else:
        np.testing.assert_array_equal(file.read("w"), expected)


def test_streams_a_large_tensor_in_pieces(tmp_path: Path) -> None:
    values = np.random.default_rng(2).normal(size=(701, 960)).astype(np.float32)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("w", quantize(values, Q.Q5_1), raw_dtype=Q.Q5_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = open_gguf(tmp_path / "x.gguf")
    pieces = list(file.stream("w"))
    assert len(pieces) == 3
    expected = dequantize(quantize(values, Q.Q5_1), Q.Q5_1)
    np.testing.assert_array_equal(np.concatenate(pieces), expected.ravel())
    np.testing.assert_array_equal(file.read("w"), expected)


def test_cut_at_any_byte_it_is_a_bad_checkpoint(small: Path, tmp_path: Path) -> None:
    whole = small.read_bytes()
    tensors = open_gguf(small).tensors.values()
    start, end = min(t.offset for t in tensors), max(t.offset + t.nbytes for t in tensors)
    cut = tmp_path / "cut.gguf"
    for length in (*range(start), *range(start, end, 29), end - 1):
        cut.write_bytes(whole[:length])
        with pytest.raises(BadCheckpoint) as caught:
            open_gguf(cut)
        assert "\n" not in str(caught.value)
    cut.write_bytes(whole[:end])  # only the padding after the last tensor is gone
    assert open_gguf(cut).read("quantised").shape == (6, 64)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # arithmetic on the damaged scales
@pytest.mark.parametrize(
    "change", [lambda b: 0xFF, lambda b: 0, lambda b: b ^ 0x10, lambda b: b + 1]
)
def test_a_damaged_header_opens_or_is_an_error_of_ours(small: Path, tmp_path: Path, change) -> None:  # type: ignore[no-untyped-def]
    whole = small.read_bytes()
    header = min(tensor.offset for tensor in open_gguf(small).tensors.values())
    damaged = tmp_path / "damaged.gguf"
    opened, messages = 0, set()
    for position in range(header):
        content = bytearray(whole)
        content[position] = change(content[position]) & 0xFF
        damaged.write_bytes(content)
        try:
            file = open_gguf(damaged)
            for value in file.metadata.values():
                if not isinstance(value, str | int | float):
                    list(value)
            for name in file.tensors:
                file.read(name)
            opened += 1
        except LMHeadError as error:
            messages.add(str(error))
    assert not any("\n" in message for message in messages)
    assert 0 < opened < header  # some bytes are text or numbers, others hold the file together


def _key(name: bytes, kind: int) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind)


_HOSTILE = {
    "keys": struct.pack("<QQ", 0, 2**63),
    "tensors": struct.pack("<QQ", 2**63, 0),
    "text": struct.pack("<QQ", 0, 1) + _key(b"k", 8) + struct.pack("<Q", 2**63),
    "key name": struct.pack("<QQ", 0, 1) + struct.pack("<Q", 2**64 - 1),
    "numbers": struct.pack("<QQ", 0, 1) + _key(b"k", 9) + struct.pack("<IQ", 12, 2**62),
    "texts": struct.pack("<QQ", 0, 1) + _key(b"k", 9) + struct.pack("<IQ", 8, 2**62),
    "text in texts": struct.pack("<QQ", 0, 1)
    + _key(b"k", 9)
    + struct.pack("<IQQ", 8, 1, 2**64 - 1),
    "nested arrays": struct.pack("<QQ", 0, 1) + _key(b"k", 9) + struct.pack("<IQ", 9, 1) * 2000,
    "dimensions": struct.pack("<QQ", 1, 0) + struct.pack("<Q1sI", 1, b"w", 2**32 - 1),
    "shape": struct.pack("<QQ", 1, 0) + struct.pack("<Q1sIQQIQ", 1, b"w", 2, 2**62, 2**62, 0, 0),
    "offset": struct.pack("<QQ", 1, 0) + struct.pack("<Q1sIQIQ", 1, b"w", 1, 4, 0, 2**64 - 1),
}


@pytest.mark.parametrize("body", _HOSTILE.values(), ids=_HOSTILE.keys())
def test_a_huge_count_is_refused_at_once(body: bytes, tmp_path: Path) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 3) + body + bytes(4096))
    tracemalloc.start()
    with pytest.raises(BadCheckpoint):
        open_gguf(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


def test_what_is_no_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"")
    with pytest.raises(BadCheckpoint, match="cannot read"):
        open_gguf(path)
    path.write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(BadCheckpoint, match="not a GGUF file"):
        open_gguf(path)
    with pytest.raises(BadCheckpoint, match="cannot read"):
        open_gguf(tmp_path)
    with pytest.raises(BadCheckpoint, match="cannot read"):
        open_gguf(tmp_path / "missing.gguf")


def test_versions(small: Path, tmp_path: Path) -> None:
    whole = bytearray(small.read_bytes())
    path = tmp_path / "x.gguf"
    whole[4:8] = struct.pack("<I", 2)
    path.write_bytes(whole)
    assert open_gguf(path).metadata["a.u8"] == 200
    for version in (1, 4):
        whole[4:8] = struct.pack("<I", version)
        path.write_bytes(whole)
        with pytest.raises(UnsupportedModel, match=f"version {version}"):
            open_gguf(path)


def test_big_endian_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "big.gguf", endianess=gguf.GGUFEndian.BIG)
    with pytest.raises(UnsupportedModel, match="big endian"):
        open_gguf(path)


def test_one_part_of_several_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match="one part of 3"):
        open_gguf(tmp_path / "x.gguf")


def test_a_type_newer_than_the_table_is_named(small: Path, tmp_path: Path) -> None:
    content = small.read_bytes()
    record = b"plain" + struct.pack("<IQQI", 2, 64, 6, 0)
    assert content.count(record) == 1
    path = tmp_path / "x.gguf"
    path.write_bytes(content.replace(record, record[:-4] + struct.pack("<I", 99)))
    with pytest.raises(UnsupportedModel, match="type number 99"):
        open_gguf(path)


def test_a_quarter_of_a_million_tokens_are_read_when_asked_for(tmp_path: Path) -> None:
    V = 262_144
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "gemma3")
    writer.add_token_list([f"▁token{i}" for i in range(V)])
    writer.add_token_scores([-float(i) for i in range(V)])
    writer.add_token_types([1] * V)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tracemalloc.start()
    file = open_gguf(tmp_path / "x.gguf")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20  # no token has become a Python string yet
    assert file.metadata["tokenizer.ggml.tokens"][V - 1] == f"▁token{V - 1}"
    assert file.metadata["tokenizer.ggml.scores"][V - 1] == -float(V - 1)


def test_opening_imports_neither_torch_nor_numpy(small: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from lmhead.files.gguf import open_gguf;"
        f"open_gguf(Path({str(small)!r}));"
        "sys.exit(bool({'torch', 'numpy', 'gguf'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
