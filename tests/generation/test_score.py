"""Scores of the real model: those of transformers' own logits, whatever the batch."""

import json
import math
from dataclasses import replace

import pytest
import torch

import lmhead
from lmhead.errors import BadInput
from lmhead.generation import perplexity, score_text
from lmhead.generation import score as scoring
from lmhead.loading import Model

pytestmark = pytest.mark.model
TEXTS = (
    "The capital of France is Paris.",
    "Hi",
    "def add(a, b):\n    return a + b\n",
    "Ünïcödé ☃ 你好, and a rather longer sentence, so that the rows of a batch are uneven.",
    "one two three four five six seven",
)


def theirs(model: Model, ids: list[int]) -> list[float]:
    """The log-probability of every id but the first, by transformers' own forward, in float64."""
    with torch.no_grad():
        z = model.body.model(torch.tensor([ids])).logits[0].double()
    return [float(z[t - 1].log_softmax(-1)[ids[t]]) for t in range(1, len(ids))]


def test_scores_are_those_of_transformers(model: Model) -> None:
    for batch_size in (1, 3):
        reported = score_text(TEXTS, model, batch_size=batch_size)
        assert [s.text for s in reported] == list(TEXTS)
        for s in reported:
            ids = model.encode(s.text)
            assert list(s.ids) == ids
            assert s.logprobs[0] is None  # this tokenizer puts nothing before a text
            expected = theirs(model, ids)
            assert list(s.logprobs[1:]) == pytest.approx(expected, abs=5e-5)
            assert s.logprob == pytest.approx(sum(expected), abs=1e-3)
            assert s.scored == len(ids) - 1
            if expected:
                mean = -sum(expected) / len(expected)
                assert s.perplexity == pytest.approx(math.exp(mean), rel=1e-4)
            assert "".join(s.tokens) == s.text or "☃" in s.text
    (alone,) = score_text("a", model)
    assert (alone.scored, alone.logprob, alone.perplexity) == (0, 0.0, None)
    assert perplexity([alone]) is None
    assert perplexity(reported) == pytest.approx(
        math.exp(-sum(s.logprob for s in reported) / sum(s.scored for s in reported))
    )
    assert (
        json.loads(json.dumps(reported[0].to_dict(), allow_nan=False))["scored"]
        == reported[0].scored
    )
    assert "logprobs" not in reported[0].to_dict(tokens=False)
    assert lmhead.score_text is score_text


def test_a_prompt_stands_before_and_is_not_scored(model: Model) -> None:
    paris, rome = score_text([" Paris", " Rome"], model, prompt="The capital of France is")
    ids = model.encode("The capital of France is Paris")
    assert list(paris.ids) == ids[-1:] == [7042]
    assert paris.logprobs == (pytest.approx(theirs(model, ids)[-1], abs=5e-5),)
    assert math.exp(paris.logprob) == pytest.approx(0.7725, abs=1e-3)  # what `lmhead next` says
    assert rome.logprob < paris.logprob
    assert paris.prompt == "The capital of France is"
    # the same by ids, and with a prompt for each
    prompt = model.encode("The capital of France is")
    alone = score_text([[7042]], model, prompt=prompt)[0]  # a batch of one rounds in its own way
    assert alone.logprobs == (pytest.approx(paris.logprob, abs=2e-5),)
    each = score_text([" Paris", " Rome"], model, prompt=["The capital of France is"] * 2)
    assert [s.logprob for s in each] == pytest.approx([paris.logprob, rome.logprob], abs=5e-5)


def test_a_token_over_the_boundary_belongs_to_the_text(model: Model) -> None:
    whole = model.encode("The capital of France is Paris")
    (reported,) = score_text("ris", model, prompt="The capital of France is Pa")
    assert list(reported.ids) == whole[-1:]
    assert reported.logprob == pytest.approx(theirs(model, whole)[-1], abs=5e-5)


def test_a_chat_scores_the_answer(model: Model) -> None:
    said = model.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Say hello."}], tokenize=False, add_generation_prompt=True
    )
    ids = model.tokenizer(said + "Hello!", add_special_tokens=False)["input_ids"]
    (reported,) = score_text("Hello!", model, prompt="Say hello.", chat=True)
    n = len(reported.ids)
    assert list(reported.ids) == ids[-n:]
    assert list(reported.logprobs) == pytest.approx(theirs(model, ids)[-n:], abs=5e-5)


def test_a_token_that_the_tokenizer_adds_gives_the_first_token_a_score(model: Model) -> None:
    from copy import deepcopy

    from tokenizers.processors import TemplateProcessing

    tokenizer = deepcopy(model.tokenizer)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A <|im_end|>",
        special_tokens=[("<|endoftext|>", 0), ("<|im_end|>", 2)],
    )
    with_bos = replace(model, tokenizer=tokenizer)
    ids = model.encode(TEXTS[0])
    assert with_bos.encode(TEXTS[0]) == [0, *ids, 2]
    (reported,) = score_text(TEXTS[0], with_bos)
    assert list(reported.ids) == ids  # the text alone
    assert list(reported.logprobs) == pytest.approx(theirs(model, [0, *ids]), abs=5e-5)
    (reported,) = score_text(" Paris", with_bos, prompt="The capital of France is")
    whole = [0, *model.encode("The capital of France is Paris")]
    assert reported.logprob == pytest.approx(theirs(model, whole)[-1], abs=5e-5)


def test_a_text_beyond_the_context_needs_a_stride(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "One two three four five six seven eight nine ten eleven twelve thirteen."
    ids = model.encode(text)
    n = len(ids)
    monkeypatch.setattr(type(model.body), "context", 8)
    with pytest.raises(BadInput, match=rf"has {n} tokens .* reads at most 8; .*stride"):
        score_text(text, model)
    (reported,) = score_text(text, model, stride=3)
    assert reported.scored == n - 1
    expected, start, end = [], 0, 1
    while end < n:
        stop = min(start + 8, n)
        expected += theirs(model, ids[start:stop])[end - start - 1 :]
        end, start = stop, min(start + 3, n - 8)
    assert list(reported.logprobs[1:]) == pytest.approx(expected, abs=5e-5)
    with pytest.raises(BadInput, match="stride is 8; expected less than the 8"):
        score_text(text, model, stride=8)


def test_logits_are_held_for_a_few_positions_only(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    V = model.head.vocab_size

    class Watched:
        vocab_size, hidden_size, reads_all = V, model.head.hidden_size, True

        def __call__(self, h: torch.Tensor) -> torch.Tensor:
            asked.append(h.shape[0])
            return model.head(h)

    monkeypatch.setattr(scoring, "LOGITS_AT_ONCE", 5 * V)
    plain = score_text(TEXTS, model)
    assert score_text(TEXTS, model, head=Watched()) == plain  # type: ignore[arg-type]
    assert max(asked) == 5
    assert sum(asked) == sum(s.scored for s in plain)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"texts": None}, "expected a text"),
        ({"texts": ""}, "a text is empty"),
        ({"texts": ["a", "b"], "prompt": ["x", "y", "z"]}, "3 prompts and 2 texts"),
        ({"texts": "a", "chat": True}, "give a prompt"),
        ({"texts": "a", "stride": 0}, "stride is 0"),
        ({"texts": "a", "batch_size": 0}, "batch_size is 0"),
        ({"texts": [49_152]}, "holds the id 49,152"),
    ],
)
def test_wrong_calls(model: Model, options: dict[str, object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        score_text(model=model, **options)  # type: ignore[arg-type]
