"""States of every layer: the same as the model's own, whatever runs beside them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lmhead.body.blocks import Blocks
from lmhead.body.states import States, batches
from lmhead.errors import BadInput
from lmhead.loading import Model
from lmhead.steer.learn.data import Row
from lmhead.steer.runs import Runs, frozen
from lmhead.steer.states import encode, read_states
from lmhead.steer.vector import HEAD

Tiny = Callable[[str], Model]
TEXTS = ["one.", "a longer text.", "b", "so it is.", "the last of them all."]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_last_states_are_the_models_own(tiny: Tiny, family: str) -> None:
    model = tiny(family)
    found = read_states(model, TEXTS)
    assert found.last.shape == (5, 4, 24)
    for i, text in enumerate(TEXTS):
        ids = torch.tensor([model.encode(text)])
        with torch.no_grad():
            out = model.body.model(ids, output_hidden_states=True)
        for layer in range(2):  # transformers shows the last block's state after the norm
            torch.testing.assert_close(
                found.at(layer)[i], out.hidden_states[layer + 1][0, -1], atol=1e-4, rtol=1e-4
            )
        h = model.last_hidden(ids[0].tolist())
        torch.testing.assert_close(found.at(HEAD)[i], h, atol=1e-4, rtol=1e-4)
        if ids.shape[1] > 1:
            z = out.logits[0, :-1, : model.reachable].double()  # padding rows take no part
            logp = z.log_softmax(-1).gather(1, ids[0, 1:, None]).mean()
            assert abs(float(found.logprob[i]) - float(logp)) < 1e-4


def test_a_prompt_is_not_scored(tiny: Tiny) -> None:
    model = tiny("llama")
    row = Row("ab cd", 1, prompt="ab")
    ids = torch.tensor([model.encode(row.text)])
    with torch.no_grad():
        logits = model.body.model(ids).logits[0, :-1, : model.reachable].double()
    each = logits.log_softmax(-1).gather(1, ids[0, 1:, None])
    found = read_states(model, [row, Row("ab cd")]).logprob
    assert float(found[0]) == pytest.approx(float(each[1:].mean()), abs=1e-4)
    assert float(found[1]) == pytest.approx(float(each.mean()), abs=1e-4)


def test_states_are_kept_by_default(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMHEAD_CACHE", str(tmp_path))
    monkeypatch.delenv("LMHEAD_STATES")
    model = tiny("llama")
    first = read_states(model, TEXTS)
    assert len(list((tmp_path / "states").iterdir())) == 1
    again = read_states(model, TEXTS[:2])
    assert torch.equal(first.last[:2], again.last)
    assert isinstance(first[:2], States)
    assert len(first[:2]) == 2


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["fine", "  "], "text 2 of 2 is empty"),
        (["x" * 65], "text 1 of 1 .* 65 tokens"),
    ],
)
def test_texts_that_cannot_be_read(tiny: Tiny, texts: list[str], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        read_states(tiny("llama"), texts)


def test_batches_hold_every_text_once(tiny: Tiny) -> None:
    found = batches(encode(tiny("llama"), TEXTS), size=2)
    assert sorted(i for b in found for i in b.rows.tolist()) == [0, 1, 2, 3, 4]
    assert all(b.ids.shape[1] == int(b.last.max()) + 1 for b in found)


@pytest.mark.parametrize("layer", [0, 1, 2, HEAD])
def test_runs_give_what_a_whole_pass_gives(tiny: Tiny, layer: int | str) -> None:
    model = tiny("llama")
    runs = Runs.read(model, TEXTS, layer)
    plain = read_states(model, TEXTS).at(HEAD)
    torch.testing.assert_close(runs.last(None), plain, atol=1e-4, rtol=1e-4)
    added = torch.randn(24, generator=torch.Generator().manual_seed(0))
    before, after = runs.compare(added)
    assert len(before) == sum(len(model.encode(t)) for t in TEXTS)
    assert not torch.allclose(before, after)
    if layer == HEAD:
        torch.testing.assert_close(after, before + added)


def test_gradients_reach_the_vector_and_no_weight(tiny: Tiny) -> None:
    model = tiny("llama")
    model.body.model.zero_grad(set_to_none=True)  # other tests share the model
    runs = Runs.read(model, TEXTS, 1, blocks=Blocks(model.body))
    v = torch.zeros(24, requires_grad=True)
    with frozen(model):
        run = next(runs.chunks([0, 2, 4]))
        run.at_last(run.run(v)).square().sum().backward()
    assert v.grad is not None
    assert v.grad.abs().max() > 0
    assert all(p.grad is None and p.requires_grad for p in model.body.model.parameters())
