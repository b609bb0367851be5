"""The next token of the real model, before and after the sampling filters."""

import json

import pytest
import torch

from lmhead.errors import BadInput
from lmhead.generation import next_tokens
from lmhead.loading import Model
from lmhead.sampling import SamplingParams

pytestmark = pytest.mark.model
PROMPT = "The capital of France is"


def test_the_prompt_comes_first_and_may_be_ids(model: Model) -> None:
    reported = next_tokens(PROMPT, model, top=3)
    assert (reported.tokens[0].id, reported.tokens[0].token) == (7042, " Paris")
    assert reported.tokens[0].after is None
    assert reported.trace is None
    assert next_tokens(model.encode(PROMPT), model, top=3) == reported
    with pytest.warns(DeprecationWarning, match=r"now next_tokens\(prompt, model\)"):
        assert next_tokens(model, PROMPT, top=3) == reported


def test_after_is_what_generation_draws_from(model: Model) -> None:
    controls = {"top_k": 4, "temperature": 0.7, "banned_ids": (7042,), "logit_bias": {198: 20.0}}
    reported = next_tokens(PROMPT, model, top=8, **controls)
    with torch.no_grad():
        z = model.body.model(torch.tensor([model.encode(PROMPT)])).logits[0, -1].double()
    plain = z.softmax(-1)
    z[7042] = -torch.inf
    z[198] += 20
    kept = z.topk(4)
    expected = dict(zip(kept.indices.tolist(), (kept.values / 0.7).softmax(-1), strict=True))
    assert [t.id for t in reported.tokens[:4]] == kept.indices.tolist()
    for token in reported.tokens:
        assert token.after == pytest.approx(float(expected.get(token.id, 0.0)), abs=1e-5)
        assert token.probability == pytest.approx(float(plain[token.id]), abs=1e-5)
    # what was cut comes last, the most probable first
    cut = [t.probability for t in reported.tokens[4:]]
    assert reported.tokens[4].id == 7042
    assert cut == sorted(cut, reverse=True)
    assert reported.rest_after == pytest.approx(0.0, abs=1e-6)
    assert reported.rest + sum(t.probability for t in reported.tokens) == pytest.approx(1)
    assert reported == next_tokens(PROMPT, model, top=8, params=SamplingParams(**controls))  # type: ignore[arg-type]
    assert json.loads(json.dumps(reported.to_dict(), allow_nan=False))["tokens"][0]["id"] == 198


def test_min_tokens_bans_the_models_own_stop_ids(model: Model) -> None:
    reported = next_tokens(PROMPT, model, min_tokens=1)
    assert reported.trace is not None
    (step,) = (s for s in reported.trace.steps if s.name == "min_tokens")
    assert step.left == model.reachable - len(model.stop_ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top": 0}, "top is 0"),
        ({"order": "vlm"}, None),
        ({"order": "vlm", "top_k": 3}, "did you mean 'vllm'"),
        ({"top_q": 3}, "did you mean 'top_"),
        ({"params": SamplingParams(), "top_k": 3}, "one or the other"),
    ],
)
def test_wrong_options(options: dict[str, object], message: str | None, model: Model) -> None:
    if message is None:
        next_tokens(PROMPT, model, **options)  # type: ignore[arg-type]
        return
    with pytest.raises(BadInput, match=message):
        next_tokens(PROMPT, "no/model", **options)  # type: ignore[arg-type]


def test_wrong_prompts(model: Model) -> None:
    for wrong in (None, 3, [], ["a", "b"]):
        with pytest.raises(BadInput, match="expected"):
            next_tokens(wrong, model)  # type: ignore[arg-type]
