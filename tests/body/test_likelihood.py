"""The figures of a text are those that its law gives, token by token."""

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from lmhead.body import TorchBody
from lmhead.body.blocks import Blocks
from lmhead.body.likelihood import FIGURES, LAST, MEAN
from lmhead.body.reading import Encoded
from lmhead.body.states import states_of
from lmhead.head import LMHead

Net = Callable[[str], PreTrainedModel]


def test_figures_are_those_of_the_models_own_logits(net: Net) -> None:
    model = net("llama")
    texts: list[Encoded] = [([5, 9, 2, 40, 7, 3, 8], 2), ([8, 3], 1), ([90, 1, 7], 1), ([4], 1)]
    found = states_of(Blocks(TorchBody(model)), LMHead.from_model(model), texts).likelihood
    assert found.shape == (4, len(FIGURES))
    assert not found[3].any()  # nothing of it is predicted
    for i, (ids, first) in enumerate(texts[:3]):
        with torch.no_grad():
            laws = model(torch.tensor([ids])).logits[0, first - 1 : -1].double().softmax(-1)
        p = [float(law[token]) for law, token in zip(laws, ids[first:], strict=True)]
        log_p = [float(torch.tensor(x).log()) for x in p]
        best = [float(law.max().log()) for law in laws]
        entropy = [float(-(law * law.log()).sum()) for law in laws]
        rank = [float(((law > own).sum() + 1).log()) for law, own in zip(laws, p, strict=True)]
        said = slice(0, max(1, len(p) - 1))  # without the stop
        last = slice(max(0, len(p) - 4), max(1, len(p) - 1))

        def mean(values: list[float], part: slice = slice(None)) -> float:
            return sum(values[part]) / len(values[part])

        less = [a - b for a, b in zip(log_p, best, strict=True)]
        more = [a + b for a, b in zip(log_p, entropy, strict=True)]
        expected = [
            mean(log_p), sum(log_p), min(log_p[said]), mean(log_p, last), log_p[said][-1],
            log_p[-1], mean(less), min(less[said]), mean(less, last), mean(entropy),
            mean(entropy, last), mean(rank), max(rank[said]), mean(rank, last), mean(more),
            mean(more, last),
        ]  # fmt: skip
        torch.testing.assert_close(found[i], torch.tensor(expected), atol=1e-4, rtol=1e-4)
    assert (FIGURES[MEAN], FIGURES[LAST]) == ("mean log p", "last three log p")
