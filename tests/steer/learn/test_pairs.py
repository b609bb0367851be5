"""The log-odds of pairs are those of the model's own logits, a vector added by a plain hook."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lmhead.body.adding import blocks_of
from lmhead.loading import Model
from lmhead.steer import SteeringVector, guard
from lmhead.steer.learn.data import Pair
from lmhead.steer.learn.pairs import PairRuns
from lmhead.steer.measure import token_head

Tiny = Callable[[str], Model]
PAIRS = [
    Pair("the capital of a is", " b", " cd"),
    Pair("one and one are", " two", " three of them"),
    Pair("so", " it is", " no"),
]


@torch.no_grad()
def by_hook(model: Model, text: str, first: int, vector: SteeringVector | None) -> float:
    """Return log p of the tokens from `first` on, by transformers alone."""
    net, ids = model.body.model, model.encode(text)

    def add(_block: Any, _args: Any, out: Any) -> Any:
        assert vector is not None
        moved = (out[0] if isinstance(out, tuple) else out) + vector.alpha * vector.direction
        return (moved, *out[1:]) if isinstance(out, tuple) else moved

    hooks = []
    if vector is not None:
        hooks.append(blocks_of(net)[int(vector.layer)].register_forward_hook(add))
    z = net(torch.tensor([ids])).logits[0, :, : model.reachable].double().log_softmax(-1)
    for hook in hooks:
        hook.remove()
    return float(z[torch.arange(first - 1, len(ids) - 1), torch.tensor(ids[first:])].sum())


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_log_odds_are_those_of_a_plain_hook(tiny: Tiny, family: str) -> None:
    model = tiny(family)
    drawn = torch.randn(24, generator=torch.Generator().manual_seed(3))
    vector = SteeringVector(drawn, 1, 0.5)
    runs = PairRuns.read(model, PAIRS, vector.layer)
    head = token_head(model)
    for used in (None, vector):
        found = runs.log_odds(head, None if used is None else used.added)
        for pair, odds in zip(PAIRS, found.tolist(), strict=True):
            first = len(model.encode(pair.prompt))
            true, false = (
                by_hook(model, pair.prompt + e, first, used) for e in (pair.true, pair.false)
            )
            assert odds == pytest.approx(true - false, abs=1e-4)
    # a guard with nothing to hold back gives the same
    free = runs.log_odds(guard(model, vector, None, 1e6).head, vector.added)
    torch.testing.assert_close(free, runs.log_odds(head, vector.added), atol=1e-4, rtol=0)
