"""What every pure Tile op computes, over NumPy: the judge of what targets emit.

Exact semantics: integers wrap; bool adds by or, subtracts by xor, multiplies by and; floats
narrower than 32 bits are computed in float32 and rounded once at the end; elementary functions
are the true value rounded, to which a target may be a few ulp off. Integers divided by zero
give 0, and so do their remainders (masked lanes hold 0, and must not trap). Shifts by the width
or more (or by a negative amount) give 0, or copies of the sign. NumPy's own functions do all of
these. Invariant: no function changes its inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from statistics import NormalDist
from typing import Any

import numpy as np

from ..core import dtype as dtypes
from ..core.dtype import DType
from ..core.errors import InternalError
from ..ir.types import Shape

Array = np.ndarray[Any, Any]
Meaning = Callable[..., Array]  # of a dtype and the operands


def elementwise(name: str, dtype: DType, inputs: list[Array]) -> Array:
    """One elementwise op; `dtype` is that of the operands."""
    wide = dtypes.int8 if dtype is dtypes.int4 else dtype.wide
    given = inputs if wide is dtype else [i.astype(wide.numpy) for i in inputs]
    result = np.asarray(TABLE[name](wide, *given))
    return result if result.dtype == np.bool_ else result.astype(dtype.numpy)


# ---- elementwise ----------------------------------------------------------------------------


def _exact(function: Meaning) -> Meaning:
    """A function of floats: computed in the next wider float, then rounded."""

    def apply(dtype: DType, *inputs: Array) -> Array:
        wide = np.float64 if dtype is dtypes.float32 else np.longdouble
        return np.asarray(function(*[i.astype(wide) for i in inputs])).astype(dtype.numpy)

    return apply


def _plain(function: Callable[..., Any]) -> Meaning:
    """A function that is the same for all dtypes."""
    return lambda d, *inputs: np.asarray(function(*inputs))


def _by_float64(function: Callable[..., float]) -> Callable[..., Array]:
    """A function of Python floats, element by element."""
    return np.vectorize(lambda *x: function(*map(float, x)), otypes=[np.float64])


def _erf_inverse(x: float) -> float:
    if math.isnan(x) or abs(x) > 1:
        return math.nan
    if abs(x) == 1:
        return math.copysign(math.inf, x)
    if x == 0:
        return x
    size = abs(x)
    if size < 1e-3:
        guess = size * math.sqrt(math.pi) / 2
    else:
        guess = -NormalDist().inv_cdf((1 - size) / 2) / math.sqrt(2)
    for _ in range(3):  # Halley's step on erf(g) = size, by erfc near 1
        near_one = size > 0.5
        error = (1 - size) - math.erfc(guess) if near_one else math.erf(guess) - size
        slope = 2 / math.sqrt(math.pi) * math.exp(-guess * guess)
        if slope == 0:
            break
        step = error / slope
        guess -= step / (1 + guess * step)
    return math.copysign(guess, x)


def _boolean(d: DType) -> bool:
    return d.kind == "bool"


def _negative(d: DType, x: Array) -> Array:
    return x if _boolean(d) else np.negative(x)


def _sign(d: DType, x: Array) -> Array:
    """Zeros keep their sign."""
    return x if _boolean(d) else np.where(x == 0, x, np.sign(x))


def _subtract(d: DType, a: Array, b: Array) -> Array:
    return np.not_equal(a, b) if _boolean(d) else np.subtract(a, b)


def _rounding(ufunc: Any) -> Meaning:
    """floor, ceil, round (half to even), trunc: integers are whole already."""
    return lambda d, x: ufunc(x) if d.is_float else x


def _divide(d: DType, a: Array, b: Array) -> Array:
    """Of integers: truncated, as C has it."""
    return np.divide(a, b) if d.is_float else (a - np.fmod(a, b)) // b


def _floor_divide(d: DType, a: Array, b: Array) -> Array:
    """Of floats by the exact remainder, as PyTorch has it."""
    if not d.is_float:
        return a // b
    rest, ratio = np.fmod(a, b), np.divide(a, b)
    quotient = (a - rest) / b - ((rest != 0) & ((rest < 0) != (b < 0)))
    whole = np.floor(quotient)
    whole = np.where(quotient - whole > 0.5, whole + 1, whole)
    whole = np.where(quotient == 0, np.copysign(np.zeros_like(a), ratio), whole)
    return np.where(b == 0, ratio, whole)


def _remainder(d: DType, a: Array, b: Array) -> Array:
    """Of floats: zero has the sign of a."""
    if not d.is_float:
        return np.remainder(a, b)
    rest = np.fmod(a, b)
    return np.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


def _unsigned(function: Callable[[Array, Array], Array]) -> Meaning:
    """A function of operands seen as unsigned."""

    def apply(d: DType, a: Array, b: Array) -> Array:
        kind = f"u{d.size}"
        return np.asarray(function(a.view(kind), b.view(kind))).astype(kind).view(d.numpy)

    return apply


def _power(d: DType, a: Array, b: Array) -> Array:
    """Integers: the product wraps; a negative exponent gives 0, and 1 or -1 for those bases."""
    if d.is_float:
        return _exact(np.power)(d, a, b)
    inverse = np.where(np.abs(a) == 1, np.where(b & 1 == 1, a, 1), 0)
    return np.where(b < 0, inverse, np.power(a, np.maximum(b, 0)))


def _extreme(ufunc: Any, sign: int) -> Meaning:
    def apply(d: DType, a: Array, b: Array) -> Array:
        """nan if either is; 0 is above -0."""
        result: Array = ufunc(a, b)
        if not d.is_float:
            return result
        return np.where((a == 0) & (b == 0), sign * (sign * a + sign * b), result)

    return apply


def _multiply_high(a: Array, b: Array) -> Array:
    """The upper half of a product."""
    return (a.astype(object) * b.astype(object)) >> (8 * a.itemsize)


def _parts(words: Array, kind: Any) -> Array:
    """What lies in each word, along a new last axis."""
    return np.asarray(words, order="C")[..., None].view(kind)


def _words(parts: Array) -> Array:
    """The other way round."""
    return np.ascontiguousarray(parts).view(np.int32)[..., 0]


def _byte_dot(kind: type[np.generic]) -> Meaning:
    """The meaning where the first has bytes of a kind."""

    def run(d: DType, a: Array, b: Array, c: Array) -> Array:
        """c + the sum of the products of a's four bytes by b's, signed ones; int32 alone, and it
        wraps"""
        products = _parts(a, kind).astype(np.int32) * _parts(b, np.int8)
        return np.asarray(c + products.sum(-1, dtype=np.int32))

    return run


def _byte_permute(d: DType, a: Array, b: Array, chosen: Array) -> Array:
    """Byte i is the one of a (0..3) and b (4..7) that the low three bits of the third's
    hexadecimal digit i name; int32 alone."""
    digits = (chosen[..., None] >> np.arange(0, 16, 4, dtype=np.int32)) & 7
    given = np.concatenate([_parts(a, np.uint8), _parts(b, np.uint8)], -1)
    return _words(np.take_along_axis(given, digits.astype(np.int64), -1))


def _to_odd(near: Array, lost: Array) -> Array:
    """A rounded value, to the side of what was lost where its last bit is even: so the next
    rounding is the only one."""
    even = (near.view(f"i{near.itemsize}") & 1) == 0
    away = np.copysign(np.inf, lost).astype(near.dtype)
    inexact = np.isfinite(near) & (lost != 0) & even
    return np.where(inexact, np.nextafter(near, away), near)


def _multiply_add(d: DType, a: Array, b: Array, c: Array) -> Array:
    """a * b + c, rounded once."""
    if not d.is_float:
        return (a & b) | c if _boolean(d) else a * b + c
    if d is dtypes.float64:
        return _by_float64(_fused)(a, b, c)
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + addend
    part = total - product
    lost = (product - (total - part)) + (addend - part)
    return _to_odd(total, lost).astype(np.float32)


def _pair_multiply_add(kind: DType) -> Meaning:
    """The meaning for one kind of narrow floats."""

    def run(d: DType, *words: Array) -> Array:
        """a * b + c of the two narrow floats in each word, rounded once; int32 alone"""
        a, b, c = (_parts(w, kind.numpy).astype(np.float64) for w in words)
        total = a * b + c
        near = total.astype(np.float32)
        return _words(_to_odd(near, total - near).astype(kind.numpy))

    return run


def _fused(a: float, b: float, c: float) -> float:
    plain = a * b + c
    if not (math.isfinite(a) and math.isfinite(b) and math.isfinite(c)):
        return plain
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    try:
        return float(exact) if exact else plain
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


EXACT = "exp exp2 log log2 log10 expm1 log1p sin cos tan arcsin arccos arctan sinh cosh tanh"
# What `functions` expands where no instruction computes it: their results are floats.
FUNCTIONS: dict[str, Meaning] = {
    **{name.replace("arc", "a"): _exact(getattr(np, name)) for name in EXACT.split()},
    "erf": _exact(_by_float64(math.erf)),
    "erfc": _exact(_by_float64(math.erfc)),
    "erf_inverse": _exact(_by_float64(_erf_inverse)),
}
UNARY: dict[str, Meaning] = {
    "negative": _negative,
    "absolute": _plain(np.absolute),
    "square_root": _plain(np.sqrt),
    "reciprocal": _plain(np.reciprocal),
    **FUNCTIONS,
    "floor": _rounding(np.floor), "ceil": _rounding(np.ceil), "round": _rounding(np.rint),
    "trunc": _rounding(np.trunc),
    "bit_not": _plain(np.invert),
    "sign": _sign,
    "quick_exp": FUNCTIONS["exp"], "quick_exp2": FUNCTIONS["exp2"],
    "quick_reciprocal": _plain(np.reciprocal),
}  # fmt: skip
BINARY: dict[str, Meaning] = {
    "add": _plain(np.add), "subtract": _subtract, "multiply": _plain(np.multiply),
    "divide": _divide, "floor_divide": _floor_divide,
    "remainder": _remainder, "fmod": _plain(np.fmod), "power": _power,
    "maximum": _extreme(np.maximum, 1), "minimum": _extreme(np.minimum, -1),
    "bit_and": _plain(np.bitwise_and), "bit_or": _plain(np.bitwise_or),
    "bit_xor": _plain(np.bitwise_xor),
    "shift_left": _plain(np.left_shift), "shift_right": _plain(np.right_shift),
    "multiply_high": _unsigned(_multiply_high),
    "unsigned_divide": _unsigned(np.floor_divide),
    "unsigned_remainder": _unsigned(np.remainder),
    "quick_divide": _divide,
}  # fmt: skip
COMPARE = {
    "equal": _plain(np.equal),
    "not_equal": _plain(np.not_equal),
    "less": _plain(np.less),
    "less_equal": _plain(np.less_equal),
}
TERNARY: dict[str, Meaning] = {
    "multiply_add": _multiply_add,
    "byte_dot": _byte_dot(np.uint8),
    "signed_byte_dot": _byte_dot(np.int8),
    "byte_permute": _byte_permute,
    "pair_multiply_add_bfloat16": _pair_multiply_add(dtypes.bfloat16),
    "pair_multiply_add_float16": _pair_multiply_add(dtypes.float16),
}
CATEGORIES = {"unary": UNARY, "binary": BINARY, "compare": COMPARE, "ternary": TERNARY}
TABLE = {**UNARY, **BINARY, **COMPARE, **TERNARY}

OF_FLOATS = {"square_root", "reciprocal", "quick_exp", "quick_exp2", "quick_reciprocal", *FUNCTIONS}
UNSIGNED = {"multiply_high", "unsigned_divide", "unsigned_remainder"}
OF_INTEGERS = {"shift_left", "shift_right", *UNSIGNED}
OF_BITS = {"bit_and", "bit_or", "bit_xor", "bit_not"}
OF_WORDS = {*TERNARY} - {"multiply_add"}
OF_NUMBERS = {"divide", "quick_divide", "floor_divide", "remainder", "fmod", "power"}
NEEDS: tuple[tuple[str, set[str], Callable[[DType], bool]], ...] = (  # what ops ask of operands
    ("floats", OF_FLOATS, lambda d: d.is_float),
    ("integers", OF_INTEGERS, lambda d: d.is_integer),
    ("integers or bools", OF_BITS, lambda d: not d.is_float),
    ("int32", OF_WORDS, lambda d: d is dtypes.int32),
    ("numbers", OF_NUMBERS, lambda d: not _boolean(d)),
)


def wanted(name: str, dtype: DType) -> str:
    """The operands an elementwise op has a meaning for; '' where those of a dtype are such."""
    for operands, names, fits in NEEDS:
        if name in names and not fits(dtype):
            return operands
    return ""


# ---- shape, reduce, dot, cast ---------------------------------------------------------------


def part(x: Array, start: Shape, shape: Shape) -> Array:
    """A rectangle of x."""
    return x[tuple(slice(a, a + size) for a, size in zip(start, shape))]


def box(index: Any, shape: Shape, axes: Shape, sizes: Shape, strides: Any) -> Any:
    """Offsets of a tile at an index of an array, tile axis i along axes[i] of it, and where they
    are inside of the array's sizes."""
    offset, inside = np.zeros(shape, np.int64), np.ones(shape, np.bool_)
    steps = np.indices(shape, sparse=True)
    for axis, (start, size, stride) in enumerate(zip(index, sizes, strides)):
        position = start + sum(step for step, along in zip(steps, axes) if along == axis)
        inside &= (position >= 0) & (position < size)
        offset += position * stride
    return offset, inside


# The op that combines two values of a reduction; NumPy has a function of that name.
COMBINE = {"sum": "add", "prod": "multiply", "max": "maximum", "min": "minimum"}


def identity(kind: str, dtype: DType) -> Any:
    """The value that changes nothing under a reduction."""
    if kind == "sum":
        return False if dtype.kind == "bool" else (-0.0 if dtype.is_float else 0)
    if kind == "prod":
        return True if dtype.kind == "bool" else 1
    return dtype.lowest if kind == "max" else dtype.highest


def fold(x: Array, dtype: DType, kind: str, axis: int, whole: bool) -> Array:
    """Reduce (or run along) an axis; sums of narrow floats are kept in float32, a sum of bools is
    whether one holds."""
    wide = np.dtype(np.int8) if dtype.bits == 4 else dtype.wide.numpy  # no folds of int4
    function = getattr(np, COMBINE[kind])
    call = function.reduce if whole else function.accumulate
    return np.asarray(call(x.astype(wide), axis=axis, dtype=wide)).astype(dtype.numpy)


def dot(a: Array, b: Array, c: Array, dtype: DType) -> Array:
    """a @ b + c: operands converted to c's dtype, narrow floats accumulated in float32."""
    wide = dtype.wide.numpy
    return (a.astype(wide) @ b.astype(wide) + c.astype(wide)).astype(dtype.numpy)


def matrix_dot(accumulator: Array, a: Array, b: Array) -> Array:
    """accumulator + a @ b, where b (k/g, n*g) holds groups of g values of k side by side, or as
    words (k/g, n)."""
    (_, k), n = a.shape, accumulator.shape[1]
    if b.dtype.itemsize > a.dtype.itemsize:
        b = np.ascontiguousarray(b).view(a.dtype)
    rows = b.shape[0]
    if k % rows or b.shape[1] * rows != k * n:
        raise InternalError("tile.matrix_dot", f"{a.shape} by packed {b.shape} is not {n} wide")
    group = k // rows
    plain = b.reshape(rows, n, group).transpose(0, 2, 1).reshape(k, n)
    wide = accumulator.dtype
    return accumulator + a.astype(wide) @ plain.astype(wide)


def cast(x: Array, source: DType, target: DType) -> Array:
    """x converted. Floats to integers saturate at int32 (at int64 for wider or unsigned 32-bit
    targets), nan gives 0, then they wrap; float64 rounds to float32 before narrower floats."""
    if source is target:
        return x
    if target.is_float and target.bits < 32:
        x = x.astype(np.float32)
    elif source.is_float and target.is_integer:
        x = _saturate(x, np.int64 if target.bits >= 32 and target is not dtypes.int32 else np.int32)
    return x.astype(target.numpy)


def _saturate(x: Array, wide: Any) -> Array:
    """Floats truncated to a signed integer, saturating; nan gives 0."""
    limit, exact = np.iinfo(wide), np.nan_to_num(x.astype(np.float64), nan=0.0)
    exact = np.maximum(exact, float(limit.min))
    return np.where(exact >= float(limit.max), limit.max, exact.astype(wide))


def repeat_bits(x: Array) -> Array:
    """16 bits in both halves of an int32."""
    bits = np.ascontiguousarray(x).view(np.uint16).astype(np.uint32)
    return (bits << np.uint32(16) | bits).view(np.int32)


def bitcast(x: Array, dtype: DType) -> Array:
    """The same bits as another dtype of the same width."""
    return np.ascontiguousarray(x).view(dtype.numpy).reshape(x.shape)
