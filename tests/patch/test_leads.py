"""The shortcut of a greedy step, and what a patched step leaves behind."""

from collections import Counter

import numpy as np
import pytest
import torch

from lmhead.patch import patch_generate
from lmhead.patch.call import _numbers_to_come
from patched_models import MASK, PROMPTS, V, ids_of, tiny


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_lead_is_one_by_the_models_own_logits(dtype: torch.dtype) -> None:
    """Two rows, one a little shorter than the other: ever less, down to nothing."""
    model = patch_generate(tiny("llama").to(dtype))
    weight, screen = model.lm_head.weight, vars(model)["_lmhead_generate"].screen
    h = torch.randn(1, 1, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    reported: Counter[bool] = Counter()
    with torch.no_grad():
        row = (h / h.float().square().sum() * 60)[0, 0]
        for step in np.arange(0, 26, 0.5):
            weight[400], weight[9] = row, (row.double() * (1 - 2.0**-step)).to(dtype)
            ready = screen.of(model)
            ids, z = ready.head.candidates(h[:, -1].float(), 9)
            leads = ready.leads(h[:, -1].float(), ids.numpy(), z.numpy())
            logits = model.lm_head(h)[0, -1]
            if leads:
                assert logits.argmax() == ids[0, 0] == 400
                assert (logits == logits.max()).sum() == 1
            reported[leads] += 1
    # 2^-step of a logit, and half of it or more in the model's own steps
    digits = {torch.float32: 17, torch.bfloat16: 7, torch.float16: 10}[dtype]
    assert reported[False]
    assert reported[True] >= 2 * (digits - 1)


@pytest.mark.parametrize(
    "asked", [{}, {"do_sample": True}, {"do_sample": True, "top_k": 0}], ids=str
)
def test_random_numbers_go_on_as_they_would_have(asked: dict[str, object]) -> None:
    plain, model = tiny("llama"), patch_generate(tiny("llama"))
    states = []
    with torch.random.fork_rng():
        for one in (plain, model):
            torch.manual_seed(3)
            one.generate(PROMPTS, attention_mask=MASK, max_new_tokens=4, **asked)
            states.append(torch.get_rng_state())
    assert model.lmhead_stats.steps
    assert torch.equal(*states)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_default_dtype_changes_nothing(dtype: torch.dtype) -> None:
    plain, model = tiny("llama"), patch_generate(tiny("llama"))
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        for asked in ({"do_sample": True}, {"do_sample": True, "top_k": 0, "top_p": 0.9}, {}):
            assert torch.equal(ids_of(model, asked), ids_of(plain, asked)), asked
        with torch.random.fork_rng():
            ours = _numbers_to_come(2, V)
            assert torch.equal(ours, torch.empty(2, V, dtype=torch.float32).exponential_(1))
    finally:
        torch.set_default_dtype(before)
    assert model.lmhead_stats.steps > 5 * model.lmhead_stats.dense_steps
