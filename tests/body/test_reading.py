"""What several texts begin with is read once, and changes nothing of what is known of each."""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import pytest
import torch
from transformers import PreTrainedModel

from lmhead.body import TorchBody
from lmhead.body.blocks import Blocks
from lmhead.body.reading import Encoded, read_once
from lmhead.body.sharing import TOKENS, lengths_shared, shared_batches
from lmhead.body.state import State
from lmhead.head import LMHead

Net = Callable[[str], PreTrainedModel]
Ids = tuple[int, ...]


def drawn(seed: int, most: int = 30) -> list[Ids]:
    """Different texts of few tokens, which often begin alike."""
    draw = random.Random(seed)
    kinds = draw.choice([2, 3, 5])
    made = {
        tuple(draw.randrange(kinds) for _ in range(draw.randint(1, 9)))
        for _ in range(draw.randint(1, most))
    }
    return sorted(made)


def most_saved(texts: Sequence[Ids], depth: int = 0) -> int:
    """The tokens that the best choice of beginnings saves, by trying every one of them."""
    own = (len(texts) - 1) * depth
    further = defaultdict(list)
    for ids in texts:
        if len(ids) > depth + 1:  # the last token is always a text's own
            further[ids[depth]].append(ids)
    inner = sum(most_saved(some, depth + 1) for some in further.values())
    return max(own if own >= 4 else 0, inner)


@pytest.mark.parametrize("seed", range(200))
def test_beginnings_save_as_much_as_can_be_saved(seed: int) -> None:
    texts = drawn(seed)
    lengths = lengths_shared(texts)
    assert all(len(ids) > P for P, ids in zip(lengths, texts, strict=True))
    shared = Counter(ids[:P] for P, ids in zip(lengths, texts, strict=True) if P)
    assert sum((n - 1) * len(ids) for ids, n in shared.items()) == most_saved(texts)


@pytest.mark.parametrize("seed", range(20))
def test_every_text_is_in_one_batch_behind_its_own_beginning(seed: int) -> None:
    texts = drawn(seed, most=3000)
    seen: list[int] = []
    for batch in shared_batches(texts):
        seen += batch.texts
        rests = [len(texts[i]) - batch.length for i in batch.texts]
        assert len(rests) * max(rests) <= TOKENS
        assert {len(ids) for ids in batch.beginnings} <= {batch.length}
        for i, g in zip(batch.texts, batch.of, strict=bool(batch.of)):
            assert texts[i][: batch.length] == batch.beginnings[g]
    assert sorted(seen) == list(range(len(texts)))


@pytest.mark.parametrize("seed", range(20))
def test_the_order_of_texts_does_not_decide_what_runs_together(seed: int) -> None:
    """Else a state had other last bits where another call had read it, and a vector with it."""
    texts = drawn(seed, most=3000)
    mixed = random.Random(seed).sample(texts, len(texts))
    for share in (True, False):
        one, other = (
            [([some[i] for i in batch.texts], batch.beginnings) for batch in made]
            for some, made in (
                (texts, shared_batches(texts, share=share)),
                (mixed, shared_batches(mixed, share=share)),
            )
        )
        assert one == other


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_texts_that_begin_alike_read_as_each_alone(net: Net, family: str) -> None:
    model = net(family)
    draw = random.Random(1)
    begin = [draw.randrange(1, 97) for _ in range(12)]  # longer than gemma's window
    texts: list[Encoded] = [
        ([*begin[:n], *(draw.randrange(1, 97) for _ in range(k))], first)
        for n, k, first in [(12, 1, 1), (12, 5, 1), (12, 2, 4), (12, 3, 14), (3, 2, 1), (0, 6, 2)]
    ]
    blocks, head = Blocks(TorchBody(model)), LMHead.from_model(model)
    tokens = counted(model)
    read = list(read_once(blocks, head, texts))
    assert sum(tokens) < sum(len(ids) for ids, _ in texts)  # padding and a trial included
    order = torch.tensor([i for some, _, _ in read for i in some])
    states, figures = (torch.cat([part[k] for part in read]) for k in (1, 2))
    for i, place in enumerate(order.argsort().tolist()):
        [(_, state, figured)] = read_once(blocks, head, [texts[i]])
        torch.testing.assert_close(states[place], state[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(figures[place], figured[0], atol=1e-4, rtol=1e-4)


def test_a_memory_that_cannot_be_copied_is_not_shared(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net("llama")
    texts: list[Encoded] = [([5, 9, 2, 40, 7, 3], 1), ([5, 9, 2, 40, 8], 1)]
    blocks, head = Blocks(TorchBody(model)), LMHead.from_model(model)
    [(first, states, figures)] = read_once(blocks, head, texts)
    monkeypatch.setattr(State, "recurrent", True)
    tokens = counted(model)
    [(order, whole, figured)] = read_once(blocks, head, texts)
    assert sum(tokens) == 2 + 12  # a trial, and two texts of six tokens, one of them padded
    assert sorted(order) == sorted(first) == [0, 1]
    place = torch.tensor([order.index(i) for i in first])
    torch.testing.assert_close(whole[place], states, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(figured[place], figures, atol=1e-4, rtol=1e-4)


def counted(model: PreTrainedModel) -> list[int]:
    """A list that grows by the tokens of every run."""
    tokens: list[int] = []
    model.get_input_embeddings().register_forward_hook(
        lambda _module, args, _result: tokens.append(args[0].numel())
    )
    return tokens
