"""The geometry of a head, against the definitions, written out in float64."""

from pathlib import Path

import pytest
import torch

from lmhead.errors import BadInput
from lmhead.inspect import geometry as module
from lmhead.inspect.geometry import chunks, geometry, spectrum_of


def rows(V: int = 307, d: int = 24) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    scale = torch.linspace(0.1, 3, d)
    return torch.randn(V, d, generator=generator) * scale + 0.7


def test_the_spectrum_is_that_of_the_whole_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 24 * 50)  # seven chunks, the last one short
    W = rows()
    assert len(list(chunks(W))) == 7
    found = spectrum_of(W)
    s = torch.linalg.svdvals(W.double())
    assert torch.allclose(torch.tensor(found.singular_values).double(), s, rtol=1e-4)

    def rank(values: torch.Tensor) -> float:
        p = values.square() / values.square().sum()
        return float((-(p * p.log()).sum()).exp())

    assert found.effective_rank == pytest.approx(rank(s), rel=1e-4)
    centred = torch.linalg.svdvals(W.double() - W.double().mean(0))
    assert found.centred_effective_rank == pytest.approx(rank(centred), rel=1e-3)
    assert found.first_share == pytest.approx(float(s[0] ** 2 / s.square().sum()), rel=1e-4)
    unit = torch.nn.functional.normalize(W.double())
    cosines = unit @ unit.T
    V = len(W)
    mean = (float(cosines.sum()) - V) / (V * (V - 1))
    assert found.mean_cosine == pytest.approx(mean, rel=1e-4)


@pytest.mark.model
def test_smollm2(smollm2: Path) -> None:
    result = geometry(smollm2, near=" Paris", vector=torch.eye(576)[3], top=40)
    s = result.spectrum
    assert s.effective_rank == pytest.approx(43.5, abs=0.1)
    assert s.centred_effective_rank == pytest.approx(348.9, abs=0.2)
    assert s.mean_cosine == pytest.approx(0.442, abs=0.001)
    assert (result.rows, result.width, len(result.norms)) == (49_152, 576, 49_152)
    assert [t.text for t in result.near[:2]] == ["Paris", " London"]
    assert result.shortest[0].text == " John"  # a short row is not a sign of an untrained one
    names = {t.text for t in result.untrained}
    assert {" transistorsum", "PlaneProtection"} <= names
    assert not names & {" John", " Michael", "<|im_start|>"}
    assert result.untrained_special > 5
    groups = [{t.text for t in group} for group in result.duplicates]
    assert {"<gh_stars>", " transistorsum"} in groups
    assert result.raised[0].value > 0 > result.lowered[0].value
    assert "norms" not in result.to_dict()
    assert "effective rank" in result._repr_html_()
    with pytest.raises(BadInput, match=r"the vector has shape \[3\]"):
        geometry(smollm2, vector=torch.ones(3))


def test_options_come_first() -> None:
    with pytest.raises(BadInput, match="top is 0"):
        geometry("no-such-model", top=0)
