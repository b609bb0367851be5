"""The lens: its last row is the model, and every other one the head on a block's output."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from lmhead.errors import BadInput, UnsupportedModel
from lmhead.head import LMHead
from lmhead.inspect.lens import lens, looked
from lmhead.inspect.tokens import Token
from lmhead.loading import load
from tiny_models import without_words as whole

Tiny = Callable[..., PreTrainedModel]
IDS = [3, 4, 5, 6, 7]
SAMPLE = "gpt2 gemma2 opt mamba bert cohere"
REFUSED = "deepseek_v4 reformer blt xlm"


@pytest.mark.parametrize("name", SAMPLE.split())
def test_the_last_row_is_the_model(name: str, tiny: Tiny) -> None:
    model = tiny(name)
    with torch.no_grad():
        z = model(input_ids=torch.tensor([IDS]), use_cache=False).logits[0, :, :90]
    rows, exact, logits = looked(whole(model), IDS, None, top=3)
    assert exact
    assert torch.equal(logits[:, :90], z)
    for t, cell in enumerate(rows[-1].cells):
        p = z[t].float().softmax(-1)
        best = torch.topk(p, 3)
        assert [token.id for token in cell.top] == best.indices.tolist()
        assert cell.top[0].probability == pytest.approx(float(best.values[0]))
        assert cell.entropy == pytest.approx(float(-(p * p.log()).sum()), abs=1e-4)
        assert (cell.rank, cell.kl) == (1, pytest.approx(0, abs=1e-6))


def test_a_row_is_the_head_on_what_its_block_puts_out(tiny: Tiny) -> None:
    model = tiny("llama")
    head = LMHead.from_model(model)
    with torch.no_grad():
        reported = model(torch.tensor([IDS]), output_hidden_states=True, use_cache=False)
    rows, _, _ = looked(whole(model), IDS, Token(8, "8"), top=2)
    assert [row.name for row in rows] == ["embedding", "block 0", "block 1"]
    final = reported.logits[0, :, :90].double().log_softmax(-1)
    for row, x in zip(rows[:2], reported.hidden_states[:2], strict=True):
        with torch.no_grad():
            z = head(x, from_block=True)[0, :, :90].double()
        lp = z.log_softmax(-1)
        for t, cell in enumerate(row.cells):
            answer = int(final[t].argmax())
            assert cell.top[0].id == int(z[t].argmax())
            assert cell.rank == 1 + int((z[t] > z[t, answer]).sum())
            assert cell.probability == pytest.approx(float(lp[t, answer].exp()), rel=1e-4)
            assert cell.token_rank == 1 + int((z[t] > z[t, 8]).sum())
            assert cell.token_probability == pytest.approx(float(lp[t, 8].exp()), rel=1e-4)
            kl = float((final[t].exp() * (final[t] - lp[t])).sum())
            assert cell.kl == pytest.approx(kl, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("name", REFUSED.split())
def test_what_cannot_be_looked_into_is_refused_by_name(name: str, tiny: Tiny) -> None:
    model = tiny(name)
    with pytest.raises(UnsupportedModel, match=type(model).__name__):
        looked(whole(model), IDS, None, top=1)


@pytest.mark.model
def test_smollm2(smollm2: Path) -> None:
    model = load(smollm2)
    result = lens("The capital of France is", model, token=" Paris", last=2)
    assert result.exact
    assert len(result.rows) == 31
    assert [len(row.cells) for row in result.rows] == [2] * 31
    assert result.rows[-1].cells[-1].top[0].text == " Paris"
    assert result.rows[-1].cells[-1].token_rank == 1
    assert result.rows[0].cells[-1].top[0].text == " is"  # tied: the embedding says itself
    assert " Paris" in result._repr_html_()
    assert result.to_dict()["rows"][3]["name"] == "block 2"
    with pytest.raises(BadInput, match=r"token is 'transistorsumming', which .* reads as"):
        lens("Hi", model, token="transistorsumming")


@pytest.mark.gemma
def test_gemma3(gemma3: Path) -> None:
    assert lens("The capital of France is", gemma3).exact


def test_options_come_first() -> None:
    with pytest.raises(BadInput, match="top is 0"):
        lens("Hi", "no-such-model", top=0)


def test_positions_read_in_parts_are_those_read_together(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long prompts and large vocabularies: few rows of logits at a time."""
    model, ids = whole(tiny("llama")), list(range(3, 14))
    together = looked(model, ids, None, top=3)[0]
    monkeypatch.setattr("lmhead.inspect.lens.LOGITS_AT_ONCE", 64)
    monkeypatch.setattr("lmhead.inspect.lens.STATES_AT_ONCE", 6)
    for one, other in zip(together, looked(model, ids, None, top=3)[0], strict=True):
        assert len(one.cells) == len(other.cells) == len(ids)
        assert [c.rank for c in one.cells] == [c.rank for c in other.cells]
        assert [c.entropy for c in one.cells] == pytest.approx([c.entropy for c in other.cells])
        assert [c.kl for c in one.cells] == pytest.approx([c.kl for c in other.cells], abs=1e-5)
