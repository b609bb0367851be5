"""The audit: every number again, by plain means."""

import math
from collections.abc import Callable

import pytest
import torch

from lmhead.errors import BadInput
from lmhead.generation import generate
from lmhead.loading import Model
from lmhead.steer import HEAD, SteeringVector, audit, certify, steer_model
from lmhead.steer.bound.auditing import distinct_2, repetition
from lmhead.steer.prompts import NEUTRAL

Tiny = Callable[[str], Model]
PROMPTS = ["the cat sat on a mat", "what?", "some longer words, and then some"]


def vector(layer: int | str, alpha: float = 2.0) -> SteeringVector:
    return SteeringVector(torch.randn(24, generator=torch.Generator().manual_seed(1)), layer, alpha)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("layer", [1, HEAD])
def test_every_number_again(tiny: Tiny, family: str, layer: int | str) -> None:
    model, v = tiny(family), vector(layer)
    found = audit(model, v, PROMPTS, max_tokens=8)
    steered = steer_model(model, v)
    V = model.reachable
    deltas, kls, flips, surprise = [], [], [], [[], []]
    for prompt in PROMPTS:
        ids = torch.tensor([model.encode(prompt)])
        with torch.no_grad():
            z, other = (
                m.head(m.body(ids, use_cache=False)[0])[0, :, :V].double() for m in (model, steered)
            )
        p, q = torch.log_softmax(z, -1), torch.log_softmax(other, -1)
        deltas.append(other - z)
        kls.append((p.exp() * (p - q)).sum(-1))
        flips.append(z.argmax(-1) != other.argmax(-1))
        for i, logs in enumerate((p, q)):
            surprise[i].append(-logs[:-1].gather(-1, ids[0, 1:, None]))
    delta, kl = torch.cat(deltas), torch.cat(kls)
    centred = delta - delta.mean(-1, keepdim=True)
    assert found.positions == len(kl)
    assert found.max_raw_delta == pytest.approx(float(delta.abs().max()), rel=1e-5)
    assert found.max_delta == pytest.approx(float(centred.abs().max()), rel=1e-5)
    for reported, moved in ((found.p99_raw_delta, delta), (found.p99_delta, centred)):
        falling = moved.abs().flatten().sort(descending=True).values
        assert reported == pytest.approx(float(falling[len(falling) // 100]), rel=1e-5)
    assert found.max_range == pytest.approx(float((delta.amax(-1) - delta.amin(-1)).max()))
    assert found.max_kl == pytest.approx(float(kl.max()))
    assert found.mean_kl == pytest.approx(float(kl.mean()))
    assert found.median_kl == pytest.approx(float(kl.median()))
    assert found.flips == pytest.approx(float(torch.cat(flips).double().mean()))
    for reported, parts in zip(found.perplexity, surprise, strict=True):
        assert reported == pytest.approx(math.exp(float(torch.cat(parts).mean())))
    for i, m in enumerate((model, steered)):
        openings = [row[0] for row in found.continuations]
        results = generate(openings, m, max_tokens=8)
        assert [row[1 + i] for row in found.continuations] == [r.text for r in results]
        mean = sum(distinct_2(r.ids) for r in results) / len(results)
        assert found.distinct_2[i] == pytest.approx(mean)
    assert found.worst.kl == found.max_kl
    assert found.worst.delta.shape == (V,)


def test_at_the_head_the_direct_path_is_the_path(tiny: Tiny) -> None:
    model, v = tiny("llama"), vector(HEAD)
    found = audit(model, v, PROMPTS, max_tokens=2)
    assert found.direct_range == pytest.approx(found.max_range, rel=1e-4)
    assert found.direct_correlation == pytest.approx(1.0, abs=1e-6)
    assert not found.direct_disagrees
    c = certify(model.head, v)
    assert found.max_range <= c.range + 1e-4
    assert found.max_kl <= c.kl_bound


def test_below_it_is_not(tiny: Tiny) -> None:
    found = audit(tiny("llama"), vector(0, 20.0), PROMPTS, max_tokens=2)
    assert found.direct_disagrees


def test_json_has_no_tensors_and_no_nan(tiny: Tiny) -> None:
    import json

    reported = json.loads(
        json.dumps(audit(tiny("gpt2"), vector(1), PROMPTS).to_dict(), allow_nan=False)
    )
    assert reported["perplexity"].keys() == {"unsteered", "steered"}
    assert reported["max_delta"] > 0
    assert len(reported["continuations"]) == 3


def test_measures_of_repetition() -> None:
    assert distinct_2([1, 2, 3]) == 1
    assert distinct_2([1, 1, 1, 1, 1]) == 0.25
    assert distinct_2([1]) == 1
    assert repetition([1, 2, 3, 4]) == 0
    assert repetition([1, 1, 1, 1, 1, 1]) == pytest.approx(2 / 3)
    assert repetition([]) == 0


def test_the_built_in_prompts_are_all_different() -> None:
    assert len(set(NEUTRAL)) == len(NEUTRAL) >= 24


def test_bad_input(tiny: Tiny) -> None:
    model = tiny("llama")
    with pytest.raises(BadInput, match="no prompt"):
        audit(model, vector(1), [])
    with pytest.raises(BadInput, match="the prompt is empty"):
        audit(model, vector(1), ["fine", ""])
    with pytest.raises(BadInput, match="reads at most 64"):
        audit(model, vector(1), ["long " * 30])
    with pytest.raises(BadInput, match="alpha is 0"):
        audit(model, vector(1), alpha=0)
