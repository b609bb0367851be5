"""The vector, its arithmetic, and the file that it travels in."""

import json
import struct
from pathlib import Path

import pytest
import torch

from lmhead.errors import BadCheckpoint, BadInput
from lmhead.steer import HEAD, Card, SteeringVector


def vector(
    layer: int | str = HEAD, alpha: float = 2.0, seed: int = 0, d: int = 17
) -> SteeringVector:
    direction = torch.randn(d, generator=torch.Generator().manual_seed(seed))
    card = Card("steer", "some-model", "ab" * 32, budget=2.0, certificate={"range": 1.5}, seed=seed)
    return SteeringVector(direction, layer, alpha, card)


def test_arithmetic_is_that_of_what_is_added() -> None:
    a, b = vector(), vector(seed=1, alpha=0.5)
    assert torch.equal((a + b).added, a.added + b.added)
    assert torch.equal((-a).added, -a.added)
    assert torch.equal((a - b).added, a.added - b.added)
    assert torch.allclose((3 * a).added, 3 * a.added)
    assert torch.allclose((a * -3).added, -3 * a.added)
    assert (a * -3).alpha == 6.0


def test_a_negative_strength_points_the_other_way(tmp_path: Path) -> None:
    a = vector(alpha=-2.0)
    assert torch.equal(a.added, -vector(alpha=2.0).added)
    assert torch.equal(SteeringVector.load(a.save(tmp_path / "v.safetensors")).added, a.added)
    assert torch.equal((a * -3).added, (vector(alpha=2.0) * 3).added)


def test_what_was_certified_does_not_survive_arithmetic() -> None:
    for changed in (-vector(), 2 * vector(), vector() + vector()):
        assert changed.card.certificate is None
        assert changed.card.budget is None
        assert changed.card.model == "some-model"


def test_only_vectors_of_one_place_add() -> None:
    with pytest.raises(BadInput, match="side by side"):
        vector() + vector(layer=3)
    with pytest.raises(BadInput, match="width 17, and of layer head and width 5"):
        vector() + vector(d=5)


@pytest.mark.parametrize("layer", [HEAD, 0, 11])
def test_the_file_gives_back_the_same_bits(tmp_path: Path, layer: int | str) -> None:
    before = vector(layer)
    after = SteeringVector.load(before.save(tmp_path / "new" / "v.safetensors"))
    assert torch.equal(before.direction, after.direction)
    assert (after.layer, after.alpha, after.card) == (before.layer, before.alpha, before.card)
    first = (tmp_path / "new" / "v.safetensors").read_bytes()
    after.save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == first
    size = struct.unpack("<Q", first[:8])[0]
    header = json.loads(first[8 : 8 + size])
    assert header["direction"]["shape"] == [17]
    assert json.loads(header["__metadata__"]["card"])["alpha"] == 2.0


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (lambda: SteeringVector(torch.tensor([1.0, float("nan")]), HEAD), "1 numbers that are NaN"),
        (lambda: SteeringVector(torch.tensor([1.0, float("inf")]), 3), "NaN or infinite"),
        (lambda: SteeringVector(torch.ones(2, 2), HEAD), "expected floats"),
        (lambda: SteeringVector(torch.ones(2, dtype=torch.long), HEAD), "expected floats"),
        (lambda: SteeringVector(torch.ones(0), HEAD), "expected floats"),
        (lambda: vector(alpha=0.0), "alpha is 0.0; expected a number other than 0"),
        (lambda: vector(alpha=float("-inf")), "alpha is -inf"),
        (lambda: vector(alpha=float("nan")), "alpha is nan"),
        (lambda: vector(alpha=True), "alpha is True"),
        (lambda: vector(layer=-1), "the layer is -1"),
        (lambda: vector(layer="norm"), "'norm'; expected a block's index from 0, or 'head'"),
        (lambda: 0 * vector(), "alpha is 0"),
        (lambda: Card(job="guess"), "'guess'; expected one of detect, steer"),
        (lambda: Card(budget=-2.0), "the budget is -2.0"),
        (lambda: vector().save("v.pt"), "expected a name that ends in .safetensors"),
        (lambda: SteeringVector.load("nowhere.safetensors"), "there is no vector at nowhere"),
    ],
)
def test_bad_input(what: object, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        what()  # type: ignore[operator]


def test_damaged_files(tmp_path: Path) -> None:
    path = vector().save(tmp_path / "v.safetensors")
    whole = path.read_bytes()
    for content, message in (
        (whole[:-3], "is not a safetensors file"),
        (b"\x80\x04pickle", "is not a safetensors file"),
        (whole.replace(b'"direction"', b'"direktion"'), "expected `direction`"),
        (
            whole.replace(b'"direction"', b'"d\\nrectio"'),
            "tensors .'d.nrectio'.",
        ),
        (whole.replace(b'\\"alpha\\"', b'\\"alfha\\"'), "cannot be read"),
        (whole.replace(b'\\"layer\\": \\"head\\"', b'\\"layer\\": \\"tail\\"'), "cannot be read"),
    ):
        assert content != whole
        path.write_bytes(content)
        with pytest.raises(BadCheckpoint, match=message):
            SteeringVector.load(path)
