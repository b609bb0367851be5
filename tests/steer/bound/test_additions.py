"""What vectors add up to, layer by layer, and which of them do not fit a model."""

from collections.abc import Callable

import pytest
import torch

from lmhead.errors import BadInput
from lmhead.loading import Model
from lmhead.steer import HEAD, SteeringVector
from lmhead.steer.bound.steering import additions

Tiny = Callable[[str], Model]


def test_layers_and_widths_that_do_not_fit(tiny: Tiny) -> None:
    body = tiny("llama").body
    with pytest.raises(BadInput, match=r"the layer is 3, but the model has 3 blocks; expected 0"):
        additions(body, [SteeringVector(torch.ones(24), 3)])
    for layer in (1, HEAD):
        with pytest.raises(BadInput, match=r"width 23, but the model's states .* have 24"):
            additions(body, [SteeringVector(torch.ones(23), layer)])


def test_several_vectors_add_up(tiny: Tiny) -> None:
    v = SteeringVector(torch.ones(24), 1, 2.0)
    w = SteeringVector(torch.ones(24), HEAD, 0.5)
    total = additions(tiny("llama").body, [v, w, v])
    assert set(total) == {1, HEAD}
    assert torch.equal(total[1], torch.full((24,), 4.0))
    assert torch.equal(total[HEAD], torch.full((24,), 0.5))
