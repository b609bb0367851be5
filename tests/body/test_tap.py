"""The tap: what one run takes or changes no other sees, and a model without us is as it was."""

import copy
import gc
import io
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from lmhead.body import TorchBody
from lmhead.body.blocks import Blocks
from lmhead.body.tap import _enter, _leave, tapped

Net = Callable[[str], PreTrainedModel]
FAMILIES = ("llama", "gpt2", "gemma3")
IDS = torch.randint(1, 90, (2, 11), generator=torch.Generator().manual_seed(3))


def hooks(layer: torch.nn.Module) -> tuple[int, int]:
    """Count ours."""
    before = list(layer._forward_pre_hooks.values()).count(_enter)
    return before, list(layer._forward_hooks.values()).count(_leave)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_h_is_what_enters_the_output_layer(net: Net, family: str) -> None:
    model = net(family)
    plain = model(IDS)
    seen: list[torch.Tensor] = []
    handle = model.lm_head.register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
    model(IDS)
    handle.remove()
    h, output = TorchBody(model)(IDS, use_cache=False)
    assert torch.equal(h, seen[0])
    assert output.logits.shape == (2, 11, 1)  # no logits were computed
    assert torch.equal(model(IDS).logits, plain.logits)  # and without us nothing has changed


@torch.no_grad()
def test_hooks_are_put_on_once_and_come_back_when_the_layer_is_replaced(net: Net) -> None:
    model = net("llama")
    first, second = TorchBody(model), TorchBody(model)
    for body in (first, second, first):
        body(IDS)
    assert hooks(model.lm_head) == (1, 1)
    old = model.lm_head
    model.resize_token_embeddings(120, mean_resizing=False)
    assert model.lm_head is not old
    h, _ = first(IDS)
    assert h.shape == (2, 11, 24)
    assert hooks(model.lm_head) == (1, 1)
    assert torch.equal(model.lm_head(h), model(IDS).logits)


@torch.no_grad()
def test_a_copy_has_the_tap_and_goes_its_own_way(net: Net) -> None:
    model = net("llama")
    body = TorchBody(model)
    expected, _ = body(IDS)
    twin = copy.deepcopy(model)
    assert hooks(twin.lm_head) == (1, 1)
    for p in twin.parameters():
        p.mul_(1.5)
    other, _ = TorchBody(twin)(IDS)
    assert hooks(twin.lm_head) == (1, 1)
    assert not torch.equal(other, expected)
    assert torch.equal(body(IDS)[0], expected)
    assert torch.equal(twin.lm_head(other), twin(IDS).logits)


@torch.no_grad()
def test_a_tapped_model_is_saved_and_pickled_like_any_other(net: Net, tmp_path: Path) -> None:
    model = net("llama")
    expected = model(IDS).logits
    TorchBody(model)(IDS)
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(IDS).logits, expected)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(IDS).logits, expected)


@torch.no_grad()
def test_a_model_is_freed_with_its_last_name(net: Net) -> None:
    model = net("llama")
    body = TorchBody(model)
    body(IDS)
    with tapped(model.model.layers[1], leave=lambda x: x + 1):
        body(IDS)
    gc.collect()
    gone = weakref.ref(model)
    gc.disable()  # a reference cycle would wait for the collector
    try:
        del model, body
        assert gone() is None
    finally:
        gc.enable()


@torch.no_grad()
def test_an_error_inside_leaves_nothing_behind(net: Net) -> None:
    model = net("llama")
    plain, body = model(IDS).logits, TorchBody(model)

    def fail(_x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("stop here")

    with pytest.raises(RuntimeError, match="stop here"), tapped(model.model.layers[1], leave=fail):
        body(IDS)
    assert torch.equal(model(IDS).logits, plain)
    assert body(IDS)[0].shape == (2, 11, 24)


@torch.no_grad()
def test_wishes_of_one_module_are_carried_out_in_turn(net: Net) -> None:
    model = net("llama")
    block = model.model.layers[2]
    with tapped(block, leave=lambda x: 2 * x), tapped(block, leave=lambda x: x + 1):
        both, _ = TorchBody(model)(IDS)
    with tapped(block, leave=lambda x: 2 * x + 1):
        one, _ = TorchBody(model)(IDS)
    assert torch.equal(both, one)


@torch.no_grad()
def test_threads_tap_one_model_and_see_only_their_own(net: Net) -> None:
    model = net("llama")
    body = TorchBody(model)
    plain, logits = body(IDS)[0], model(IDS).logits

    def steered(factor: float) -> torch.Tensor:
        with tapped(model.model.layers[1], leave=lambda x: x * factor):
            return body(IDS)[0]

    factors = [0.5, 1.5, 2.0]
    expected = [steered(f) for f in factors]
    wrong: list[str] = []
    start = threading.Barrier(5)

    def work(name: str, run: Callable[[], torch.Tensor], right: torch.Tensor) -> None:
        start.wait()
        with torch.no_grad():
            for _ in range(60):
                try:
                    if not torch.equal(run(), right):
                        wrong.append(name)
                except Exception as error:  # what a swapped forward gave: [B, T, 1] logits
                    wrong.append(f"{name}: {error}")

    jobs = [("body", lambda: body(IDS)[0], plain), ("model", lambda: model(IDS).logits, logits)]
    jobs += [
        (f"times {f}", lambda f=f: steered(f), right)  # type: ignore[misc]
        for f, right in zip(factors, expected, strict=True)
    ]
    threads = [threading.Thread(target=work, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@torch.no_grad()
def test_a_compiled_model_stays_one_graph_and_has_a_body(net: Net) -> None:
    model = net("llama")

    def logits(ids: torch.Tensor) -> torch.Tensor:
        return model(ids, use_cache=False).logits  # type: ignore[no-any-return]

    graphs = torch._dynamo.explain(logits)(IDS).graph_count
    body = TorchBody(model)
    blocks = Blocks(body)
    h, states = body(IDS, use_cache=False)[0], blocks.states(IDS)
    assert torch.equal(blocks.above(1, states[1]), h)
    torch._dynamo.reset()
    assert torch._dynamo.explain(logits)(IDS).graph_count == graphs
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(TorchBody(compiled)(IDS, use_cache=False)[0], h)
    torch.testing.assert_close(compiled(IDS, use_cache=False).logits, logits(IDS))
    torch._dynamo.reset()
