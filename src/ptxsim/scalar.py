"""Arithmetic, comparison, conversion and moves of the simulator, one lane-wise function each.

Invariant: a float result is the exact one rounded once as the form says (approximations give
the correctly rounded value); integers wrap. The file is long because it holds one row for each
of the many scalar forms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from .errors import TextError
from .rounding import directed
from .text import Instruction
from .values import (
    BF16,
    FLOATS,
    LANES,
    PARAMETERS,
    SHARED_WINDOW,
    TYPES,
    UNSIGNED,
    Array,
    Decoder,
    Mask,
    Run,
    flush,
    fma32,
    fma64,
    odd_sum,
    rounded,
)

if TYPE_CHECKING:
    from .machine import Warp

Function = Callable[..., Array]
MODES = ("rn", "rz", "rm", "rp")


def apply(d: Decoder, i: Instruction, function: Function, into: str, *types: str) -> Run:
    """Run a function over operands of these types into the first operand."""
    if len(i.operands) != len(types) + 1:
        raise TextError(f"{len(types) + 1} operands expected, not {len(i.operands)}")
    put = d.put(i.operands[0], into)
    reads = [d.read(operand, type_) for operand, type_ in zip(i.operands[1:], types)]
    if len(reads) == 1:
        (one,) = reads
        return lambda warp, mask: put(warp, mask, function(one(warp)))
    if len(reads) == 2:
        left, right = reads
        return lambda warp, mask: put(warp, mask, function(left(warp), right(warp)))
    if len(reads) == 3:
        first, second, third = reads
        return lambda warp, mask: put(warp, mask, function(first(warp), second(warp), third(warp)))
    return lambda warp, mask: put(warp, mask, function(*[read(warp) for read in reads]))


def halves(function: Function, type_: str) -> Function:
    """A function over a 16-bit type, on both halves of 32-bit values."""
    dtype = TYPES[type_]

    def run(*values: Array) -> Array:
        split = [np.ascontiguousarray(v).view(dtype) for v in values]
        return np.ascontiguousarray(function(*split)).view(np.uint32)

    return run


def wide(value: Array) -> Array:
    """Any float as float64."""
    return value.astype(np.float64)


# ---- floats ---------------------------------------------------------------------------------


def _direction(words: list[str]) -> str:
    return next((m for m in MODES[1:] if m in words), "")


def _directed(name: str, type_: str, words: list[str]) -> Function:
    """Arithmetic with a directed rounding."""
    exact, finish = directed(name, type_, _direction(words)), _finish(type_, words)
    ftz = "ftz" in words and type_ == "f32"
    return lambda *values: finish(wide(exact(*[flush(v) if ftz else v for v in values])))


def _finish(type_: str, words: list[str]) -> Function:
    """Rounding, flushing and saturation of an exact or odd-rounded float64 result."""
    mode = next((m for m in MODES if m in words), "rn")
    ftz, sat, relu = "ftz" in words, "sat" in words, "relu" in words

    def run(value: Array) -> Array:
        result = rounded(value, type_, mode)
        if ftz and type_ == "f32":
            result = flush(result)
        if sat:
            result = np.where(np.isnan(wide(result)), np.zeros_like(result), result)
            result = np.clip(wide(result), 0.0, 1.0).astype(result.dtype)
        if relu:
            kept = wide(result) > 0
            result = np.where(kept | np.isnan(wide(result)), result, np.zeros_like(result))
        return result

    return run


def _float_binary(name: str, type_: str, words: list[str]) -> Function:
    finish, ftz = _finish(type_, words), "ftz" in words and type_ == "f32"
    if _direction(words):
        return _directed(name, type_, words)
    if type_ in ("f32", "f64") and not ({"ftz", "sat"} & set(words)):
        return {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}[name]

    def run(a: Array, b: Array) -> Array:
        if ftz:
            a, b = flush(a), flush(b)
        x, y = wide(a), wide(b)
        if name == "mul":
            return finish(x * y)
        if name == "div":
            return finish(wide(np.divide(a, b)))
        return finish(odd_sum(x, y if name == "add" else -y))

    return run


def _fma(type_: str, words: list[str]) -> Function:
    finish, ftz = _finish(type_, words), "ftz" in words and type_ == "f32"
    if _direction(words):
        return _directed("fma", type_, words)
    if type_ == "f64":
        return fma64
    if type_ == "f32" and not {"ftz", "sat"} & set(words):
        return fma32

    def run(a: Array, b: Array, c: Array) -> Array:
        if ftz:
            a, b, c = flush(a), flush(b), flush(c)
        return finish(odd_sum(wide(a) * wide(b), wide(c)))

    return run


def _extreme(name: str, type_: str, words: list[str]) -> Function:
    """min and max: a number wins over NaN unless .NaN, and -0 is below +0."""
    nan, ftz = "NaN" in words, "ftz" in words and type_ == "f32"

    def run(a: Array, b: Array) -> Array:
        if ftz:
            a, b = flush(a), flush(b)
        x, y = wide(a), wide(b)
        less = (x < y) | ((x == y) & np.signbit(x))
        result = np.where(less == (name == "min"), a, b)
        result = np.where(np.isnan(x), b, np.where(np.isnan(y), a, result))
        either = np.isnan(x) | np.isnan(y) if nan else np.isnan(x) & np.isnan(y)
        return np.where(either, np.full_like(a, np.nan), result)

    return run


UNARY: dict[str, Function] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": lambda x: 1.0 / x,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


def _float_unary(name: str, type_: str, words: list[str]) -> Function:
    function, finish = UNARY[name], _finish(type_, words)
    ftz = "ftz" in words and type_ == "f32"
    if _direction(words):
        return _directed(name, type_, words)
    if type_ == "f32" and name in ("rcp", "sqrt"):
        exact: Function = np.sqrt if name == "sqrt" else (lambda x: np.float32(1) / x)
        return lambda a: finish(wide(exact(flush(a) if ftz else a)))
    return lambda a: finish(function(wide(flush(a) if ftz else a)))


def decode_float(d: Decoder, i: Instruction) -> Run | None:
    """Arithmetic on floats; None if the type is not one."""
    words, type_ = i.words, i.words[-1]
    packed = type_.endswith("x2") and type_ not in ("s16x2", "u16x2")
    plain = type_[:-2] if packed else type_
    if plain not in FLOATS:
        return None
    name = words[0]
    if name in ("add", "sub", "mul", "div"):
        function, count = _float_binary(name, plain, words), 2
    elif name in ("fma", "mad"):
        function, count = _fma(plain, words), 3
    elif name in ("min", "max"):
        function, count = _extreme(name, plain, words), 2
    elif name in UNARY:
        function, count = _float_unary(name, plain, words), 1
    elif name in ("abs", "neg"):
        operation = np.abs if name == "abs" else np.negative
        ftz = "ftz" in words and plain == "f32"
        function, count = (lambda a: operation(flush(a) if ftz else a)), 1
    elif name == "copysign":  # the sign of the first, the rest of the second
        function, count = (lambda a, b: np.copysign(b, a)), 2
    else:
        return None
    return apply(d, i, halves(function, plain) if packed else function, type_, *[type_] * count)


# ---- integers -------------------------------------------------------------------------------


def _high(a: Array, b: Array) -> Array:
    """The upper half of a product."""
    bits = 8 * a.dtype.itemsize
    if bits < 64:
        double = np.dtype(f"{a.dtype.kind}{bits // 4}")
        return (a.astype(double) * b.astype(double) >> double.type(bits)).astype(a.dtype)
    product = (a.astype(object) * b.astype(object)) >> 64
    wrapped = [int(x) & ((1 << 64) - 1) for x in product]
    return np.array(wrapped, np.uint64).view(a.dtype)


def _widened(a: Array, b: Array) -> Array:
    double = np.dtype(f"{a.dtype.kind}{a.dtype.itemsize * 2}")
    return a.astype(double) * b.astype(double)


def _divide(a: Array, b: Array) -> Array:
    """Truncating; x / 0 is all ones."""
    safe = np.where(b == 0, np.ones_like(b), b)
    quotient = a // safe
    if a.dtype.kind == "i":
        quotient = quotient + ((quotient < 0) & (quotient * safe != a)).astype(a.dtype)
        quotient = np.where(b == -1, -a, quotient)
    return np.where(b == 0, ~np.zeros_like(a), quotient)


def _remainder(a: Array, b: Array) -> Array:
    return np.where(b == 0, a, a - _divide(a, b) * b)


def _shift_left(a: Array, b: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    amount = np.minimum(b, bits - 1).astype(a.dtype)
    return np.where(b >= bits, np.zeros_like(a), a << amount)


def _shift_right(a: Array, b: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    amount = np.minimum(b, bits - 1).astype(a.dtype)
    gone = a >> a.dtype.type(bits - 1) if a.dtype.kind == "i" else np.zeros_like(a)
    return np.where(b >= bits, gone, a >> amount)


def _saturating(a: Array, b: Array, sign: int) -> Array:
    total = a.astype(np.int64) + sign * b.astype(np.int64)
    return np.clip(total, -(1 << 31), (1 << 31) - 1).astype(a.dtype)


INTEGER: dict[str, Function] = {
    "add": np.add,
    "sub": np.subtract,
    "div": _divide,
    "rem": _remainder,
    "min": np.minimum,
    "max": np.maximum,
    "abs": np.abs,
    "neg": np.negative,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "cnot": lambda a: (a == 0).astype(a.dtype),
    "sad": lambda a, b, c: c + np.where(a < b, b - a, a - b),
}
ARITY = {"abs": 1, "neg": 1, "not": 1, "cnot": 1, "sad": 3}


def decode_integer(d: Decoder, i: Instruction) -> Run | None:
    """Arithmetic on integers and predicates."""
    name, type_, words = i.words[0], i.words[-1], i.words
    if name in ("addc", "subc", "madc") or (name in ("add", "sub", "mad") and "cc" in words):
        return _carrying(d, i)
    if name in ("add", "sub") and "sat" in words:
        sign = 1 if name == "add" else -1
        return apply(d, i, lambda a, b: _saturating(a, b, sign), type_, type_, type_)
    if name in ("mul", "mad", "mul24", "mad24"):
        return _multiply(d, i)
    if name in ("shl", "shr"):
        return apply(d, i, _shift_left if name == "shl" else _shift_right, type_, type_, "u32")
    if name not in INTEGER:
        return None
    if type_ in ("s16x2", "u16x2"):
        inner = halves(INTEGER[name], type_[:3])
        relu = "relu" in words
        function = (
            (lambda a, b: halves(lambda v: np.maximum(v, 0), "s16")(inner(a, b))) if relu else inner
        )
        return apply(d, i, function, type_, type_, type_)
    if "relu" in words:
        base = INTEGER[name]
        return apply(d, i, lambda a, b: np.maximum(base(a, b), 0), type_, type_, type_)
    return apply(d, i, INTEGER[name], type_, *[type_] * ARITY.get(name, 2))


def _multiply(d: Decoder, i: Instruction) -> Run:
    type_, words = i.words[-1], i.words
    into = f"{type_[0]}{2 * int(type_[1:])}" if "wide" in words else type_
    product: Function = np.multiply
    if "wide" in words:
        product = _widened
    elif words[0] in ("mul24", "mad24"):
        product = _multiply24(type_, "hi" in words)
    elif "hi" in words:
        product = _high
    if words[0] in ("mul", "mul24"):
        return apply(d, i, product, into, type_, type_)
    return apply(d, i, lambda a, b, c: product(a, b) + c, into, type_, type_, into)


def _multiply24(type_: str, high: bool) -> Function:
    def run(a: Array, b: Array) -> Array:
        x, y = (
            ((v.astype(np.int64) << 40) >> 40) if type_ == "s32" else v.astype(np.int64) & 0xFFFFFF
            for v in (a, b)
        )
        return ((x * y) >> (16 if high else 0)).astype(np.uint64).astype(np.uint32).view(a.dtype)

    return run


def _carrying(d: Decoder, i: Instruction) -> Run:
    """add.cc, addc, sub.cc, subc, mad.cc and madc with the warp's carry flag."""
    name, type_ = i.words[0], i.words[-1]
    bits = int(type_[1:])
    put = d.put(i.operands[0], type_)
    reads = [d.read(o, type_) for o in i.operands[1:]]
    takes, gives = name in ("addc", "subc", "madc"), "cc" in i.words
    product = (np.multiply if "lo" in i.words else _high) if name[:3] == "mad" else None

    def run(warp: Warp, mask: Mask) -> None:
        values = [r(warp) for r in reads]
        a, b = (product(values[0], values[1]), values[2]) if product else values
        unsigned = UNSIGNED[bits // 8]
        x, y = a.view(unsigned), b.view(unsigned)
        carry = (warp.carry if takes else np.zeros(LANES, np.bool_)).astype(unsigned)
        if name[:3] == "sub":
            total = x - y - carry
            out = (x < y) | ((x == y) & (carry > 0))
        else:
            total = x + y + carry
            out = (total < x) | ((total == x) & (carry > 0) & (y == ~np.zeros_like(y)))
        put(warp, mask, total)
        if gives:
            warp.carry = out if mask is None else np.where(mask, out, warp.carry)

    return run


def _bit_count(value: Array) -> Array:
    bytes_ = np.ascontiguousarray(value).view(np.uint8).reshape(LANES, -1)
    return np.unpackbits(bytes_, axis=1).sum(1).astype(np.uint32)


def _highest_bit(value: Array) -> Array:
    """The number of the highest set bit, 0xFFFFFFFF for 0."""
    result = np.full(LANES, 0xFFFFFFFF, np.uint32)
    for bit in range(8 * value.dtype.itemsize):
        result = np.where((value >> value.dtype.type(bit)) & value.dtype.type(1), bit, result)
    return result.astype(np.uint32)


def _find(value: Array) -> Array:
    unsigned = value.view(UNSIGNED[value.dtype.itemsize])
    if value.dtype.kind == "i":
        unsigned = np.where(value < 0, ~unsigned, unsigned)
    return _highest_bit(unsigned)


def _shift_to_top(at: np.ndarray, bits: int) -> np.ndarray:
    """How far to shift left until the bit at `at` is the highest; all ones where there is none."""
    return np.where(at == 0xFFFFFFFF, at, np.uint32(bits - 1) - at)


def _reverse(value: Array) -> Array:
    bytes_ = np.ascontiguousarray(value).view(np.uint8).reshape(LANES, -1)[:, ::-1]
    bits = np.unpackbits(bytes_, axis=1)[:, ::-1]
    return np.packbits(bits, axis=1)[:, ::-1].copy().view(value.dtype).reshape(LANES)


def _extract(a: Array, position: Array, length: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    result = np.zeros_like(a)
    for lane in range(LANES):
        at, count = int(position[lane]) & 255, int(length[lane]) & 255
        raw = int(a[lane]) & ((1 << bits) - 1)
        field = (raw >> at) & ((1 << count) - 1)
        if a.dtype.kind == "i" and count:
            sign = (raw >> min(at + count - 1, bits - 1)) & 1
            have = max(0, min(count, bits - at))
            if sign:
                field |= -1 << have
        field &= (1 << bits) - 1
        result[lane] = np.array([field], UNSIGNED[bits // 8]).view(a.dtype)[0]
    return result


def _insert(a: Array, b: Array, position: Array, length: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    result = np.zeros_like(b)
    for lane in range(LANES):
        at, count = int(position[lane]) & 255, int(length[lane]) & 255
        mask = (((1 << count) - 1) << at) & ((1 << bits) - 1)
        result[lane] = (int(b[lane]) & ~mask) | ((int(a[lane]) << at) & mask)
    return result


def _permute(mode: str) -> Function:
    def run(a: Array, b: Array, c: Array) -> Array:
        pool = np.stack([a, b], 1).view(np.uint8).reshape(LANES, 8)
        low = (c & 3).astype(np.int64)
        steps = np.arange(4)
        if not mode:
            selectors = (c[:, None] >> (4 * steps).astype(np.uint32)) & 15
            picked = np.take_along_axis(pool, (selectors & 7).astype(np.int64), 1)
            signs = (picked.view(np.int8) >> 7).view(np.uint8)
            picked = np.where(selectors & 8, signs, picked)
        else:
            at = {
                "f4e": low[:, None] + steps,
                "b4e": (low[:, None] - steps) % 8,
                "rc8": np.repeat(low[:, None], 4, 1),
                "ecl": np.maximum(low[:, None], steps),
                "ecr": np.minimum(low[:, None], steps),
                "rc16": (low[:, None] & 1) * 2 + steps % 2,
            }[mode]
            picked = np.take_along_axis(pool, at, 1)
        return np.ascontiguousarray(picked).view(np.uint32).reshape(LANES)

    return run


def _lop3(table: int) -> Function:
    def run(a: Array, b: Array, c: Array, _: Array) -> Array:
        result = np.zeros_like(a)
        for row in range(8):
            if table >> row & 1:
                result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
        return result

    return run


def _funnel(words: list[str]) -> Function:
    def run(a: Array, b: Array, c: Array) -> Array:
        both = (b.astype(np.uint64) << np.uint64(32)) | a.astype(np.uint64)
        amount = (c & 31 if "wrap" in words else np.minimum(c, 32)).astype(np.uint64)
        if "l" in words:
            return ((both << amount) >> np.uint64(32)).astype(np.uint32)
        return (both >> amount).astype(np.uint32)

    return run


def _dot(words: list[str]) -> Function:
    """dp4a and dp2a: sums of products of bytes."""
    left, right = (np.int8 if w == "s32" else np.uint8 for w in words[-2:])

    def run(a: Array, b: Array, c: Array) -> Array:
        x = np.ascontiguousarray(a).view(left).reshape(LANES, 4).astype(np.int64)
        y = np.ascontiguousarray(b).view(right).reshape(LANES, 4).astype(np.int64)
        if words[0] == "dp2a":
            half = np.int16 if words[-2] == "s32" else np.uint16
            x = np.ascontiguousarray(a).view(half).reshape(LANES, 2).astype(np.int64)
            y = y[:, :2] if "lo" in words else y[:, 2:]
        return (c.astype(np.int64) + (x * y).sum(1)).astype(np.uint64).astype(np.uint32)

    return run


def decode_bits(d: Decoder, i: Instruction) -> Run | None:
    """Instructions on the bits of words."""
    name, type_, words = i.words[0], i.words[-1], i.words
    if name == "shf":
        return apply(d, i, _funnel(words), "b32", "b32", "b32", "u32")
    if name == "bfe":
        return apply(d, i, _extract, type_, type_, "u32", "u32")
    if name == "bfi":
        return apply(d, i, _insert, type_, type_, type_, "u32", "u32")
    if name == "popc":
        return apply(d, i, _bit_count, "u32", type_)
    if name == "clz":
        bits = int(type_[1:])
        return apply(d, i, lambda a: np.uint32(bits - 1) - _highest_bit(a), "u32", type_)
    if name == "bfind":
        bits = int(type_[1:])
        if "shiftamt" in words:
            return apply(d, i, lambda a: _shift_to_top(_find(a), bits), "u32", type_)
        return apply(d, i, _find, "u32", type_)
    if name == "brev":
        return apply(d, i, _reverse, type_, type_)
    if name == "prmt":
        return apply(d, i, _permute(words[2] if len(words) > 2 else ""), *["b32"] * 4)
    if name == "lop3":
        return apply(d, i, _lop3(int(i.operands[4].text, 0)), *["b32"] * 5)
    if name in ("dp4a", "dp2a"):
        return apply(d, i, _dot(words), *["b32"] * 4)
    return None


# ---- comparison and choice ------------------------------------------------------------------


def compare(relation: str) -> Function:
    """A comparison; the unordered ones hold for NaN."""
    plain = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(relation, relation)
    if plain == "num":
        return lambda a, b: ~(np.isnan(a) | np.isnan(b))
    if plain == "nan":
        return lambda a, b: np.isnan(a) | np.isnan(b)
    table = {
        "eq": np.equal,
        "ne": np.not_equal,
        "lt": np.less,
        "le": np.less_equal,
        "gt": np.greater,
        "ge": np.greater_equal,
    }
    if plain in table:
        if plain == "ne":
            return lambda a, b: (a != b) & ~_unordered(a, b)
        return table[plain]
    if len(plain) == 3 and plain[-1] == "u" and plain[:2] in table:
        inner = table[plain[:2]]
        return lambda a, b: inner(a, b) | _unordered(a, b)
    raise TextError(f"comparison {relation}")


def _unordered(a: Array, b: Array) -> Array:
    return (a != a) | (b != b)


COMBINE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _comparable(type_: str, ftz: bool) -> Function:
    if type_ in ("bf16", "f16"):
        return wide
    return flush if ftz and type_ == "f32" else (lambda a: a)


def decode_compare(d: Decoder, i: Instruction) -> Run | None:
    """setp, set, selp, slct, testp."""
    words, type_ = i.words, i.words[-1]
    if words[0] == "setp":
        return _setp(d, i)
    if words[0] == "set":
        relation, into = compare(words[1]), words[-2]
        true = {"f32": np.float32(1), "u32": np.uint32(0xFFFFFFFF), "s32": np.int32(-1)}[into]
        ready = _comparable(type_, "ftz" in words)
        false = true.dtype.type(0)
        return apply(
            d,
            i,
            lambda a, b: np.where(relation(ready(a), ready(b)), true, false),
            into,
            type_,
            type_,
        )
    if words[0] == "selp":
        return apply(d, i, _select, type_, type_, type_, "pred")
    if words[0] == "slct":
        return apply(
            d, i, lambda a, b, c: _select(a, b, c >= 0), words[-2], words[-2], words[-2], type_
        )
    if words[0] == "testp":
        return apply(d, i, _test_property(words[1]), "pred", type_)
    return None


def _select(a: Array, b: Array, condition: Array) -> Array:
    return np.where(condition, a, b)


def _test_property(name: str) -> Function:
    def normal(a: Array) -> Array:
        least = 2.0**-126 if a.dtype == np.float32 else 2.0**-1022
        return np.isfinite(a) & (np.abs(a) >= least)

    tests: dict[str, Function] = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda a: ~np.isnan(a),
        "notanumber": np.isnan,
        "normal": normal,
        "subnormal": lambda a: np.isfinite(a) & ~normal(a) & (a != 0),
    }
    return tests[name]


def _setp(d: Decoder, i: Instruction) -> Run:
    words, type_ = i.words, i.words[-1]
    relation, ready = compare(words[1]), _comparable(type_.removesuffix("x2"), "ftz" in words)
    combine = next((COMBINE[w] for w in words if w in COMBINE), None)
    pair = i.operands[0].kind == "pair"
    outs = [d.put(o, "pred") for o in (i.operands[0].parts if pair else i.operands[:1])]
    a, b = d.read(i.operands[1], type_), d.read(i.operands[2], type_)
    third = d.read(i.operands[3], "pred") if combine else None

    def run(warp: Warp, mask: Mask) -> None:
        x, y = a(warp), b(warp)
        if type_.endswith("x2"):
            both = [
                np.ascontiguousarray(v).view(TYPES[type_[:-2]]).reshape(LANES, 2) for v in (x, y)
            ]
            result = relation(ready(both[0]), ready(both[1]))
            for half, put in enumerate(outs):
                put(warp, mask, np.ascontiguousarray(result[:, half]))
            return
        result = relation(ready(x), ready(y))
        for number, put in enumerate(outs):
            value = result if number == 0 else ~result
            put(warp, mask, combine(value, third(warp)) if combine and third else value)

    return run


# ---- conversion -----------------------------------------------------------------------------


def _float_to_integer(source: str, into: str, mode: str) -> Function:
    dtype = TYPES[into]
    turn = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode]
    info = np.iinfo(dtype)
    lost = (
        0
        if source != "f64" and dtype.itemsize < 8
        else (info.min if dtype.kind == "i" else 1 << (info.bits - 1))
    )

    def run(a: Array) -> Array:
        value = turn(wide(a))
        top, bottom = value >= float(info.max), value <= float(info.min)
        safe = np.where(top | bottom | np.isnan(value), 0.0, value)
        result = safe.astype(dtype)
        result = np.where(top, info.max, np.where(bottom, info.min, result)).astype(dtype)
        return np.where(np.isnan(value), np.array(lost, dtype), result).astype(dtype)

    return run


def _to_eight_bits(into: str, words: list[str]) -> Function:
    """float to e4m3 or e5m2, clamped to the largest finite value."""
    dtype = TYPES[into]
    most = float(ml_dtypes.finfo(dtype).max)

    def run(a: Array) -> Array:
        value = a.astype(np.float32)
        if "relu" in words:
            value = np.where(value > 0, value, np.where(np.isnan(value), value, np.float32(0)))
        clipped = np.where(np.isnan(value), value, np.clip(value, -most, most))
        result = clipped.astype(dtype).view(np.uint8)
        return np.where(np.isnan(value), np.uint8(0x7F), result).astype(np.uint16)

    return run


def decode_cvt(d: Decoder, i: Instruction) -> Run:
    """cvt in all directions."""
    words = i.words
    into, source = words[-2], words[-1]
    if words[1] == "pack":
        return _pack_integers(d, i)
    if into.endswith("x2") or source.endswith("x2"):
        return _packed_cvt(d, i, into, source)
    mode = next((w for w in words if w in ("rni", "rzi", "rmi", "rpi")), "")
    if into == "tf32":
        return apply(d, i, _to_tf32(words), "b32", "f32")
    ready: Function = flush if "ftz" in words and source == "f32" else (lambda a: a)
    if into in FLOATS:
        finish = _finish(into, words)
        if source not in FLOATS:
            return apply(d, i, _integer_to_float(into, source, finish), into, source)
        if mode:
            whole = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode]
            return apply(d, i, lambda a: finish(whole(wide(ready(a)))), into, source)
        return apply(d, i, lambda a: finish(wide(ready(a))), into, source)
    if source in FLOATS:
        function = _float_to_integer(source, into, mode or "rzi")
        return apply(d, i, lambda a: function(ready(a)), into, source)
    dtype = TYPES[into]
    if "sat" in words:
        info = np.iinfo(dtype)

        def saturate(a: Array) -> Array:
            return np.array([min(max(int(x), info.min), info.max) for x in a], dtype)

        return apply(d, i, saturate, into, source)
    return apply(d, i, lambda a: a.astype(dtype), into, source)


def _pack_integers(d: Decoder, i: Instruction) -> Run:
    """cvt.pack.sat: two s32 side by side in the low bits, then what a third operand holds."""
    into = i.words[3]
    info = np.iinfo(TYPES[into])
    mask = np.uint32((1 << info.bits) - 1)

    def run(a: Array, b: Array, *rest: Array) -> Array:
        high, low = (
            np.clip(v, info.min, info.max).astype(np.int32).view(np.uint32) & mask for v in (a, b)
        )
        packed = high << np.uint32(info.bits) | low
        return packed | rest[0] << np.uint32(16) if rest else packed

    return apply(d, i, run, "b32", "s32", "s32", *["b32"] * (len(i.operands) - 3))


def _integer_to_float(into: str, source: str, finish: Function) -> Function:
    if source not in ("s64", "u64"):
        return lambda a: finish(a.astype(np.float64))

    def run(a: Array) -> Array:
        near = a.astype(np.float64)
        exact = np.array([int(x) for x in a], object)
        error = np.array([float(e - int(n)) for e, n in zip(exact, near)])
        return finish(odd_sum(near, error) if into != "f64" else near)

    return run


def _to_tf32(words: list[str]) -> Function:
    def run(a: Array) -> Array:
        bits = a.view(np.uint32)
        if "rna" in words:
            moved = bits + np.uint32(0x1000)
        elif "rn" in words:
            moved = bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))
        else:
            moved = bits
        result = np.where(np.isfinite(a), moved & np.uint32(0xFFFFE000), bits)
        return np.where((a <= 0) & ("relu" in words), np.uint32(0), result)

    return run


def _packed_cvt(d: Decoder, i: Instruction, into: str, source: str) -> Run:
    if into in ("f16x2", "bf16x2") and source == "f32":
        finish = _finish(into[:-2], i.words)

        def pack(a: Array, b: Array) -> Array:
            both = np.stack([finish(wide(b)), finish(wide(a))], 1)
            return np.ascontiguousarray(both).view(np.uint32).reshape(LANES)

        return apply(d, i, pack, into, "f32", "f32")
    if into in ("e4m3x2", "e5m2x2"):
        turn = _to_eight_bits(into[:4], i.words)
        if source == "f32":
            return apply(d, i, lambda a, b: (turn(a) << np.uint16(8)) | turn(b), into, "f32", "f32")
        half = TYPES[source[:-2]]

        def join(a: Array) -> Array:
            both = turn(np.ascontiguousarray(a).view(half)).reshape(LANES, 2)
            return (both[:, 1] << np.uint16(8)) | both[:, 0]

        return apply(d, i, join, into, source)
    if source in ("e4m3x2", "e5m2x2"):
        dtype, half = TYPES[source[:4]], TYPES[into[:-2]]

        def split(a: Array) -> Array:
            values = np.ascontiguousarray(a).view(dtype).astype(np.float32).astype(half)
            return np.ascontiguousarray(values).view(np.uint32)

        return apply(d, i, split, into, source)
    raise TextError(f"cvt from {source} to {into}")


# ---- moves ----------------------------------------------------------------------------------


def decode_mov(d: Decoder, i: Instruction) -> Run:
    """mov, also of packed registers and of addresses."""
    return apply(d, i, lambda a: a, i.words[-1], i.words[-1])


def decode_cvta(d: Decoder, i: Instruction) -> Run:
    """Addresses between a space and the generic one."""
    space = next(w for w in i.words if w in ("global", "shared", "local", "const", "param"))
    base = {"shared": SHARED_WINDOW, "param": PARAMETERS}.get(space, 0)
    back = "to" in i.words

    def run(a: Array) -> Array:
        inside = a.astype(np.uint64) >= np.uint64(base)
        if back:
            return np.where(inside, a - np.array(base, a.dtype), a)
        return np.where(inside, a, a + np.array(base, a.dtype))

    return apply(d, i, run, i.words[-1], i.words[-1])


def decode_isspacep(d: Decoder, i: Instruction) -> Run:
    """Which space a generic address lies in."""
    bounds = {
        "global": (0x7F, 0x100),
        "shared": (0x7E, 0x7F),
        "shared::cta": (0x7E, 0x7F),
        "shared::cluster": (0x7E, 0x7F),
        "param": (0x7D, 0x7E),
    }
    low, high = bounds.get(i.words[1], (0, 0))
    step = np.uint64(40)
    return apply(d, i, lambda a: ((a >> step) >= low) & ((a >> step) < high), "pred", "u64")


def decode(d: Decoder, i: Instruction) -> Run | None:
    """Decode a scalar instruction; None if it is not one."""
    name = i.words[0]
    special: dict[str, Any] = {
        "cvt": decode_cvt,
        "mov": decode_mov,
        "cvta": decode_cvta,
        "isspacep": decode_isspacep,
    }
    if name in special:
        return special[name](d, i)
    for decoder in (decode_float, decode_compare, decode_integer, decode_bits):
        run = decoder(d, i)
        if run is not None:
            return run
    return None


__all__ = ["BF16", "apply", "decode"]
