"""Kept states belong to one body, one head and the texts; another body never reads them."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from lmhead.body import TorchBody, reading
from lmhead.body.blocks import Blocks
from lmhead.body.reading import Encoded
from lmhead.body.states import States, states_of
from lmhead.errors import BadInput, LMHeadWarning
from lmhead.head import LMHead

Net = Callable[[str], PreTrainedModel]
TEXTS: list[Encoded] = [([5, 9, 2, 40], 1), ([8, 3], 1), ([90, 1, 7], 2)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LMHEAD_CACHE", str(tmp_path))
    monkeypatch.delenv("LMHEAD_STATES", raising=False)
    return tmp_path / "states"


def read(model: PreTrainedModel, texts: Sequence[Encoded] = TEXTS, keep: bool = True) -> States:
    return states_of(Blocks(TorchBody(model)), LMHead.from_model(model), texts, keep=keep)


class Counted:
    """How many texts of more than the two tokens that `Blocks` tries go through a model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.texts = 0
        model.model.layers[0].register_forward_hook(self._count)

    def _count(self, _block: object, args: tuple[torch.Tensor], _result: object) -> None:
        self.texts += len(args[0]) if args[0].shape[1] > 2 else 0


@torch.no_grad()
def test_another_body_under_the_same_head_has_states_of_its_own(net: Net, cache: Path) -> None:
    model, other = net("llama"), net("llama")
    first = read(model)
    assert torch.equal(read(other).last, first.last)  # the same weights
    assert len(list(cache.iterdir())) == 1
    other.model.layers[1].mlp.down_proj.weight.mul_(2)  # the head is the same
    assert LMHead.from_model(other).sha256 == LMHead.from_model(model).sha256
    changed = read(other)
    assert len(list(cache.iterdir())) == 2
    assert torch.equal(changed.at(0), first.at(0))
    assert not torch.allclose(changed.at(1), first.at(1))


def test_a_text_is_read_once_whatever_stands_beside_it(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_reads_trees", lambda _blocks: False)  # one row for each text
    model = net("llama")
    counted = Counted(model)
    first = read(model, [*TEXTS, TEXTS[0]])  # twice the same
    assert counted.texts == 3
    assert torch.equal(first.last[0], first.last[3])
    again = read(model, [TEXTS[2], TEXTS[0]])
    assert counted.texts == 3
    assert torch.equal(again.last, first.last[[2, 0]])
    assert torch.equal(again.likelihood, first.likelihood[[2, 0]])
    read(model, [([5, 9, 2, 41], 1), TEXTS[1]])
    assert counted.texts == 4
    read(model, [(TEXTS[0][0], 2)])  # the same ids, but more of them are the prompt
    assert counted.texts == 5
    read(model, keep=False)
    assert counted.texts == 8


def test_what_a_disk_or_a_killed_process_spoiled_is_read_again(net: Net, cache: Path) -> None:
    model = net("llama")
    first = read(model)
    [file] = cache.glob("*/records")
    whole = file.read_bytes()
    size = len(whole) // 3
    file.write_bytes(whole[: 2 * size + 40])  # the third is unfinished
    counted = Counted(model)
    again = read(model).likelihood  # two as they were kept; one, alone, rounds in its own way
    assert int((again == first.likelihood).all(-1).sum()) >= 2
    torch.testing.assert_close(again, first.likelihood)
    assert counted.texts == 1
    assert len(file.read_bytes()) == len(whole)
    spoiled = bytearray(whole)
    spoiled[-3] ^= 1
    file.write_bytes(spoiled)
    torch.testing.assert_close(read(model).last, first.last)
    assert counted.texts == 2


def test_no_more_is_kept_than_the_limit(
    net: Net, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = net("llama"), net("gpt2")
    read(other)
    [older] = cache.glob("*/records")
    os.utime(older, (1, 1))  # long ago
    texts: list[Encoded] = [([i, i + 1, 3], 1) for i in range(40)]
    read(model, texts[:1])
    [file] = (f for f in cache.glob("*/records") if f != older)
    size = file.stat().st_size
    monkeypatch.setenv("LMHEAD_STATES", str(10 * size))
    for text in texts:
        read(model, [text])
        assert sum(f.stat().st_size for f in cache.glob("*/records")) <= 10 * size
    assert list(cache.glob("*/records")) == [file]  # what was not used for longest has gone
    counted = Counted(model)
    read(model, texts[-4:])  # the newest are still there
    assert counted.texts == 0
    monkeypatch.setenv("LMHEAD_STATES", "0")
    before = file.read_bytes()
    read(model, texts[:2])
    assert file.read_bytes() == before
    monkeypatch.setenv("LMHEAD_STATES", "lots")
    with pytest.raises(BadInput, match="LMHEAD_STATES is 'lots'; expected a number and a unit"):
        read(model)


def test_a_cache_that_cannot_be_written_is_no_obstacle(
    net: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("LMHEAD_CACHE", str(tmp_path / "file"))
    with pytest.warns(LMHeadWarning, match="computed again next time"):
        assert len(read(net("llama"))) == 3


@torch.no_grad()
def test_the_number_of_a_body_follows_weights_and_configuration(net: Net) -> None:
    model = net("llama")
    body = TorchBody(model)
    first = body.sha256
    assert body.sha256 == first == TorchBody(net("llama")).sha256
    weight = model.model.layers[2].self_attn.q_proj.weight
    weight.add_(1)
    assert (changed := body.sha256) != first
    model.config.rms_norm_eps = 0.5
    assert TorchBody(model).sha256 not in (first, changed)
    assert TorchBody(net("gpt2")).sha256 != first
    assert TorchBody(model.to(torch.bfloat16)).sha256 != first
