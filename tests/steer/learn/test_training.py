"""Training from data to a vector: every method and job, honest splits, nothing on wrong input."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lmhead.cli.steer_train import parse_layer
from lmhead.cli.steer_train import train as command
from lmhead.errors import BadInput
from lmhead.loading import Model, load
from lmhead.steer import SteeringVector, certify
from lmhead.steer.bound.constraints import Constraints
from lmhead.steer.learn import gradient, training
from lmhead.steer.learn.builtin import builtin_data
from lmhead.steer.learn.data import Data, Pair
from lmhead.steer.learn.pairs import PairRuns
from lmhead.steer.learn.request import Request
from lmhead.steer.learn.training import train
from lmhead.steer.learn.tsv import Settings
from lmhead.steer.measure import harm
from lmhead.steer.runs import Runs
from lmhead.steer.states import read_states

Tiny = Callable[[str], Model]
SHORT = ("a plain text.", "and another one, as plain.")
SMALL: dict[str, Any] = {"labels": 18, "unlabelled": 12}


@pytest.fixture
def data() -> Data:
    """Pairs that fit the tiny model's context."""
    pairs = tuple(p for p in builtin_data().pairs if len(p.prompt) < 30)[::4]
    return Data("some", tuple(row for p in pairs for row in p.rows), pairs)


@pytest.fixture(autouse=True)
def short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient, "NEUTRAL", SHORT)
    monkeypatch.setattr(training, "NEUTRAL", SHORT)


@pytest.mark.parametrize("method", ["mean-diff", "pca", "probe", "auto"])
def test_linear_detectors(tiny: Tiny, data: Data, method: str) -> None:
    model = tiny("llama")
    vector = train(data, model, method=method, **SMALL)
    card = vector.card
    assert (card.job, card.method, card.seed) == ("detect", method, 0)
    assert card.head_sha256 == model.head.sha256
    assert card.metrics["chosen_on"] == "folds"
    assert card.data["split"]["labels"] == card.data["split"]["labelled"] == 18
    again = train(data, model, method=method, **SMALL)
    assert torch.equal(vector.direction, again.direction)
    assert json.dumps(vector.to_dict()) == json.dumps(again.to_dict())


def test_the_card_names_all_that_was_looked_at_and_no_test_row(tiny: Tiny, data: Data) -> None:
    vector = train(data, tiny("llama"), method="probe", layer=1, seed=4, **SMALL)
    parts = Request(seed=4, **SMALL).split(data)
    seen = {row.sha256 for row in (*parts.labelled, *parts.unlabelled, *parts.validation)}
    assert set(vector.card.data["sha256"]) == seen
    assert not seen & {row.sha256 for row in parts.test}
    assert vector.layer == 1


def test_tsv_writes_prototypes_and_the_layer_it_chose(tiny: Tiny, data: Data) -> None:
    model = tiny("llama")
    vector = train(data, model, method="tsv", settings=Settings(epochs=2), validation=10, **SMALL)
    split = vector.card.data["split"]
    assert (split["labels"], split["labelled"], split["validation"]) == (18, 8, 10)
    assert vector.card.prototypes is not None
    assert vector.alpha == 5.0
    assert str(vector.layer) in vector.card.metrics["layers"]
    assert len(vector.card.metrics["history"]) == 4
    assert vector.card.certificate is None


def test_a_budget_at_the_head_is_on_the_card_and_certified(tiny: Tiny, data: Data) -> None:
    model = tiny("llama")
    request = Request(
        method="tsv",
        layer="head",
        settings=Settings(epochs=3, learning_rate=0.2),
        constraints=Constraints(budget=2.0),
        **SMALL,
    )
    vector = train(data, model, request)
    assert vector.card.certificate is not None
    assert vector.card.certificate["range"] == certify(model.head, vector).range <= 2.0
    assert vector.card.budget == 2.0


@pytest.mark.parametrize("layer", [1, "head"])
@pytest.mark.parametrize("method", ["mean-diff", "gradient"])
def test_a_steering_vector_keeps_its_budget(
    tiny: Tiny, data: Data, layer: int | str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient, "EPOCHS", 1)
    model = tiny("llama")
    vector = train(
        data, model, job="steer", method=method, layer=layer, constraints=Constraints(budget=1.0)
    )
    runs = Runs.read(model, SHORT, layer)
    assert float(harm(model.head, *runs.compare(vector.added)).range.max()) <= 1.0 + 1e-4
    assert vector.card.budget == 1.0
    assert vector.card.metrics["neutral"]["max_range"] <= 1.0 + 1e-4
    if layer == "head":
        assert certify(model.head, vector).range <= 1.0
        assert vector.card.metrics["budget_is"] == "certified"
    else:
        assert vector.card.metrics["budget_is"] == "measured on neutral prompts"


def test_log_odds_are_those_of_the_model(tiny: Tiny) -> None:
    model = tiny("llama")
    pair = Pair("ab", " cd", " e")
    found = PairRuns.read(model, [pair], 1).log_odds(model.head, None)
    expected = 0.0
    for sign, ending in ((1, pair.true), (-1, pair.false)):
        ids = torch.tensor([model.encode(pair.prompt + ending)])
        with torch.no_grad():
            logp = model.body.model(ids).logits[0, :-1].double().log_softmax(-1)
        expected += sign * float(logp.gather(1, ids[0, 1:, None])[1:].sum())
    assert float(found) == pytest.approx(expected, abs=1e-3)


def test_gradient_training_raises_the_log_odds(tiny: Tiny, data: Data) -> None:
    model = tiny("llama")
    vector = train(
        data, model, job="steer", method="gradient", layer=1, constraints=Constraints(budget=1.0)
    )
    assert vector.card.metrics["training_log_odds_gain"] > 0
    losses = [step["loss"] for step in vector.card.metrics["history"]]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": "magic"}, "the method is 'magic'"),
        ({"job": "win"}, "the job is 'win'"),
        ({"job": "steer", "method": "tsv"}, "the method is 'tsv'"),
        ({"layer": 3}, "the layer is 3, but the model has 3 blocks"),
        ({"method": "probe", "layer": -1}, "the layer is -1"),
        ({"method": "probe", "constraints": Constraints(kl=1.0)}, "adds\n? ?nothing"),
        ({"labels": 400}, "expected 400 to train on"),
        ({"method": "tsv", "validation": 0}, "validation rows"),
        ({"method": "tsv", "validation": 17}, "validation is 17 of 18 labels"),
        ({"method": "auto", "validation": 4}, "chooses by folds over all labels"),
    ],
)
def test_wrong_requests(tiny: Tiny, data: Data, options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        train(data, tiny("llama"), **{**SMALL, **options})


def test_steering_needs_pairs(tiny: Tiny, data: Data) -> None:
    with pytest.raises(BadInput, match="holds no pairs"):
        train(Data("rows", data.rows), tiny("llama"), job="steer")


@pytest.mark.parametrize(
    ("rows", "options", "said"),
    [
        ("statement,label\na,1\nb,1\n", {}, "expected both"),
        ("statement,label\na,1\nb,0\n", {}, "expected 132 to train on"),
        ("statement,label\n,1\n", {}, "is empty"),
        ("statement,label\na,1\nb,0\n", {"alpha": 0.0}, "alpha is 0"),
        ("statement,label\na,1\nb,0\n", {"alpha": -2.0}, "alpha is -2"),
        ("statement,label\na,1\nb,0\n", {"budget": -1.0}, "the budget is -1"),
        ("statement,label\na,1\nb,0\n", {"layer": "top"}, "the layer is 'top'"),
        ("statement,label\na,1\nb,0\n", {"out": Path("v.bin")}, "ends in [.]safetensors"),
    ],
)
def test_nothing_is_written_on_wrong_input(
    tmp_path: Path, rows: str, options: dict[str, Any], said: str
) -> None:
    (tmp_path / "d.csv").write_text(rows)
    out = tmp_path / options.pop("out", "v.safetensors")
    with pytest.raises(BadInput, match=said):
        command(str(tmp_path / "d.csv"), out, model="no such model", **options)
    assert [p.name for p in tmp_path.iterdir()] == ["d.csv"]


def test_layers_are_parsed() -> None:
    assert (parse_layer("3"), parse_layer("head"), parse_layer("auto")) == (3, "head", "auto")


@pytest.mark.model
def test_the_command_on_the_real_model(
    smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "v.safetensors"
    command("builtin", out, model=str(smollm2), method="probe", unlabelled=0, labels=62, json=True)
    reported = json.loads(capsys.readouterr().out)
    vector = SteeringVector.load(out)
    assert reported["layer"] == vector.layer
    assert reported["metrics"]["validation_auroc"] > 0.7
    assert [p.name for p in tmp_path.iterdir()] == ["v.safetensors"]
    assert load(smollm2).head.sha256 == vector.card.head_sha256


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "mean-diff", "constraints": Constraints(kl=1.0)}, "trains nothing"),
        ({"method": "pca", "constraints": Constraints(excess=1.0)}, "trains nothing"),
        ({"constraints": Constraints(mean=0.2)}, "mean is 0.2"),
    ],
)
def test_constraints_that_would_do_nothing_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        Request(job="steer", **options)


def test_the_card_tells_the_constraints_that_were_at_work(
    tiny: Tiny, data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient, "EPOCHS", 1)
    model = tiny("llama")

    def reported(**options: Any) -> dict[str, Any]:
        vector = train(data, model, job="steer", layer=1, **options)
        constraints: dict[str, Any] = vector.card.metrics["constraints"]
        return constraints

    assert reported() == {"kl": gradient.KL_WEIGHT, "budget": gradient.DEFAULT_BUDGET}
    assert reported(constraints=Constraints(kl=0.5, budget=1.0)) == {"kl": 0.5, "budget": 1.0}
    excess = {"excess": 0.5, "threshold": 2.0, "largest": 50, "budget": 2.0}
    assert reported(constraints=Constraints(excess=0.5)) == excess
    assert reported(method="mean-diff") == {"budget": gradient.DEFAULT_BUDGET}


def test_arguments_that_would_be_ignored_are_refused(
    tiny: Tiny, data: Data, tmp_path: Path
) -> None:
    model = tiny("llama")
    for options in ({"job": "steer"}, {"method": "probe"}):
        with pytest.raises(BadInput, match="a checkpoint is given for the method"):
            train(data, model, checkpoint=tmp_path / "c", layer=1, **options)
    states = read_states(model, data.rows[:2])
    for options in ({"job": "steer"}, {"method": "tsv"}):
        with pytest.raises(BadInput, match="states are given"):
            train(data, model, states=states, layer=1, **options)
