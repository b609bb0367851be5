"""What N ranks save, M ranks load; a tensor-parallel model goes on as if nothing had happened."""

import os
import pickle
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lost_checks
from lmhead.errors import BadCheckpoint
from lmhead.ranks import load_checkpoint, save_checkpoint
from world import World


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    opened = World(preload=["transformers.models.llama.modeling_llama", "lmhead.patch"])
    yield opened
    opened.close()


def test_a_head_saved_on_some_ranks_loads_on_others(world: World, tmp_path: Path) -> None:
    for saved in (3, 1):
        folder = str(tmp_path / f"of-{saved}")
        world.run("lost_checks.save", folder, size=saved)
        for size in (1, 2, 4):
            world.run("lost_checks.load", folder, size=size)
        with pytest.raises(AssertionError, match="already exists"):
            world.run("lost_checks.save", folder, size=saved)


def test_no_checkpoint(world: World, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="holds no checkpoint"):
        world.run("lost_checks.load", str(tmp_path), size=2)


def test_a_tensor_parallel_model_trains_as_one_rank_does(world: World, tmp_path: Path) -> None:
    """20 steps on 2 ranks; from step 10 on, 3 ranks continue identically from what 2 saved."""
    folder = str(tmp_path / "checkpoint")
    alone = lost_checks.train_alone(20)
    assert alone[-1] < alone[0]
    for losses, received in world.run("lost_checks.train", folder, 0, 10, size=2):
        assert losses == pytest.approx(alone[:10], abs=1e-5)
        # 51 tokens: four float32 numbers each, sizes, and the gradient of h; logits: 51 * 255 * 4
        assert received <= 51 * 16 + 16 + 51 * 48 * 4
    for losses, _ in world.run("lost_checks.train", folder, 10, 20, size=3):
        assert losses == pytest.approx(alone[10:], abs=1e-5)
    for losses, _ in world.run("lost_checks.train", str(tmp_path / "all"), 0, 20, size=2):
        assert losses == pytest.approx(alone, abs=1e-5)


class Evil:
    """What makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.mkdir, (str(self.path),)


def state(step: Any) -> dict[str, Any]:
    return {"w": torch.arange(12.0).reshape(4, 3), "about": {"step": step, "rates": [0.1, "x"]}}


def test_no_code_of_a_checkpoint_runs(tmp_path: Path) -> None:
    """torch's own reader unpickles the list of tensors, and every value that is none."""
    folder, made = tmp_path / "saved", tmp_path / "made"
    save_checkpoint(state(5), folder)
    found = state(0) | {"w": torch.zeros(4, 3)}
    load_checkpoint(found, folder)
    assert torch.equal(found["w"], state(5)["w"])
    assert found["about"] == state(5)["about"]

    listed = folder / ".metadata"
    sound = listed.read_bytes()
    listed.write_bytes(pickle.dumps(Evil(made)))
    with pytest.raises(BadCheckpoint, match=r"posix\.mkdir|nt\.mkdir"):
        load_checkpoint(found, folder)
    listed.write_bytes(sound.replace(b"__0_0.distcp", b"../0_.distcp"))
    with pytest.raises(BadCheckpoint, match="outside of the folder"):
        load_checkpoint(found, folder)
    for damaged in (b"", sound[:50], b"junk", pickle.dumps({"a": 1})):
        listed.write_bytes(damaged)
        with pytest.raises(BadCheckpoint):
            load_checkpoint(found, folder)

    save_checkpoint(state(Evil(made)), folder, force=True)
    with pytest.raises(BadCheckpoint):
        load_checkpoint(found, folder)
    assert not made.exists()


@pytest.mark.parametrize(
    ("claim", "refusal"),
    [
        (b"r" + struct.pack("<I", 2**30), "puts a value at place 1,073,741,824"),
        (b"p1073741824\n", "puts a value at place 1,073,741,824"),
        (b"\x96" + struct.pack("<Q", 2**40), "bytes in a bytearray8, but only 1 remain"),
        (b"\x8e" + struct.pack("<Q", 2**40), "bytes in a bytes8, but only 1 remain"),
    ],
)
def test_a_tiny_list_takes_no_memory(claim: bytes, refusal: str, tmp_path: Path) -> None:
    """Python's own unpickler takes 16 GB for the first, and touches them."""
    (tmp_path / ".metadata").write_bytes(b"\x80\x05N" + claim + b".")
    with pytest.raises(BadCheckpoint, match=refusal):
        load_checkpoint(state(0), tmp_path)
