"""Two heads side by side: a fine-tune, a trim, a quantisation, and strangers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lmhead.errors import BadInput
from lmhead.inspect.compare import compare
from lmhead.loading import load

TEXT = "w3 w5 w7 w3 w9 w11 w5"
KEPT = [0, 3, 5, 7, 9, 11, 13]


def test_a_model_and_itself(save: Any) -> None:
    folder = save("a")
    result = compare(folder, folder, text=TEXT)
    assert (result.common, result.equal, result.moved) == (60, 60, ())
    assert result.on_text is not None
    assert (result.on_text.disagreements, result.on_text.max_kl) == (0, 0)
    assert result.spectrum_a == result.spectrum_b


def test_a_fine_tune_tells_the_rows_that_moved(save: Any) -> None:
    a, b = save("a"), save("b", noise=3.0, rows=[4, 9, 17])
    result = compare(a, b, text=TEXT, top=5)
    assert result.equal == 57
    assert {row.id for row in result.moved} == {4, 9, 17}
    weights = [load(folder).head.weight.detach().double() for folder in (a, b)]
    first = result.moved[0]
    moved = (weights[1] - weights[0])[first.id].norm() / weights[0][first.id].norm()
    assert first.distance == pytest.approx(float(moved), rel=1e-5)
    reported = result.on_text
    assert reported is not None
    best, lps = [], []
    for folder in (a, b):
        model = load(folder)
        with torch.no_grad():
            ids = torch.tensor([model.encode(TEXT)])
            z = model.body.model(ids).logits[0].double()
        best.append(z.argmax(-1))
        lps.append(z.log_softmax(-1))
    kl = (lps[0].exp() * (lps[0] - lps[1])).sum(-1)
    assert reported.positions == 7
    assert reported.disagreements == int((best[0] != best[1]).sum()) > 0
    assert reported.mean_kl == pytest.approx(float(kl.mean()), rel=1e-4)
    assert reported.max_kl == pytest.approx(float(kl.max()), rel=1e-4)
    at = reported.worst[0].position
    assert (reported.worst[0].a.id, reported.worst[0].b.id) == (int(best[0][at]), int(best[1][at]))
    assert "moved most" in result._repr_html_()
    assert result.to_dict()["equal"] == 57


@pytest.mark.parametrize("swap", [False, True])
def test_a_trim_is_compared_by_its_id_map(save: Any, swap: bool) -> None:
    whole, trim = save("whole"), save("trim", kept=KEPT)
    reported = {"id_map": {"rows": 60, "kept": KEPT}}
    (trim / "lmhead_trim.json").write_text(json.dumps(reported))
    pair = (trim, whole) if swap else (whole, trim)
    result = compare(*pair, text=TEXT)
    assert (result.common, result.equal, result.moved) == (7, 7, ())
    assert {result.rows_a, result.rows_b} == {60, 7}
    assert result.on_text is not None
    assert result.on_text.max_kl == pytest.approx(0, abs=1e-5)  # over the tokens that both have
    with pytest.raises(BadInput, match="expected a text that both read as the same tokens"):
        compare(*pair, text="w3 w4 w5")  # w4 was not kept


def test_without_its_id_map_a_trim_is_another_model(save: Any) -> None:
    result = compare(save("whole"), save("trim", kept=KEPT))
    assert (result.common, result.equal) == (7, 1)


@pytest.mark.model
def test_strangers_are_refused(save: Any, smollm2: Path) -> None:
    with pytest.raises(BadInput, match="expected two heads of one model"):
        compare(save("a"), smollm2)
    with pytest.raises(BadInput, match="top is 0"):
        compare("no-such-model", "nor-this", top=0)
