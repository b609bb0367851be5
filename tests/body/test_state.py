"""The memory of a batch: rows leave, change places and join, and every row answers as alone.

The oracle is the same model with one sequence and no padding.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lmhead.body import State, TorchBody
from lmhead.body.joining import joining
from lmhead.errors import UnsupportedModel
from lmhead.models.gpt2 import GPT2Config, GPT2LMHeadModel

Tiny = Callable[..., PreTrainedModel]

PROMPTS = ([5, 9, 13, 7, 22, 31, 8, 40, 17], [11, 6, 19], [3, 44, 27, 60, 2])
# What follows each prompt, step by step; longer than the windows below.
NEXT = torch.randint(4, 90, (12, 3), generator=torch.Generator().manual_seed(0))
WINDOW: dict[str, Any] = {"sliding_window": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {},
    "bloom": {},  # positions by the mask alone
    "gemma3_text": {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "mistral": WINDOW,
    "llama4_text": {"attention_chunk_size": 4},
    "mamba": {},
    "mamba2": {},
    "jamba": {},
    "falcon_h1": {},
    "zamba2": {},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_next": {},
    "openai-gpt": {},  # has no memory: it reads everything again
}


def own_gpt2() -> GPT2LMHeadModel:
    config = GPT2Config(vocab_size=97, n_positions=40, n_embd=24, n_layer=3, n_head=4)
    return GPT2LMHeadModel(config, torch.Generator().manual_seed(0)).eval()


@pytest.fixture(params=[*FAMILIES, "our gpt2"])
def body(request: pytest.FixtureRequest, tiny: Tiny) -> TorchBody:
    name = request.param
    return TorchBody(own_gpt2() if name == "our gpt2" else tiny(name, **FAMILIES[name]))


def alone(body: TorchBody, row: int) -> list[Tensor]:
    """What h `[d]` is after a prompt, and after each token that follows it."""
    h, state = body.run(torch.tensor([PROMPTS[row]]))
    states = [h[0, -1]]
    for token in NEXT[:, row].tolist():
        h, state = body.run(torch.tensor([[token]]), state)
        states.append(h[0, -1])
    return states


def close(h: Tensor, expected: Sequence[Tensor]) -> None:
    torch.testing.assert_close(h, torch.stack(list(expected)), rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_rows_that_join_and_leave_answer_as_alone(body: TorchBody) -> None:
    expected = [alone(body, row) for row in range(3)]
    _, state = body.run(torch.tensor([PROMPTS[1]]))
    done = {1: 0}  # what is in the batch, in order, and how many tokens each has read
    for time in range(24):
        if time in (2, 3):  # a longer one joins, then one that has to be padded itself
            new = {2: 0, 3: 2}[time]
            _, other = body.run(torch.tensor([PROMPTS[new]]))
            state.join(other)
            done[new] = 0
        ids = torch.tensor([[int(NEXT[done[row], row])] for row in done])
        h, state = body.run(ids, state)
        done = {row: n + 1 for row, n in done.items()}
        close(h[:, -1], [expected[row][n] for row, n in done.items()])
        left = [row for row, n in done.items() if n < len(NEXT)]
        if len(left) < len(done):
            if not left:
                break
            state.select([list(done).index(row) for row in left])
            done = {row: done[row] for row in left}
    assert list(done) == [2]


@torch.inference_mode()
def test_rows_change_places_and_are_taken_twice(body: TorchBody) -> None:
    expected = [alone(body, row) for row in range(2)]
    _, state = body.run(torch.tensor([PROMPTS[0]]))
    _, other = body.run(torch.tensor([PROMPTS[1]]))
    state.join(other)
    state.select([1, 0, 1])
    order = [1, 0, 1]
    for n in range(4):
        h, state = body.run(NEXT[n][order].unsqueeze(1), state)
        close(h[:, -1], [expected[row][n + 1] for row in order])


@torch.inference_mode()
def test_padding_that_nobody_needs_is_given_up(body: TorchBody) -> None:
    """With the longest sequence goes its width: the bits are those of a run that never met it."""
    _, kept = body.run(torch.tensor([PROMPTS[1]]))
    for token in NEXT[:2, 1].tolist():
        _, kept = body.run(torch.tensor([[token]]), kept)
    _, state = body.run(torch.tensor([PROMPTS[1]]))
    for token in NEXT[:2, 1].tolist():
        _, state = body.run(torch.tensor([[token]]), state)
    _, other = body.run(torch.tensor([PROMPTS[0]]))
    state.join(other)
    state.select([0])
    assert state.padding is None
    assert state.length == kept.length
    pairs = list(zip(state.tensors(), kept.tensors(), strict=True))
    assert all(torch.equal(ours, its) for ours, its in pairs)
    after, _ = body.run(NEXT[2:3, 1:2], state)
    expected, _ = body.run(NEXT[2:3, 1:2], kept)
    assert torch.equal(after, expected)


@torch.inference_mode()
def test_an_unpadded_batch_is_given_no_mask(tiny: Tiny) -> None:
    state = State.of_prompts([[1, 2], [3, 4]])[1]
    assert "attention_mask" not in state.inputs(torch.tensor([[1, 2], [3, 4]]), ["position_ids"])
    ids, state = State.of_prompts([[1, 2, 3], [4]])
    given = state.inputs(ids, ["position_ids"])
    assert given["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    assert given["position_ids"].tolist() == [[0, 1, 2], [0, 0, 0]]


@torch.inference_mode()
def test_memories_of_two_models_do_not_join(tiny: Tiny) -> None:
    _, one = TorchBody(tiny("gpt2")).run(torch.tensor([[1, 2]]))
    _, other = TorchBody(tiny("gpt2", n_layer=3)).run(torch.tensor([[1, 2]]))
    with pytest.raises(UnsupportedModel, match="two memories of one model"):
        one.join(other)


@torch.inference_mode()
def test_an_unknown_memory_is_named(tiny: Tiny) -> None:
    body = TorchBody(tiny("minimax"))
    _, state = body.run(torch.tensor([[1, 2]]))
    assert state.unjoinable is not None
    with pytest.raises(UnsupportedModel, match=r"cannot select rows of a batch: .*MiniMaxCache"):
        state.select([0, 0])


@pytest.mark.parametrize(
    ("name", "pads"), [("gpt2", True), ("gemma3_text", True), ("mamba", False), ("jamba", False)]
)
def test_which_models_run_sequences_together(name: str, pads: bool, tiny: Tiny) -> None:
    found = joining(TorchBody(tiny(name)))
    assert (found.in_turn, found.pads) == (None, pads)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("rwkv", "fails on two sequences|does not answer"),  # mixes up the rows of a batch
        ("bart", "does not answer two sequences of unequal length"),  # counts the padding
        ("minimax", "MiniMaxCache"),
        ("deepseek_v4", "DeepseekV4HCACache"),
    ],
)
def test_which_models_run_sequences_in_turn(name: str, why: str, tiny: Tiny) -> None:
    model = tiny(name)
    found = joining(TorchBody(model))
    assert found.in_turn is not None
    assert type(model).__name__ in found.in_turn
    assert re.search(why, found.in_turn)


def test_what_is_found_out_is_not_asked_again(tiny: Tiny) -> None:
    model = tiny("gpt2")
    joining(TorchBody(model))
    calls: list[Any] = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    joining(TorchBody(model))
    assert not calls
