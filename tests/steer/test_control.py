"""GGUF control vectors: the same bits there and back, and what other programs write."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter

from lmhead.errors import BadCheckpoint, BadInput
from lmhead.steer import (
    HEAD,
    Card,
    SteeringVector,
    SteeringWarning,
    load_control_vector,
    load_vectors,
    save_control_vector,
)


def vectors(*layers: int, d: int = 33, alpha: float = 1.0) -> list[SteeringVector]:
    g = torch.Generator().manual_seed(7)
    return [
        SteeringVector(torch.randn(d, generator=g), n, alpha, Card(model="llama")) for n in layers
    ]


def foreign(path: Path, tensors: dict[str, np.ndarray], arch: str = "controlvector") -> Path:
    """A file as repeng lays it out: directions as they come, with the same three keys."""
    writer = GGUFWriter(path, arch)
    writer.add_string("controlvector.model_hint", "mistral")
    writer.add_uint32("controlvector.layer_count", len(tensors))
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_there_and_back_are_the_same_bits(tmp_path: Path) -> None:
    before = vectors(9, 2, 11)
    path = save_control_vector(before, tmp_path / "new" / "a.gguf")
    after = load_control_vector(path)
    assert [v.layer for v in after] == [2, 9, 11]
    for v in before:
        (same,) = [w for w in after if w.layer == v.layer]
        assert torch.equal(same.direction, v.direction)
        assert same.alpha == 1.0
        assert same.card.model == "llama"
    again = save_control_vector(after, tmp_path / "b.gguf")
    assert again.read_bytes() == path.read_bytes()


def test_strength_1_adds_alpha_times_the_direction(tmp_path: Path) -> None:
    (v,) = vectors(4, alpha=3.7)
    (w,) = load_control_vector(save_control_vector(v, tmp_path / "v.gguf"))
    assert torch.equal(w.added, v.added)
    twice = save_control_vector([v, v], tmp_path / "w.gguf")
    assert torch.equal(load_control_vector(twice)[0].added, v.added + v.added)


def test_the_gguf_package_reads_it(tmp_path: Path) -> None:
    (v,) = vectors(4)
    reader = GGUFReader(save_control_vector(v, tmp_path / "v.gguf", hint="qwen2"))
    assert reader.get_field("general.architecture").contents() == "controlvector"
    assert reader.get_field("controlvector.model_hint").contents() == "qwen2"
    assert reader.get_field("controlvector.layer_count").contents() == 1
    (tensor,) = reader.tensors
    assert (tensor.name, tensor.tensor_type.name) == ("direction.4", "F32")
    assert np.array_equal(tensor.data, v.direction.numpy())


def test_a_file_in_repengs_layout_loads_and_comes_back(tmp_path: Path) -> None:
    g = np.random.default_rng(0)
    tensors = {f"direction.{n}": g.standard_normal(48, np.float32) for n in range(1, 12)}
    path = foreign(tmp_path / "theirs.gguf", tensors)
    loaded = load_vectors(path)
    assert [v.layer for v in loaded] == list(range(1, 12))
    for v in loaded:
        assert np.array_equal(v.direction.numpy(), tensors[f"direction.{v.layer}"])
    assert save_control_vector(loaded, tmp_path / "ours.gguf").read_bytes() == path.read_bytes()


def test_half_precision_directions_load(tmp_path: Path) -> None:
    half = np.linspace(-1, 1, 32).astype(np.float16)
    (v,) = load_control_vector(foreign(tmp_path / "h.gguf", {"direction.3": half}))
    assert np.array_equal(v.direction.numpy(), half.astype(np.float32))


def test_block_0_is_written_with_a_warning(tmp_path: Path) -> None:
    with pytest.warns(SteeringWarning, match=r"llama\.cpp refuses"):
        path = save_control_vector(vectors(0), tmp_path / "v.gguf")
    assert load_control_vector(path)[0].layer == 0


def test_what_cannot_be_written(tmp_path: Path) -> None:
    head = SteeringVector(torch.ones(3), HEAD)
    for given, name, message in (
        (head, "v.gguf", "after blocks only"),
        ([*vectors(3), *vectors(4, d=5)], "v.gguf", "the widths 33 and 5"),
        ([], "v.gguf", "no vector to write"),
        (vectors(3), "v.bin", "expected a name that ends in .gguf"),
    ):
        with pytest.raises(BadInput, match=message):
            save_control_vector(given, tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_what_is_no_control_vector(tmp_path: Path) -> None:
    one = np.ones(4, np.float32)
    for tensors, arch, message in (
        ({"direction.1": one}, "llama", "holds a llama, no control vector"),
        ({"direction.x": one}, "controlvector", "expected only direction.N"),
        ({"direction.-1": one}, "controlvector", "expected only direction.N"),
        ({"direction.1": np.ones((2, 2), np.float32)}, "controlvector", "expected only"),
        ({"direction.1": one * np.nan}, "controlvector", "tensor direction.1: .* NaN"),
        ({"direction.1": one, "direction.2": np.ones(5, np.float32)}, "controlvector", "widths"),
        ({}, "controlvector", "holds no direction"),
    ):
        path = foreign(tmp_path / "x.gguf", tensors, arch)
        with pytest.raises(BadCheckpoint, match=message):
            load_control_vector(path)
    path.write_bytes(b"not a file")
    with pytest.raises(BadCheckpoint, match="not a GGUF file"):
        load_control_vector(path)
    with pytest.raises(BadInput, match="no control vector at"):
        load_vectors(tmp_path / "none.gguf")
