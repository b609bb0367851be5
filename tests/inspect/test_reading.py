"""Reading: every token's numbers are those of the model, in one window or in several."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lmhead.errors import BadInput
from lmhead.generation import score_text
from lmhead.inspect.reading import read
from lmhead.loading import load

TEXT = "w3 w5 w7 w3 w9 w11 w5"


def test_the_numbers_are_the_models(save: Any) -> None:
    model = load(save("a"))
    result = read(TEXT, model, top=3)
    with torch.no_grad():
        ids = torch.tensor([model.encode(TEXT)])
        lp = model.body.model(ids).logits[0].double().log_softmax(-1)
    assert result.tokens[0].logprob is None
    for t, token in enumerate(result.tokens[1:]):
        i = int(ids[0, t + 1])
        assert token.id == i
        assert token.logprob == pytest.approx(float(lp[t, i]), abs=1e-5)
        assert token.rank == 1 + int((lp[t] > lp[t, i]).sum())
        assert token.entropy == pytest.approx(float(-(lp[t].exp() * lp[t]).sum()), abs=1e-5)
        assert [g.id for g in token.guesses] == torch.topk(lp[t], 3).indices.tolist()
    (score,) = score_text(TEXT, model)
    assert result.logprob == pytest.approx(score.logprob, abs=1e-4)
    assert result.perplexity == pytest.approx(score.perplexity, rel=1e-4)
    worst = result.surprises()
    assert result.tokens[worst[0]].logprob == min(score.logprobs[1:])  # type: ignore[type-var]
    assert len(worst) == 6


@pytest.mark.parametrize("stride", [3, 8, 15])
def test_windows_read_every_token_once(save: Any, stride: int) -> None:
    model = load(save("a"))  # its context is 16
    text = " ".join(f"w{1 + (7 * i) % 50}" for i in range(45))
    (score,) = score_text(text, model, stride=stride)
    result = read(text, model, stride=stride)
    assert [t.id for t in result.tokens] == list(score.ids)
    reported = [t.logprob for t in result.tokens]
    assert reported[0] is None
    assert reported[1:] == pytest.approx(score.logprobs[1:], abs=1e-4)
    with pytest.raises(BadInput, match="reads at most 16"):
        read(text, model)


def test_the_page_works_offline_and_shows_the_text(save: Any) -> None:
    page = read(TEXT, load(save("a"))).to_html()
    assert page.startswith("<!doctype html>")
    assert "default-src 'none'" in page
    assert "http" not in page.replace("http-equiv", "")
    assert "log-probability" in page
    assert page.count("<span") == 7


@pytest.mark.model
def test_smollm2(smollm2: Path) -> None:
    result = read("The capital of France is Berlin.", load(smollm2))
    worst = result.tokens[result.surprises()[0]]
    assert worst.text in (" capital", " Berlin")
    berlin = next(t for t in result.tokens if t.text == " Berlin")
    assert berlin.guesses[0].text == " Paris"
    assert berlin.rank is not None
    assert berlin.rank > 1
    with pytest.raises(BadInput, match="top is -1"):
        read("Hi", "no-such-model", top=-1)
