"""targets/ptx/rules: every elementwise op and cast against the Tile interpreter's numbers.

The instructions are run by a small evaluator over arrays of lanes, each lane with its own place
in the program, so that loops are as easy as straight lines. What hardware only approximates
(ex2.approx, rcp.approx) is moved by the error it is allowed, both ways.
"""

from __future__ import annotations

import math
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from simulator import simulate

from tilegrad.core import dtype as dtypes
from tilegrad.core.dtype import DType
from tilegrad.core.errors import InternalError
from tilegrad.targets.llvm import rules as llvm_rules
from tilegrad.targets.ptx import division, element, rules
from tilegrad.targets.ptx.program import Entry
from tilegrad.targets.ptx.write import Writer
from tilegrad.tile import numeric, ops

Array = np.ndarray
LONG = np.longdouble
CONTAINERS = {"p": np.bool_, "h": np.uint16, "r": np.uint32, "d": np.uint64}
FLOATS = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64}
ARITY = {"unary": 1, "binary": 2, "compare": 2, "ternary": 3}
NAMES = [n for n in ops.ELEMENTWISE if not n.startswith("pair_")]  # those: test_pairs


# ---- an evaluator of scalar PTX over lanes ---------------------------------------------------


def numpy_type(name: str) -> Any:
    """The NumPy type of an operand type such as s32, b16 or f64."""
    if name == "pred":
        return np.dtype(np.bool_)
    if name in FLOATS:
        return np.dtype(FLOATS[name])
    return np.dtype(f"{'i' if name[0] == 's' else 'u'}{int(name[1:]) // 8}")


class Machine:
    """Registers of all lanes, and what each form does to them."""

    def __init__(self, lanes: int, noise: int = 0) -> None:
        self.lanes, self.noise = lanes, noise
        self.multiply_add = quick_multiply_add
        self.registers: dict[str, Array] = {}

    def read(self, operand: str, type_: str) -> Array:
        """An operand of all lanes; a wider register is cut."""
        dtype = numpy_type(type_)
        if operand.startswith("%"):
            held = self.registers[operand]
            if dtype == np.bool_ or held.dtype.itemsize == dtype.itemsize:
                return held.view(dtype)
            assert held.dtype.itemsize > dtype.itemsize, (operand, type_)
            return held.astype(f"u{dtype.itemsize}").view(dtype)
        if operand[:2] in ("0f", "0d"):
            bits = np.array(int(operand[2:], 16), "u4" if operand[1] == "f" else "u8")
            value = bits.view("f4" if operand[1] == "f" else "f8")
            assert value.itemsize == dtype.itemsize, (operand, type_)
            value = value.view(dtype)
        else:
            mask = (1 << (8 * dtype.itemsize)) - 1
            value = np.array(int(operand, 0) & mask, f"u{dtype.itemsize}").view(dtype)
        return np.broadcast_to(value, (self.lanes,))

    def write(self, register: str, value: Array, active: Array) -> None:
        """A result into a register that is as wide or wider (then extended by its sign)."""
        container = np.dtype(CONTAINERS[register[1]])
        if value.dtype != np.bool_:
            assert value.dtype.itemsize <= container.itemsize, register
            if value.dtype.itemsize < container.itemsize:
                assert value.dtype.kind in "iu"
                value = value.astype(f"{value.dtype.kind}{container.itemsize}")
            value = np.ascontiguousarray(value).view(container)
        assert value.dtype == container, (register, value.dtype)
        old = self.registers.get(register)
        self.registers[register] = value if old is None else np.where(active, value, old)

    def run(self, lines: Sequence[str]) -> None:
        """All lanes from the first line past the last, the ones furthest behind first."""
        program = [line.strip().rstrip(";") for line in lines]
        labels = {text[:-1]: n for n, text in enumerate(program) if text.endswith(":")}
        places = np.zeros(self.lanes, np.int64)
        with np.errstate(all="ignore"):
            for _ in range(100_000):
                here = int(places.min())
                if here >= len(program):
                    return
                active = places == here
                text = program[here]
                places[active] += 1
                if text.endswith(":"):
                    continue
                if text.startswith("@"):
                    guard, text = text[1:].split(" ", 1)
                    holds = self.registers[guard.removeprefix("!")]
                    active = active & (~holds if guard.startswith("!") else holds)
                form, rest = text.split(" ", 1)
                operands = [part.strip() for part in rest.split(",")]
                if form == "bra":
                    places[active] = labels[operands[0]]
                else:
                    self.write(operands[0], self.value(form.split("."), operands[1:]), active)
        raise AssertionError("the program does not end")

    def value(self, words: list[str], operands: list[str]) -> Array:
        """What one instruction computes."""
        name, type_ = words[0], words[-1]
        if name == "cvt":
            return self.convert(words[1:], operands)
        if name == "selp":
            a, b = (self.read(o, type_) for o in operands[:2])
            return np.where(self.read(operands[2], "pred"), a, b)
        if name in ("shl", "shr"):
            return shift(name, self.read(operands[0], type_), self.read(operands[1], "u32"))
        if name in ("dp4a", "prmt"):
            given = [self.read(o, "s32").astype(np.int64) for o in operands]
            return of_bytes(name, *given, signed=words[1] == "s32")
        inputs = [self.read(o, type_) for o in operands]
        if name == "setp":
            return COMPARE[words[1]](*inputs)
        if name in ("ex2", "rcp") and words[1] == "approx":
            return self.approximate(name, "ftz" in words, inputs[0])
        if name in ("min", "max") and inputs[0].dtype.kind not in "iu":
            return extreme(name, "NaN" in words, *inputs)
        if inputs[0].dtype.kind not in "iub" and name in ("add", "sub", "mul", "div", "rcp"):
            assert words[1] == "rn", words  # or ptxas may contract
        if name == "fma":
            return self.multiply_add(*inputs)
        key = ".".join(w for w in words[:-1] if w in ("lo", "hi") or w == name)
        return np.asarray(VALUES[key](*inputs))

    def approximate(self, name: str, flush: bool, x: Array) -> Array:
        """2**x or 1/x in float32, moved by the allowed error where it is not exact."""
        wide = x.astype(np.float64)
        tiny = 2.0**-126
        if flush:
            wide = np.where(np.abs(wide) < tiny, np.copysign(0.0, wide), wide)
        exact = np.exp2(wide) if name == "ex2" else 1 / wide
        near = exact.astype(np.float32)
        moves = np.isfinite(near) & (near.astype(np.float64) != exact) & (near >= tiny)
        allowed = self.noise if name == "ex2" else np.sign(self.noise)
        moved = (near.view(np.int32) + np.int32(allowed)).view(np.float32)
        near = np.where(moves & np.isfinite(moved), moved, near)
        return np.where(np.abs(near) < tiny, np.float32(0), near) if flush else near

    def convert(self, words: list[str], operands: list[str]) -> Array:
        """cvt in the forms of the rules."""
        *how, target, source = words
        if target in ("e4m3x2", "e5m2x2"):
            assert how == ["rn", "satfinite"]
            high, low = (to_float8(target, self.read(o, "f32")) for o in operands)
            return low | (high << np.uint16(8))
        if target in ("f16x2", "bf16x2") and source == "f32":
            parts = [self.read(o, "f32").astype(FLOATS[target[:-2]]) for o in operands]
            high, low = (p.view(np.uint16).astype(np.uint32) for p in parts)
            return low | (high << np.uint32(16))
        if source == "e4m3x2":
            both = self.read(operands[0], "b16").view(np.uint8).view(ml_dtypes.float8_e4m3fn)
            return both.astype(np.float16).view(np.uint32)
        x = self.read(operands[0], source)
        if target in FLOATS and source in FLOATS and how and how[0][-1] == "i":
            assert target == source
            return {"rmi": np.floor, "rpi": np.ceil, "rni": np.rint, "rzi": np.trunc}[how[0]](x)
        if source in FLOATS and target not in FLOATS:
            assert how == ["rzi"]
            return to_integer(x, numpy_type(target), source)
        narrows = target in FLOATS and (source not in FLOATS or int(target[-2:]) < int(source[-2:]))
        assert how == (["rn"] if narrows else []), words
        return x.astype(numpy_type(target))


def to_float8(pair: str, x: Array) -> Array:
    """float32 to the byte of an 8-bit float, stopping at the largest."""
    dtype, limit = {
        "e4m3x2": (ml_dtypes.float8_e4m3fn, 448.0),
        "e5m2x2": (ml_dtypes.float8_e5m2, 57344.0),
    }[pair]
    return np.clip(x, -limit, limit).astype(dtype).view(np.uint8).astype(np.uint16)


def to_integer(x: Array, dtype: Any, source: str) -> Array:
    """Truncated and saturated; nan is 0, or the lowest where 64 bits take part."""
    information = np.iinfo(dtype)
    wide = np.trunc(x.astype(np.float64))
    over, under = wide >= float(information.max), wide <= float(information.min)
    inside = np.where(over | under | np.isnan(wide), 0, wide).astype(dtype)
    result = np.where(over, information.max, np.where(under, information.min, inside))
    odd = information.min if source == "f64" or dtype.itemsize == 8 else 0
    return np.where(np.isnan(wide), odd, result).astype(dtype)


def shift(name: str, x: Array, amount: Array) -> Array:
    """The amount is held at the width."""
    bits = 8 * x.dtype.itemsize
    over = amount >= bits
    within = np.where(over, 0, amount).astype(x.dtype)
    if name == "shl":
        return np.where(over, 0, np.left_shift(x, within)).astype(x.dtype)
    fill = np.where(x < 0, -1, 0).astype(x.dtype) if x.dtype.kind == "i" else np.zeros_like(x)
    return np.where(over, fill, np.right_shift(x, within))


def extreme(name: str, propagate: bool, a: Array, b: Array) -> Array:
    """min or max of floats: -0 is below 0; a nan wins with NaN, else loses."""
    ufunc = {
        ("min", True): np.minimum,
        ("max", True): np.maximum,
        ("min", False): np.fmin,
        ("max", False): np.fmax,
    }[name, propagate]
    zero = a + b if name == "max" else -(-a + -b)
    return np.where((a == 0) & (b == 0), zero, ufunc(a, b)).astype(a.dtype)


def exact_multiply_add(a: Array, b: Array, c: Array) -> Array:
    """a * b + c rounded once; of float64 slowly, in fractions."""
    return numeric.elementwise("multiply_add", dtypes.dtype_of(a.dtype), [a, b, c])


def quick_multiply_add(a: Array, b: Array, c: Array) -> Array:
    """a * b + c rounded once; of float64 in longdouble, exact where the result is exact, else
    now and then rounded the wrong way where it lies near halfway."""
    if a.dtype == np.float32:
        return exact_multiply_add(a, b, c)
    a, b, c = (value.astype(LONG) for value in (a, b, c))
    product = a * b
    parts = []
    for value in (a, b):
        moved = value * LONG(2.0**32 + 1)
        high = moved - (moved - value)
        parts += [high, value - high]
    error = ((parts[0] * parts[2] - product) + parts[0] * parts[3] + parts[1] * parts[2]) + (
        parts[1] * parts[3]
    )
    total = product + c
    part = total - product
    lost = (product - (total - part)) + (c - part)
    rest = lost + error
    return np.where(np.isfinite(total) & (rest != 0), total + rest, total).astype(np.float64)


def truncated(a: Array, b: Array) -> Array:
    """Integer quotient towards zero; a divisor of 0 or an overflow is not allowed to come here."""
    assert (b != 0).all()
    if a.dtype.kind == "u":
        return a // b
    assert not ((a == np.iinfo(a.dtype).min) & (b == -1)).any() or a.dtype.itemsize > 2
    quotient = a // b
    return (quotient + ((quotient * b != a) & ((a < 0) != (b < 0)))).astype(a.dtype)


def high_product(a: Array, b: Array) -> Array:
    """The upper half of an unsigned product."""
    wide = a.astype(object) * b.astype(object)
    return np.asarray(wide >> (8 * a.dtype.itemsize)).astype(a.dtype)


def of_bytes(name: str, a: Array, b: Array, c: Array, signed: bool) -> Array:
    """dp4a of bytes (unsigned or signed) by signed ones, and prmt of digits below 8."""
    total = c if name == "dp4a" else np.zeros_like(a)
    assert name == "dp4a" or not (c & 0x8888).any()  # or a sign would be copied
    both = (a & 0xFFFFFFFF).astype(np.uint64) | (b & 0xFFFFFFFF).astype(np.uint64) << np.uint64(32)
    for i in range(4):
        if name == "dp4a":
            left = a >> 8 * i & 255
            left = (left ^ 128) - 128 if signed else left
            total = total + left * (((b >> 8 * i & 255) ^ 128) - 128)
        else:
            at = (8 * (c >> 4 * i & 7)).astype(np.uint64)
            total = total | (both >> at & np.uint64(255)).astype(np.int64) << 8 * i
    return (total & 0xFFFFFFFF).astype(np.uint32).view(np.int32)


VALUES: dict[str, Callable[..., Array]] = {
    "mov": lambda x: x,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "mul.lo": np.multiply,
    "mul.hi": high_product,
    "mad.lo": lambda a, b, c: a * b + c,
    "div": lambda a, b: truncated(a, b) if a.dtype.kind in "iu" else np.divide(a, b),
    "rem": lambda a, b: a - truncated(a, b) * b,
    "min": np.minimum,
    "max": np.maximum,
    "abs": np.abs,
    "neg": np.negative,
    "sqrt": np.sqrt,
    "rcp": lambda x: x.dtype.type(1) / x,
    "copysign": lambda a, b: np.copysign(b, a),
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
}
COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "neu": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
    "ne": lambda a, b: (a != b) & (a == a) & (b == b),
}


# ---- elements into and out of registers ------------------------------------------------------


def load(machine: Machine, register: str, dtype: DType, x: Array) -> None:
    """Elements as the registers hold them."""
    if dtype.kind == "bool":
        held = x
    elif dtype is dtypes.int4:
        held = x.astype(np.int16).view(np.uint16)
    elif dtype.is_float and dtype.bits == 8:
        held = x.view(np.uint8).astype(np.uint16)
    elif dtype.bits == 8:
        held = x.astype(np.int16).view(np.uint16)
    else:
        held = x.view(f"u{dtype.size}")
    machine.registers[register] = held


def fetch(machine: Machine, register: str, dtype: DType) -> Array:
    """Elements of a register, which must be extended as the DType asks."""
    held = machine.registers[register]
    if dtype.kind == "bool" or dtype.bits >= 16:
        return held.view(dtype.numpy)
    if dtype.kind == "int":
        wide = held.view(np.int16)
        assert wide.min() >= dtype.lowest and wide.max() <= dtype.highest, (dtype, wide)
        return wide.astype(np.int8).astype(dtype.numpy)
    assert held.max() <= 255, (dtype, held)
    return held.astype(np.uint8).view(dtype.numpy)


def run(name: str, dtype: DType, inputs: Sequence[Array], noise: int = 0) -> Array:
    """One op through its instructions."""
    w, machine = Writer(), Machine(inputs[0].size, noise)
    registers = []
    for number, x in enumerate(inputs):
        kind = dtypes.bool_ if name == "where" and number == 0 else dtype
        registers.append(w.new(element.kind_of(kind)))
        load(machine, registers[-1], kind, x)
    if name == "multiply_add":
        machine.multiply_add = exact_multiply_add
    result = rules.apply(w, name, dtype, *registers)
    machine.run(w.lines)
    return fetch(machine, result, dtypes.bool_ if name in ops.COMPARE else dtype)


def instructions(name: str, dtype: DType) -> int:
    """How many instructions an op takes."""
    w = Writer()
    registers = [
        w.new(element.kind_of(dtype)) for _ in range(ARITY[ops.ELEMENTWISE[name].category])
    ]
    rules.apply(w, name, dtype, *registers)
    return len(w.lines)


# ---- arguments -------------------------------------------------------------------------------

SEED = 7


def edges(dtype: DType) -> Array:
    """Values at which something changes."""
    if dtype.kind == "bool":
        return np.array([False, True])
    if not dtype.is_float:
        whole = [0, 1, 2, 3, 5, 7, 8, 15, 16, 31, 32, 63, 64, 100, dtype.highest]
        whole += [dtype.highest - 1, dtype.highest // 2, dtype.highest // 2 + 1]
        signed = (
            [-v for v in whole] + [dtype.lowest, dtype.lowest + 1] if dtype.kind == "int" else []
        )
        inside = [v for v in whole + signed if dtype.lowest <= v <= dtype.highest]
        return np.array(sorted(set(inside)), dtype.numpy)
    information = ml_dtypes.finfo(dtype.numpy)
    small, tiny = float(information.smallest_subnormal), float(information.tiny)
    values = [
        0.0,
        small,
        3 * small,
        tiny,
        0.1,
        0.25,
        0.5,
        0.55,
        1.0,
        1.5,
        2.0,
        2.5,
        3.0,
        10.0,
        100.0,
    ]
    values += [88.72283, 87.5, 127.9, 149.5, float(information.max), math.inf]
    with np.errstate(over="ignore"):
        return np.array([*values, *(-v for v in values), math.nan]).astype(dtype.numpy)


def scattered(dtype: DType, count: int, rng: np.random.Generator) -> Array:
    """Random bits, and random numbers of ordinary size."""
    if dtype.kind == "bool":
        return rng.integers(0, 2, count).astype(np.bool_)
    if dtype is dtypes.int4:
        return rng.integers(-8, 8, count).astype(dtype.numpy)
    bits = rng.integers(0, 1 << dtype.bits, count, dtype=np.uint64).astype(f"u{dtype.size}")
    ordinary = (rng.standard_normal(count) * 10).astype(dtype.numpy if dtype.is_float else np.int64)
    return np.where(rng.random(count) < 0.5, bits.view(dtype.numpy), ordinary.astype(dtype.numpy))


def every(dtype: DType) -> Array | None:
    """All values of a small DType."""
    if dtype is dtypes.int4:
        return np.arange(-8, 8).astype(dtype.numpy)
    if dtype.kind == "bool" or dtype.bits > 8:
        return None
    return np.arange(256).astype(np.uint8).view(dtype.numpy)


def arguments(name: str, dtype: DType, arity: int) -> list[Array]:
    """Operands of one op: pairs of all edges (of all values where they are few), and random."""
    rng = np.random.default_rng(SEED)
    pool = every(dtype)
    known = edges(dtype) if pool is None else pool
    if arity == 1:
        return [np.concatenate([known, scattered(dtype, 3000, rng)])]
    a, b = (grid.reshape(-1) for grid in np.meshgrid(known, known))
    found = [np.concatenate([x, scattered(dtype, 2000, rng)]) for x in (a, b)]
    if arity == 3:
        kind = dtypes.bool_ if name == "where" else dtype
        third = np.concatenate([scattered(kind, a.size, rng), scattered(kind, 2000, rng)])
        found = [third, *found] if name == "where" else [*found, third]
    return found


PAIRS = [(name, dtype) for name in NAMES for dtype in dtypes.ALL if not numeric.wanted(name, dtype)]
# Largest distance from the rounded true value in ulp: float32, float64. Of float32 the first
# three rest on ex2.approx, which is allowed to be 2 ulp off itself.
ULPS = {
    "exp": (3, 1),
    "exp2": (2, 1),
    "tanh": (4, 2),
    "log": (1, 1),
    "log2": (2, 2),
    "expm1": (2, 2),
    "log1p": (2, 2),
    "sin": (1, 1),
    "cos": (1, 1),
    "tan": (3, 3),
    "asin": (3, 3),
    "acos": (2, 2),
    "atan": (2, 2),
    "erf": (2, 2),
    "erf_inverse": (3, 4),
    "power": (2, 2),
    "log10": (2, 2),
    "sinh": (2, 2),
    "cosh": (2, 2),
    "erfc": (2, 2),
}


# ---- tests -----------------------------------------------------------------------------------


def same(got: Array, wanted: Array, dtype: DType) -> Array:
    """Equal to the bit, signed zeros too; any nan is a nan."""
    kind = f"u{dtype.size}"
    equal = got.view(kind) == wanted.view(kind)
    with np.errstate(invalid="ignore"):
        return equal | (np.isnan(got) & np.isnan(wanted)) if dtype.is_float else equal


def distance(got: Array, wanted: Array) -> Array:
    """Steps between floats of one type; infinite where only one is nan."""
    wide = np.int64 if got.dtype.itemsize == 8 else np.int32
    low = np.iinfo(wide).min
    a, b = (np.where(v.view(wide) < 0, low - v.view(wide), v.view(wide)) for v in (got, wanted))
    steps = np.abs(a.astype(LONG) - b.astype(LONG))
    nan_a, nan_b = np.isnan(got), np.isnan(wanted)
    return np.where(nan_a & nan_b, 0, np.where(nan_a != nan_b, np.inf, steps))


def test_no_op_lacks_a_row() -> None:
    assert set(rules.ROWS) == set(ops.ELEMENTWISE)
    assert set(llvm_rules.ROWS) <= set(rules.ROWS)


def test_what_has_no_meaning_is_refused() -> None:
    refused = {(n, d.name) for n in NAMES for d in dtypes.ALL} - {(n, d.name) for n, d in PAIRS}
    floats = {d.name for d in dtypes.ALL if d.is_float}
    functions = {*ULPS, "square_root", "reciprocal", *QUICK} - {"power", "quick_divide"}
    integers_only = {
        "bit_and",
        "bit_or",
        "bit_xor",
        "bit_not",
        "shift_left",
        "shift_right",
        "multiply_high",
        "unsigned_divide",
        "unsigned_remainder",
    }
    for name, dtype in refused:
        assert (
            (name in functions and dtype not in floats)
            or (name in integers_only and dtype in floats)
            or (name in ("byte_dot", "signed_byte_dot", "byte_permute") and dtype != "int32")
            or dtype == "bool"
        ), (name, dtype)


@pytest.mark.parametrize("dtype", [dtypes.bfloat16, dtypes.float16], ids=str)
def test_pairs(dtype: DType) -> None:
    """One instruction on two narrow floats, subnormal ones too; NumPy rounds once as it does."""
    name, w = f"pair_multiply_add_{dtype}", Writer()
    rules.apply(w, name, dtypes.int32, "%r0", "%r1", "%r2")
    assert f"fma.rn.{'b' if dtype is dtypes.bfloat16 else ''}f16x2" in "\n".join(w.lines)
    with pytest.raises(InternalError, match="no meaning"):
        words = [ops.constant(value=0, dtype=dtypes.float32, shape=())] * 3
        ops.ELEMENTWISE[name](*words)
    least = np.arange(256, dtype=np.uint16).view(dtype.numpy)  # whole numbers of the least float
    power = dtype.numpy.type(2.0 ** (126 if dtype is dtypes.bfloat16 else 15))
    words = [np.stack([v, v], -1).view(np.int32)[:, 0] for v in (least, np.full_like(least, power))]
    zero = np.zeros(256, np.int32)
    found = numeric.elementwise(name, dtypes.int32, [*words, zero]).view(dtype.numpy)
    unit = 2.0 ** (-7 if dtype is dtypes.bfloat16 else -9)
    np.testing.assert_array_equal(found[::2].astype(np.float64), np.arange(256) * unit)


QUICK = ("quick_exp", "quick_exp2", "quick_reciprocal", "quick_divide")  # of floats, off by 2**-18
EXACT = [
    (name, dtype)
    for name, dtype in PAIRS
    if (name not in ULPS and name not in QUICK) or dtype.is_integer
]


@pytest.mark.parametrize("name,dtype", EXACT, ids=[f"{n}-{d}" for n, d in EXACT])
def test_exact_op(name: str, dtype: DType) -> None:
    inputs = arguments(name, dtype, ARITY[ops.ELEMENTWISE[name].category])
    got = run(name, dtype, inputs)
    with np.errstate(all="ignore"):
        if name == "where":
            wanted = np.where(*inputs)
        else:
            wanted = np.asarray(numeric.elementwise(name, dtype, list(inputs)))
    kind = dtypes.bool_ if name in ops.COMPARE else dtype
    wrong = np.flatnonzero(~same(got, wanted, kind))
    shown = [(*(i[n] for i in inputs), got[n], wanted[n]) for n in wrong[:5]]
    assert not wrong.size, f"{wrong.size} of {got.size}: (inputs, got, wanted) {shown}"


ROUNDED = [(n, d) for n, d in PAIRS if n in ULPS and d in (dtypes.float32, dtypes.float64)]


@pytest.mark.parametrize("name,dtype", ROUNDED, ids=[f"{n}-{d}" for n, d in ROUNDED])
def test_function_within_ulps(name: str, dtype: DType) -> None:
    inputs = arguments(name, dtype, ARITY[ops.ELEMENTWISE[name].category])
    if name in ("asin", "acos", "erf_inverse"):
        more = np.random.default_rng(1).uniform(-1, 1, 2000).astype(dtype.numpy)
        inputs = [np.concatenate([inputs[0], more])]
    with np.errstate(all="ignore"):
        wanted = numeric.elementwise(name, dtype, list(inputs))
    bound = ULPS[name][dtype is dtypes.float64]
    for noise in (-2, 0, 2) if name in APPROXIMATE and dtype is dtypes.float32 else (0,):
        got = run(name, dtype, inputs, noise)
        steps = distance(got, wanted)
        worst = int(steps.argmax())
        assert steps[worst] <= bound, (
            f"{name}({[i[worst] for i in inputs]}) = {got[worst]!r}, not {wanted[worst]!r}: "
            f"{steps[worst]} ulp with noise {noise}"
        )


APPROXIMATE = ("exp", "exp2", "tanh")


@pytest.mark.parametrize("name", APPROXIMATE)
def test_fast_functions_over_their_whole_range(name: str) -> None:
    low, high = {"exp": (-105, 89), "exp2": (-151, 129), "tanh": (-10, 10)}[name]
    sizes = np.exp2(np.linspace(-149, 7, 20001))
    x = np.concatenate([np.linspace(low, high, 200001), sizes, -sizes]).astype(np.float32)
    if name == "exp":  # every float around the last finite result
        around = np.float32(88.722839).view(np.int32) + np.arange(-200, 200, dtype=np.int32)
        x = np.concatenate([x, around.view(np.float32)])
    with np.errstate(all="ignore"):
        wanted = numeric.elementwise(name, dtypes.float32, [x])
    for noise in (-2, 0, 2):
        steps = distance(run(name, dtypes.float32, [x], noise), wanted)
        worst = int(steps.argmax())
        assert steps[worst] <= ULPS[name][0], (x[worst], steps[worst], noise)


NARROW = [d for d in dtypes.ALL if d.is_float and d.bits < 32]
NARROW_FUNCTIONS = [(n, d) for n, d in PAIRS if n in ULPS and d in NARROW]


@pytest.mark.parametrize(
    "name,dtype", NARROW_FUNCTIONS, ids=[f"{n}-{d}" for n, d in NARROW_FUNCTIONS]
)
def test_narrow_function_is_the_wide_one_rounded(name: str, dtype: DType) -> None:
    arity = ARITY[ops.ELEMENTWISE[name].category]
    inputs = [x[:1500] for x in arguments(name, dtype, arity)]
    got = run(name, dtype, inputs)
    wide = run(name, dtypes.float32, [x.astype(np.float32) for x in inputs])
    with np.errstate(all="ignore"):
        assert same(got, wide.astype(dtype.numpy), dtype).all()


CASTS = [(a, b) for a in dtypes.ALL for b in dtypes.ALL]


@pytest.mark.parametrize("source", dtypes.ALL, ids=str)
def test_casts(source: DType) -> None:
    x = arguments("negative", source, 1)[0]
    if source.is_float and source.bits >= 32:  # the ends of integers, and of narrow floats
        ends = np.exp2(np.arange(0, 65)).astype(source.numpy)
        near = [np.nextafter(ends, source.numpy.type(0)), ends, ends + source.numpy.type(0.5)]
        limits = np.array([448, 464, 464.1, 480, 57344, 61439.9, 61440, 65504, 65520, 3.4e38])
        near.append(limits.astype(source.numpy))
        for narrow in NARROW:  # all halfway points between neighbours
            if narrow.bits == 8:
                values = every(narrow).astype(source.numpy)
                values = np.sort(values[np.isfinite(values)])
                near.append((values[1:] + values[:-1]) / 2)
        x = np.concatenate([x, *near, *(-n for n in near)])
    for target in dtypes.ALL:
        w, machine = Writer(), Machine(x.size)
        register = w.new(element.kind_of(source))
        load(machine, register, source, x)
        result = element.convert(w, source, target, register)
        machine.run(w.lines)
        got = fetch(machine, result, target)
        with np.errstate(all="ignore"):
            wanted = numeric.cast(x, source, target)
        wrong = np.flatnonzero(~same(got, wanted, target))
        shown = [(x[n], got[n], wanted[n]) for n in wrong[:5]]
        assert not wrong.size, f"{source} to {target}: (x, got, wanted) {shown}"


HALVES = [d for d in NARROW if d.bits == 16]


@pytest.mark.parametrize("target", HALVES, ids=str)
def test_pairs_are_two_casts(target: DType) -> None:
    a, b = arguments("add", dtypes.float32, 2)
    w, machine = Writer(), Machine(a.size)
    low, high = w.new("b32"), w.new("b32")
    load(machine, low, dtypes.float32, a)
    load(machine, high, dtypes.float32, b)
    result = element.convert_pair(w, dtypes.float32, target, low, high)
    assert result is not None
    machine.run(w.lines)
    packed = machine.registers[result].view(target.numpy).reshape(-1, 2)
    with np.errstate(all="ignore"):
        for got, x in ((packed[:, 0], a), (packed[:, 1], b)):
            wanted = numeric.cast(x, dtypes.float32, target)
            assert same(np.ascontiguousarray(got), wanted, target).all()


def test_pairs_only_where_an_instruction_does_both() -> None:
    for source, target in CASTS:
        if source is not dtypes.float32 or target not in HALVES:
            assert element.convert_pair(Writer(), source, target, "%r0", "%r1") is None


@pytest.mark.parametrize("source", dtypes.ALL, ids=str)
def test_bitcasts(source: DType) -> None:
    x = arguments("negative", source, 1)[0]
    for target in dtypes.ALL:
        w, machine = Writer(), Machine(x.size)
        register = w.new(element.kind_of(source))
        if source is not target and (source.bits != target.bits or dtypes.int4 in (source, target)):
            with pytest.raises(InternalError, match="differ in width"):
                element.bitcast(w, source, target, register)
            continue
        held = x if target.kind != "bool" else (x.view(np.uint8) & 1).view(source.numpy)
        load(machine, register, source, held)
        result = element.bitcast(w, source, target, register)
        machine.run(w.lines)
        got = fetch(machine, result, target)
        assert np.array_equal(got.view(f"u{target.size}"), held.view(f"u{source.size}"))


@pytest.mark.parametrize("dtype", dtypes.ALL, ids=str)
def test_constants(dtype: DType) -> None:
    for value in (0, 1, -1, dtype.highest, dtype.lowest, 0.1, -0.0, math.inf, math.nan):
        if not dtype.is_float and (value != value or value in (math.inf, -math.inf)):
            continue
        whole = value if dtype.is_float else int(value)
        w, machine = Writer(), Machine(1)
        result = element.constant(w, whole, dtype)
        assert len(w.lines) == 1
        machine.run(w.lines)
        with np.errstate(all="ignore"):
            wanted = np.atleast_1d(np.asarray(whole).astype(dtype.numpy))
        assert same(fetch(machine, result, dtype), wanted, dtype).all(), (dtype, value)


@pytest.mark.parametrize("kind", ["sum", "prod", "max", "min"])
@pytest.mark.parametrize("dtype", dtypes.ALL, ids=str)
def test_combine_is_a_fold_of_two(kind: str, dtype: DType) -> None:
    if dtype is dtypes.int4:
        return  # NumPy folds no int4
    a, b = arguments("add", dtype, 2)
    w, machine = Writer(), Machine(a.size)
    registers = [w.new(element.kind_of(dtype)) for _ in range(2)]
    for register, x in zip(registers, (a, b)):
        load(machine, register, dtype, x)
    result = rules.apply(w, numeric.COMBINE[kind], dtype, *registers)
    machine.run(w.lines)
    got = fetch(machine, result, dtype)
    with np.errstate(all="ignore"):
        wanted = numeric.fold(np.stack([a, b]), dtype, kind, 0, True)
        zeros = (a == 0) & (b == 0)  # which zero NumPy keeps is not said
    assert (same(got, wanted, dtype) | zeros).all()


DIVISORS = (
    1,
    2,
    3,
    5,
    6,
    7,
    8,
    9,
    10,
    11,
    12,
    13,
    28,
    64,
    100,
    127,
    128,
    255,
    641,
    1000,
    32767,
    1 << 15,
    (1 << 15) + 1,
    65535,
    6700417,
    1_000_000_007,
    1 << 30,
    (1 << 31) - 1,
    1 << 31,
    (1 << 31) + 1,
    (1 << 32) - 1,
    274177,
    1 << 62,
    (1 << 63) - 25,
    (1 << 63) + 1,
    0,
    -1,
    -2,
    -3,
    -7,
    -8,
    -100,
    -128,
    -32768,
)
WHOLE = [d for d in dtypes.ALL if d.is_integer]


@pytest.mark.parametrize("dtype", WHOLE, ids=str)
def test_divisions_by_a_literal(dtype: DType) -> None:
    known = arguments("negative", dtype, 1)[0]
    ends = (dtype.lowest, dtype.highest)
    for value in {v for v in (*DIVISORS, *ends) if dtype.lowest <= v <= dtype.highest}:
        wide = known[:500].astype(object) // (value or 1) * value  # multiples, and one below
        near = [v for v in (*wide, *(wide - 1)) if dtype.lowest <= v <= dtype.highest]
        x = np.concatenate([known, np.array(near, object).astype(dtype.numpy)])
        for name in sorted(division.DIVISIONS):
            w, machine = Writer(), Machine(x.size)
            register = w.new(element.kind_of(dtype))
            load(machine, register, dtype, x)
            result = rules.apply(w, name, dtype, register, element.literal(value, dtype))
            machine.run(w.lines)
            with np.errstate(all="ignore"):
                divisor = np.full_like(x, value)
                wanted = numeric.elementwise(name, dtype, [x, divisor])
            got = fetch(machine, result, dtype)
            assert same(got, wanted, dtype).all(), (name, dtype, value)


def test_other_literals_are_refused() -> None:
    for name, dtype, inputs in [
        ("add", dtypes.int32, ("%r0", "1")),
        ("divide", dtypes.float32, ("%r0", "0f3F800000")),
        ("divide", dtypes.int32, ("1", "%r0")),
    ]:
        with pytest.raises(InternalError, match="takes no literal"):
            rules.apply(Writer(), name, dtype, *inputs)


def test_hot_functions_take_few_instructions() -> None:
    for name, most in {
        "exp": 8,
        "exp2": 1,
        "divide": 1,
        "reciprocal": 1,
        "square_root": 1,
        "tanh": 25,
        "erf": 40,
        "maximum": 1,
        "multiply_add": 1,
    }.items():
        assert instructions(name, dtypes.float32) <= most, name
    for dtype in (dtypes.bfloat16, dtypes.float16):
        for name in ("maximum", "minimum", "negative", "absolute"):
            assert instructions(name, dtype) == 1, name


# ---- assembly --------------------------------------------------------------------------------

LOADS = {"b16": 2, "b32": 4, "b64": 8}


def fetch_operand(w: Writer, dtype: DType, offset: int, base: str = "%d0") -> str:
    """A register of the DType with bits from memory."""
    if dtype.kind == "bool":
        return w.value("setp.ne.b32", w.value("ld.global.b32", f"[{base}+{offset}]"), "0")
    kind = element.kind_of(dtype)
    return w.value(f"ld.global.{kind}", f"[{base}+{offset}]")


def kernel(name: str, write: Callable[[Writer], list[tuple[str, DType]]]) -> str:
    """An entry that stores what `write` gives."""
    w = Writer()
    w.value("ld.param.u64", "[memory]")
    for number, (result, dtype) in enumerate(write(w)):
        kind = element.kind_of(dtype)
        if kind == "pred":
            result, kind = w.value("selp.b32", "1", "0", result), "b32"
        w.put(f"st.global.{kind}", f"[%d0+{1024 + 8 * number}]", result)
    w.put("ret")
    body = "\n".join([*w.declarations(), *w.lines])
    return f".visible .entry {name}(.param .u64 memory)\n{{\n{body}\n}}\n"


def op_kernel(name: str, dtype: DType) -> str:
    def write(w: Writer) -> list[tuple[str, DType]]:
        kinds = [dtype] * ARITY[ops.ELEMENTWISE[name].category]
        if name == "where":
            kinds[0] = dtypes.bool_
        registers = [fetch_operand(w, d, 8 * n) for n, d in enumerate(kinds)]
        result = dtypes.bool_ if name in ops.COMPARE else dtype
        return [(rules.apply(w, name, dtype, *registers), result)]

    return kernel(f"{name}_{dtype}", write)


def cast_kernel(source: DType, targets: Sequence[DType]) -> str:
    def write(w: Writer) -> list[tuple[str, DType]]:
        x, y = (fetch_operand(w, source, n) for n in (0, 8))
        found = [(element.convert(w, source, target, x), target) for target in targets]
        for target in targets:
            pair = element.convert_pair(w, source, target, x, y)
            if pair is not None:
                found.append((pair, dtypes.uint32))
            found.append((element.constant(w, 1, target), target))
            if source.bits == target.bits and dtypes.int4 not in (source, target):
                found.append((element.bitcast(w, source, target, x), target))
        return found

    return kernel(f"cast_{source}", write)


def division_kernel(dtype: DType) -> str:
    def write(w: Writer) -> list[tuple[str, DType]]:
        x = fetch_operand(w, dtype, 0)
        return [
            (rules.apply(w, name, dtype, x, element.literal(value, dtype)), dtype)
            for name in sorted(division.DIVISIONS)
            for value in (0, 1, 3, 4, -1, -2, -3, dtype.lowest, dtype.highest)
        ]

    return kernel(f"division_{dtype}", write)


def assemble(kernels: list[str], architecture: str, folder: Path) -> None:
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        pytest.skip("ptxas is not installed: the text of the rules is NOT assembled")
    text = folder / "rules.ptx"
    text.write_text(HEADER.format(architecture) + "\n".join(kernels))
    command = [ptxas, f"-arch={architecture}", "-O1", str(text), "-o", str(folder / "rules.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[:2000]


# ---- the simulator ---------------------------------------------------------------------------

HEADER = ".version 8.0\n.target {}\n.address_size 64\n\n"


def simulated(dtype: DType, result: DType, write: Callable[..., str], inputs: list[Array]) -> Array:
    """What the simulator of the target makes of an op, a warp of elements at a time."""
    w, count = Writer(), len(inputs[0])
    base = w.value("ld.param.u64", "[memory]")
    lane = w.value("mov.u32", "%tid.x")
    offset = w.value("mul.wide.u32", lane, "32")
    at = w.value("add.s64", base, offset)
    registers = []
    kinds = [dtypes.bool_ if x.dtype == np.bool_ else dtype for x in inputs]
    for number, kind in enumerate(kinds):
        registers.append(fetch_operand(w, kind, 8 * number, at))
    found, kind = write(w, *registers), element.kind_of(result)
    if kind == "pred":
        found, kind = w.value("selp.b16", "1", "0", found), "b16"
    w.put(f"st.global.{kind}", f"[{at}+24]", found)
    w.put("ret")
    body = "\n".join([*w.declarations(), *w.lines])
    text = HEADER.format("sm_90a") + f".visible .entry one(.param .u64 memory)\n{{\n{body}\n}}\n"
    memory = np.zeros((count, 4), np.uint64)
    for number, (x, kind_) in enumerate(zip(inputs, kinds)):
        machine = Machine(count)
        load(machine, "%", kind_, x)
        memory[:, number] = machine.registers["%"].astype(np.uint64)
    entry = Entry("one", (("pointer", 0),), (1,), count)
    simulate(text, entry, [memory])
    machine = Machine(count)
    width = {"pred": np.uint16, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64}
    held = memory[:, 3].astype(width[element.kind_of(result)])
    machine.registers["%"] = held if result.kind != "bool" else held != 0
    return fetch(machine, "%", result)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", dtypes.ALL, ids=str)
def test_the_simulator_agrees(dtype: DType) -> None:
    rng = np.random.default_rng(3)
    for name in [n for n, d in PAIRS if d is dtype and not (n in QUICK and d.is_float)]:
        inputs = arguments(name, dtype, ARITY[ops.ELEMENTWISE[name].category])
        chosen = rng.choice(len(inputs[0]), 64)
        inputs = [np.ascontiguousarray(x[chosen]) for x in inputs]
        result = dtypes.bool_ if name in ops.COMPARE else dtype

        def write(w: Writer, *registers: str, name: str = name) -> str:
            return rules.apply(w, name, dtype, *registers)

        got = simulated(dtype, result, write, inputs)
        wanted = run(name, dtype, inputs)
        if name in ULPS and dtype is dtypes.float64:  # the evaluator's own fma is the quick one
            assert distance(got, wanted).max() <= 2, name
        else:
            assert same(got, wanted, result).all(), name
    x = np.ascontiguousarray(rng.permutation(arguments("negative", dtype, 1)[0])[:64])
    for target in dtypes.ALL:

        def cast(w: Writer, register: str, target: DType = target) -> str:
            return element.convert(w, dtype, target, register)

        with np.errstate(all="ignore"):
            wanted = numeric.cast(x, dtype, target)
        assert same(simulated(dtype, target, cast, [x]), wanted, target).all(), target


@pytest.mark.parametrize("name", QUICK)
def test_quick_ops_are_near(name: str) -> None:
    rng = np.random.default_rng(4)
    x = rng.uniform(-30, 30, 512).astype(np.float32)
    y = (rng.uniform(0.5, 2, 512) * 2.0 ** rng.integers(-60, 60, 512)).astype(np.float32)
    inputs = [x] if name.startswith("quick_exp") else [y] if name == "quick_reciprocal" else [x, y]

    def write(w: Writer, *registers: str) -> str:
        return rules.apply(w, name, dtypes.float32, *registers)

    for start in range(0, 512, 64):
        part = [np.ascontiguousarray(i[start : start + 64]) for i in inputs]
        got = simulated(dtypes.float32, dtypes.float32, write, part).astype(np.float64)
        wide = [i.astype(np.float64) for i in part]
        wanted = {
            "quick_exp": np.exp,
            "quick_exp2": np.exp2,
            "quick_reciprocal": np.reciprocal,
            "quick_divide": np.divide,
        }[name](*wide)
        assert (np.abs(got - wanted) <= 2.0**-18 * np.abs(wanted)).all(), name


# ---- ptxas -----------------------------------------------------------------------------------


def test_every_pair_assembles(tmp_path: Path) -> None:
    kernels = [op_kernel(name, dtype) for name, dtype in PAIRS]
    kernels += [cast_kernel(source, dtypes.ALL) for source in dtypes.ALL]
    kernels += [division_kernel(dtype) for dtype in WHOLE]
    assemble(kernels, "sm_90a", tmp_path)


def test_all_but_8_bit_floats_assembles_for_older_machines(tmp_path: Path) -> None:
    older = [d for d in dtypes.ALL if not (d.is_float and d.bits == 8)]
    kernels = [cast_kernel(source, older) for source in older]
    names = ("add", "maximum", "exp", "tanh", "remainder", "less", "where", "power")
    kernels += [op_kernel(n, d) for n, d in PAIRS if n in names and d in older]
    assemble(kernels, "sm_80", tmp_path)
