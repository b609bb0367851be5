"""A sharded head gives LMHead's answers on 1, 2, 3 and 4 real ranks, however its rows are split."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lmhead.errors import BadInput
from lmhead.head import LMHead
from lmhead.head.sharded import ShardedHead
from lmhead.head.sharding.rows import even_split
from sharded_checks import D, V, random
from world import World

SPLITS = ("even", "uneven")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    opened = World()
    yield opened
    opened.close()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_verb(world: World, size: int) -> None:
    """The logits have the same bits, whatever the split: one thread, rows in their blocks."""
    for split in SPLITS if size > 1 else SPLITS[:1]:
        for dtype in ("float32", "bfloat16", "float64"):
            off = world.run("sharded_checks.verbs", dtype, {}, split, size=size)
            assert max(off) == 0, (dtype, split)
    options = {"softcap": 30.0, "scale": 0.5, "vocab_size": V - 90}
    assert max(world.run("sharded_checks.verbs", "float32", options, "uneven", size=size)) == 0


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_same_seed_gives_the_same_token(world: World, size: int) -> None:
    for split in SPLITS if size > 1 else SPLITS[:1]:
        world.run("sharded_checks.draws", split, size=size)


@pytest.mark.parametrize("screened", [False, True])
def test_touched_tokens(world: World, screened: bool) -> None:
    for size in (1, 2, 4):
        for split in SPLITS if size > 1 else SPLITS[:1]:
            world.run("sharded_checks.touched", split, screened, size=size)


def test_scale_softcap_padding_and_gradients(world: World) -> None:
    for size, split in ((2, "even"), (3, "uneven")):
        world.run("sharded_checks.scale_and_padding", split, size=size)


def test_what_is_refused(world: World) -> None:
    world.run("sharded_checks.wrong_calls", size=3)


def test_a_mesh_and_dtensors(world: World) -> None:
    world.run("sharded_checks.mesh")
    world.run("sharded_checks.fully_sharded")


LOSSES: list[dict[str, Any]] = [
    {},
    {"reduction": "sum", "ignore_index": 3},
    {"reduction": "none", "label_smoothing": 0.1},
    {"label_smoothing": 0.2, "z_loss": 1e-3, "softcap": 20.0, "scale": 0.7},
]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_loss_and_gradients(world: World, size: int) -> None:
    for options in LOSSES:
        for split in SPLITS:
            for off, worst in world.run(
                "sharded_checks.losses", "float32", options, split, size=size
            ):
                assert off <= 1e-6 * (100 if options.get("reduction") == "sum" else 4)
                assert worst <= 1e-5
    for off, worst in world.run("sharded_checks.losses", "bfloat16", {}, "uneven", size=size):
        assert off <= 1e-5
        assert worst <= 2**-8  # bfloat16's own rounding of the gradients


def test_what_is_exchanged_does_not_grow_with_the_vocabulary(world: World) -> None:
    for size in (2, 4):
        small = world.run("sharded_checks.traffic", 1024, size=size)[0]
        large = world.run("sharded_checks.traffic", 8192, size=size)[0]
        logits = small.pop("logits"), large.pop("logits")
        assert logits[1] == 8 * logits[0]  # what these would cost
        assert small == large
        others = size - 1
        assert large["topk"] == others * 8 * 8  # k ids and logits of 4 bytes from every other rank
        assert large["loss"] <= others * (4 * 4 + 1)  # four float32 numbers, and the sizes once


def test_real_states(world: World, smollm2: Path, tmp_path: Path) -> None:
    """60 states of the real body; benchmarks/sharded.py --exact does 1,000."""
    from safetensors.torch import save_file

    from lmhead.loading import load

    model = load(str(smollm2))
    text = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 8
    ids = model.tokenizer(text)["input_ids"][:60]
    with torch.no_grad():
        h, _ = model.body(torch.tensor([ids]), use_cache=False)
    path = tmp_path / "states.safetensors"
    save_file({"h": h[0].contiguous()}, path)
    for size, dtype in ((3, "float32"), (4, "bfloat16")):
        reported = world.run(
            "sharded_checks.real_states", str(smollm2), str(path), dtype, size=size
        )
        assert sum(t["rows"] for t in reported) == 49_152
        one = reported[0]
        assert one["states"] == 60
        assert (one["topk"], one["sample"]) == (0, 0)
        assert one["loss"] <= 2e-6  # of about 17
        assert one["loss_of_its_size"] <= 1e-6
        assert one["equal"]


def test_one_rank_needs_no_process_group() -> None:
    dense, h = LMHead(random(V, D)), random(3, D, seed=1)
    head = ShardedHead.from_head(dense)
    assert torch.equal(head(h), dense(h))
    assert torch.equal(head.topk(h, 4).ids, dense.topk(h, 4).ids)
    assert head.sha256 == dense.sha256
    assert "rank 0 of 1" in repr(head)


def test_splits() -> None:
    assert even_split(49_152, 4) == (12_288,) * 4
    assert even_split(507, 4) == (64, 128, 128, 187)
    assert even_split(5, 3) == (1, 2, 2)
    for rows, ranks in ((49_152, 3), (262_145, 7), (64, 64), (65, 64)):
        split = even_split(rows, ranks)
        assert sum(split) == rows
        assert min(split) >= 1
        assert max(split) - min(split) <= 2 * 64
    with pytest.raises(BadInput, match="take fewer ranks"):
        even_split(3, 4)
