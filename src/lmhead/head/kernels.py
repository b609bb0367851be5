"""The loops of the screened head, compiled by numba; `portable.py` has the same in torch.

The scan multiplies int8 rows by int16 states and adds up in int32, which is exact and for which
processors have an instruction (two products and their sum at once). numba's own loops do not
reach it, so the inner product is written in LLVM's language, for any processor.

Only `scan` and `weigh` touch every row; both run on as many threads as torch does.
"""

from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from lmhead.head.bounds import (
    BLOCK,
    LANES,
    SMALLEST_STEP,
    TINY,
    Float32,
    Float64,
    Ints,
    Quantised,
    Screen,
    State,
    largest_step,
)

_FAST = {"reassoc", "contract", "nsz"}  # all of fastmath would assume that there is no infinity
_TINY = np.float32(TINY)
_NO_ROW = np.float32(-np.inf)
_AHEAD = 2048  # bytes: what is asked for now is needed some hundred nanoseconds from now

_I32, _I64 = ir.IntType(32), ir.IntType(64)


def _inner_products(states: int) -> Any:
    """Make the intrinsic that multiplies an int8 row by some int16 states.

    Its arguments are the addresses of the row and of the first state, and their length, a multiple
    of LANES. It returns int32 sums. One row at a time: memory is read in one stream, several
    streams halve what it gives.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def inner(typing: Any, q: Any, g: Any, length: Any) -> Any:
        result = types.UniTuple(types.int32, states)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            q, g, length = args
            wide, half = ir.VectorType(_I32, LANES), ir.VectorType(_I32, LANES // 2)
            even = ir.Constant(half, list(range(0, LANES, 2)))
            odd = ir.Constant(half, list(range(1, LANES, 2)))
            undefined = ir.Constant(wide, ir.Undefined)
            zero = ir.Constant(half, [0] * (LANES // 2))
            sums = [cgutils.alloca_once_value(builder, zero) for _ in range(states)]

            def load(base: Any, row: int, column: Any, bits: int) -> Any:
                element = builder.add(builder.mul(_I64(row), length), column)
                address = builder.add(base, builder.mul(element, _I64(bits // 8)))
                vector = ir.VectorType(ir.IntType(bits), LANES)
                value = builder.load(builder.inttoptr(address, vector.as_pointer()))
                value.align = bits // 8
                return builder.sext(value, wide)

            with cgutils.for_range_slice(builder, _I64(0), length, _I64(LANES), _I64) as (j, _):
                w = load(q, 0, j, 8)
                for b, at in enumerate(sums):
                    product = builder.mul(w, load(g, b, j, 16))
                    pairs = builder.add(
                        builder.shuffle_vector(product, undefined, even),
                        builder.shuffle_vector(product, undefined, odd),
                    )
                    builder.store(builder.add(builder.load(at), pairs), at)
            total = cgutils.get_or_insert_function(
                builder.module,
                ir.FunctionType(_I32, [half]),
                f"llvm.vector.reduce.add.v{LANES // 2}i32",
            )
            values = [builder.call(total, [builder.load(at)]) for at in sums]
            return context.make_tuple(builder, result, values)

        return result(types.intp, types.intp, types.intp), generate

    return inner


_with_one = _inner_products(states=1)
_with_four = _inner_products(states=4)


@intrinsic  # type: ignore[untyped-decorator]
def _prefetch(typing: Any, address: Any) -> Any:
    """Ask for the memory at an address, which need not exist."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        ask = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32]),
            "llvm.prefetch.p0i8",
        )
        read, soon, data = _I32(0), _I32(3), _I32(1)
        builder.call(ask, [builder.inttoptr(args[0], pointer), read, soon, data])
        return context.get_dummy_value()

    return types.void(types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def _float_of(typing: Any, bits: Any) -> Any:
    """Read 32 bits as a float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic  # type: ignore[untyped-decorator]
def _widen(typing: Any, x: Any) -> Any:
    """Turn a weight into float64: a float32, or a bfloat16 given as its uint16 bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = args[0]
        if x == types.uint16:
            bits = builder.shl(builder.zext(value, _I32), _I32(16))
            value = builder.bitcast(bits, ir.FloatType())
        return builder.fpext(value, ir.DoubleType())

    return types.float64(x), generate


@njit(parallel=True, cache=True, nogil=True, fastmath=_FAST)  # type: ignore[untyped-decorator]
def _scan(
    q: Any, scale: Any, residual: Any, norm: Any, base: Any, V: Any,
    g: Any, step: Any, rho: Any, epsilon: Any, upper: Any, peaks: Any,
) -> None:  # fmt: skip
    B, d = g.shape
    for block in prange(peaks.shape[1]):
        first = block * BLOCK
        rows = min(BLOCK, V - first)
        sums = np.empty((4, BLOCK), np.int32)
        b = 0
        while b < B:
            together = 4 if B - b >= 4 else 1
            states = g.ctypes.data + 2 * b * d
            for i in range(BLOCK):
                row = q.ctypes.data + (first + i) * d
                if b == 0:  # for the other states the block is in the cache
                    for ahead in range(_AHEAD, _AHEAD + d, 64):
                        _prefetch(row + ahead)
                if together == 4:
                    s = _with_four(row, states, d)
                    sums[0, i], sums[1, i], sums[2, i], sums[3, i] = s
                else:
                    sums[0, i] = _with_one(row, states, d)[0]
            for c in range(together):
                t, rh, ep = step[b + c], rho[b + c], epsilon[b + c]
                out = upper[b + c, first : first + rows]
                for i in range(rows):
                    j = first + i
                    bound = rh * residual[j] + ep * norm[j] + _TINY
                    out[i] = np.float32(sums[c, i]) * (scale[j] * t) + bound
                if base.size:
                    for i in range(rows):
                        out[i] += base[first + i]
                peak = _NO_ROW
                for i in range(rows):
                    peak = max(peak, out[i])
                peaks[b + c, block] = peak
            b += together


@njit(cache=True, nogil=True, fastmath=_FAST)  # type: ignore[untyped-decorator]
def _quantise(h: Any, cap: Any, g: Any, step: Any, norms: Any) -> None:
    B, d = h.shape
    for b in range(B):
        peak = np.float32(0)
        for j in range(d):
            peak = max(peak, abs(h[b, j]))
        t = np.float32(np.float64(peak) / cap * (1 + 2.0**-22))  # never too small
        if not t >= SMALLEST_STEP:
            t = np.float32(1)
        step[b] = t
        inverse = 1 / np.float64(t)
        rho, eta, epsilon = 0.0, 0.0, 0.0
        for j in range(d):
            x = np.float64(h[b, j])
            whole = np.rint(x * inverse)
            g[b, j] = np.int16(whole)
            near = whole * t
            rho += x * x
            eta += near * near
            epsilon += (x - near) * (x - near)
        norms[0, b], norms[1, b], norms[2, b] = np.sqrt(rho), np.sqrt(eta), np.sqrt(epsilon)


def quantise(h: Float32, columns: int) -> Quantised:
    """Turn states h `[B, d]` into int16 numbers and a step each."""
    B = len(h)
    g = np.zeros((B, columns), np.int16)
    step, norms = np.empty(B, np.float32), np.empty((3, B))
    _quantise(h, largest_step(columns), g, step, norms)
    return Quantised(g, step, *norms)


def scan(screen: Screen, base: Float32, state: State, upper: Float32, peaks: Float32) -> None:
    """Fill `upper [B, rows]` with bounds of every score, `peaks [B, blocks]` with their maxima."""
    numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
    _scan(
        screen.q.numpy(), screen.scale.numpy(), screen.residual.numpy(), screen.norm.numpy(),
        base, screen.vocab_size, state.g, state.step, state.rho, state.epsilon, upper, peaks,
    )  # fmt: skip


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
def _scores(weight: Any, ids: Any, h: Any) -> Any:
    out = np.empty(ids.shape[0], np.float64)
    for n in range(ids.shape[0]):
        row = weight[ids[n]]
        total = 0.0
        for j in range(h.shape[0]):
            total += _widen(row[j]) * np.float64(h[j])
        out[n] = total
    return out


def scores(weight: torch.Tensor, ids: Ints, h: Float32) -> Float64:
    """Take the inner products of some rows of a weight `[V, d]` with h `[d]`, in float64."""
    z: Float64 = _scores(_numbers(weight), ids, h)
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
    weight: Any, bias: Any, h: Any, upper: Any, peaks: Any, k: Any, error: Any
) -> Any:  # fmt: skip
    # k blocks have a row that large; where there are not that many blocks, look at the rows
    cut = _largest(peaks, k) if k <= len(peaks) // 2 else _largest(upper, k)
    ids = _rows_between(upper, peaks, cut, np.nan)
    z = _scores(weight, ids, h)
    if bias.size:
        z += bias[ids]
    more = ids[:0]
    extra = z[:0]
    if len(ids) >= k:
        floor = _largest(z, k) - 2 * error
        if not floor >= cut:
            more = _rows_between(upper, peaks, floor, cut)
            extra = _scores(weight, more, h)
            if bias.size:
                extra += bias[more]
    return ids, z, more, extra


def shortlist(
    weight: torch.Tensor,
    bias: Float64,
    h: Float32,
    upper: Float32,
    peaks: Float32,
    k: int,
    error: float,
) -> tuple[Ints, Float64]:
    """Score every row that can be among the k best: ids and scores, best first.

    First the rows with the k largest bounds, or a few more; k of them reach some score, which is
    the floor: a row whose bound is lower is left alone. `bias` is empty where there is none.
    """
    ids, z, more, extra = _shortlist(_numbers(weight), bias, h, upper, peaks, k, error)
    if len(more):
        ids, z = np.concatenate((ids, more)), np.concatenate((z, extra))
    order = np.lexsort((ids, -z))
    return ids[order], z[order]


def _numbers(weight: torch.Tensor) -> Any:
    """Give a weight to numba, which knows no bfloat16, as an array."""
    return (weight.view(torch.uint16) if weight.dtype == torch.bfloat16 else weight).numpy()


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
            e *= _float_of(np.int32((whole + np.int32(127)) << np.int32(23)))
            w[i] = e if _NO_ROW < x[i] < high else np.float32(0)
        total = 0.0
        for i in range(BLOCK):
            total += np.float64(w[i])
        sums[block] = total


def weigh(
    upper: Float32, high: float, slope: float, shift: float, cap: float, q: Float32, sums: Float64
) -> None:
    """Fill `q [rows]` with 2^(f slope + shift) where the bound is below high, 0 where not or -inf.

    f is the bound itself, or `cap tanh(bound / cap)` where cap is above 0. The exponent is held
    within [-100, 100]; q errs by less than 1 in 10,000. `sums [blocks]` are the sums of q.
    """
    numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
    f = np.float32
    _weigh(upper, f(high), f(slope), f(shift), f(cap), q, sums)
