"""What several texts begin with is read once, and changes nothing of what is known of each."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lmhead.body import TorchBody, reading
from lmhead.body.blocks import Blocks
from lmhead.body.reading import Encoded, read_once
from lmhead.body.sharing import rows_of
from lmhead.errors import LMHeadError
from lmhead.head import LMHead

Net = Callable[[str], PreTrainedModel]

# What cannot be built, or does not read ids: see tests/head/find/test_architectures.py.
LEFT_OUT = {"gemma3n", "musicgen", "musicgen_melody", "gemma4_assistant"}
LEFT_OUT |= {"gemma4_unified_assistant"}
DRAWS = {"reformer"}  # hashes anew for every run
NAMES = [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in LEFT_OUT | DRAWS]


def begun_alike(seed: int, V: int) -> list[Encoded]:
    """Texts that share much, little or nothing; some longer than a tiny model's window."""
    draw = random.Random(seed)
    begin = [draw.randrange(1, V) for _ in range(12)]
    return [
        ([*begin[:n], *(draw.randrange(1, V) for _ in range(k))], first)
        for n, k, first in [(12, 1, 1), (12, 5, 1), (12, 2, 4), (12, 3, 14), (3, 2, 1), (3, 3, 1)]
    ] + [([draw.randrange(1, V) for _ in range(6)], 2)]


def together(
    blocks: Blocks, head: LMHead, texts: list[Encoded]
) -> tuple[torch.Tensor, torch.Tensor]:
    """States and figures, in the order of the texts."""
    read = list(read_once(blocks, head, texts))
    order = torch.tensor([i for some, _, _ in read for i in some]).argsort()
    states, figures = (torch.cat([part[k] for part in read])[order] for k in (1, 2))
    return states, figures


def counted(model: PreTrainedModel) -> list[int]:
    """A list that grows by the tokens of every run."""
    tokens: list[int] = []
    model.get_input_embeddings().register_forward_hook(
        lambda _module, args, _result: tokens.append(args[0].numel())
    )
    return tokens


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_texts_that_begin_alike_read_as_each_alone(net: Net, family: str) -> None:
    model = net(family)
    texts = begun_alike(1, 97)
    blocks, head = Blocks(TorchBody(model)), LMHead.from_model(model)
    tokens = counted(model)
    states, figures = together(blocks, head, texts)
    if family != "gemma3":  # five of its texts are longer than its window
        assert tokens[-1] == 12 + 1 + 5 + 2 + 3 + 2 + 3 + 6  # two runs before it are the trial
        assert len(tokens) == 3
    for i, text in enumerate(texts):
        [(_, state, figured)] = read_once(blocks, head, [text])
        torch.testing.assert_close(states[i], state[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(figures[i], figured[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_every_attention_reads_trees(net: Net, kind: str) -> None:
    model = net("llama")
    model.set_attn_implementation(kind)
    assert reading._reads_trees(Blocks(TorchBody(model)))


@pytest.mark.parametrize("name", NAMES)
def test_every_architecture_reads_as_each_alone(name: str, tiny: Callable[..., Any]) -> None:
    """In trees or not: some have no positions, some a memory of what came before in the row."""
    model: PreTrainedModel = tiny(name)
    texts = [ids for ids, _ in begun_alike(2, int(model.get_input_embeddings().weight.shape[0]))]
    found: dict[int, list[torch.Tensor]] = {}
    with torch.no_grad():
        try:
            blocks = Blocks(TorchBody(model))
            alone = [reading._states(blocks, rows_of(texts, [i])) for i in range(len(texts))]
        except LMHeadError as error:
            pytest.skip(str(error))
        first = blocks.states(torch.tensor([texts[1][:4]]))[-1][0]
        if len(first) != 4 or not torch.allclose(first, alone[1][-1][0, :4], atol=1e-5, rtol=1e-5):
            pytest.skip("it looks ahead: what stands behind a token changes its state")
        for rows in reading._plan(blocks, texts):
            states = reading._states(blocks, rows)
            for b, row in enumerate(rows):
                for i, path in zip(row.texts, row.paths, strict=True):
                    found[i] = [x[b, path] for x in states]
        for i in range(len(texts)):
            for one, other in zip(found[i], alone[i], strict=True):
                torch.testing.assert_close(one, other[0], atol=1e-4, rtol=1e-3)


def test_a_model_that_reads_no_trees_reads_each_text(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net("llama")
    texts: list[Encoded] = [([5, 9, 2, 40, 7, 3], 1), ([5, 9, 2, 40, 8], 1)]
    blocks, head = Blocks(TorchBody(model)), LMHead.from_model(model)
    states, figures = together(blocks, head, texts)
    monkeypatch.setattr(reading, "_reads_trees", lambda _blocks: False)
    tokens = counted(model)
    whole, figured = together(blocks, head, texts)
    assert tokens == [12]  # two texts of six tokens, one of them padded
    torch.testing.assert_close(whole, states, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(figured, figures, atol=1e-4, rtol=1e-4)
