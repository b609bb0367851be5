"""Guarded texts stay whole: compared with the unsteered ones, by counting pairs once more."""

from collections.abc import Callable, Sequence

import pytest
import torch

from lmhead.generation import generate
from lmhead.generation.api import requests
from lmhead.loading import Model
from lmhead.sampling import SamplingParams
from lmhead.steer import SteeringVector, guard
from lmhead.steer.bound.keeping import LEAST, SHARES, kept

Tiny = Callable[[str], Model]
PROMPTS = ["a", "the cat", "some longer words", "x y z"]


def pairs(ids: Sequence[int]) -> float:
    found = {(ids[i], ids[i + 1]) for i in range(len(ids) - 1)}
    return len(found) / (len(ids) - 1) if len(ids) > 1 else 1.0


def wild(d: int, layer: int, alpha: float, seed: int) -> SteeringVector:
    v = torch.randn(d, generator=torch.Generator().manual_seed(seed))
    return SteeringVector(v / v.norm(), layer, alpha)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
@pytest.mark.parametrize("controls", [{}, {"temperature": 0.7, "seed": 3}])
def test_no_text_repeats_itself_more(tiny: Tiny, family: str, controls: dict[str, float]) -> None:
    model = tiny(family)
    params = SamplingParams.asked(dict(controls))
    asked = requests(PROMPTS, model, params=params, max_tokens=32, samples=1)
    plain = generate(PROMPTS, model, params=params, max_tokens=32)
    shares = set()
    for seed in range(2):
        vector = wild(24, 1, 60.0, seed)
        found = dict(kept(model, asked, guard(model, vector, 2.0).steering, batch_size=3))
        assert sorted(found) == list(range(len(PROMPTS)))
        for n, one in found.items():
            own = one.generation
            assert own.prompt == PROMPTS[n]
            assert pairs(own.ids) >= LEAST * pairs(plain[n].ids)
            assert one.distinct_2 == pytest.approx((pairs(plain[n].ids), pairs(own.ids)))
            assert one.log.max_kl <= 2.0
            assert one.log.tokens == (len(own.ids) if one.share else 0)
            if not one.share:
                assert own.ids == plain[n].ids
            shares.add(one.share)
            assert one.to_dict()["share"] == one.share
    assert shares <= {*SHARES, 0.0}
    assert controls or len(shares) > 1  # some texts were written again


def test_a_text_that_stays_whole_is_the_guarded_one(tiny: Tiny) -> None:
    model = tiny("llama")
    steering = guard(model, wild(24, 1, 0.5, 0), 0.1)
    params = SamplingParams.asked({})
    found = dict(kept(model, requests(PROMPTS, model, params=params), steering.steering))
    for n, one in enumerate(generate(PROMPTS, steering.model)):
        if found[n].share == 1:
            assert found[n].generation.ids == one.ids
    assert any(one.share == 1 for one in found.values())
