"""Multiple choice: log-probabilities of whole continuations, from the rows that are needed."""

import math
from pathlib import Path

import pytest

from lmhead.errors import BadInput
from lmhead.generation.choose import ERROR, choose
from lmhead.generation.score import score_text
from lmhead.head.screened import ScreenedHead
from lmhead.loading import load

PROMPT = "The capital of France is"
OPTIONS = [" London", " Paris", " the city of Paris, on the Seine"]


@pytest.mark.model
def test_the_sums_are_those_of_score_text(smollm2: Path) -> None:
    model = load(smollm2)
    choice = choose(PROMPT, OPTIONS, model, head=model.head)
    reported = score_text(OPTIONS, model, prompt=PROMPT)
    for option, score in zip(choice.options, reported, strict=True):
        assert option.logprob == pytest.approx(score.logprob, abs=1e-4)
        assert option.mean == pytest.approx(score.logprob / score.scored, abs=1e-4)
        assert option.ids == score.ids
    assert (choice.best, choice.error) == (1, 0.0)
    assert math.fsum(option.share for option in choice.options) == pytest.approx(1)


@pytest.mark.model
def test_a_screened_head_says_how_close_it_is_and_is_exact_where_that_matters(
    smollm2: Path,
) -> None:
    model = load(smollm2)
    head = ScreenedHead.from_head(model.head)
    clear = [" Paris", " London"]
    choice, exact = (choose(PROMPT, clear, model, head=one) for one in (head, model.head))
    assert choice.error == ERROR
    assert (choice.best, choice.best_by_mean) == (exact.best, exact.best_by_mean) == (0, 0)
    for ours, theirs in zip(choice.options, exact.options, strict=True):
        assert abs(ours.logprob - theirs.logprob) < ERROR + 1e-4
    assert head.stats.states == 2
    assert head.stats.rescored < 0.1 * 2 * head.vocab_size
    close = choose(PROMPT, [" Paris", " Paris"], model, head=head)  # nothing is closer
    assert (close.error, close.best) == (0.0, 0)


@pytest.mark.parametrize(
    ("prompt", "options", "error"),
    [("", ["a", "b"], "prompt is empty"), ("a", ["b"], "at least two"), ("a", ["b", ""], "option")],
)
def test_what_is_no_choice(prompt: str, options: list[str], error: str) -> None:
    with pytest.raises(BadInput, match=error):
        choose(prompt, options, "no-such-model")
