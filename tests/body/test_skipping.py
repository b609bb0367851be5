"""Blocks that are left out: in one thread alone, and without a trace in copies and pickles."""

import copy
import gc
import io
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from lmhead.body import TorchBody
from lmhead.body.blocks import Blocks
from lmhead.body.skipping import skipping
from lmhead.errors import UnsupportedModel

Net = Callable[[str], PreTrainedModel]
IDS = torch.randint(1, 90, (2, 11), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def test_threads_leave_out_blocks_of_one_model_that_others_run_whole(net: Net) -> None:
    model = net("llama")
    body = TorchBody(model)
    blocks = Blocks(body)
    logits, states = model(IDS).logits, blocks.states(IDS)
    given = [torch.randn(2, 11, 24, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    expected = [blocks.above(layer, x) for layer, x in enumerate(given)]
    wrong: list[str] = []
    start = threading.Barrier(5)

    def work(name: str, run: Callable[[], torch.Tensor], right: torch.Tensor) -> None:
        start.wait()
        with torch.no_grad():
            for _ in range(60):
                try:
                    if not torch.equal(run(), right):
                        wrong.append(name)
                except Exception as error:  # whatever another's swap may cause
                    wrong.append(f"{name}: {error}")

    jobs = [
        (f"above {i}", lambda i=i: blocks.above(i, given[i]), expected[i])  # type: ignore[misc]
        for i in range(3)
    ]
    jobs += [("model", lambda: model(IDS).logits, logits)]
    jobs += [("states", lambda: blocks.states(IDS)[-1], states[-1])]
    threads = [threading.Thread(target=work, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@torch.no_grad()
def test_a_model_with_such_blocks_is_copied_pickled_and_freed(net: Net) -> None:
    model = net("llama")
    expected = model(IDS).logits
    blocks = Blocks(TorchBody(model))
    x = blocks.states(IDS)[1]
    h = blocks.above(1, x)
    block = model.model.layers[0]
    assert isinstance(block, LlamaDecoderLayer)
    assert type(block).__name__ == "LlamaDecoderLayer"
    twin = copy.deepcopy(model)
    assert type(twin.model.layers[0]) is LlamaDecoderLayer
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (twin, torch.load(file, weights_only=False)):
        assert torch.equal(other(IDS).logits, expected)
        assert torch.equal(Blocks(TorchBody(other)).above(1, x), h)
    assert torch.equal(model(IDS).logits, expected)
    del other, twin
    gc.collect()
    gone = weakref.ref(model)
    gc.disable()
    try:
        del model, blocks, block
        assert gone() is None
    finally:
        gc.enable()


@torch.no_grad()
def test_a_block_that_ran_all_the_same_is_told(net: Net) -> None:
    model = net("llama")
    body, block = TorchBody(model), model.model.layers[0]
    block.forward = block.forward  # what wrappers do, and so the class's own is not asked
    with (
        pytest.raises(UnsupportedModel, match="1 blocks of class LlamaDecoderLayer ran although"),
        skipping([block], torch.zeros(2, 11, 24)),
    ):
        body(IDS)
