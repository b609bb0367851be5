"""Edits of any kind of ids, and of none; what is not an id is said by name."""

from typing import Any

import numpy as np
import pytest
import torch

from lmhead.errors import BadInput
from lmhead.head import Edit, LMHead
from lmhead.head.screened import ScreenedHead


@pytest.fixture(scope="module")
def heads() -> tuple[LMHead, ScreenedHead]:
    torch.manual_seed(0)
    head = LMHead(torch.nn.Parameter(torch.randn(200, 32)))
    return head, ScreenedHead.from_head(head, None)


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize(
    "ids",
    [
        [],
        [3, 5],
        range(3, 9),
        np.array([3, 5], np.int32),
        *(torch.tensor([3, 5]).to(dtype) for dtype in (torch.int32, torch.int16, torch.uint8)),
    ],
    ids=str,
)
def test_every_kind_of_ids(heads: tuple[LMHead, ScreenedHead], ids: Any, broken: bool) -> None:
    h = torch.randn(2, 32, generator=torch.Generator().manual_seed(1))
    if broken:
        h[0, 0] = torch.nan
    edit = Edit.ban(ids)
    dense, screened = (head.topk(h, 5, edits=edit).ids[1].tolist() for head in heads)
    assert dense == screened
    assert not set(dense) & set(edit.ids.tolist())


@pytest.mark.parametrize(
    "ids", [["x"], 5, [1.5], [2**70], [True], torch.tensor([True]), torch.tensor([1.0])], ids=str
)
def test_what_is_no_id(ids: Any) -> None:
    with pytest.raises(BadInput, match="an edit got"):
        Edit.ban(ids)


def test_everything_banned_under_min_p(heads: tuple[LMHead, ScreenedHead]) -> None:
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(BadInput, match="nothing to sample from"):
        heads[1].sample(
            torch.randn(2, 32), min_p=0.1, edits=Edit.ban(range(200)), generator=generator
        )


@pytest.mark.parametrize("change", [lambda z: z[:1], lambda z: None, lambda z: z[None]])
def test_an_edit_of_another_shape(heads: tuple[LMHead, ScreenedHead], change: Any) -> None:
    for head in heads:
        with pytest.raises(BadInput, match="expected a tensor"):
            head.topk(torch.randn(2, 32), 3, edits=Edit(torch.tensor([1, 2]), change))
