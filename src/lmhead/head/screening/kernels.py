"""The loops of the screened head, compiled by numba; `portable.py` has the same in torch.

The scan multiplies int8 rows by int16 states and adds up in int32, which is exact. Only `_scan` and
`_weigh` touch every row; both run on as many threads as torch does.

A call from Python costs some microseconds, and so does every array made there. What is done for
each state is therefore one call: `read` for the bounds, `best` for the bounds and the k best,
`draw` for the bounds and a token. The rows that these will score exactly lie far apart in memory;
while it reads the copy, the scan asks for those that would have been scored last time.
"""

import threading
from typing import Any

import numba
import numpy as np
import torch
from numba import njit, prange

from lmhead.head.screening.bounds import (
    BLOCK,
    LARGEST,
    SMALLEST_STEP,
    TINY,
    Buffers,
    Float32,
    Float64,
    Ints,
    factors_of,
)
from lmhead.head.screening.intrinsics import (
    block_bounds,
    float_of,
    floats_at,
    four_with_one,
    one_with_four,
    prefetch,
    widen,
)
from lmhead.head.screening.levels import levels as levels
from lmhead.head.screening.loops import Forked
from lmhead.head.screening.rejection import WIDEST, exponent_of, float32_from

_FAST = {"reassoc", "contract", "nsz"}  # all of fastmath would assume that there is no infinity
_TINY = np.float32(TINY)
_NO_ROW = np.float32(-np.inf)

# Each rounding as written: no fastmath.
_factors_of = njit(cache=True, nogil=True)(factors_of)
_exponent_of = njit(cache=True, nogil=True)(exponent_of)
_float32_from = njit(cache=True, nogil=True)(float32_from)
_PART = 8  # blocks that one thread reads at a time: some 300 KB
_SHARE = 16  # rows that one thread scores at a time; fewer are not worth a second one
_FORESEEN = 6  # rows of a part that are asked for during the scan, because they may be scored
_ROWS_AHEAD = 8  # rows lie far apart: they are asked for that many before they are scored
_local = threading.local()


@njit(cache=True, nogil=True, fastmath=_FAST)  # type: ignore[untyped-decorator]
def _quantise(h: Any, cap: Any, g: Any) -> Any:
    peak = np.float32(0)
    for j in range(len(h)):
        peak = max(peak, abs(h[j]))
    t = np.float32(np.float64(peak) / cap * (1 + 2.0**-22))  # never too small
    if not t >= SMALLEST_STEP:
        t = np.float32(1)
    inverse = 1 / np.float64(t)
    rho, eta, epsilon = 0.0, 0.0, 0.0
    for j in range(len(h)):
        x = np.float64(h[j])
        whole = np.rint(x * inverse)
        g[j] = np.int16(whole)
        near = whole * t
        rho += x * x
        eta += near * near
        epsilon += (x - near) * (x - near)
    return t, np.sqrt(rho), np.sqrt(eta), np.sqrt(epsilon)


@njit(parallel=True, cache=True, nogil=True, fastmath=_FAST)  # type: ignore[untyped-decorator]
def _scan(
    q: Any, scale: Any, residual: Any, norm: Any, base: Any, V: Any,
    g: Any, factors: Any, upper: Any, peaks: Any, hints: Any, weight_at: Any, stride: Any,
) -> None:  # fmt: skip
    B, d = g.shape
    blocks = peaks.shape[1]
    for part in prange((blocks + _PART - 1) // _PART):
        sums = np.empty((4, BLOCK), np.int32)
        foreseen = 0
        for block in range(part * _PART, min((part + 1) * _PART, blocks)):
            first = block * BLOCK
            rows = max(min(BLOCK, V - first), 0)
            for line in range(0, 4 * BLOCK, 64):  # what the next block will need
                ahead = 4 * (first + BLOCK) + line
                prefetch(scale.ctypes.data + ahead)
                prefetch(residual.ctypes.data + ahead)
                prefetch(norm.ctypes.data + ahead)
            b = 0
            while b < B:
                together = 4 if B - b >= 4 else 1
                states = g.ctypes.data + 2 * b * d
                block_at = q.ctypes.data + first * d
                if together == 4:
                    for i in range(BLOCK):
                        s = one_with_four(block_at + i * d, states, d)
                        sums[0, i], sums[1, i], sums[2, i], sums[3, i] = s
                else:
                    for i in range(0, BLOCK, 4):
                        s = four_with_one(block_at + i * d, states, d)
                        sums[0, i], sums[0, i + 1], sums[0, i + 2], sums[0, i + 3] = s
                for c in range(together):
                    t, rh, ep = factors[b + c, 0], factors[b + c, 1], factors[b + c, 2]
                    if rows == BLOCK and not base.size:
                        peaks[b + c, block] = block_bounds(
                            sums.ctypes.data + 4 * c * BLOCK, scale.ctypes.data + 4 * first,
                            residual.ctypes.data + 4 * first, norm.ctypes.data + 4 * first,
                            upper.ctypes.data + 4 * ((b + c) * upper.shape[1] + first), t, rh, ep,
                        )  # fmt: skip
                        if weight_at and peaks[b + c, block] >= hints[b + c]:
                            for i in range(first, first + BLOCK):
                                if upper[b + c, i] >= hints[b + c] and foreseen < _FORESEEN:
                                    foreseen += 1
                                    for line in range(0, stride, 64):
                                        prefetch(weight_at + stride * i + line)
                        continue
                    out = upper[b + c, first : first + BLOCK]
                    peak = _NO_ROW
                    for i in range(BLOCK):
                        j = first + i
                        bound = rh * residual[j] + ep * norm[j] + _TINY
                        value = np.float32(sums[c, i]) * (scale[j] * t) + bound
                        if base.size:
                            value += base[j]
                        out[i] = value if i < rows else _NO_ROW
                        peak = max(peak, out[i])
                    peaks[b + c, block] = peak
                b += together


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _read(
    q: Any, scale: Any, residual: Any, norm: Any, base: Any, most: Any,
    h: Any, cap: Any, V: Any, g: Any, factors: Any, limits: Any, upper: Any, peaks: Any,
    hints: Any, weight_at: Any, stride: Any,
) -> None:  # fmt: skip
    B, d = h.shape
    for b in range(B):
        step, rho, eta, epsilon = _quantise(h[b], cap, g[b])
        factors[b, 0] = step
        factors[b, 1], factors[b, 2], limits[b, 0], limits[b, 1] = _factors_of(
            rho, eta, epsilon, d, most[0], most[1], most[2]
        )
    _scan(
        q, scale, residual, norm, base, V, g, factors, upper, peaks, hints, weight_at, stride
    )  # fmt: skip


def read(
    copy: tuple[Any, ...], most: Float64, h: Float32, cap: int, V: int, buffers: Buffers
) -> None:
    """Fill the buffers with what is known of states h `[B, d]`: the bounds of the first V rows."""
    _use_threads()
    _read(*copy, most, h, cap, V, *buffers, 0, 0)


def _use_threads() -> None:
    """Use as many threads as torch; numba remembers the number for each thread that calls it."""
    threads = torch.get_num_threads()
    if not Forked.started:
        # To start its threads, numba tells OpenMP how many: for this process, torch included.
        numba.np.ufunc.parallel._launch_threads()
        torch.set_num_threads(threads)
        Forked.started = True
    if getattr(_local, "threads", None) != threads:
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
        _local.threads = threads


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _rows_between(upper: Any, peaks: Any, low: Any, high: Any) -> Any:
    found = np.empty(256, np.int64)
    n = 0
    for block in range(peaks.shape[0]):
        if not peaks[block] >= low:
            continue
        for i in range(block * BLOCK, block * BLOCK + BLOCK):
            if upper[i] >= low and not upper[i] >= high and upper[i] > _NO_ROW:
                if n == found.shape[0]:
                    found = np.concatenate((found, np.empty_like(found)))
                found[n] = i
                n += 1
    return found[:n]


def rows_between(upper: Float32, peaks: Float32, low: float, high: float) -> Ints:
    """List the rows whose bound is at least low, not at least high (NaN: no limit), not -inf."""
    rows: Ints = _rows_between(upper, peaks, low, high)
    return rows


@njit(cache=True, nogil=True, fastmath=_FAST)  # type: ignore[untyped-decorator]
def _score(weight: Any, bias: Any, ids: Any, h: Any, out: Any) -> None:
    nbytes, start = weight.itemsize * h.shape[0], weight.ctypes.data
    for n in range(-_ROWS_AHEAD, ids.shape[0]):
        if n + _ROWS_AHEAD < ids.shape[0]:
            ahead = start + weight.strides[0] * ids[n + _ROWS_AHEAD]
            for line in range(0, nbytes, 64):
                prefetch(ahead + line)
        if n < 0:
            continue
        row = weight[ids[n]]
        total = 0.0
        for j in range(h.shape[0]):
            total += widen(row[j]) * np.float64(h[j])
        out[n] = total
    if bias.size:
        for n in range(ids.shape[0]):
            out[n] += bias[ids[n]]


@njit(parallel=True, cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _scores_together(weight: Any, bias: Any, ids: Any, h: Any, out: Any) -> None:
    for part in prange((len(ids) + _SHARE - 1) // _SHARE):
        first, last = part * _SHARE, min((part + 1) * _SHARE, len(ids))
        _score(weight, bias, ids[first:last], h, out[first:last])


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _scores(weight: Any, bias: Any, ids: Any, h: Any) -> Any:
    out = np.empty(ids.shape[0], np.float64)
    if len(ids) > _SHARE:
        _scores_together(weight, bias, ids, h, out)
    else:
        _score(weight, bias, ids, h, out)
    return out


def scores(weight: Any, bias: Float64, ids: Ints, h: Float32) -> Float64:
    """Score some rows of a weight `[V, d]` for h `[d]` in float64; bias `[V]`, or empty."""
    z: Float64 = _scores(weight, bias, ids, h)
    return z


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _largest(x: Any, k: Any) -> Any:
    """Find the k-th largest with a heap; numpy's own ways take numba half a minute to compile."""
    heap = np.full(k, -np.inf)  # the smallest of the k largest is at the top
    for i in range(len(x)):
        if not x[i] > heap[0]:
            continue
        at = 0
        while True:
            child = 2 * at + 1
            if child >= k:
                break
            if child + 1 < k and heap[child + 1] < heap[child]:
                child += 1
            if not heap[child] < x[i]:
                break
            heap[at] = heap[child]
            at = child
        heap[at] = x[i]
    return heap[0]


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _shortlist(
    weight: Any, bias: Any, h: Any, upper: Any, peaks: Any, k: Any, place: Any, margin: Any
) -> Any:  # fmt: skip
    # k blocks have a row that large; where there are not that many blocks, look at the rows
    cut = _largest(peaks, k) if k <= len(peaks) // 2 else _largest(upper, min(k, len(upper)))
    ids = _rows_between(upper, peaks, cut, np.nan)
    z = _scores(weight, bias, ids, h)
    if len(ids) >= place:
        floor = _largest(z, place) - margin
        if not floor >= cut:
            more = _rows_between(upper, peaks, floor, cut)
            z = np.concatenate((z, _scores(weight, bias, more, h)))
            ids = np.concatenate((ids, more))
            cut = floor
    return ids, z, cut


def shortlist(
    weight: Any,
    bias: Float64,
    h: Float32,
    upper: Float32,
    peaks: Float32,
    k: int,
    place: int,
    margin: float,
) -> tuple[Ints, Float64, float]:
    """Score the rows with the k largest bounds, or a few more, and all that can compete with them.

    The best of them but `place - 1` reaches some score; less the margin that is the floor. Every
    row whose bound is at least the last number that is returned has been scored.
    """
    found: tuple[Ints, Float64, float] = _shortlist(weight, bias, h, upper, peaks, k, place, margin)
    return found


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _sink(z: Any, ids: Any, size: Any, at: Any) -> None:
    """Let an entry of a heap sink to its place; the worst is at the top."""
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        other = child + 1
        if other < size and (
            z[other] < z[child] or (z[other] == z[child] and ids[other] > ids[child])
        ):
            child = other
        if z[at] < z[child] or (z[at] == z[child] and ids[at] > ids[child]):
            break
        z[at], z[child] = z[child], z[at]
        ids[at], ids[child] = ids[child], ids[at]
        at = child


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _order(ids: Any, z: Any, n: Any) -> Any:
    """Return the n best, best first, equal ones in the order of their ids."""
    best, which = z[:n].copy(), ids[:n].copy()
    for at in range(n // 2 - 1, -1, -1):
        _sink(best, which, n, at)
    for i in range(n, len(z)):
        if z[i] > best[0] or (z[i] == best[0] and ids[i] < which[0]):
            best[0], which[0] = z[i], ids[i]
            _sink(best, which, n, 0)
    for last in range(n - 1, 0, -1):
        best[0], best[last] = best[last], best[0]
        which[0], which[last] = which[last], which[0]
        _sink(best, which, last, 0)
    return which, best


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _best(
    q: Any, scale: Any, residual: Any, norm: Any, base: Any, most: Any,
    address: Any, h: Any, cap: Any, V: Any,
    g: Any, factors: Any, limits: Any, upper: Any, peaks: Any, hints: Any,
    weight: Any, bias: Any, k: Any, ids: Any, z: Any,
) -> Any:  # fmt: skip
    floats_at(address, h)
    _read(
        q, scale, residual, norm, base, most, h, cap, V, g, factors, limits, upper, peaks,
        hints, weight.ctypes.data, weight.strides[0],
    )  # fmt: skip
    rescored, unsettled = 0, 0
    for b in range(len(h)):
        error, reach = limits[b, 0], limits[b, 1]
        settled = reach < LARGEST
        if not settled:
            ids[b, 0] = -1
            for i in range(k):  # in loops: numba takes seconds to compile the copy of a slice
                z[b, i] = 0.0
            unsettled += 1
            continue
        margin = 2 * error
        rows, s, hints[b] = _shortlist(weight, bias, h[b], upper[b], peaks[b], k, k, margin)
        rescored += len(rows)
        rows, s = _order(rows, s, min(k + 1, len(rows)))
        for i in range(len(rows) - 1):
            # Without an error (h is 0) equal scores are equal.
            settled &= not (error > 0 and s[i] - s[i + 1] <= margin)
        for i in range(k):
            ids[b, i], z[b, i] = rows[i], s[i]
        if not settled:
            ids[b, 0] = -1
            unsettled += 1
    return rescored, 0, unsettled


def best(
    copy: tuple[Any, ...],
    most: Float64,
    address: int,
    h: Float32,
    cap: int,
    V: int,
    buffers: Buffers,
    weight: Any,
    bias: Float64,
    k: int,
    ids: Ints,
    z: Float32 | Float64,
) -> tuple[int, int, int]:
    """Fill ids and z `[B, k]` with the k best of the first V rows, best first.

    The states lie at an address, and are copied to h `[B, d]`. The first id is -1 for a state that
    needs more care: one that is not finite or too large, or whose scores are too close to each
    other to tell their order. Returns how many rows were scored and proposed (none), and how many
    states are left.
    """
    _use_threads()
    counts: tuple[int, int, int] = _best(
        *copy, most, address, h, cap, V, *buffers, weight, bias, k, ids, z
    )
    return counts


def numbers(weight: torch.Tensor) -> Any:
    """Give a weight to numba as an array; of 16-bit numbers, which it does not know, the bits."""
    bits = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
    return weight.view(bits.get(weight.dtype, weight.dtype)).numpy()


@njit(parallel=True, cache=True, nogil=True, fastmath=_FAST)  # type: ignore[untyped-decorator]
def _weigh(upper: Any, high: Any, slope: Any, shift: Any, cap: Any, q: Any, sums: Any) -> None:
    for block in prange(sums.shape[0]):
        first = block * BLOCK
        x = upper[first : first + BLOCK]
        w = q[first : first + BLOCK]
        if cap > 0:
            for i in range(BLOCK):
                w[i] = np.tanh(x[i] / cap) * cap
        else:
            for i in range(BLOCK):
                w[i] = x[i]
        for i in range(BLOCK):
            # 2^y = 2^whole * e^part, |part| <= ln(2) / 2, by six terms of its series
            y = min(max(w[i] * slope + shift, np.float32(-100)), np.float32(100))
            whole = np.int32(y + np.float32(128.5)) - np.int32(128)
            part = (y - np.float32(whole)) * np.float32(0.6931471805599453)
            e = np.float32(1 / 120)
            e = e * part + np.float32(1 / 24)
            e = e * part + np.float32(1 / 6)
            e = e * part + np.float32(0.5)
            e = e * part + np.float32(1)
            e = e * part + np.float32(1)
            e *= float_of(np.int32((whole + np.int32(127)) << np.int32(23)))
            w[i] = e if _NO_ROW < x[i] < high else np.float32(0)
        total = 0.0
        for i in range(BLOCK):
            total += np.float64(w[i])
        sums[block] = total


def weigh(
    upper: Float32, high: float, slope: float, shift: float, cap: float, q: Float32, sums: Float64
) -> float:
    """Fill `q [rows]` with 2^(f slope + shift) where the bound is below high, 0 where not or -inf.

    f is the bound itself, or `cap tanh(bound / cap)` where cap is above 0. The exponent is held
    within [-100, 100]; q errs by less than 1 in 10,000. `sums [blocks]` are the sums of q; what
    they add up to is returned.
    """
    _use_threads()
    f = np.float32
    _weigh(upper, f(high), f(slope), f(shift), f(cap), q, sums)
    return float(sums.sum())


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _propose(q: Any, sums: Any, place: Any) -> Any:
    block = 0
    while block < len(sums) - 1 and place >= sums[block]:
        place -= sums[block]
        block += 1
    row = block * BLOCK
    while row < block * BLOCK + BLOCK - 1 and place >= q[row]:
        place -= np.float64(q[row])
        row += 1
    return row


def propose(q: Float32, sums: Float64, place: float) -> int:
    """Find the row at which the running sum of `q [rows]` passes a place; `sums` are its blocks."""
    row: int = _propose(q, sums, place)
    return row


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _logit(z: Any, factor: Any, softcap: Any) -> Any:
    y = z * factor
    return np.tanh(y / softcap) * softcap if softcap > 0 else y


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _draw(
    q: Any, scale: Any, residual: Any, norm: Any, base: Any, most: Any,
    address: Any, h: Any, cap: Any, V: Any,
    g: Any, factors: Any, limits: Any, upper: Any, peaks: Any, hints: Any,
    weight: Any, bias: Any, first: Any, factor: Any, softcap: Any, temperature: Any,
    chances: Any, loose: Any, sums: Any, ids: Any,
) -> Any:  # fmt: skip
    floats_at(address, h)
    _read(
        q, scale, residual, norm, base, most, h, cap, V, g, factors, limits, upper, peaks,
        hints, weight.ctypes.data, weight.strides[0],
    )  # fmt: skip
    rescored, proposed, unsettled = 0, 0, 0
    one = np.empty(1, np.int64)
    for b in range(len(h)):
        ids[b] = -1
        unsettled += 1
        reach = limits[b, 1]
        if not reach < LARGEST:
            continue
        rows, exact, cut = _shortlist(weight, bias, h[b], upper[b], peaks[b], first, 1, 0.0)
        hints[b] = cut
        best = -np.inf
        for i in range(len(exact)):
            exact[i] = _logit(exact[i], factor, softcap)
            best = max(best, exact[i])
        slope, shift, slack = _exponent_of(reach, best, factor, temperature)
        if not (np.isfinite(best) and slack <= WIDEST):
            continue
        rescored += len(rows)
        known = 0.0
        for i in range(len(exact)):
            known += np.exp((exact[i] - best) / temperature)
            exact[i] = known
        _weigh(
            upper[b], np.float32(_float32_from(cut)), np.float32(slope), np.float32(shift + slack),
            np.float32(softcap / factor), loose, sums,
        )  # fmt: skip
        total = known
        for block in range(len(sums)):
            total += sums[block]
        for t in range(chances.shape[1]):
            place = chances[b, t, 0] * total
            if place < known:
                i = 0
                while not exact[i] > place:
                    i += 1
                ids[b] = rows[i]
                break
            row = _propose(loose, sums, place - known)
            if loose[row] == 0:  # only by rounding, at the very edge of a block
                continue
            one[0] = row
            rescored += 1
            y = _logit(_scores(weight, bias, one, h[b])[0], factor, softcap)
            if chances[b, t, 1] * loose[row] < np.exp((y - best) / temperature):
                ids[b] = row
                break
        if ids[b] >= 0:
            proposed += t + 1
            unsettled -= 1
    return rescored, proposed, unsettled


def draw(
    copy: tuple[Any, ...],
    most: Float64,
    address: int,
    h: Float32,
    cap: int,
    V: int,
    buffers: Buffers,
    weight: Any,
    bias: Float64,
    first: int,
    transform: tuple[float, float],
    temperature: float,
    chances: Float64,
    loose: Float32,
    sums: Float64,
    ids: Ints,
) -> tuple[int, int, int]:
    """Fill ids `[B]` with one draw for each state from the softmax of all its logits.

    As `rejection.py` does it, from `chances [B, pairs, 2]`; `first` rows are scored first. The
    states lie at an address, and are copied to h `[B, d]`. -1 for a state that needs more care.
    Returns how many rows were scored and proposed, and how many states are left.
    """
    _use_threads()
    counts: tuple[int, int, int] = _draw(
        *copy, most, address, h, cap, V, *buffers, weight, bias, first, *transform,
        float(temperature), chances, loose, sums, ids,
    )  # fmt: skip
    return counts
