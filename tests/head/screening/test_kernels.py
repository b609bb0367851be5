"""The compiled loops and those of torch do the same."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from lmhead.head import LMHead
from lmhead.head.screened import ScreenedHead
from lmhead.head.screening import portable
from lmhead.head.screening.bounds import BLOCK
from lmhead.head.screening.rejection import float32_from

kernels = pytest.importorskip("lmhead.head.screening.kernels", reason="needs the extra `fast`")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@given(
    st.lists(
        st.tuples(st.integers(-3, 3), st.integers(0, 50)), min_size=1, max_size=60, unique=True
    ),
    st.data(),
)
def test_the_n_best_in_order(rows, data):
    z = np.array([float(a) for a, _ in rows])
    ids = np.array([100 * b + a for a, b in rows], np.int64)
    n = data.draw(st.integers(1, len(rows)))
    which, best = kernels._order(ids, z, n)
    order = np.lexsort((ids, -z))[:n]
    assert which.tolist() == ids[order].tolist()
    assert best.tolist() == z[order].tolist()


@given(arrays(np.float32, 2 * BLOCK, elements=st.sampled_from([0, 0.5, 3, 1e-20])), st.data())
def test_proposals_fall_into_the_same_row(q, data):
    sums = q.reshape(-1, BLOCK).sum(1, dtype=np.float64)
    if not sums.any():
        return
    place = data.draw(st.floats(0, 1, exclude_max=True)) * float(sums.sum())
    rows = kernels.propose(q, sums, place), portable.propose(q, sums, place)
    # on the edge of two rows they may round differently; else it is one row
    ends = np.cumsum(q, dtype=np.float64)
    if np.abs(ends - place).min() > 1e-9:
        assert rows[0] == rows[1] == int(np.searchsorted(ends, place, side="right"))


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_the_same_shortlists_and_weights(softcap):
    g = torch.Generator().manual_seed(0)
    head = LMHead(torch.randn(700, 33, generator=g), torch.randn(700, generator=g), softcap=softcap)
    h = torch.randn(5, 33, generator=g).numpy()
    cap = softcap or 0.0
    for V in (700, 640, 130):
        scanners = [ScreenedHead.from_head(head, kernels=k)._scanner for k in ("numba", "torch")]
        for one, other in zip(*(s.read(h, V) for s in scanners), strict=True):
            # float32 sums of one are looser than int32 sums of the other, but hardly
            np.testing.assert_allclose(one.upper, other.upper, rtol=1e-4, atol=1e-3)
            for k, place in ((1, 1), (7, 7), (64, 1)):
                (ids, _), _ = one.shortlist(k, place, 0.0)
                (more, _), _ = other.shortlist(k, place, 0.0)
                best = one.everything().ordered().ids[:place]
                assert set(best.tolist()) <= set(ids.tolist()) & set(more.tolist())
            weights = [s.weights for s in scanners]
            for loops, w, s in zip((kernels, portable), weights, scanners, strict=True):
                total = loops.weigh(one.upper, 4.0, 1.4, -3.0, cap, w, s.sums)
                assert total == pytest.approx(w.sum(dtype=np.float64))
            np.testing.assert_allclose(*weights, rtol=1e-3)
            assert not weights[0][V:].any()


@given(st.floats(-1e30, 1e30), st.floats(-(2.0**99), 2.0**99, width=32))
def test_the_same_float32_numbers_are_below(x, y):
    for number in (y, float(np.float32(x)), float(np.nextafter(np.float32(x), np.float32(-1e38)))):
        assert (number < float32_from(x)) == (number < x)
    assert float(np.float32(float32_from(x))) == float32_from(x)
