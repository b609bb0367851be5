"""The residual stream taken apart: to the last bit, and only where it is a sum."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lmhead.body import TorchBody
from lmhead.body.parts import parts_of, taken_apart
from lmhead.body.stream import Watch
from lmhead.body.units import Unit, units_of
from lmhead.errors import UnsupportedModel
from lmhead.head import LMHead

IDS = [3, 4, 5, 6, 7]
Net = Callable[[str], PreTrainedModel]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("position", [0, 2, 4])
def test_the_parts_are_the_state(net: Net, family: str, dtype: torch.dtype, position: int) -> None:
    model = net(family).to(dtype)
    found = parts_of(TorchBody(model), LMHead.from_model(model), IDS, position)
    total = sum(part.value for part in found.parts) + found.rounding
    assert torch.allclose(total, found.x, rtol=0, atol=1e-12)
    with torch.no_grad():
        reported = model(torch.tensor([IDS]), output_hidden_states=True, use_cache=False)
    assert torch.equal(found.h, reported.hidden_states[-1][0, position])
    assert torch.equal(found.logits, reported.logits[0, position])
    kinds = [
        (part.unit.block, part.unit.kind) for part in found.parts if part.unit.block is not None
    ]
    assert kinds == [(b, kind) for b in range(3) for kind in ("attention", "mlp")]
    # up to each block, the parts are what the model itself says enters it; what rounds apart from
    # a sum is the scale of Gemma's embedding
    for block in range(1, 3):
        below = [p.value for p in found.parts if p.unit.block is None or p.unit.block < block]
        below.append(found.rounding)
        state = reported.hidden_states[block][0, position].double()
        assert torch.allclose(torch.stack(below).sum(0), state, atol=1e-6)


def watched(run: Callable[[Watch, Tensor], Tensor]) -> Any:
    """Watch a made-up run on an embedding `[1, 3, 4]`; return its last state taken apart."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(9, 4, generator=generator)
    watch = Watch(4, 3, 2)
    with torch.no_grad(), watch:
        x = nn.functional.embedding(watch.read(torch.tensor([[1, 5, 2]])), table)
        top = watch.node(run(watch, x))
    return taken_apart(top, "MadeUp")


def unit(watch: Watch, name: str, x: Tensor) -> Tensor:
    watch.begin(Unit(name, name, 0))
    made = torch.tanh(x @ torch.linspace(-1, 1, 16).view(4, 4))
    watch.end()
    return made


def test_sums_scales_and_what_changes_in_place() -> None:
    held = {}

    def run(watch: Watch, x: Tensor) -> Tensor:
        a = unit(watch, "a", x)
        held["x"], held["a"] = x[0, 2].clone(), a[0, 2].clone()
        x = x + 0.22 * a
        b = unit(watch, "b", x)
        held["b"] = b[0, 2].clone()
        x += b  # the same tensor from now on
        return x.view(3, 4).unsqueeze(0) * torch.tensor([1.0, 2.0, 3.0, 4.0]) / 2

    parts, rounding = watched(run)
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0]).double() / 2
    expected = {"embedding": held["x"], "a": 0.22 * held["a"], "b": held["b"]}
    assert [part.unit.kind for part in parts] == list(expected)
    for part in parts:
        assert torch.allclose(part.value, scale * expected[part.unit.kind].double(), atol=1e-6)
    assert float(rounding.abs().max()) < 1e-6


def test_parallel_units_are_told_apart() -> None:
    def run(watch: Watch, x: Tensor) -> Tensor:
        return unit(watch, "a", x) + unit(watch, "b", 2 * x) + x

    assert {part.unit.kind for part in watched(run)[0]} == {"embedding", "a", "b"}


def test_a_norm_behind_a_unit_is_the_units_and_one_across_the_stream_is_refused() -> None:
    def behind(watch: Watch, x: Tensor) -> Tensor:
        return x + nn.functional.layer_norm(unit(watch, "a", x), (4,))

    assert [part.unit.kind for part in watched(behind)[0]] == ["embedding", "a"]

    def across(watch: Watch, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x + unit(watch, "a", x), (4,)) + unit(watch, "b", x)

    with pytest.raises(UnsupportedModel, match="the blocks of MadeUp cannot be told apart"):
        watched(across)


def test_two_units_behind_one_norm_are_refused() -> None:
    def run(watch: Watch, x: Tensor) -> Tensor:
        both = unit(watch, "a", x) + unit(watch, "b", x)
        return x + nn.functional.layer_norm(both, (4,))

    with pytest.raises(UnsupportedModel, match="acts on a and b"):
        watched(run)


def test_what_was_not_seen_is_refused() -> None:
    def run(watch: Watch, x: Tensor) -> Tensor:
        a = unit(watch, "a", x)
        with torch._C.DisableTorchFunction():
            a.mul_(3)  # nobody notices
        return x + a

    with pytest.raises(UnsupportedModel, match="in a way that was not seen"):
        watched(run)


def test_units_go_by_their_names(net: Net) -> None:
    model = net("gpt2")
    found = units_of(model, model.transformer.h)
    reported = [(u.name, u.kind, u.block) for u in found.values()][:2]
    assert reported == [("transformer.h.0.attn", "attention", 0), ("transformer.h.0.mlp", "mlp", 0)]
