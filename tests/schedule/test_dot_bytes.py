"""Products of int8 by instructions of bytes: exact sums on this machine, and on others by the
interpreter; what is emitted for Arm and for x86 is counted.

Invariant: sums are those of NumPy's int32, to the bit, whatever the sizes and the values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from interpreted import run_interpreted
from judge import run

from tilegrad.compiler.compile import schedule_for
from tilegrad.core.dtype import float32, int8, int32
from tilegrad.core.target import AVX2, AVX512, AVX512_AMX, NEON, Target
from tilegrad.graph import build, ops
from tilegrad.graph.interpret import interpret
from tilegrad.ir.node import Node
from tilegrad.ir.symbol import symbol
from tilegrad.targets.llvm.driver import assembly
from tilegrad.targets.llvm.emit import emit

ARM = replace(NEON, features="+neon,+dotprod").with_cores(2)
VNNI = replace(AVX512, features=f"{AVX512.features},+avx512vnni").with_cores(2)
AVX_VNNI = replace(AVX2, features=f"{AVX2.features},+avxvnni").with_cores(2)
TARGETS = {"arm": ARM, "avx512": VNNI, "avx2": AVX_VNNI}
Sizes = tuple[int, ...]  # batch, if any, m, n, k


def product(sizes: Sizes, along_k: bool, dtype: Any = int32) -> tuple[list[Node], Node]:
    """Inputs, and a @ b^T where b lies along k, else a @ b."""
    *batch, m, n, k = sizes
    right = (*batch, n, k) if along_k else (*batch, k, n)
    inputs = [build.input_((*batch, m, k), int8), build.input_(right, int8)]
    lead, last = tuple(range(len(batch))), len(batch) + 1
    contract = ((last,), (last if along_k else last - 1,))
    return inputs, build.dot(*inputs, (lead, lead), contract, dtype)


def values_of(inputs: list[Node], lowest: bool = False) -> list[np.ndarray]:
    draw = np.random.default_rng(len(inputs[0].shape))
    found = [draw.integers(-128, 128, x.shape).astype(np.int8) for x in inputs]
    return [np.full_like(x, -128) for x in found] if lowest else found


def expected(values: list[np.ndarray], along_k: bool) -> np.ndarray:
    a, b = (x.astype(np.int32) for x in values)
    return a @ (b.swapaxes(-1, -2) if along_k else b)


def check(sizes: Sizes, along_k: bool, lowest: bool, target: Target | None = None) -> None:
    inputs, dot = product(sizes, along_k)
    values = values_of(inputs, lowest)
    if target is None:
        (found,) = run(inputs, [dot], values)
    else:
        (found,) = run_interpreted(target, inputs, [dot], values)
    np.testing.assert_array_equal(found, expected(values, along_k))


SIZE = st.integers(1, 70)
SIZES = st.tuples(SIZE, SIZE, SIZE) | st.tuples(st.integers(1, 3), SIZE, SIZE, SIZE)


@settings(max_examples=30, deadline=None)
@given(SIZES, st.booleans(), st.booleans())
@example((1, 1, 1), True, True)
@example((64, 64, 64), True, False)
@example((64, 64, 64), False, False)
@example((4, 9, 63), True, False)
@example((9, 9, 63), True, False)
def test_sums_are_exact_here(sizes: Sizes, along_k: bool, lowest: bool) -> None:
    check(sizes, along_k, lowest)


VIEWS: dict[str, Callable[[Node], Node]] = {
    "turned": lambda x: build.permute(x, tuple(reversed(range(len(x.shape))))),
    "a part": lambda x: build.slice_axis(x, 0, min(1, x.shape[0] - 1), x.shape[0]),
    "every other": lambda x: build.slice_axis(x, len(x.shape) - 1, 0, x.shape[-1], 2),
    "mirrored": lambda x: build.flip(x, (len(x.shape) - 1,)),
    "one row for all": lambda x: build.broadcast_to(build.slice_axis(x, 0, 0, 1), x.shape),
    "with zeros around": lambda x: build.pad(x, (2,) * len(x.shape), (1,) * len(x.shape)),
    "computed": lambda x: build.cast(build.add(build.cast(x, int32), 77), int8),
}
SEEN = st.lists(st.sampled_from(sorted(VIEWS)), max_size=2)
READERS: dict[str, Callable[[Node], list[Node]]] = {
    "nothing": lambda dot: [dot],
    "a sum over rows": lambda dot: [dot, build.sum_(dot, len(dot.shape) - 2)],
    "two values": lambda dot: [build.add(dot, dot), build.maximum(dot, 0)],
    "bytes": lambda dot: [build.cast(dot, int8)],
}


@settings(max_examples=20, deadline=None)
@given(SIZES, SEEN, SEEN, st.sampled_from(sorted(READERS)))
def test_any_view_of_operands_and_any_reader(
    sizes: Sizes, left: list[str], right: list[str], reader: str
) -> None:
    """Operands in parts, repeated, padded, computed or along other axes; judged by the
    interpreter. k and the batch are what both have."""
    *batch, m, n, k = sizes
    inputs = [build.input_((*batch, rows, k), int8) for rows in (m, n)]
    operands = []
    for x, views in zip(inputs, (left, right)):
        for view in views:
            x = VIEWS[view](x)
        operands.append(x)
    *lead, _, depth = (min(pair) for pair in zip(*(x.shape for x in operands)))
    ends = [(*lead, x.shape[-2], depth) for x in operands]
    cut = [build.slice_(x, (0,) * len(end), end) for x, end in zip(operands, ends)]
    axes, last = tuple(range(len(lead))), (len(lead) + 1,)
    results = READERS[reader](build.dot(*cut, (axes, axes), (last, last), int32))
    values = values_of(inputs)
    wanted = interpret(results, dict(zip(inputs, values)))
    for got, one in zip(run(inputs, results, values), wanted):
        np.testing.assert_array_equal(got, one)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("along_k", [True, False], ids=["along k", "along n"])
@pytest.mark.parametrize(
    "sizes",
    [(1, 33, 70), (3, 16, 64), (1, 5, 3), (9, 50, 65), (24, 48, 128), (2, 9, 17, 31)],
    ids=str,
)
def test_sums_are_exact_elsewhere(target: Target, along_k: bool, sizes: Sizes) -> None:
    check(sizes, along_k, sum(sizes) % 2 == 0, target)


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("k", [131072, 140001])
def test_sums_of_a_long_k_wrap_as_int32_does(rows: int, k: int) -> None:
    """2**31 is reached by 131,072 products of -128 with itself."""
    check((rows, 3, k), True, True)


@pytest.mark.parametrize("rows", [1, 4, 40])
def test_scales_bias_and_activation_are_fused(rows: int) -> None:
    """A product of codes as a layer has it: one kernel, equal to float32 after the sum."""
    inputs, dot = product((rows, 75, 130), True)
    shapes = [(rows, 1), (75,), (75,)]
    factors = [build.input_(shape, float32) for shape in shapes]
    value = build.cast(dot, float32)
    for one in factors[:2]:
        value = build.multiply(value, build.broadcast_to(one, value.shape))
    value = build.add(value, build.broadcast_to(factors[2], value.shape))
    value = build.maximum(value, 0.0)
    given = values_of(inputs)
    draw = np.random.default_rng(1)
    floats = [draw.standard_normal(shape).astype(np.float32) for shape in shapes]
    for target in (ARM, VNNI):
        assert len(schedule_for([*inputs, *factors], [value], target).kernels) == 1
    (found,) = run([*inputs, *factors], [value], [*given, *floats])
    sums = expected(given, True).astype(np.float32)
    np.testing.assert_allclose(
        found, np.maximum(sums * floats[0] * floats[1] + floats[2], 0), rtol=1e-6, atol=1e-5
    )


def test_what_a_operand_is_computed_of_is_computed_once_a_program() -> None:
    """Codes that are rounded on the way into a product of one row are packed before it."""
    x, weight = build.input_((1, 130), float32), build.input_((40, 130), int8)
    codes = build.cast(build.unary(ops.round_, build.multiply(x, 20.0)), int8)
    dot = build.dot(codes, weight, ((), ()), ((1,), (1,)), int32)
    draw = np.random.default_rng(2)
    values = [
        draw.uniform(-6, 6, (1, 130)).astype(np.float32),
        draw.integers(-128, 128, (40, 130)).astype(np.int8),
    ]
    (found,) = run([x, weight], [dot], values)
    wanted = np.rint(values[0] * np.float32(20)).astype(np.int32) @ values[1].astype(np.int32).T
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("most", [8, 30])
def test_sizes_that_only_the_run_knows(most: int) -> None:
    """Few rows, and more; all sizes are Symbols."""
    m, n, k = (symbol(name, 1, top) for name, top in (("m", most), ("n", 50), ("k", 90)))
    inputs = [build.input_((m, k), int8), build.input_((n, k), int8)]
    dot = build.dot(*inputs, ((), ()), ((1,), (1,)), int32)
    for sizes in ((1, 50, 64), (most, 7, 90), (3, 16, 5)):
        draw = np.random.default_rng(sizes)
        shapes = ((sizes[0], sizes[2]), (sizes[1], sizes[2]))
        values = [draw.integers(-128, 128, shape).astype(np.int8) for shape in shapes]
        bound = dict(zip("mnk", sizes))
        for found in (
            *run(inputs, [dot], values, bound),
            *run_interpreted(VNNI, inputs, [dot], values, bound),
        ):
            np.testing.assert_array_equal(found, expected(values, True))


def test_a_result_of_eight_bits_wraps() -> None:
    inputs, dot = product((6, 9, 40), True, int8)
    values = values_of(inputs)
    (found,) = run(inputs, [dot], values)
    np.testing.assert_array_equal(found, expected(values, True).astype(np.int8))


def lines_of(target: Target, sizes: Sizes, along_k: bool = True) -> list[str]:
    """The assembly of the one kernel of a product."""
    inputs, dot = product(sizes, along_k)
    (kernel,) = schedule_for(inputs, [dot], target).kernels
    (launch,) = kernel.steps
    text = emit(launch.body, "k", target)[0]  # type: ignore[union-attr]
    return [line.strip() for line in assembly(text, target).splitlines()]


@pytest.mark.parametrize("along_k", [True, False], ids=["along k", "along n"])
def test_a_step_of_arm_takes_lanes(along_k: bool) -> None:
    """8 x 8 sums, four steps of four bytes: 64 products, each with a lane; nothing else is one."""
    dots = [line for line in lines_of(ARM, (512, 576, 1536), along_k) if line.startswith("sdot")]
    assert len(dots) == 64 and all(".4b[" in line for line in dots)


def test_one_row_on_arm_reads_a_vector_for_each_product() -> None:
    """Eight columns, a line of 64 bytes of each: 32 products of whole vectors, one read each."""
    lines = lines_of(ARM, (1, 1536, 576))
    first = next(i for i, line in enumerate(lines) if line.startswith("sdot"))
    last = max(i for i, line in enumerate(lines) if line.startswith("sdot"))
    loop = lines[first - 12 : last + 1]
    assert sum(line.startswith("sdot") for line in lines) == 32
    assert sum(line.startswith("prfm") for line in loop) <= 8
    read = sum(2 if line.startswith("ldp") else 1 for line in loop if line.startswith("ld"))
    assert read <= 32 + 4


@pytest.mark.parametrize(
    "target, across, register",
    [(VNNI, 24, "%zmm"), (AVX_VNNI, 12, "%ymm")],
    ids=["avx512", "avx2"],
)
def test_a_step_of_x86(target: Target, across: int, register: str) -> None:
    """Four steps of all sums without a register spilled between them; 128 is taken off once."""
    lines = lines_of(target, (512, 576, 1536))
    dots = [i for i, line in enumerate(lines) if "vpdpbusd" in line]
    assert all(register in lines[i] for i in dots)
    inner = lines[dots[-4 * across] : dots[-1] + 1]
    assert sum("vpdpbusd" in line for line in inner) == 4 * across
    assert not any("Spill" in line or "Reload" in line for line in inner)
    assert len(dots) - 4 * across <= 4
    assert any("vpdpbusd" in line for line in lines_of(target, (1, 1536, 576)))


def test_who_takes_products() -> None:
    """Machines without such instructions multiply as before; AMX takes all but a few rows."""

    def winner(target: Target, rows: int) -> str:
        inputs, dot = product((rows, 128, 256), True)
        (kernel,) = schedule_for(inputs, [dot], target).kernels
        return kernel.notes["verdict"].winner  # type: ignore[no-any-return]

    assert [winner(ARM, rows) for rows in (1, 40)] == ["products of bytes"] * 2
    assert winner(replace(NEON, features="+neon"), 40) == "products on vectors"
    assert winner(AVX512.with_cores(2), 40) == "products on vectors"
    assert winner(AVX512_AMX.with_cores(2), 40) == "products on tiles"
    assert winner(AVX512_AMX.with_cores(2), 1) == "products of bytes"
