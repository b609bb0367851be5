"""The screened head on real heads and real hidden states."""

import pydoc
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lmhead.generation import generate
from lmhead.head.screened import ScreenedHead
from lmhead.loading import Model, load

PAGES = ("json", "argparse", "decimal", "ssl")
LICENCE = Path(__file__).parents[2] / "LICENSE"
PROSE = (
    "Der Fluss trat über die Ufer, als der Schnee schmolz. Il pleuvait depuis trois jours. "
    "今天天气很好，我们去公园吧。 def area(r): return 3.14159 * r ** 2  # 12, 24, 36, 48"
)


def hidden_states(model: Model, each: int) -> Tensor:
    """What enters the head on varied text, `[n, d]`."""
    texts = [pydoc.plain(pydoc.render_doc(name))[: 8 * each] for name in PAGES]
    found = []
    for text in [*texts, LICENCE.read_text()[: 8 * each], PROSE]:
        ids = model.tokenizer(text)["input_ids"][:each]
        with torch.inference_mode():
            found.append(model.body(torch.tensor([ids]), use_cache=False)[0][0])
    return torch.cat(found)


def differences(model: Model, each: int) -> tuple[int, ScreenedHead]:
    """Count the states whose greedy token or 50 best tokens differ from those of float64."""
    weight = model.head.weight.detach().double()
    screened = ScreenedHead.from_head(model.head)
    wrong = 0
    for h in hidden_states(model, each).split(16):
        z, ids = (h.double() @ weight.T).topk(51)
        assert bool((z[:, :-1] > z[:, 1:]).all()), "a tie: topk need not order it by id"
        wrong += int((screened.topk(h, 50).ids != ids[:, :50]).any(1).sum())
        wrong += int((screened.topk(h, 1).ids != ids[:, :1]).sum())
    return wrong, screened


@pytest.mark.model
def test_smollm2(smollm2):
    model = load(smollm2)
    wrong, screened = differences(model, each=48)
    assert wrong == 0
    assert not screened.stats.fallbacks
    assert screened.stats.rescored / screened.stats.states < 200  # of 49,152
    assert screened.screen.nbytes <= 0.27 * model.head.weight.nbytes
    prompt = "The three laws of motion are"
    dense = generate([prompt], model, max_tokens=24)[0]
    screened.stats.clear()
    same = generate([prompt], model, max_tokens=24, head=screened)[0]
    assert same.ids == dense.ids
    assert screened.stats.states == len(same.ids)


@pytest.mark.gemma
def test_gemma3(gemma3):
    wrong, screened = differences(load(gemma3), each=8)
    assert wrong == 0
    assert not screened.stats.fallbacks
