"""What numba has no words for, written in LLVM's language, for any processor.

Processors have an instruction that multiplies int8 or int16 numbers in pairs and adds up in int32;
numba's own loops do not reach it.

numba's cache looks at the file of the function that it compiled, not at what that one calls: after
a change here or in `bounds.py`, touch `kernels.py`.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from lmhead.head.screening.bounds import LANES

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


with_one = _inner_products(states=1)
with_four = _inner_products(states=4)


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(typing: Any, address: Any) -> Any:
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
def float_of(typing: Any, bits: Any) -> Any:
    """Read 32 bits as a float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic  # type: ignore[untyped-decorator]
def widen(typing: Any, x: Any) -> Any:
    """Turn a weight into float64: a float32, or a bfloat16 given as its uint16 bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = args[0]
        if x == types.uint16:
            bits = builder.shl(builder.zext(value, _I32), _I32(16))
            value = builder.bitcast(bits, ir.FloatType())
        return builder.fpext(value, ir.DoubleType())

    return types.float64(x), generate
