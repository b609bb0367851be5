"""The head on the real model, fed with what plain transformers gives: `last_hidden_state`."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmhead.head import Head, LMHead
from lmhead.head.screened import ScreenedHead
from lmhead.head.trimmed import TrimmedHead
from lmhead.loading import load

pytestmark = pytest.mark.model
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def real(smollm2: Path) -> tuple[Any, torch.Tensor, int]:
    """The model as transformers loads it, the prompt's ids `[1, T]` and the id of " Paris"."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2).eval()
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    return model, ids, tokenizer(" Paris").input_ids[0]


@torch.no_grad()
def test_the_heads_first_example_gives_the_models_own_numbers(
    real: tuple[Any, torch.Tensor, int],
) -> None:
    model, ids, paris = real
    head = LMHead.from_model(model)
    h = model.model(ids).last_hidden_state  # [1, T, d]
    output = model(ids, labels=ids)
    assert torch.equal(head(h), output.logits)
    p = torch.softmax(head(h)[0, -1], -1)
    assert round(float(p[paris]), 4) == 0.7725
    assert head.topk(h, 1).ids[0, -1].item() == paris
    loss = head.loss(h[:, :-1], ids[:, 1:])
    # transformers sums 49,152 shares in float32; ours is the one nearer to float64
    assert float(loss) == pytest.approx(float(output.loss), rel=1e-5)
    z = h[0, :-1].double() @ head.weight.double().T  # [T - 1, V], without any rounding to float32
    exact = float(F.cross_entropy(z, ids[0, 1:]))
    assert float(loss) == pytest.approx(exact, rel=1e-6)  # logits near 17 have steps of 2e-6
    assert abs(float(loss) - exact) < abs(float(output.loss) - exact)


@torch.no_grad()
@pytest.mark.parametrize("engine", [ScreenedHead.from_head, lambda head: TrimmedHead(head, KEPT)])
def test_every_engine_takes_the_same_states(
    real: tuple[Any, torch.Tensor, int], engine: Any
) -> None:
    model, ids, paris = real
    dense = LMHead.from_model(model)
    head: Head = engine(dense)
    h = model.model(ids).last_hidden_state[:, -1]  # [1, d]
    assert head.topk(h, 1).ids.item() == paris
    assert head(h)[0, paris] == model.lm_head(h)[0, paris]  # a product of one state, as here
    assert head.sample(h, temperature=0.0).item() == paris


KEPT = range(0, 49152, 2)  # " Paris" is 7042


@torch.no_grad()
def test_a_state_straight_from_a_block(real: tuple[Any, torch.Tensor, int]) -> None:
    model, ids, _ = real
    head = LMHead.from_model(model)
    left = []
    hook = model.model.layers[-1].register_forward_hook(lambda _, __, out: left.append(out))
    logits = model(ids).logits
    hook.remove()
    x = left[0] if isinstance(left[0], torch.Tensor) else left[0][0]
    assert torch.equal(head(x, from_block=True), logits)


def test_our_own_body_and_head_fit_together(smollm2: Path) -> None:
    model = load(smollm2)
    h = model.last_hidden(model.encode(PROMPT))
    assert model.token_text(int(model.head.topk(h, 1).ids)) == " Paris"
