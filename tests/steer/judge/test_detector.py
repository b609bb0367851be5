"""Scores of new text are those of training, from the file alone."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lmhead.body.reading import read_once
from lmhead.errors import BadInput
from lmhead.loading import Model
from lmhead.steer import SteeringVector
from lmhead.steer.judge.detector import detect, detect_stream, score_rows
from lmhead.steer.judge.evaluation import evaluate
from lmhead.steer.learn.builtin import builtin_data
from lmhead.steer.learn.data import Data
from lmhead.steer.learn.request import Request
from lmhead.steer.learn.training import labels_of, train
from lmhead.steer.learn.tsv import Settings
from lmhead.steer.metrics import auroc
from lmhead.steer.states import read_states

Tiny = Callable[[str], Model]
SMALL: dict[str, Any] = {"labels": 18, "unlabelled": 12}


@pytest.fixture
def data() -> Data:
    pairs = tuple(p for p in builtin_data().pairs if len(p.prompt) < 30)[::4]
    return Data("some", tuple(row for p in pairs for row in p.rows), pairs)


@pytest.mark.parametrize("method", ["probe", "auto", "tsv"])
def test_a_saved_detector_scores_as_it_was_chosen(
    tiny: Tiny, data: Data, method: str, tmp_path: Path
) -> None:
    model = tiny("llama")
    choosing = {"validation": 10} if method == "tsv" else {}
    request = Request(method=method, layer=1, settings=Settings(epochs=2), **SMALL, **choosing)
    vector = train(data, model, request)
    again = SteeringVector.load(vector.save(tmp_path / "v.safetensors"))
    parts = request.split(data)
    rows = parts.validation or parts.labelled
    scores = score_rows(again, rows, model)
    assert torch.equal(scores, score_rows(vector, rows, model))
    assert ((scores >= 0) & (scores <= 1)).all()
    if method == "tsv":  # the others' own figure is of rows left out of the fit
        found = vector.card.metrics["validation_auroc"]
        assert auroc(scores, labels_of(rows)) == pytest.approx(found, abs=0.05)


def test_known_states_give_the_same_scores(tiny: Tiny, data: Data) -> None:
    model = tiny("llama")
    vector = train(data, model, method="auto", **SMALL)
    rows = data.rows[:9]
    known = score_rows(vector, rows, model, states=read_states(model, rows))
    torch.testing.assert_close(known, score_rows(vector, rows, model))


def test_text_is_closed_as_in_training(tiny: Tiny, data: Data) -> None:
    model = tiny("llama")
    vector = train(data, model, method="probe", layer=1, **SMALL)
    open_, closed = detect(vector, ["It is so", "It is so."], model)
    assert open_.to_dict() == closed.to_dict()


def test_train_eval_and_detect_read_every_text_once(
    tiny: Tiny, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMHEAD_CACHE", str(tmp_path))
    monkeypatch.delenv("LMHEAD_STATES")
    model = tiny("llama")
    read: list[int] = []
    ran: list[torch.Size] = []

    def counted(*args: Any) -> Iterator[Any]:
        for texts, *found in read_once(*args):
            read.extend(texts)
            yield texts, *found

    def count(_block: object, args: tuple[torch.Tensor], _result: object) -> None:
        if args[0].shape[1] > 2:  # not the two tokens that `Blocks` tries
            ran.append(args[0].shape)

    monkeypatch.setattr("lmhead.body.states.read_once", counted)
    hook = model.body.model.model.layers[0].register_forward_hook(count)
    try:
        vector = train(data, model, method="auto", **SMALL)
        evaluate(vector, data, model)
        found = detect(vector, list(data.rows), model)
        assert len(read) == len({row.text for row in data.rows})
        assert ran
        ran.clear()
        detect(vector, list(data.rows), model)
        assert not ran
    finally:
        hook.remove()
    assert [d.text for d in found] == [row.text for row in data.rows]
    monkeypatch.setenv("LMHEAD_STATES", "0")
    fresh = detect(vector, list(data.rows), model)
    for kept, again in zip(found, fresh, strict=True):
        assert kept.score == pytest.approx(again.score, abs=1e-4)


def test_scores_come_while_texts_are_read(tiny: Tiny, data: Data) -> None:
    model = tiny("llama")
    vector = train(data, model, method="probe", layer=1, **SMALL)
    asked: list[str] = []

    def texts() -> Iterator[str]:
        for row in data.rows[:10]:
            asked.append(row.text)
            yield row.text

    stream = detect_stream(vector, texts(), model, size=4)
    first = next(stream)
    assert len(asked) == 4
    found = [first, *stream]
    assert [d.to_dict() for d in found] == [
        pytest.approx(d.to_dict(), abs=1e-5) for d in detect(vector, data.rows[:10], model)
    ]


@pytest.mark.parametrize(
    ("texts", "said"),
    [([], "no text"), (["fine", " "], "text 2 of 2 is empty"), (["x" * 80], "81 tokens")],
)
def test_texts_that_cannot_be_scored(tiny: Tiny, data: Data, texts: list[str], said: str) -> None:
    vector = train(data, tiny("llama"), method="probe", layer=1, **SMALL)
    with pytest.raises(BadInput, match=said):
        detect(vector, texts, tiny("llama"))


def test_what_is_no_detector(tiny: Tiny, data: Data) -> None:
    model = tiny("llama")
    with pytest.raises(BadInput, match="not a detector"):
        detect(SteeringVector(torch.ones(24), 1), ["a"], model)
    vector = train(data, model, method="probe", layer=1, **SMALL)
    with pytest.raises(BadInput, match="not a detector"):
        detect(2 * vector, ["a"], model)  # its bias was for the vector as it was
    with pytest.raises(BadInput, match="width 5"):
        detect(replace(vector, direction=torch.ones(5)), ["a"], model)


@pytest.mark.model
def test_the_command_tells_true_from_false(
    smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from lmhead.cli.detect import detect as command
    from lmhead.loading import load

    model = load(smollm2)
    vector = train(builtin_data(), model, method="auto", labels=92, unlabelled=0)
    path = vector.save(tmp_path / "v.safetensors")
    parts = Request(method="auto", labels=92, unlabelled=0).split(builtin_data())
    texts = [row.text for row in parts.test[:40]]
    command(path, texts, model=str(smollm2), json=True)
    found = json.loads(capsys.readouterr().out)["results"]
    scores = torch.tensor([row["score"] for row in found])
    assert auroc(scores, labels_of(parts.test[:40])) > 0.7
