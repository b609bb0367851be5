"""What numba has no words for, written in LLVM's language, for any processor.

Processors have an instruction that multiplies int8 or int16 numbers in pairs and adds up in int32;
numba's own loops do not reach it.

numba's cache looks at the file of the function that it compiled, not at what that one calls: after
a change here, in `bounds.py` or in `rejection.py`, touch `kernels.py`.
"""

from itertools import product
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from lmhead.head.screening.bounds import BLOCK, LANES, TINY

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_LINE = 64  # bytes that memory gives at a time
_AHEAD = 2048  # bytes: what is asked for now is needed some hundred nanoseconds from now


def _inner_products(rows: int, states: int) -> Any:
    """Make the intrinsic that multiplies int8 rows by int16 states, `rows * states` products.

    Its arguments are the addresses of the first row and of the first state, and their length, a
    multiple of LANES. It returns int32 sums, row by row. Several sums at a time, because one alone
    would wait for each of its additions; more than four do not fit into the registers. Memory is
    asked for in one stream, AHEAD of what is multiplied: several streams halve what it gives.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def inner(typing: Any, q: Any, g: Any, length: Any) -> Any:
        result = types.UniTuple(types.int32, rows * states)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            q, g, length = args
            wide, half = ir.VectorType(_I32, LANES), ir.VectorType(_I32, LANES // 2)
            even = ir.Constant(half, list(range(0, LANES, 2)))
            odd = ir.Constant(half, list(range(1, LANES, 2)))
            undefined = ir.Constant(wide, ir.Undefined)
            zero = ir.Constant(half, [0] * (LANES // 2))
            sums = [cgutils.alloca_once_value(builder, zero) for _ in range(rows * states)]

            def load(base: Any, row: int, column: Any, bits: int) -> Any:
                element = builder.add(builder.mul(_I64(row), length), column)
                address = builder.add(base, builder.mul(element, _I64(bits // 8)))
                vector = ir.VectorType(ir.IntType(bits), LANES)
                value = builder.load(builder.inttoptr(address, vector.as_pointer()))
                value.align = bits // 8
                return builder.sext(value, wide)

            def add_products(j: Any) -> None:
                w = [load(q, row, j, 8) for row in range(rows)]
                h = [load(g, state, j, 16) for state in range(states)]
                for (a, b), at in zip(product(w, h), sums, strict=True):
                    each = builder.mul(a, b)
                    pairs = builder.add(
                        builder.shuffle_vector(each, undefined, even),
                        builder.shuffle_vector(each, undefined, odd),
                    )
                    builder.store(builder.add(builder.load(at), pairs), at)

            # By lines, then what is left.
            lines = builder.and_(length, _I64(-_LINE))
            with cgutils.for_range_slice(builder, _I64(0), lines, _I64(_LINE), _I64) as (j, _):
                ahead = builder.add(builder.add(q, _I64(_AHEAD)), builder.mul(j, _I64(rows)))
                for line in range(rows):
                    _prefetch(builder, builder.add(ahead, _I64(line * _LINE)))
                for lane in range(0, _LINE, LANES):
                    add_products(builder.add(j, _I64(lane)))
            with cgutils.for_range_slice(builder, lines, length, _I64(LANES), _I64) as (j, _):
                add_products(j)
            total = cgutils.get_or_insert_function(
                builder.module,
                ir.FunctionType(_I32, [half]),
                f"llvm.vector.reduce.add.v{LANES // 2}i32",
            )
            values = [builder.call(total, [builder.load(at)]) for at in sums]
            return context.make_tuple(builder, result, values)

        return result(types.intp, types.intp, types.intp), generate

    return inner


four_with_one = _inner_products(rows=4, states=1)
one_with_four = _inner_products(rows=1, states=4)


@intrinsic  # type: ignore[untyped-decorator]
def block_bounds(
    typing: Any, sums: Any, scale: Any, residual: Any, norm: Any, out: Any, t: Any, rh: Any, ep: Any
) -> Any:
    """Write the bounds of a block's rows: sums * (scale * t) + (rh * residual + ep * norm + TINY).

    The first five arguments are addresses, the others float32. Returns the largest bound. numba
    does not see that what is written is none of what is read, and would go row by row.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        *addresses, t, rh, ep = args
        width = 8
        floats = ir.VectorType(ir.FloatType(), width)

        def spread(value: Any) -> Any:
            undefined = ir.Constant(floats, ir.Undefined)
            first = builder.insert_element(undefined, value, _I32(0))
            lanes = ir.Constant(ir.VectorType(_I32, width), [0] * width)
            return builder.shuffle_vector(first, undefined, lanes)

        def place(which: int, row: int, kind: Any) -> Any:
            address = builder.add(addresses[which], _I64(4 * row))
            return builder.inttoptr(address, ir.VectorType(kind, width).as_pointer())

        def load(which: int, row: int, kind: Any) -> Any:
            value = builder.load(place(which, row, kind))
            value.align = 4
            return value

        step, first, second = spread(t), spread(rh), spread(ep)
        tiny = ir.Constant(floats, [TINY] * width)
        peak = None
        for row in range(0, BLOCK, width):
            product = builder.sitofp(load(0, row, _I32), floats)
            s, r, n = (load(which, row, ir.FloatType()) for which in (1, 2, 3))
            error = builder.fadd(builder.fmul(first, r), builder.fmul(second, n))
            near = builder.fmul(product, builder.fmul(s, step))
            bound = builder.fadd(near, builder.fadd(error, tiny))
            builder.store(bound, place(4, row, ir.FloatType())).align = 4
            larger = None if peak is None else builder.fcmp_ordered(">", bound, peak)
            peak = bound if peak is None else builder.select(larger, bound, peak)
        largest = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.FloatType(), [floats]),
            f"llvm.vector.reduce.fmax.v{width}f32",
        )
        return builder.call(largest, [peak])

    address = types.intp
    return types.float32(*[address] * 5, *[types.float32] * 3), generate


def _prefetch(builder: Any, address: Any) -> None:
    """Ask for the memory at an address, which need not exist."""
    pointer = ir.IntType(8).as_pointer()
    ask = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32]),
        "llvm.prefetch.p0i8",
    )
    read, soon, data = _I32(0), _I32(3), _I32(1)
    builder.call(ask, [builder.inttoptr(address, pointer), read, soon, data])


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(typing: Any, address: Any) -> Any:
    """Ask for the memory at an address, which need not exist."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _prefetch(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def _float_at(typing: Any, address: Any) -> Any:
    """Read the float32 at an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], ir.FloatType().as_pointer()))

    return types.float32(types.intp), generate


@njit  # type: ignore[untyped-decorator]
def floats_at(address: Any, out: Any) -> None:
    """Copy float32 numbers that lie at an address into an array `[n, m]`."""
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            out[i, j] = _float_at(address + 4 * (i * out.shape[1] + j))


@intrinsic  # type: ignore[untyped-decorator]
def float_of(typing: Any, bits: Any) -> Any:
    """Read 32 bits as a float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic  # type: ignore[untyped-decorator]
def widen(typing: Any, x: Any) -> Any:
    """Turn a weight into float64: a float32, or the bits of a bfloat16 or (int16) a float16."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = args[0]
        if x == types.uint16:
            bits = builder.shl(builder.zext(value, _I32), _I32(16))
            value = builder.bitcast(bits, ir.FloatType())
        elif x == types.int16:
            value = builder.fpext(builder.bitcast(value, ir.HalfType()), ir.FloatType())
        return builder.fpext(value, ir.DoubleType())

    return types.float64(x), generate
