"""States that are kept: what is found again, and what of it is not believed."""

import os
import warnings
from pathlib import Path

import pytest
import torch

from lmhead.body.state_cache import StateCache, key_of
from lmhead.errors import LMHeadWarning

KEYS = [key_of([1, 2, 3], 0), key_of([4, 5], 1)]
STATES, FIGURES = torch.arange(12.0).reshape(2, 2, 3), torch.ones(2, 4)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StateCache:
    monkeypatch.setenv("LMHEAD_CACHE", str(tmp_path))
    made = StateCache("tiny", (2, 3), 4)
    made.add(KEYS, STATES, FIGURES)
    return made


def test_what_was_added_is_found(kept: StateCache) -> None:
    found = kept.find([KEYS[1], key_of([9], 0), KEYS[0]])
    assert sorted(found) == [0, 2]
    assert torch.equal(found[0][0], STATES[1])
    assert torch.equal(found[2][1], FIGURES[0])


def test_a_damaged_record_is_not_there(kept: StateCache) -> None:
    data = bytearray(kept.path.read_bytes())
    data[kept.type.itemsize - 1] ^= 1  # the last byte of the first record
    kept.path.write_bytes(bytes(data) + b"what a killed process left")
    assert sorted(kept.find(KEYS)) == [1]
    kept.add(KEYS[:1], STATES[:1], FIGURES[:1])
    assert sorted(kept.find(KEYS)) == [0, 1]


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away"
)
@pytest.mark.parametrize("which", ["folder", "path"])
def test_what_another_user_wrote_is_not_believed(kept: StateCache, which: str) -> None:
    os.chown(getattr(kept, which), 12345, -1)
    before = kept.path.read_bytes()
    assert kept.find(KEYS) == {}
    with pytest.warns(LMHeadWarning, match="belongs to another user"):
        kept.add(KEYS, STATES, FIGURES)
    assert kept.path.read_bytes() == before


def test_nothing_is_kept_where_nothing_may(
    kept: StateCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMHEAD_STATES", "0")
    size = kept.path.stat().st_size
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept.add([key_of([7], 0)], STATES[:1], FIGURES[:1])
    assert kept.path.stat().st_size == size
