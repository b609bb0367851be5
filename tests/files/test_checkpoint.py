"""Folders that are not what they should be, each with an error that says what to do."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lmhead.errors import BadCheckpoint, UnsupportedModel
from lmhead.files.checkpoint import open_checkpoint
from lmhead.files.safetensors import read_header
from lmhead.models.reading import read_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    tensors = {"a": torch.randn(7, 3), "b": torch.randn(5).to(torch.bfloat16)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path


def test_headers_and_tensors(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    a, b = checkpoint.tensors["a"], checkpoint.tensors["b"]
    assert (a.dtype, a.shape, a.size, a.nbytes) == ("F32", (7, 3), 21, 84)
    assert (b.dtype, b.shape, b.nbytes) == ("BF16", (5,), 10)
    assert checkpoint.read("b").dtype is torch.bfloat16


@pytest.mark.parametrize("keep", [0, 7, 8, 40, -1])
def test_truncated_safetensors(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(BadCheckpoint, match="truncated"):
        open_checkpoint(folder)


def test_damaged_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[10:20] = b"\xff" * 10
    file.write_bytes(data)
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors"):
        read_header(file)


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"no config\.json"):
        open_checkpoint(tmp_path)


def test_config_that_is_no_object(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(BadCheckpoint, match="expected an object"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_with_the_way_to_convert(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"\x80\x04")
    with pytest.raises(UnsupportedModel, match="save_pretrained"):
        open_checkpoint(tmp_path)


def test_no_weights_at_all(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadCheckpoint, match="no weights"):
        open_checkpoint(tmp_path)


def test_missing_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-2.safetensors")
    names = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(BadCheckpoint, match=r"lacks 1 of the 2 files"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../x", "", "x" * 5000, 5, None])
def test_an_index_names_files_of_its_own_folder(folder: Path, name: object) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(BadCheckpoint, match=r"outside its folder|not a file"):
        open_checkpoint(folder)


def test_the_weights_are_those_that_transformers_loads(folder: Path) -> None:
    save_file({"a": torch.zeros(2)}, folder / "other.safetensors")
    index = {"weight_map": {"a": "other.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert open_checkpoint(folder).tensors["a"].shape == (7, 3)  # one whole file comes first
    for name in ("other.safetensors", "model.safetensors.index.json", 5, ["x"]):
        (folder / "config.json").write_text(json.dumps({"transformers_weights": name}))
        with pytest.raises(UnsupportedModel, match="names other weights"):
            open_checkpoint(folder)
    (folder / "config.json").write_text('{"transformers_weights": "model.safetensors"}')
    open_checkpoint(folder)


def test_a_tensor_in_two_files_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    save_file({"a": torch.zeros(2)}, folder / "two.safetensors")
    index = {"weight_map": {"a": "two.safetensors", "b": "one.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadCheckpoint, match=r"is in one\.safetensors and in two\.safetensors"):
        open_checkpoint(folder)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes of POSIX")
@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "merges.txt", "x", "additional_chat_templates/x.jinja"]
)
def test_a_pipe_among_the_files_keeps_nobody_waiting(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        make(folder / name)
        with pytest.raises(BadCheckpoint, match="not a regular file"):
            open_checkpoint(folder)
        with pytest.raises(BadCheckpoint, match="not a regular file"):
            read_tokenizer(folder)
        (folder / name).unlink()


@pytest.mark.parametrize("name", ["chat_template.jinja", "vocab.txt", "LICENSE", "README.md"])
def test_a_template_without_end_is_refused(folder: Path, name: str) -> None:
    (folder / name).touch()
    os.truncate(folder / name, 2**40)  # takes no room on the disk
    with pytest.raises(BadCheckpoint, match="expected at most"):
        open_checkpoint(folder)


def test_links_out_of_a_folder_are_told_from_those_of_the_hubs_cache(tmp_path: Path) -> None:
    from lmhead.files.checkpoint import resolves_inside

    repository = tmp_path / "models--a--b"
    snapshot, blobs = repository / "snapshots" / "0", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "1").write_text("x")
    (tmp_path / "secret").write_text("x")
    (snapshot / "model").symlink_to("../../blobs/1")
    (snapshot / "licence").symlink_to(tmp_path / "secret")
    (snapshot / "own").write_text("x")
    (snapshot / "again").symlink_to("own")
    inside = {p.name: resolves_inside(snapshot, p) for p in snapshot.iterdir()}
    assert inside == {"model": True, "licence": False, "own": True, "again": True}
