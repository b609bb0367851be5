"""Running a body: memory, padding, and what is added to single rows."""

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from lmhead.body import HEAD, State, TorchBody
from lmhead.body.adding import adding
from lmhead.errors import BadInput

Net = Callable[[str], PreTrainedModel]
FAMILIES = ("llama", "gpt2", "gemma3")
IDS = torch.randint(1, 90, (4, 11), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_run_goes_on_from_its_state(net: Net, family: str) -> None:
    body = TorchBody(net(family))
    whole, _ = body(IDS, use_cache=False)
    h, state = body.run(IDS[:, :6])
    torch.testing.assert_close(h, whole[:, :6])
    for first, last in ((6, 7), (7, 8), (8, 11)):
        h, state = body.run(IDS[:, first:last], state)
        torch.testing.assert_close(h, whole[:, first:last], atol=1e-5, rtol=1e-4)
    assert state.length == 11


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_padded_rows_are_what_they_are_alone(net: Net, family: str) -> None:
    body = TorchBody(net(family))
    prompts = [[5, 9, 2, 40], [8], [96, 1]]
    ids, state = State.of_prompts(prompts)
    h, state = body.run(ids, state)
    state.select([2, 0])
    after, _ = body.run(torch.tensor([[7], [30]]), state)
    for row, prompt, token in ((0, prompts[2], 7), (1, prompts[0], 30)):
        alone, own = body.run(torch.tensor([prompt]))
        torch.testing.assert_close(h[[2, 0][row], -1], alone[0, -1], atol=1e-5, rtol=1e-4)
        alone, _ = body.run(torch.tensor([[token]]), own)
        torch.testing.assert_close(after[row, -1], alone[0, -1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_each_row_has_its_own_additions(net: Net, family: str) -> None:
    body = TorchBody(net(family))
    v, w = (torch.randn(24, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    plain, _ = body.run(IDS)
    rows = (None, {1: v}, {0: w, HEAD: v}, {1: w})
    mixed, state = body.run(IDS, rows=rows)
    assert torch.equal(mixed[0], plain[0])  # bit by bit: nothing was added to it
    for row, added in enumerate(rows):
        if added is None:
            continue
        with adding(body.model, added):
            alone, _ = body.run(IDS)
        if HEAD in added:
            alone = alone + added[HEAD]
        assert torch.equal(mixed[row], alone[row])
        assert not torch.allclose(mixed[row], plain[row])
    # and so it goes on, one token at a time
    _, untouched = body.run(IDS)
    token = torch.tensor([[3], [4], [5], [6]])
    assert torch.equal(body.run(token, state, rows=rows)[0][0], body.run(token, untouched)[0][0])
    again, _ = body.run(IDS)
    assert torch.equal(again, plain)


def test_rows_that_do_not_fit(net: Net) -> None:
    body = TorchBody(net("llama"))
    with pytest.raises(BadInput, match="rows has 3 entries for a batch of 4; expected one for"):
        body.run(IDS, rows=[None] * 3)
    with pytest.raises(BadInput, match="the layer is 3, but the model has 3 blocks"):
        body.run(IDS, rows=[{3: torch.ones(24)}, None, None, None])
