"""The PTX simulator's matrix instructions: fragments and shared-memory layouts, element by element.

The layouts are laid out here once more, by loops over elements, as the instruction set manual
and docs describe them, so that the simulator's array code has a judge.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ptx_text import run
from wgmma_text import (
    SMEM,
    TYPES,
    accumulated,
    descriptor,
    kernel,
    lay_out,
    listed,
    product,
    random,
)

from ptxsim import POLICIES
from ptxsim.errors import (
    DivergenceError,
    MatrixFenceError,
    OutOfBoundsError,
    PendingError,
    ProxyFenceError,
    RaceError,
    SimulationError,
    TextError,
    UninitialisedError,
    WarpgroupError,
)

# ---- ldmatrix and stmatrix ------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", ["", ".trans"])
def test_ldmatrix_and_stmatrix(count: int, trans: str) -> None:
    x = np.arange(32 * 8, dtype=np.uint16)
    loaded, stored = np.zeros((4, 32, 2), np.uint16), np.zeros(32 * 8, np.uint16)
    names = ", ".join(f"%r{10 + n}" for n in range(count))
    body = f"""
	ld.param.u64 %d0, [p0];
	ld.param.u64 %d1, [p1];
	ld.param.u64 %d2, [p2];
	mov.u32 %r0, %tid.x;
	mov.u32 %r1, smem;
	mul.wide.u32 %d3, %r0, 16;
	shl.b32 %r2, %r0, 4;
	add.u32 %r2, %r2, %r1;
	add.s64 %d4, %d0, %d3;
	ld.global.v4.b32 {{%r3, %r4, %r5, %r6}}, [%d4];
	st.shared.v4.b32 [%r2], {{%r3, %r4, %r5, %r6}};
	ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{names}}}, [%r2];
	stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r2+512], {{{names}}};
	mul.wide.u32 %d5, %r0, 4;
	add.s64 %d1, %d1, %d5;
"""
    body += "".join(f"\tst.global.b32 [%d1+{128 * n}], %r{10 + n};\n" for n in range(count))
    body += f"""
	setp.lt.u32 %p0, %r0, {8 * count};
	@!%p0 bra $end;
	ld.shared.v4.b32 {{%r3, %r4, %r5, %r6}}, [%r2+512];
	add.s64 %d4, %d2, %d3;
	st.global.v4.b32 [%d4], {{%r3, %r4, %r5, %r6}};
$end:
"""
    run(body, [x, loaded, stored], shared=1024)
    matrices = x.reshape(4, 8, 8)
    for matrix in range(count):
        for lane in range(32):
            for half in range(2):
                row, column = lane // 4, lane % 4 * 2 + half
                place = (column, row) if trans else (row, column)
                assert loaded[matrix, lane, half] == matrices[matrix][place]
    np.testing.assert_array_equal(stored[: 64 * count], x[: 64 * count])


def test_movmatrix() -> None:
    x, y = np.arange(64, dtype=np.uint16), np.zeros(64, np.uint16)
    body = """
	ld.param.u64 %d0, [p0];
	ld.param.u64 %d1, [p1];
	mov.u32 %r0, %tid.x;
	mul.wide.u32 %d3, %r0, 4;
	add.s64 %d0, %d0, %d3;
	add.s64 %d1, %d1, %d3;
	ld.global.b32 %r1, [%d0];
	movmatrix.sync.aligned.m8n8.trans.b16 %r2, %r1;
	st.global.b32 [%d1], %r2;
"""
    run(body, [x, y])
    np.testing.assert_array_equal(y.reshape(8, 8), x.reshape(8, 8).T)


# ---- mma.sync -------------------------------------------------------------------------------


def fragment_a(a: np.ndarray, each: int, registers: int) -> np.ndarray:
    """(16, k) as (registers, lanes, elements of a register)."""
    result = np.zeros((registers, 32, each), a.dtype)
    for r in range(registers):
        for lane in range(32):
            for e in range(each):
                row = lane // 4 + 8 * (r & 1)
                result[r, lane, e] = a[row, lane % 4 * each + e + 4 * each * (r >> 1)]
    return result


def fragment_b(b: np.ndarray, each: int, registers: int) -> np.ndarray:
    """(8, k), a column of B a row, as (registers, lanes, elements)."""
    result = np.zeros((registers, 32, each), b.dtype)
    for r in range(registers):
        for lane in range(32):
            for e in range(each):
                result[r, lane, e] = b[lane // 4, lane % 4 * each + e + 4 * each * r]
    return result


def fragment_c(c: np.ndarray) -> np.ndarray:
    """(16, n) of 32-bit elements as (registers, lanes)."""
    result = np.zeros((c.shape[1] // 2, 32), c.dtype)
    for r in range(result.shape[0]):
        for lane in range(32):
            row, column = lane // 4 + 8 * (r >> 1 & 1), 8 * (r >> 2) + lane % 4 * 2 + (r & 1)
            result[r, lane] = c[row, column]
    return result


MMA = [
    ("m16n8k16", "f32", "bf16", "bf16"),
    ("m16n8k16", "f32", "f16", "f16"),
    ("m16n8k8", "f32", "bf16", "bf16"),
    ("m16n8k8", "f32", "tf32", "tf32"),
    ("m16n8k4", "f32", "tf32", "tf32"),
    ("m16n8k32", "s32", "s8", "s8"),
    ("m16n8k32", "s32", "u8", "s8"),
    ("m16n8k16", "s32", "s8", "u8"),
]


@pytest.mark.parametrize(("shape", "into", "left", "right"), MMA)
def test_mma(shape: str, into: str, left: str, right: str) -> None:
    k, each = int(shape.split("k")[1]), 4 // np.dtype(TYPES[left]).itemsize
    a, b = random((16, k), left, 1), random((8, k), right, 2)
    c = random((16, 8), into if into == "f32" else "s8", 3).astype(TYPES[into])
    counts = (k // each // 2, k // each // 4, 4)
    parts = [fragment_a(a, each, counts[0]), fragment_b(b, each, counts[1]), fragment_c(c)]
    data = np.concatenate([np.ascontiguousarray(p).view(np.uint32).reshape(-1, 32) for p in parts])
    result = np.zeros((4, 32), TYPES[into])
    body = """
	ld.param.u64 %d0, [p0];
	ld.param.u64 %d1, [p1];
	mov.u32 %r0, %tid.x;
	mul.wide.u32 %d3, %r0, 4;
	add.s64 %d0, %d0, %d3;
	add.s64 %d1, %d1, %d3;
"""
    body += "".join(f"\tld.global.b32 %r{10 + n}, [%d0+{128 * n}];\n" for n in range(sum(counts)))
    groups, start = [], 10
    for count in counts:
        groups.append("{" + ", ".join(f"%r{start + n}" for n in range(count)) + "}")
        start += count
    body += f"\tmma.sync.aligned.{shape}.row.col.{into}.{left}.{right}.{into} "
    body += "{%r40, %r41, %r42, %r43}, " + ", ".join(groups) + ";\n"
    body += "".join(f"\tst.global.b32 [%d1+{128 * n}], %r{40 + n};\n" for n in range(4))
    run(body, [data, result])
    np.testing.assert_array_equal(result, fragment_c(product(a, b, c, into)))


def test_mma_with_half_accumulators() -> None:
    a, b, c = random((16, 16), "f16", 1), random((8, 16), "f16", 2), random((16, 8), "f16", 3)

    def halves(matrix: np.ndarray) -> np.ndarray:
        result = np.zeros((2, 32, 2), np.float16)
        for lane in range(32):
            for r in range(2):
                for e in range(2):
                    result[r, lane, e] = matrix[lane // 4 + 8 * r, lane % 4 * 2 + e]
        return result

    parts = [fragment_a(a, 2, 4), fragment_b(b, 2, 2), halves(c)]
    data = np.concatenate([np.ascontiguousarray(p).view(np.uint32).reshape(-1, 32) for p in parts])
    result = np.zeros((2, 32, 2), np.float16)
    body = """
	ld.param.u64 %d0, [p0];
	ld.param.u64 %d1, [p1];
	mov.u32 %r0, %tid.x;
	mul.wide.u32 %d3, %r0, 4;
	add.s64 %d0, %d0, %d3;
	add.s64 %d1, %d1, %d3;
"""
    body += "".join(f"\tld.global.b32 %r{10 + n}, [%d0+{128 * n}];\n" for n in range(8))
    body += (
        "\tmma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%r40, %r41}, {%r10, %r11, "
        "%r12, %r13}, {%r14, %r15}, {%r16, %r17};\n"
    )
    body += "\tst.global.b32 [%d1], %r40;\n\tst.global.b32 [%d1+128], %r41;\n"
    run(body, [data, result])
    np.testing.assert_array_equal(result, halves(product(a, b, c, "f32").astype(np.float16)))


# ---- wgmma ----------------------------------------------------------------------------------

CASES = [
    (n, left, right, s, False, False)
    for n, left, right, s in (
        (64, "bf16", "bf16", 128),
        (8, "bf16", "bf16", 128),
        (32, "f16", "f16", 64),
        (16, "bf16", "bf16", 32),
        (24, "bf16", "bf16", 0),
        (32, "tf32", "tf32", 128),
        (16, "e4m3", "e5m2", 128),
        (32, "s8", "u8", 64),
        (8, "tf32", "tf32", 0),
    )
]
CASES += [
    (n, "bf16", "bf16", s, ta, tb)
    for n, s, ta, tb in (
        (64, 128, True, False),
        (128, 128, False, True),
        (64, 128, True, True),
        (64, 64, True, True),
        (32, 32, True, True),
        (16, 0, True, False),
        (32, 0, False, True),
    )
]


@pytest.mark.parametrize(("columns", "left", "right", "swizzle", "trans_a", "trans_b"), CASES)
def test_wgmma_reads_by_descriptors(
    columns: int, left: str, right: str, swizzle: int, trans_a: bool, trans_b: bool
) -> None:
    size = np.dtype(TYPES[left]).itemsize
    depth = 32 // size
    a, b = random((64, 2 * depth), left, 1), random((columns, 2 * depth), right, 2)
    image = np.full(48 * 1024, 0x55, np.uint8)
    if swizzle == 32 or not swizzle:  # a second step in k lies in an atom of its own
        steps = [(a[:, :depth], b[:, :depth]), (a[:, depth:], b[:, depth:])]
    else:
        steps = [(a, b), (a, b)]
    lines = []
    into = "s32" if left in ("s8", "u8") else "f32"
    for number, (x, y) in enumerate(steps):
        base = [number * 24 * 1024, number * 24 * 1024 + 8 * 1024]
        leading_a, stride_a = lay_out(x, swizzle, trans_a, image, base[0])
        leading_b, stride_b = lay_out(y, swizzle, trans_b, image, base[1])
        within = number if x.shape[1] > depth else 0
        # along k: 32 bytes within an atom, or 16 rows of it where k runs over the rows
        step_a, step_b = (within * (16 * swizzle if t else 32) for t in (trans_a, trans_b))
        first = descriptor(SMEM + base[0] + step_a, leading_a, stride_a, swizzle)
        second = descriptor(SMEM + base[1] + step_b, leading_b, stride_b, swizzle)
        tail = {
            2: f", 1, 1, {int(trans_a)}, {int(trans_b)}",
            4: ", 1, 1",
            1: "" if into == "s32" else ", 1, 1",
        }[size]
        lines += [
            f"mov.b64 %d10, {first:#x};",
            f"mov.b64 %d11, {second:#x};",
            f"wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.{into}.{left}.{right} "
            f"{listed(columns // 2)}, %d10, %d11, %p{1 if number else 2}{tail};",
        ]
    result = np.zeros((columns // 2, 128), TYPES[into])
    run(kernel(columns, lines, image.size), [image, result], threads=128, shared=image.size)
    expected = product(a, b, np.zeros((64, columns)), into)
    np.testing.assert_array_equal(accumulated(result, columns), expected)


def register_body(body: str) -> tuple[str, list[str]]:
    """Loads of the A fragment from p2 into %r20..23 before everything."""
    loads = ["ld.param.u64 %d20, [p2];", "mul.wide.u32 %d21, %r0, 4;", "add.s64 %d20, %d20, %d21;"]
    loads += [f"ld.global.b32 %r{20 + n}, [%d20+{512 * n}];" for n in range(4)]
    return body, loads


def test_wgmma_with_a_in_registers_and_half_accumulators() -> None:
    a, b = random((64, 16), "f16", 1), random((32, 16), "f16", 2)
    image = np.zeros(4096, np.uint8)
    leading, stride = lay_out(np.concatenate([b, b, b, b], 1), 128, False, image, 0)
    fragments = np.concatenate([fragment_a(a[16 * w : 16 * w + 16], 2, 4) for w in range(4)], 1)
    _, loads = register_body("")
    lines = [
        *loads,
        f"mov.b64 %d11, {descriptor(SMEM, leading, stride, 128):#x};",
        "wgmma.fence.sync.aligned;",
        f"wgmma.mma_async.sync.aligned.m64n32k16.f16.f16.f16 {listed(8)}, "
        "{%r20, %r21, %r22, %r23}, %d11, %p2, 1, -1, 0;",
    ]
    result = np.zeros((8, 128, 2), np.float16)
    run(kernel(32, lines, 4096, 8), [image, result, fragments], threads=128, shared=4096)
    expected = -product(a, b, np.zeros((64, 32)), "f32").astype(np.float16)
    for r in range(8):
        for thread in range(128):
            row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (r & 1)
            for e in range(2):
                assert result[r, thread, e] == expected[row, 8 * (r >> 1) + thread % 4 * 2 + e]


def simple() -> tuple[str, list[np.ndarray], np.ndarray]:
    """One product of A in registers and B in shared memory that obeys all rules."""
    a, b = random((64, 16), "bf16", 1), random((16, 16), "bf16", 2)
    image = np.zeros(2048, np.uint8)
    leading, stride = lay_out(np.concatenate([b] * 4, 1), 128, False, image, 0)
    fragments = np.concatenate([fragment_a(a[16 * w : 16 * w + 16], 2, 4) for w in range(4)], 1)
    _, loads = register_body("")
    lines = [
        *loads,
        f"mov.b64 %d11, {descriptor(SMEM, leading, stride, 128):#x};",
        "wgmma.fence.sync.aligned;",
        f"wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {listed(8)}, "
        "{%r20, %r21, %r22, %r23}, %d11, %p2, 1, 1, 0;",
    ]
    arrays = [image, np.zeros((8, 128), np.float32), fragments]
    return kernel(16, lines, 2048), arrays, product(a, b, np.zeros((64, 16)), "f32")


@pytest.mark.parametrize("policy", POLICIES)
def test_wgmma_that_obeys(policy: str) -> None:
    body, arrays, expected = simple()
    run(body, arrays, threads=128, shared=2048, policy=policy)
    np.testing.assert_array_equal(accumulated(arrays[1], 16), expected)


WAIT = "\twgmma.wait_group.sync.aligned 0;\n"
ISSUE = "\twgmma.mma_async"
WRONG: list[tuple[str, str, Any]] = [
    ("\tfence.proxy.async.shared::cta;\n", "", ProxyFenceError),
    (
        "\tfence.proxy.async.shared::cta;\n\tbar.sync 0;\n",
        "\tbar.sync 0;\n\tfence.proxy.async.shared::cta;\n",
        ProxyFenceError,
    ),
    ("\tbar.sync 0;\n", "", (RaceError, UninitialisedError)),
    ("\twgmma.fence.sync.aligned;\n\twgmma.mma", "\twgmma.mma", MatrixFenceError),
    ("\twgmma.fence.sync.aligned;\n", "", MatrixFenceError),
    (WAIT, "", PendingError),
    (WAIT, "\twgmma.wait_group.sync.aligned 1;\n", PendingError),
    ("\twgmma.commit_group.sync.aligned;\n", "", PendingError),
    (WAIT, "\tmov.b32 %r21, 0;\n" + WAIT, PendingError),  # a register of A is overwritten
    (WAIT, "\tmov.b32 %r101, 0;\n" + WAIT, PendingError),
    (WAIT, "\tst.shared.b32 [%r1], %r0;\n" + WAIT, RaceError),  # B is overwritten
    (ISSUE, "\tmov.b32 %r23, 0;\n" + ISSUE, MatrixFenceError),
    (
        "\twgmma.commit_group",
        "\twgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r50, %r51, "
        "%r52, %r53}, {%r100, %r101, %r102, %r103}, %d11, %p2, 1, 1, 0;\n\twgmma.commit_group",
        PendingError,
    ),  # accumulators under way as A
    (
        ISSUE,
        "\tsetp.lt.u32 %p5, %r0, 96;\n\t@%p5 wgmma.mma_async",
        (WarpgroupError, UninitialisedError),
    ),
    (
        ISSUE,
        "\tsetp.lt.u32 %p5, %r0, 16;\n\t@%p5 wgmma.mma_async",
        (DivergenceError, UninitialisedError),
    ),
    ("mov.b64 %d11, ", "add.s64 %d11, %d3, ", WarpgroupError),  # lanes differ
    ("bar.sync 0;\n", "bar.sync 0;\n\tst.shared.b32 [%r1], %r0;\n", (RaceError, ProxyFenceError)),
    ("%p2, 1, 1, 0;", "%p1, 1, 1, 0;", UninitialisedError),  # the accumulator was never set
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("old", "new", "error"), WRONG)
def test_wgmma_that_does_not(old: str, new: str, error: Any, policy: str) -> None:
    body, arrays, _ = simple()
    assert old in body
    with pytest.raises(error):
        run(
            body.replace(old, new), arrays, threads=128, shared=2048, policy=policy, assembled=False
        )


def test_wgmma_needs_a_whole_warpgroup_and_memory_that_is_there() -> None:
    body, arrays, _ = simple()
    with pytest.raises(WarpgroupError, match="not a whole warpgroup"):
        run(body, arrays, threads=96, shared=2048, assembled=False)
    with pytest.raises(OutOfBoundsError):
        run(body, arrays, threads=128, shared=1536, assembled=False, check=False)
    with pytest.raises(TextError, match="bits set that mean nothing"):
        run(
            body.replace("mov.b64 %d11, 0x4", "mov.b64 %d11, 0x5"),
            arrays,
            threads=128,
            shared=2048,
            assembled=False,
        )
    with pytest.raises(SimulationError, match=r"PTX line \d+: `wgmma.mma_async"):
        run(body.replace("%r100, %r101, ", ""), arrays, threads=128, shared=2048, assembled=False)
