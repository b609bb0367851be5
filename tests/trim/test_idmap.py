"""The map between old and new ids."""

import pytest

from lmhead.errors import BadInput
from lmhead.trim.idmap import TrimMap


def test_ids_go_both_ways() -> None:
    ids = TrimMap.of([7, 2, 5, 2], rows=8)
    assert ids.kept == (2, 5, 7)
    assert ids.to_trimmed([7, 2, 7]) == [2, 0, 2]
    assert ids.to_original([2, 0, 2]) == [7, 2, 7]
    assert 5 in ids
    assert 6 not in ids
    assert TrimMap.from_dict(ids.to_dict()) == ids


def test_an_id_without_a_row_has_a_token_but_no_row() -> None:
    ids = TrimMap.of([1, 3, 9], rows=8)
    assert len(ids) == 3
    assert ids.kept_rows == 2
    assert ids.row_ids.tolist() == [1, 3]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: TrimMap((3, 2), 8), "ascending"),
        (lambda: TrimMap.of([-1, 2], 8), "negative"),
        (lambda: TrimMap.of([2], 8), "at least 2"),
        (lambda: TrimMap.of([2, 9], 8), "at least 2"),
        (lambda: TrimMap.of([1, 2], 8).to_trimmed([3]), "id 3"),
        (lambda: TrimMap.of([1, 2], 8).to_original([2]), "id 2"),
        (lambda: TrimMap.from_dict({"kept": [1, 2]}), "rows"),
        (lambda: TrimMap.from_dict({"kept": [1, 2.0], "rows": 8}), "whole numbers"),
        (lambda: TrimMap.from_dict({"kept": [1, "2"], "rows": 8}), "whole numbers"),
        (lambda: TrimMap.from_dict({"kept": [1, True], "rows": 8}), "whole numbers"),
        (lambda: TrimMap.from_dict({"kept": "12", "rows": 8}), "whole numbers"),
    ],
)
def test_what_cannot_be_is_refused(make: object, why: str) -> None:
    with pytest.raises(BadInput, match=why):
        make()  # type: ignore[operator]
