"""Files in the shape that readers expect, with values that hypothesis makes up and then shrinks.

`harness.py` mutates blindly, in a process of its own with little memory. Here a failing file comes
back as the smallest that still fails. A few files for each reader in every run;
LMHEAD_EXAMPLES=2000 tries as many, other ones each time (`make fuzz` does).
"""

import copy
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parent))

import harness
from test_fuzz import READERS

EXAMPLES = os.environ.get("LMHEAD_EXAMPLES")
MOST = int(EXAMPLES or 12)

WHOLE = st.one_of(
    st.integers(-(2**65), 2**65),
    st.sampled_from([0, 1, -1, 2**31, 2**32, 2**53, 2**63, 10**30]),
)
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    WHOLE,
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["../x", "/dev/zero", "F32", "[red]", "\x1b[2J", "\ud800", "a" * 5000]),
)
VALUES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
GONE = object()


@cache
def target(reader: str) -> tuple[bool, list[Any], Callable[[bytes, Path], None]]:
    is_json, make, read = harness._targets()[reader]
    seeds = make()
    with tempfile.TemporaryDirectory() as warm:  # so that everything is imported
        harness._run(read, json.dumps(seeds[0]).encode() if is_json else seeds[0], Path(warm))
    return is_json, seeds, read


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Give where every value of an object stands, the object itself first."""
    yield at
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*at, key))
    elif isinstance(value, list):
        for key, inner in enumerate(value[:8]):
            yield from places(inner, (*at, key))


def replaced(whole: Any, at: tuple[Any, ...], new: Any) -> Any:
    """Put a value in a place; where an earlier one has made that place go, nothing happens."""
    if not at:
        return None if new is GONE else new
    inner = whole
    try:
        for key in at[:-1]:
            inner = inner[key]
        if new is GONE:
            del inner[at[-1]]
        else:
            inner[at[-1]] = new
    except (KeyError, IndexError, TypeError):
        pass
    return whole


@st.composite
def objects(draw: st.DrawFn, seeds: list[Any]) -> bytes:
    """A seed with a few of its values replaced, or left out."""
    value = copy.deepcopy(draw(st.sampled_from(seeds)))
    known = list(places(value))
    for at in draw(st.lists(st.sampled_from(known), min_size=1, max_size=4)):
        value = replaced(value, at, draw(VALUES | st.just(GONE)))
    return json.dumps(value).encode()


@st.composite
def binaries(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    """A seed with a few stretches overwritten, put in, or left out."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, min(len(data), 2048)))
        number = WHOLE.map(lambda n: (n % 2**64).to_bytes(8, "little"))
        new = draw(number | st.binary(max_size=12) | VALUES.map(lambda v: json.dumps(v).encode()))
        end = at + draw(st.sampled_from([len(new), 0, 1, 8]))
        data[at:end] = new
    return bytes(data[: draw(st.none() | st.integers(0, len(data)))])


@pytest.mark.parametrize("reader", READERS)
@settings(
    max_examples=MOST,
    derandomize=EXAMPLES is None,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_a_file_of_the_right_shape_is_read_or_refused(reader: str, data: st.DataObject) -> None:
    if reader == "schema":
        pytest.importorskip("llguidance")
    is_json, seeds, read = target(reader)
    content = data.draw(objects(seeds) if is_json else binaries(seeds))
    with tempfile.TemporaryDirectory() as folder:
        outcome, seconds = harness._run(read, content, Path(folder))
    assert outcome in (None, "ours"), outcome
    assert seconds <= harness.SECONDS
