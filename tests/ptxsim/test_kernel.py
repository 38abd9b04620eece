"""Whole kernels in the PTX simulator: one tile by TMA and wgmma, and a warp-specialised ring.

The ring is the shape of the library's matmul: a producer that fills stages by TMA, two consumer
warpgroups that multiply and release them, an epilogue through stmatrix and a TMA store. Each
wait, fence, arrival, count and parity of it is dropped or flipped in turn and must be caught.
"""

from __future__ import annotations

import re
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ptx_mutants import mutants
from ptx_text import run

from ptxsim import POLICIES, SimulationError, TensorMap

LOAD = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
WGMMA = "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"
ACCUMULATORS = "{" + ", ".join(f"%r{100 + n}" for n in range(32)) + "}"


def operands(m: int, n: int, k: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """a (m, k) and b (n, k) of bf16."""
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((m, k)), rng.standard_normal((n, k))
    return a.astype(ml_dtypes.bfloat16), b.astype(ml_dtypes.bfloat16)


# ---- one tile -------------------------------------------------------------------------------


def tile_kernel() -> str:
    """c (64, 64) = a @ b.T by one warpgroup: two TMA loads, four wgmma, plain stores."""
    body = f"""
	mov.u32 %r0, %tid.x;
	mov.b64 %d20, p3;
	cvta.param.u64 %d20, %d20;
	mov.b64 %d21, p4;
	cvta.param.u64 %d21, %d21;
	mov.u32 %r1, smem;
	setp.eq.u32 %p0, %r0, 0;
	@!%p0 bra $ready;
	mbarrier.init.shared::cta.b64 [%r1+16384], 1;
	fence.mbarrier_init.release.cluster;
$ready:
	bar.sync 0;
	@!%p0 bra $wait;
	mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1+16384], 16384;
	{LOAD} [%r1], [%d20, {{0, 0}}], [%r1+16384];
	{LOAD} [%r1+8192], [%d21, {{0, 0}}], [%r1+16384];
$wait:
	mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1+16384], 0;
	@!%p1 bra $wait;
	shr.u32 %r3, %r1, 4;
	cvt.u64.u32 %d0, %r3;
	or.b64 %d1, %d0, 0x4000004000010000;
	add.s64 %d2, %d1, 512;
	setp.ne.u32 %p2, 0, 0;
	wgmma.fence.sync.aligned;
"""
    for step in range(4):
        body += f"\t{WGMMA} {ACCUMULATORS}, %d1, %d2, %p2, 1, 1, 0, 0;\n"
        body += "\tadd.s64 %d1, %d1, 2;\n\tadd.s64 %d2, %d2, 2;\n"
        body += "\tsetp.eq.u32 %p2, 0, 0;\n" if step == 0 else ""
    body += """
	wgmma.commit_group.sync.aligned;
	wgmma.wait_group.sync.aligned 0;
	ld.param.u64 %d10, [p2];
	shr.u32 %r4, %r0, 5;
	and.b32 %r5, %r0, 31;
	shr.u32 %r6, %r5, 2;
	mad.lo.u32 %r6, %r4, 16, %r6;
	and.b32 %r7, %r5, 3;
	shl.b32 %r7, %r7, 1;
	mad.lo.u32 %r8, %r6, 64, %r7;
	mul.wide.u32 %d11, %r8, 4;
	add.s64 %d12, %d10, %d11;
"""
    for i in range(0, 32, 2):
        offset = 4 * (64 * 8 * (i >> 1 & 1) + 8 * (i >> 2))
        body += f"\tst.global.v2.f32 [%d12+{offset}], {{%r{100 + i}, %r{101 + i}}};\n"
    return body


@pytest.mark.parametrize("policy", POLICIES)
def test_one_tile(policy: str) -> None:
    a, b = operands(64, 64, 64)
    c = np.zeros((64, 64), np.float32)
    maps = [
        TensorMap(n, np.dtype(ml_dtypes.bfloat16), (64, 64), (64, 1), (64, 64), 128) for n in (0, 1)
    ]
    run(tile_kernel(), [a, b, c], maps=maps, threads=128, shared=16448, policy=policy)
    np.testing.assert_allclose(c, a.astype(np.float64) @ b.astype(np.float64).T, atol=1e-5)


# ---- a ring ---------------------------------------------------------------------------------

FULL, EMPTY, RESULT, STAGE = 65536, 65552, 49152, 24576
RING_HEAD = """
	mov.u32 %r0, %tid.x;
	mov.b64 %d20, p3;
	cvta.param.u64 %d20, %d20;
	mov.b64 %d21, p4;
	cvta.param.u64 %d21, %d21;
	mov.b64 %d22, p5;
	cvta.param.u64 %d22, %d22;
	ld.param.u64 %d30, [p6];
	cvt.u32.u64 %r30, %d30;
	mov.u32 %r1, smem;
	mov.u32 %r40, %ctaid.x;
	mov.u32 %r41, %ctaid.y;
	shl.b32 %r40, %r40, 7;
	shl.b32 %r41, %r41, 6;
	setp.ne.u32 %p0, %r0, 0;
	@%p0 bra $made;
	mbarrier.init.shared::cta.b64 [%r1+65536], 1;
	mbarrier.init.shared::cta.b64 [%r1+65544], 1;
	mbarrier.init.shared::cta.b64 [%r1+65552], 2;
	mbarrier.init.shared::cta.b64 [%r1+65560], 2;
	fence.mbarrier_init.release.cluster;
$made:
	bar.sync 0;
	mov.u32 %r10, 0;
	setp.ge.u32 %p1, %r0, 128;
	@%p1 bra $consumer;
"""
PRODUCER = f"""
	setmaxnreg.dec.sync.aligned.u32 24;
	@%p0 bra $end;
$fill:
	and.b32 %r11, %r10, 1;
	shr.u32 %r12, %r10, 1;
	and.b32 %r12, %r12, 1;
	xor.b32 %r12, %r12, 1;
	shl.b32 %r13, %r11, 3;
	add.u32 %r13, %r13, %r1;
$free:
	mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r13+65552], %r12;
	@!%p2 bra $free;
	mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r13+65536], 24576;
	mad.lo.u32 %r14, %r11, 24576, %r1;
	shl.b32 %r15, %r10, 6;
	{LOAD} [%r14], [%d20, {{%r15, %r40}}], [%r13+65536];
	{LOAD} [%r14+16384], [%d21, {{%r15, %r41}}], [%r13+65536];
	add.u32 %r10, %r10, 1;
	setp.lt.u32 %p3, %r10, %r30;
	@%p3 bra $fill;
	bra $end;
"""
CONSUMER = """
$consumer:
	setmaxnreg.inc.sync.aligned.u32 240;
	sub.u32 %r2, %r0, 128;
	shr.u32 %r3, %r2, 7;
	and.b32 %r4, %r2, 127;
	setp.ne.u32 %p4, %r4, 0;
	setp.ne.u32 %p5, 0, 0;
	shl.b32 %r5, %r3, 13;
$step:
	and.b32 %r11, %r10, 1;
	shr.u32 %r12, %r10, 1;
	and.b32 %r12, %r12, 1;
	shl.b32 %r13, %r11, 3;
	add.u32 %r13, %r13, %r1;
$full:
	mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r13+65536], %r12;
	@!%p2 bra $full;
	mad.lo.u32 %r14, %r11, 24576, %r1;
	add.u32 %r15, %r14, %r5;
	shr.u32 %r15, %r15, 4;
	add.u32 %r16, %r14, 16384;
	shr.u32 %r16, %r16, 4;
	cvt.u64.u32 %d1, %r15;
	cvt.u64.u32 %d2, %r16;
	or.b64 %d1, %d1, 0x4000004000010000;
	or.b64 %d2, %d2, 0x4000004000010000;
	wgmma.fence.sync.aligned;
"""
for _step in range(4):
    CONSUMER += f"\t{WGMMA} {ACCUMULATORS}, %d1, %d2, %p5, 1, 1, 0, 0;\n"
    CONSUMER += "\tsetp.eq.u32 %p5, 0, 0;\n\tadd.s64 %d1, %d1, 2;\n\tadd.s64 %d2, %d2, 2;\n"
CONSUMER += """
	wgmma.commit_group.sync.aligned;
	wgmma.wait_group.sync.aligned 0;
	@!%p4 mbarrier.arrive.shared::cta.b64 _, [%r13+65552];
	add.u32 %r10, %r10, 1;
	setp.lt.u32 %p3, %r10, %r30;
	@%p3 bra $step;
	and.b32 %r20, %r0, 31;
	shr.u32 %r21, %r4, 5;
	shr.u32 %r22, %r20, 3;
	and.b32 %r23, %r20, 7;
	and.b32 %r24, %r22, 1;
	shl.b32 %r24, %r24, 3;
	add.u32 %r24, %r24, %r23;
	mad.lo.u32 %r24, %r21, 16, %r24;
	mad.lo.u32 %r25, %r24, 128, %r5;
	add.u32 %r25, %r25, %r1;
	shr.u32 %r26, %r22, 1;
"""
for _pair in range(4):
    for _n in range(4):
        _at = 100 + 8 * _pair + 2 * _n
        CONSUMER += f"\tcvt.rn.bf16x2.f32 %r{60 + _n}, %r{_at + 1}, %r{_at};\n"
    CONSUMER += f"\tadd.u32 %r27, %r26, {2 * _pair};\n\txor.b32 %r27, %r27, %r23;\n"
    CONSUMER += "\tshl.b32 %r27, %r27, 4;\n\tadd.u32 %r27, %r27, %r25;\n"
    CONSUMER += "\tstmatrix.sync.aligned.m8n8.x4.shared.b16 [%r27+49152], "
    CONSUMER += "{%r60, %r61, %r62, %r63};\n"
CONSUMER += """
	fence.proxy.async.shared::cta;
	add.u32 %r28, %r3, 1;
	bar.sync %r28, 128;
	@%p4 bra $end;
	add.u32 %r29, %r1, %r5;
	mad.lo.u32 %r31, %r3, 64, %r40;
	cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d22, {%r41, %r31}], [%r29+49152];
	cp.async.bulk.commit_group;
	cp.async.bulk.wait_group.read 0;
$end:
"""
RING = RING_HEAD + PRODUCER + CONSUMER


def run_ring(body: str, m: int, n: int, steps: int, **options: Any) -> tuple[Any, Any]:
    """(got, expected) of the ring kernel on an m x n result, 64 of k a step."""
    a, b = operands(m, n, 64 * steps)
    c = np.zeros((m, n), ml_dtypes.bfloat16)
    maps = [
        TensorMap(0, np.dtype(ml_dtypes.bfloat16), a.shape, (64 * steps, 1), (128, 64), 128),
        TensorMap(1, np.dtype(ml_dtypes.bfloat16), b.shape, (64 * steps, 1), (64, 64), 128),
        TensorMap(2, np.dtype(ml_dtypes.bfloat16), c.shape, (n, 1), (64, 64), 128),
    ]
    grid = (-(-m // 128), -(-n // 64))
    run(
        body,
        [a, b, c],
        maps=maps,
        values=[steps],
        threads=384,
        shared=65568,
        grid=grid,
        directives=".maxntid 384 .minnctapersm 1",
        **options,
    )
    return c, (a.astype(np.float64) @ b.astype(np.float64).T).astype(np.float32)


@pytest.mark.parametrize("policy", POLICIES)
def test_ring(policy: str) -> None:
    got, expected = run_ring(RING, 200, 64, 5, policy=policy)
    np.testing.assert_array_equal(got, expected.astype(ml_dtypes.bfloat16))


def test_ring_is_quick() -> None:
    start = time.perf_counter()
    run_ring(RING, 256, 128, 8)
    assert time.perf_counter() - start < 120  # four CTAs of 384 threads; about 1 s alone


@pytest.mark.parametrize("seed", range(6))
def test_ring_under_many_orders(seed: int) -> None:
    got, expected = run_ring(RING, 128, 64, 4, policy="random", seed=seed)
    np.testing.assert_array_equal(got, expected.astype(ml_dtypes.bfloat16))


# Changes by hand beside those of `mutants`: places and roles instead of instructions.
MISPLACED = [
    ("[%r13+65536], %r12;", "[%r13+65552], %r12;"),
    ("\t@!%p4 mbarrier.arrive", "\tmbarrier.arrive"),
    ("setmaxnreg.inc.sync.aligned.u32 240", "setmaxnreg.inc.sync.aligned.u32 256"),
    ("mad.lo.u32 %r14, %r11, 24576, %r1", "mad.lo.u32 %r14, %r11, 16384, %r1"),
    ("[%r27+49152]", "[%r27+32768]"),
    ("and.b32 %r11, %r10, 1", "and.b32 %r11, %r10, 3"),
    (
        "\tfence.proxy.async.shared::cta;\n\tadd.u32 %r28, %r3, 1;\n\tbar.sync %r28, 128;\n",
        "\tadd.u32 %r28, %r3, 1;\n\tbar.sync %r28, 128;\n\tfence.proxy.async.shared::cta;\n",
    ),
    (
        "\twgmma.wait_group.sync.aligned 0;\n\t@!%p4 mbarrier.arrive.shared::cta.b64 _, "
        "[%r13+65552];\n",
        "\t@!%p4 mbarrier.arrive.shared::cta.b64 _, [%r13+65552];\n"
        "\twgmma.wait_group.sync.aligned 0;\n",
    ),
]
# The last mbarrier made is one that only threads use, so its init may come after the fence.
HARMLESS = re.compile(r".*mbarrier\.init.*: after fence\.mbarrier_init")
FAULTS = [m for m in mutants(RING) if not HARMLESS.match(m[0])]
FAULTS += [(f"{old!r} -> {new!r}", RING.replace(old, new)) for old, new in MISPLACED]


def test_the_changes_by_hand_change_something() -> None:
    assert all(old in RING for old, _ in MISPLACED) and len(FAULTS) > 40


@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", range(len(FAULTS)))
def test_ring_with_a_fault(number: int) -> None:
    label, body = FAULTS[number]
    for policy in POLICIES:
        with pytest.raises(SimulationError):
            run_ring(body, 128, 64, 5, policy=policy, assembled=False)
            pytest.fail(f"not caught ({policy}): {label}")
