"""The PTX simulator's arithmetic, comparison and conversion against exact numbers.

Many forms run in one kernel over the same inputs, each thread one element; what is expected is
worked out in Python integers and fractions, or by NumPy where it is correctly rounded itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from ptx_text import run

BITS = {
    "pred": "b32",
    "f16": "b16",
    "bf16": "b16",
    "f32": "b32",
    "f64": "b64",
    "f16x2": "b32",
    "bf16x2": "b32",
    "tf32": "b32",
    "e4m3x2": "b16",
    "e5m2x2": "b16",
    **{f"{x}{n}": f"b{max(n, 16)}" for x in "bus" for n in (8, 16, 32, 64)},
}
NUMPY = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f32": np.float32,
    "f64": np.float64,
    "pred": np.uint32,
    "f16x2": np.uint32,
    "bf16x2": np.uint32,
    "tf32": np.float32,
    "e4m3x2": np.uint16,
    "e5m2x2": np.uint16,
    **{f"{x}{n}": f"{'int' if x == 's' else 'uint'}{n}" for x in "bus" for n in (8, 16, 32, 64)},
}
PREFIX = {"b16": "%h", "b32": "%r", "b64": "%d"}


def evaluate(
    cases: Sequence[tuple[str, str]], types: Sequence[str], arrays: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Run (form, result type) cases over the same inputs; '{0}' in a form places an input."""
    count = arrays[0].size
    lines, inputs, results = ["\tmov.u32 %r0, %tid.x;"], [], []
    for number, type_ in enumerate(types):
        register, bits = f"{PREFIX[BITS[type_]]}{number + 1}", BITS[type_]
        size = np.dtype(NUMPY[type_]).itemsize
        inputs.append(register)
        lines += [
            f"\tld.param.u64 %d40, [p{number}];",
            f"\tmul.wide.u32 %d41, %r0, {size};",
            "\tadd.s64 %d42, %d40, %d41;",
        ]
        kind = f"{'s' if type_[0] == 's' else 'u'}8" if size == 1 else bits
        lines.append(f"\tld.global.{kind} {register}, [%d42];")
    for number, (form, into) in enumerate(cases):
        bits = BITS[into]
        size = np.dtype(NUMPY[into]).itemsize
        result = "%p1" if into == "pred" else f"{PREFIX[bits]}20"
        given = (
            form
            if "{" in form
            else f"{form} {{d}}, " + ", ".join(f"{{{k}}}" for k in range(len(types)))
        )
        lines.append("\t" + given.format(*inputs, d=result) + ";")
        if into == "pred":
            lines.append("\tselp.b32 %r20, 1, 0, %p1;")
            result = "%r20"
        lines += [
            f"\tld.param.u64 %d40, [p{len(types) + number}];",
            f"\tmul.wide.u32 %d41, %r0, {size};",
            "\tadd.s64 %d42, %d40, %d41;",
            f"\tst.global.{'b8' if size == 1 else bits} [%d42], {result};",
        ]
        results.append(np.zeros(count, NUMPY[into]))
    inputs_ = [np.ascontiguousarray(a, NUMPY[t]) for a, t in zip(arrays, types)]
    run("\n".join(lines), [*inputs_, *results], threads=count)
    return results


def bits(value: np.ndarray) -> np.ndarray:
    """The bits of an array, every NaN alike."""
    value = np.asarray(value)
    if value.dtype.kind not in "iu":
        value = np.where(np.isnan(value.astype(np.float64)), np.full_like(value, np.nan), value)
    return value.view(f"u{value.dtype.itemsize}")


SPECIAL = np.array(
    [
        0.0,
        -0.0,
        1.0,
        -1.0,
        1e-45,
        -1e-40,
        1.1754944e-38,
        3.4028235e38,
        np.inf,
        -np.inf,
        np.nan,
        0.5,
        3.0,
        -7.25,
        1e10,
        -1e-10,
    ],
    np.float32,
)


def floats(count: int, seed: int, dtype: object = np.float32) -> np.ndarray:
    """Specials in all pairs with random exponents after them."""
    rng = np.random.default_rng(seed)
    value = rng.standard_normal(count) * np.exp2(rng.integers(-30, 30, count))
    value[: SPECIAL.size] = rng.permutation(SPECIAL)
    return value.astype(dtype)  # type: ignore[arg-type]


def nearest(value: Fraction, digits: int, least: int) -> float:
    """A fraction rounded to nearest even with so many digits, exponents down to `least`."""
    if value == 0:
        return 0.0
    exponent = max(math.floor(math.log2(abs(value))) - digits + 1, least)
    for guess in (exponent - 1, exponent, exponent + 1):
        if guess >= least and abs(value) / Fraction(2) ** guess < 2**digits:
            return float(round(value / Fraction(2) ** guess) * Fraction(2) ** guess)
    raise AssertionError(value)


def test_fma_is_rounded_once() -> None:
    rng = np.random.default_rng(1)
    a = rng.standard_normal(256).astype(np.float32)
    b = rng.standard_normal(256).astype(np.float32)
    c = (-a.astype(np.float64) * b).astype(np.float32)  # what is left is the rounding error
    c[::3] = rng.standard_normal(86) * 2.0 ** rng.integers(-40, 40, 86)
    c[1::7] = np.float32(1e-45)
    (got,) = evaluate([("fma.rn.f32", "f32")], ["f32"] * 3, [a, b, c])
    exact = [
        Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(a, b, c)
    ]
    np.testing.assert_array_equal(got, np.array([nearest(e, 24, -149) for e in exact], np.float32))
    double = [v.astype(np.float64) / 3 for v in (a, b, c)]
    (got,) = evaluate([("fma.rn.f64", "f64")], ["f64"] * 3, double)
    exact = [
        Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(*double)
    ]
    np.testing.assert_array_equal(got, np.array([float(e) for e in exact]))


@pytest.mark.parametrize("type_", ["f32", "f64"])
@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
def test_directed_rounding(mode: str, type_: str) -> None:
    dtype = NUMPY[type_]
    a, b, c = (floats(64, seed)[16:].astype(dtype) / dtype(3) for seed in (2, 3, 4))
    a, exact = np.abs(a), {}
    for name in ("add", "mul", "div", "fma", "rcp", "sqrt"):
        values = [[Fraction(float(v)) for v in row] for row in zip(a, b, c)]
        exact[name] = [
            {"add": x + y, "mul": x * y, "div": x / y, "fma": x * y + z, "rcp": 1 / x, "sqrt": x}[
                name
            ]
            for x, y, z in values
        ]
    inputs = {"fma": "{0}, {1}, {2}", "rcp": "{0}", "sqrt": "{0}"}
    forms = [
        (f"{name}.{mode}.{type_} {{d}}, " + inputs.get(name, "{0}, {1}"), type_) for name in exact
    ]
    got = evaluate(forms, [type_] * 3, [a, b, c])
    for result, (name, wanted) in zip(got, exact.items()):
        power = 2 if name == "sqrt" else 1
        for value, target in zip(result, wanted):
            down, up = (
                Fraction(float(np.nextafter(value, dtype(side)))) ** power
                for side in (-np.inf, np.inf)
            )
            here = Fraction(float(value)) ** power
            if mode == "rp" or (mode == "rz" and value < 0):
                assert down < target <= here, name
            else:
                assert here <= target < up, name


def flushed(x: np.ndarray) -> np.ndarray:
    """Subnormals to zeros of their sign."""
    return np.where(np.abs(x) < 2.0**-126, np.copysign(np.float32(0), x), x)


def test_float_arithmetic() -> None:
    a, b = floats(256, 5), floats(256, 6)
    names: dict[str, Callable[..., np.ndarray]] = {
        "add.rn.f32": np.add,
        "sub.f32": np.subtract,
        "mul.rn.f32": np.multiply,
        "div.rn.f32": np.divide,
        "div.approx.f32": np.divide,
        "div.full.f32": np.divide,
        "add.ftz.f32": lambda x, y: flushed(flushed(x) + flushed(y)),
        "mul.rn.ftz.f32": lambda x, y: flushed(flushed(x) * flushed(y)),
        "add.sat.f32": lambda x, y: np.clip(np.nan_to_num(x + y, nan=0.0), 0, 1),
        "copysign.f32": lambda x, y: np.copysign(y, x),
    }
    got = evaluate([(name, "f32") for name in names], ["f32", "f32"], [a, b])
    with np.errstate(all="ignore"):
        for result, (name, expected) in zip(got, names.items()):
            np.testing.assert_array_equal(
                bits(result), bits(expected(a, b).astype(np.float32)), err_msg=name
            )


def test_float_minimum_and_maximum() -> None:
    pairs = np.array(list(itertools.product(SPECIAL, SPECIAL)), np.float32)
    a, b = pairs[:, 0].copy(), pairs[:, 1].copy()
    got = evaluate(
        [("min.f32", "f32"), ("max.f32", "f32"), ("min.NaN.f32", "f32"), ("max.NaN.f32", "f32")],
        ["f32", "f32"],
        [a, b],
    )
    for x, y, least, most, least_nan, most_nan in zip(a, b, *got):
        numbers = sorted(
            (v for v in (x, y) if not math.isnan(v)), key=lambda v: (v, math.copysign(1, v))
        )
        if not numbers:
            assert math.isnan(least) and math.isnan(most)
        else:
            assert bits(least) == bits(numbers[0]) and bits(most) == bits(numbers[-1])
        if len(numbers) < 2:
            assert math.isnan(least_nan) and math.isnan(most_nan)
        else:
            assert bits(least_nan) == bits(least) and bits(most_nan) == bits(most)


def test_float_functions_are_correctly_rounded() -> None:
    a = np.concatenate([SPECIAL, np.random.default_rng(7).uniform(-20, 20, 112).astype(np.float32)])
    names: dict[str, Callable[..., np.ndarray]] = {
        "ex2.approx.f32": np.exp2,
        "lg2.approx.f32": np.log2,
        "rcp.approx.f32": lambda x: 1 / x,
        "rcp.rn.f32": lambda x: 1 / x,
        "sqrt.rn.f32": np.sqrt,
        "sqrt.approx.f32": np.sqrt,
        "rsqrt.approx.f32": lambda x: 1 / np.sqrt(x),
        "sin.approx.f32": np.sin,
        "cos.approx.f32": np.cos,
        "tanh.approx.f32": np.tanh,
        "neg.f32": np.negative,
        "abs.f32": np.abs,
    }
    got = evaluate([(name, "f32") for name in names], ["f32"], [a])
    with np.errstate(all="ignore"):
        for result, (name, function) in zip(got, names.items()):
            expected = function(a.astype(np.float64)).astype(np.float32)
            np.testing.assert_array_equal(bits(result), bits(expected), err_msg=name)
        (got_flushed,) = evaluate([("ex2.approx.ftz.f32", "f32")], ["f32"], [a * 7])
        expected = flushed(np.exp2(flushed(a * 7).astype(np.float64)).astype(np.float32))
        np.testing.assert_array_equal(bits(got_flushed), bits(expected))


@pytest.mark.parametrize("type_", ["f16", "bf16"])
def test_half_arithmetic(type_: str) -> None:
    dtype = NUMPY[type_]
    a, b, c = ((np.random.default_rng(s).standard_normal(64) * 3).astype(dtype) for s in (8, 9, 10))
    digits, least = (11, -24) if type_ == "f16" else (8, -133)
    forms = [f"fma.rn.{type_}", *(f"{name}.{type_} {{d}}, {{0}}, {{1}}" for name in ("mul", "max"))]
    got = evaluate([(form, type_) for form in forms], [type_] * 3, [a, b, c])
    exact = [
        Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(a, b, c)
    ]
    expected = np.array([nearest(e, digits, least) for e in exact]).astype(np.float32).astype(dtype)
    np.testing.assert_array_equal(bits(got[0]), bits(expected))
    np.testing.assert_array_equal(bits(got[1]), bits((a.astype(np.float32) * b).astype(dtype)))
    np.testing.assert_array_equal(bits(got[2]), bits(np.maximum(a, b)))
    pairs = [np.ascontiguousarray(v).view(np.uint32) for v in (a, b, c)]
    (both,) = evaluate([(f"fma.rn.{type_}x2", f"{type_}x2")], [f"{type_}x2"] * 3, pairs)
    np.testing.assert_array_equal(both.view(dtype).view(np.uint16), bits(expected))


def wrapped(value: int, width: int, signed: bool) -> int:
    """A Python integer as a machine holds it."""
    value &= (1 << width) - 1
    return value - (1 << width) if signed and value >> (width - 1) else value


@pytest.mark.parametrize("type_", ["u16", "s16", "u32", "s32", "u64", "s64"])
def test_integer_arithmetic(type_: str) -> None:
    width, signed = int(type_[1:]), type_[0] == "s"
    info, rng = np.iinfo(NUMPY[type_]), np.random.default_rng(11)
    a = rng.integers(info.min, info.max, 64, NUMPY[type_], endpoint=True)
    b = rng.integers(info.min, info.max, 64, NUMPY[type_], endpoint=True)
    a[:4], b[:4] = [info.max, info.min, info.max, 1], [info.max, info.max, 1, 3]
    b[8:40] = rng.integers(1, 100, 32)

    def quotient(x: int, y: int) -> int:
        return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)

    cases: dict[str, Callable[[int, int], int]] = {
        f"add.{type_}": lambda x, y: x + y,
        f"sub.{type_}": lambda x, y: x - y,
        f"mul.lo.{type_}": lambda x, y: x * y,
        f"mul.hi.{type_}": lambda x, y: (x * y) >> width,
        f"min.{type_}": min,
        f"max.{type_}": max,
        f"div.{type_}": quotient,
        f"rem.{type_}": lambda x, y: x - quotient(x, y) * y,
        f"mad.lo.{type_} {{d}}, {{0}}, {{1}}, {{1}}": lambda x, y: x * y + y,
        f"and.b{width}": lambda x, y: x & y,
        f"xor.b{width}": lambda x, y: x ^ y,
    }
    b[b == 0] = 5
    got = evaluate([(name, type_) for name in cases], [type_, type_], [a, b])
    for result, (name, function) in zip(got, cases.items()):
        expected = [wrapped(function(int(x), int(y)), width, signed) for x, y in zip(a, b)]
        assert [int(v) for v in result] == expected, name
    if width < 64:
        wide = f"{type_[0]}{2 * width}"
        (got_wide,) = evaluate([(f"mul.wide.{type_}", wide)], [type_, type_], [a, b])
        assert [int(v) for v in got_wide] == [int(x) * int(y) for x, y in zip(a, b)]


@pytest.mark.parametrize("type_", ["b16", "s16", "b32", "s32", "b64", "s64"])
def test_shifts(type_: str) -> None:
    width, signed = int(type_[1:]), type_[0] == "s"
    rng = np.random.default_rng(12)
    info = np.iinfo(NUMPY[type_])
    a = rng.integers(info.min, info.max, 96, NUMPY[type_], endpoint=True)
    by = np.arange(96, dtype=np.uint32)
    left, right = evaluate(
        [(f"shl.b{width}", type_), (f"shr.{type_}", type_)], [type_, "u32"], [a, by]
    )
    assert [int(v) for v in left] == [
        wrapped(int(x) << int(n), width, signed) for x, n in zip(a, by)
    ]
    assert [int(v) for v in right] == [int(x) >> int(n) for x, n in zip(a, by)]


def test_words_of_bits() -> None:
    rng = np.random.default_rng(13)
    a, b, c = (rng.integers(0, 1 << 32, 64, np.uint32) for _ in range(3))
    a[:3] = [0, 1, 0xFFFFFFFF]
    got = evaluate(
        [
            ("popc.b32 {d}, {0}", "u32"),
            ("clz.b32 {d}, {0}", "u32"),
            ("brev.b32 {d}, {0}", "u32"),
            ("bfind.u32 {d}, {0}", "u32"),
            ("prmt.b32 {d}, {0}, {1}, 0x5410", "u32"),
            ("lop3.b32 {d}, {0}, {1}, {2}, 0xCA", "u32"),
            ("shf.l.wrap.b32 {d}, {0}, {1}, 8", "u32"),
            ("shf.r.clamp.b32 {d}, {0}, {1}, 40", "u32"),
            ("bfe.u32 {d}, {0}, 4, 9", "u32"),
            ("bfe.s32 {d}, {0}, 4, 9", "s32"),
            ("bfi.b32 {d}, {0}, {1}, 8, 12", "u32"),
            ("prmt.b32 {d}, {0}, {1}, 0x8901", "u32"),
            ("dp4a.s32.s32 {d}, {0}, {1}, {2}", "s32"),
        ],
        ["b32"] * 3,
        [a, b, c],
    )
    for n, (x, y, z) in enumerate(zip(a.tolist(), b.tolist(), c.tolist())):
        high = x.bit_length()
        field = x >> 4 & 511
        signs = [0xFF if byte >> 7 else 0 for byte in (x & 255, x >> 8 & 255)]
        mask = 0xFFF << 8
        dot = sum(wrapped(x >> 8 * k, 8, True) * wrapped(y >> 8 * k, 8, True) for k in range(4))
        expected = [
            x.bit_count(),
            32 - high,
            int(f"{x:032b}"[::-1], 2),
            (high - 1) & 0xFFFFFFFF,
            (x & 0xFFFF) | (y & 0xFFFF) << 16,
            (x & y) | (~x & z & 0xFFFFFFFF),
            (y << 8 | x >> 24) & 0xFFFFFFFF,
            y,
            field,
            wrapped(field, 9, True),
            (y & ~mask) | (x << 8 & mask),
            (x >> 8 & 255) | (x & 255) << 8 | signs[1] << 16 | signs[0] << 24,
            wrapped(z + dot, 32, True),
        ]
        assert [int(g[n]) for g in got] == expected


def test_carries() -> None:
    rng = np.random.default_rng(14)
    low, high = (rng.integers(0, 1 << 32, 64, np.uint32) for _ in range(2))
    low[:2], high[:2] = 0xFFFFFFFF, 0xFFFFFFFF
    (got,) = evaluate(
        [("add.cc.u32 %r10, {0}, {1};\n\taddc.u32 {d}, {0}, {1}", "u32")],
        ["u32", "u32"],
        [low, high],
    )
    both = [(int(x) + int(y)) for x, y in zip(low, high)]
    assert [int(v) for v in got] == [(s + (s >> 32)) & 0xFFFFFFFF for s in both]


@pytest.mark.parametrize("relation", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_comparisons(relation: str) -> None:
    pairs = np.array(list(itertools.product(SPECIAL, SPECIAL)), np.float32)
    a, b = pairs[:, 0].copy(), pairs[:, 1].copy()
    table = {
        "eq": np.equal,
        "ne": np.not_equal,
        "lt": np.less,
        "le": np.less_equal,
        "gt": np.greater,
        "ge": np.greater_equal,
    }
    nan = np.isnan(a) | np.isnan(b)
    ordered, either, both = evaluate(
        [
            (f"setp.{relation}.f32", "pred"),
            (f"setp.{relation}u.f32", "pred"),
            (
                "setp.gt.f32 %p2, {0}, 0f00000000;\n"
                f"\tsetp.{relation}.and.f32 {{d}}, {{0}}, {{1}}, !%p2",
                "pred",
            ),
        ],
        ["f32", "f32"],
        [a, b],
    )
    expected = table[relation](a, b) & ~nan
    np.testing.assert_array_equal(ordered, expected)
    np.testing.assert_array_equal(either, expected | nan)
    np.testing.assert_array_equal(both, expected & ~(a > 0))
    x, y = a.view(np.int32), b.view(np.int32)
    (signed,) = evaluate([(f"setp.{relation}.s32", "pred")], ["s32", "s32"], [x, y])
    np.testing.assert_array_equal(signed, table[relation](x, y))
    (unsigned,) = evaluate([(f"setp.{relation}.u32", "pred")], ["u32", "u32"], [x, y])
    np.testing.assert_array_equal(unsigned, table[relation](x.view(np.uint32), y.view(np.uint32)))


ODD = np.array(
    [
        0,
        -0.0,
        0.5,
        1.5,
        2.5,
        -0.5,
        -1.5,
        127.5,
        128.0,
        -129.0,
        255.9,
        256.0,
        65535.7,
        2.0**31,
        -(2.0**31),
        2.0**32,
        2.0**63,
        -(2.0**63),
        2.0**64,
        1e30,
        -1e30,
        np.inf,
        -np.inf,
        np.nan,
        1e-40,
        3.99,
        -3.99,
    ],
    np.float32,
)


@pytest.mark.parametrize("into", ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"])
def test_floats_to_integers(into: str) -> None:
    info = np.iinfo(NUMPY[into])
    turns = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
    got = evaluate([(f"cvt.{mode}.{into}.f32", into) for mode in turns], ["f32"], [ODD])
    for result, turn in zip(got, turns.values()):
        for value, back in zip(ODD, result):
            if np.isnan(value):
                lost = 0 if info.bits < 64 else (info.min if into[0] == "s" else 1 << 63)
                assert int(back) == lost
            elif np.isinf(value):
                assert int(back) == (info.max if value > 0 else info.min)
            else:
                assert int(back) == min(max(int(turn(value)), info.min), info.max)


@pytest.mark.parametrize("source", ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"])
def test_integers_to_floats(source: str) -> None:
    info, rng = np.iinfo(NUMPY[source]), np.random.default_rng(15)
    a = rng.integers(info.min, info.max, 64, NUMPY[source], endpoint=True)
    a[:2] = [info.min, info.max]
    a[2:34] >>= rng.integers(0, info.bits, 32).astype(a.dtype)
    targets = {"f32": (24, -149), "f64": (53, -1074)}
    if info.bits > 8:  # ptxas has no bf16 from bytes
        targets["bf16"] = (8, -133)
    got = evaluate([(f"cvt.rn.{into}.{source}", into) for into in targets], [source], [a])
    for result, (digits, least) in zip(got, targets.values()):
        expected = [nearest(Fraction(int(x)), digits, least) for x in a]
        np.testing.assert_array_equal(result.astype(np.float64), expected)


def test_between_integers() -> None:
    a = np.array([0, 1, -1, 127, 128, -128, 255, 256, 65535, -65536, 2**31 - 1, -(2**31)], np.int32)
    got = evaluate(
        [
            ("cvt.s8.s32", "s8"),
            ("cvt.u8.s32", "u8"),
            ("cvt.sat.u8.s32", "u8"),
            ("cvt.sat.s8.s32", "s8"),
            ("cvt.s64.s32", "s64"),
            ("cvt.u64.s32", "u64"),
            ("cvt.u16.s32", "u16"),
        ],
        ["s32"],
        [a],
    )
    for n, x in enumerate(a.tolist()):
        expected = [
            wrapped(x, 8, True),
            x & 255,
            min(max(x, 0), 255),
            min(max(x, -128), 127),
            x,
            x & (2**64 - 1),
            x & 65535,
        ]
        assert [int(g[n]) for g in got] == expected


def test_between_floats() -> None:
    a = np.concatenate([ODD, floats(64, 16), np.float32([65504, 65519.9, 65520, 448, 464, 500])])
    with np.errstate(all="ignore"):
        half, brain = a.astype(np.float16), a.astype(ml_dtypes.bfloat16)
    got = evaluate(
        [
            ("cvt.rn.f16.f32", "f16"),
            ("cvt.rn.bf16.f32", "bf16"),
            ("cvt.f64.f32", "f64"),
            ("cvt.rna.tf32.f32", "tf32"),
            ("cvt.rni.f32.f32", "f32"),
            ("cvt.rz.bf16.f32", "bf16"),
        ],
        ["f32"],
        [a],
    )
    np.testing.assert_array_equal(bits(got[0]), bits(half))
    np.testing.assert_array_equal(bits(got[1]), bits(brain))
    np.testing.assert_array_equal(got[2], a.astype(np.float64))
    cut = np.where(np.isfinite(a), (a.view(np.uint32) + 0x1000) & 0xFFFFE000, a.view(np.uint32))
    np.testing.assert_array_equal(bits(got[3]), bits(cut.astype(np.uint32).view(np.float32)))
    np.testing.assert_array_equal(bits(got[4]), bits(np.rint(a)))
    towards = (a.view(np.uint32) >> 16).astype(np.uint16).view(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(bits(got[5]), bits(towards))
    (back,) = evaluate([("cvt.f32.bf16", "f32")], ["bf16"], [brain])
    np.testing.assert_array_equal(bits(back), bits(brain.astype(np.float32)))
    (double,) = evaluate([("cvt.rn.f32.f64", "f32")], ["f64"], [a.astype(np.float64) / 3])
    np.testing.assert_array_equal(bits(double), bits((a.astype(np.float64) / 3).astype(np.float32)))


@pytest.mark.parametrize("type_", ["e4m3", "e5m2"])
def test_eight_bit_floats(type_: str) -> None:
    dtype = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[type_]
    a, b = floats(64, 17), np.random.default_rng(18).standard_normal(64).astype(np.float32) * 100
    (packed,) = evaluate(
        [(f"cvt.rn.satfinite.{type_}x2.f32", f"{type_}x2")], ["f32", "f32"], [a, b]
    )
    most = float(ml_dtypes.finfo(dtype).max)
    for value, wanted in ((packed >> 8, a), (packed & 255, b)):
        expected = np.clip(wanted, -most, most).astype(dtype)
        finite = ~np.isnan(wanted)
        np.testing.assert_array_equal(
            value.astype(np.uint8)[finite], expected.view(np.uint8)[finite]
        )
        assert (value[~finite] == 0x7F).all()
    every = np.arange(0, 65536, 257, dtype=np.uint16)
    (halves,) = evaluate([(f"cvt.rn.f16x2.{type_}x2", "f16x2")], [f"{type_}x2"], [every])
    with np.errstate(all="ignore"):
        wide = every.view(dtype).astype(np.float32).astype(np.float16)
    np.testing.assert_array_equal(bits(halves.view(np.float16)), bits(wide))


def test_packs() -> None:
    a, b = floats(64, 19), floats(64, 20)
    got = evaluate(
        [
            ("cvt.rn.bf16x2.f32", "bf16x2"),
            ("cvt.rn.f16x2.f32", "f16x2"),
            ("mov.b64 %d20, {{{0}, {1}}};\n\tmov.b64 {{%r10, {d}}}, %d20", "f32"),
        ],
        ["f32", "f32"],
        [a, b],
    )
    with np.errstate(all="ignore"):
        for result, dtype in ((got[0], ml_dtypes.bfloat16), (got[1], np.float16)):
            halves = result.view(dtype).reshape(-1, 2)
            np.testing.assert_array_equal(bits(halves[:, 0].copy()), bits(b.astype(dtype)))
            np.testing.assert_array_equal(bits(halves[:, 1].copy()), bits(a.astype(dtype)))
    np.testing.assert_array_equal(got[2].view(np.uint32), b.view(np.uint32))
    x, y = np.array([70000, -70000, 5], np.int32), np.array([-3, 300, -300], np.int32)
    (packed,) = evaluate([("cvt.pack.sat.s16.s32", "u32")], ["s32", "s32"], [x, y])
    assert packed.tolist() == [0x7FFF_FFFD, 0x8000_012C, 0x0005_FED4]


def test_choices() -> None:
    a, b = floats(64, 21), floats(64, 22)
    got = evaluate(
        [
            ("setp.lt.f32 %p2, {0}, {1};\n\tselp.f32 {d}, {0}, {1}, %p2", "f32"),
            ("slct.f32.f32 {d}, {0}, {1}, {1}", "f32"),
            ("testp.notanumber.f32 {d}, {0}", "pred"),
            ("set.gt.u32.f32 {d}, {0}, {1}", "u32"),
        ],
        ["f32", "f32"],
        [a, b],
    )
    np.testing.assert_array_equal(bits(got[0]), bits(np.where(a < b, a, b)))
    np.testing.assert_array_equal(bits(got[1]), bits(np.where(b >= 0, a, b)))
    np.testing.assert_array_equal(got[2], np.isnan(a))
    np.testing.assert_array_equal(got[3], np.where(a > b, 0xFFFFFFFF, 0))
