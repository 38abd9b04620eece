"""The PTX simulator on memory, lanes, branches and barriers: hand-written PTX, known answers.

Every text is assembled by ptxas as well, so that it is PTX and not a dialect of the simulator.
Every rule it checks is shown by a program that breaks it beside one that keeps it.
"""

from __future__ import annotations

import numpy as np
import pytest
from ptx_text import run

from ptxsim import POLICIES
from ptxsim.errors import (
    BarrierError,
    DeadlockError,
    DependencyError,
    DivergenceError,
    LimitError,
    MisalignedError,
    OutOfBoundsError,
    RaceError,
    RegisterPoolError,
    SimulationError,
    TextError,
    TrapError,
    UninitialisedError,
    WarpgroupError,
)

# %d0, %d1: pointers p0, p1; %r0: thread; %d2, %d3: p0 + 4 thread, p1 + 4 thread; %r1: smem
HEAD = """
	ld.param.u64 %d0, [p0];
	ld.param.u64 %d1, [p1];
	mov.u32 %r0, %tid.x;
	mul.wide.u32 %d4, %r0, 4;
	add.s64 %d2, %d0, %d4;
	add.s64 %d3, %d1, %d4;
"""
SHARED = HEAD + "\tmov.u32 %r1, smem;\n\tshl.b32 %r2, %r0, 2;\n\tadd.u32 %r2, %r2, %r1;\n"


def numbers(count: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """An input and a cleared output."""
    return np.arange(count, dtype=np.uint32) * 3 + 1, np.zeros(count, np.uint32)


# ---- branches -------------------------------------------------------------------------------

REVERSE = (
    SHARED
    + """
	ld.global.f32 %r3, [%d2];
	st.shared.f32 [%r2], %r3;
	bar.sync 0;
	shl.b32 %r11, %r0, 2;
	xor.b32 %r13, %r11, 252;
	add.u32 %r13, %r13, %r1;
	ld.shared.f32 %r4, [%r13];
	mov.u32 %r20, 0;
$loop_1:
	add.rn.f32 %r4, %r4, 0f3F800000;
	add.u32 %r20, %r20, 1;
	setp.lt.u32 %p0, %r20, %r0;
	@%p0 bra $loop_1;
	setp.gt.s32 %p1, %r0, 40;
	@%p1 neg.f32 %r4, %r4;
	st.global.f32 [%d3], %r4;
"""
)


@pytest.mark.parametrize("policy", POLICIES)
def test_lanes_diverge_and_meet(policy: str) -> None:
    x, y = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    run(REVERSE, [x, y], threads=64, shared=256, policy=policy)
    lane = np.arange(64)
    expected = x[::-1] + np.maximum(1, lane)
    np.testing.assert_array_equal(y, np.where(lane > 40, -expected, expected))


@pytest.mark.parametrize("policy", POLICIES)
def test_missing_barrier_is_a_race(policy: str) -> None:
    x, y = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    # a warp that runs ahead of the writer reads what nothing has written
    with pytest.raises((RaceError, UninitialisedError), match=r"PTX line \d+: `(ld|st).shared"):
        run(REVERSE.replace("\tbar.sync 0;\n", ""), [x, y], threads=64, shared=256, policy=policy)


def test_write_after_read_is_a_race() -> None:
    x, y = numbers(64)
    body = (
        SHARED
        + """
	st.shared.u32 [%r2], %r0;
	bar.sync 0;
	xor.b32 %r3, %r0, 32;
	shl.b32 %r3, %r3, 2;
	add.u32 %r3, %r3, %r1;
	ld.shared.u32 %r4, [%r3];
	bar.sync 0;
	st.shared.u32 [%r2], %r4;
"""
    )
    run(body, [x, y], threads=64, shared=256)
    second = body.rfind("\tbar.sync 0;\n")
    with pytest.raises(RaceError, match="read"):
        run(body[:second] + body[second + 13 :], [x, y], threads=64, shared=256)


def test_branches_of_branches_and_early_exit() -> None:
    x, y = numbers(64)
    body = (
        HEAD
        + """
	mov.u32 %r5, 0;
	and.b32 %r6, %r0, 1;
	setp.eq.u32 %p0, %r6, 0;
	@%p0 bra $even;
	and.b32 %r6, %r0, 2;
	setp.eq.u32 %p1, %r6, 0;
	@!%p1 bra $three;
	add.u32 %r5, %r5, 100;
	bra.uni $odd;
$three:
	add.u32 %r5, %r5, 300;
$odd:
	add.u32 %r5, %r5, 1;
	bra $join;
$even:
	setp.gt.u32 %p2, %r0, 20;
	@%p2 exit;
	add.u32 %r5, %r5, 2;
$join:
	add.u32 %r5, %r5, 1000;
	st.global.u32 [%d3], %r5;
"""
    )
    run(body, [x, y], threads=64)
    lane = np.arange(64)
    expected = np.where(lane % 2, np.where(lane & 2, 301, 101), 2) + 1000
    np.testing.assert_array_equal(y, np.where((lane % 2 == 0) & (lane > 20), 0, expected))


def test_grids_symbols_and_special_registers() -> None:
    y = np.zeros((3, 2, 5), np.uint32)
    body = """
	ld.param.u64 %d0, [p0];
	ld.param.u64 %d1, [p1];
	mov.u32 %r0, %tid.x;
	mov.u32 %r1, %ctaid.x;
	mov.u32 %r2, %ctaid.y;
	mov.u32 %r3, %nctaid.x;
	mov.u32 %r4, %ctaid.z;
	mov.u32 %r9, %nctaid.y;
	cvt.u32.u64 %r5, %d1;
	mad.lo.u32 %r6, %r4, %r9, %r2;
	mad.lo.u32 %r6, %r6, %r3, %r1;
	mul.wide.u32 %d2, %r6, 4;
	add.s64 %d0, %d0, %d2;
	setp.eq.u32 %p0, %r0, 0;
	mad.lo.u32 %r7, %r6, 10, %r5;
	@%p0 st.global.u32 [%d0], %r7;
"""
    run(body, [y], threads=32, grid=(5, 2, 3), values=[5])
    np.testing.assert_array_equal(y.ravel(), np.arange(30) * 10 + 5)


def test_a_trap_a_loop_without_end_and_unknown_forms() -> None:
    x, y = numbers()
    with pytest.raises(TrapError, match="line 21"):
        run(HEAD + "\n\ttrap;", [x, y])
    with pytest.raises(LimitError):
        run(HEAD + "$again:\n\tbra $again;", [x, y], limit=10_000, assembled=False)
    with pytest.raises(TextError, match="frobnicate"):
        run(HEAD + "\tfrobnicate.u32 %r1, %r2;", [x, y], assembled=False)
    with pytest.raises(TextError, match="no register %r999"):
        run(HEAD + "\tmov.u32 %r999, 0;", [x, y], assembled=False)
    with pytest.raises(UninitialisedError, match=r"%r99.*kernel.py:12|kernel.py:12.*%r99"):
        run(HEAD + "\t// kernel.py:12\n\tadd.u32 %r1, %r99, 1;", [x, y])


# ---- memory ---------------------------------------------------------------------------------


def test_widths_and_vectors() -> None:
    x = np.random.default_rng(0).integers(0, 256, 512, np.uint8)
    y = np.zeros(512, np.uint8)
    body = """
	ld.param.u64 %d0, [p0];
	ld.param.u64 %d1, [p1];
	mov.u32 %r0, %tid.x;
	mul.wide.u32 %d4, %r0, 16;
	add.s64 %d2, %d0, %d4;
	add.s64 %d3, %d1, %d4;
	ld.global.nc.v4.b32 {%r1, %r2, %r3, %r4}, [%d2];
	mov.u32 %r10, smem;
	shl.b32 %r11, %r0, 4;
	add.u32 %r10, %r10, %r11;
	st.shared.v4.b32 [%r10], {%r1, %r2, %r3, %r4};
	ld.shared.v2.b64 {%d5, %d6}, [%r10];
	st.global.v2.b64 [%d3], {%d6, %d5};
	ld.global.s8 %h1, [%d2+3];
	cvt.s32.s16 %r5, %h1;
	st.global.b32 [%d3+4], %r5;
	ld.global.u8 %r6, [%d2+5];
	st.global.b8 [%d3+2], %r6;
	mov.b64 %d8, smem;
	cvta.shared.u64 %d8, %d8;
	cvt.u64.u32 %d9, %r11;
	add.s64 %d8, %d8, %d9;
	ld.b32 %r7, [%d8+8];
	st.b32 [%d3+8], %r7;
"""
    run(body, [x, y], shared=512)
    rows, expected = x.reshape(32, 16), np.zeros((32, 16), np.uint8)
    expected[:, :8], expected[:, 8:] = rows[:, 8:], rows[:, :8]
    expected[:, 4:8] = rows[:, 3].view(np.int8).astype(np.int32).view(np.uint8).reshape(32, 4)
    expected[:, 2], expected[:, 8:12] = rows[:, 5], rows[:, 8:12]
    np.testing.assert_array_equal(y.reshape(32, 16), expected)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("ld.global.u32 %r3, [%d2+4]", OutOfBoundsError),
        ("ld.global.u32 %r3, [%d0+-4]", OutOfBoundsError),
        ("st.global.u32 [%d3+4096], %r0", OutOfBoundsError),
        ("ld.shared.u32 %r3, [%r1+128]", OutOfBoundsError),
        ("st.shared.u32 [%r2+4], %r0", OutOfBoundsError),
        ("st.shared.u32 [%r2+-4], %r0", OutOfBoundsError),
        ("ld.global.v2.u32 {%r3, %r4}, [%d0+4]", MisalignedError),
        ("st.shared.u16 [%r1+1], %h1", MisalignedError),
        ("ld.shared.u32 %r3, [%r1+64]", UninitialisedError),
        ("st.shared.u32 [%r1], %r0", RaceError),
    ],
)
def test_bad_accesses(line: str, error: type[SimulationError]) -> None:
    x, y = numbers()
    with pytest.raises(error, match=r"PTX line \d+: `"):
        run(SHARED + f"\tmov.u16 %h1, 0;\n\t{line};", [x, y], shared=128)


def test_memory_that_may_only_be_read_and_pointers_to_nothing() -> None:
    x, y = numbers()
    x.flags.writeable = False
    run(HEAD + "\tld.global.u32 %r1, [%d2];", [x, y])
    with pytest.raises(OutOfBoundsError, match="only be read"):
        run(HEAD + "\tst.global.u32 [%d2], %r0;", [x, y])
    with pytest.raises(OutOfBoundsError):
        run(HEAD + "\tld.global.u32 %r1, [%d2];", [4096, y])


def test_atomics() -> None:
    x = np.zeros(8, np.uint32)
    y = np.zeros(64, np.uint32)
    body = (
        HEAD
        + """
	atom.global.add.u32 %r3, [%d0], 2;
	st.global.u32 [%d3], %r3;
	red.global.max.u32 [%d0+4], %r0;
	atom.global.cas.b32 %r4, [%d0+8], %r0, 7;
	mov.b32 %r5, 0f3F000000;
	red.global.add.f32 [%d0+12], %r5;
	atom.global.inc.u32 %r6, [%d0+16], 9;
	atom.global.exch.b32 %r7, [%d0+20], 5;
	red.global.or.b32 [%d0+24], %r0;
"""
    )
    run(body, [x, y], threads=64)
    assert x[0] == 128 and sorted(y.tolist()) == list(range(0, 128, 2))
    assert x[1] == 63 and x[2] == 7 and x[3:4].view(np.float32)[0] == 32.0
    assert x[4] == 64 % 10 and x[5] == 5 and x[6] == 63


def test_release_and_acquire_order_global_memory() -> None:
    """One warp writes data and raises a flag; another spins on it and reads."""
    x, y = np.zeros(64, np.uint32), np.zeros(32, np.uint32)
    body = """
	ld.param.u64 %d0, [p0];
	ld.param.u64 %d1, [p1];
	mov.u32 %r0, %tid.x;
	and.b32 %r1, %r0, 31;
	mul.wide.u32 %d4, %r1, 4;
	add.s64 %d2, %d0, %d4;
	add.s64 %d3, %d1, %d4;
	setp.ge.u32 %p0, %r0, 32;
	setp.eq.u32 %p1, %r1, 0;
	@%p0 bra $read;
	add.u32 %r3, %r1, 7;
	st.global.u32 [%d2+128], %r3;
	bar.warp.sync 0xffffffff;
	fence.acq_rel.gpu;
	@%p1 red.relaxed.gpu.global.add.u32 [%d0], 1;
	bra $end;
$read:
	ld.relaxed.gpu.global.u32 %r4, [%d0];
	setp.eq.u32 %p2, %r4, 0;
	@%p2 bra $read;
	fence.acq_rel.gpu;
	ld.global.u32 %r5, [%d2+128];
	st.global.u32 [%d3], %r5;
$end:
"""
    for policy in POLICIES:
        x[:] = y[:] = 0
        run(body, [x, y], threads=64, policy=policy)
        np.testing.assert_array_equal(y, np.arange(32) + 7)
    for place in (body.find("\tfence"), body.rfind("\tfence")):
        x[:] = 0
        with pytest.raises(RaceError):
            run(body[:place] + body[place + 20 :], [x, y], threads=64)


def test_ctas_that_nothing_orders_must_not_share_memory() -> None:
    x, y = numbers()
    head = HEAD + "\tmov.u32 %r9, %ctaid.x;\n"
    run(head + "\tst.global.u32 [%d3], %r0;", [x, y], grid=(2,))  # the same values: no harm
    again = "ld.global.u32 %r4, [%d3];\n\tst.global.u32 [%d3], %r4"
    for line in ("st.global.u32 [%d3], %r9", again):
        with pytest.raises(RaceError, match="another CTA"):
            run(head + f"\t{line};", [x, y], grid=(2,))


def test_constant_loads_of_memory_that_is_written() -> None:
    x, y = numbers()
    run(HEAD + "\tld.global.nc.u32 %r4, [%d2];\n\tst.global.u32 [%d3], %r4;", [x, y])
    with pytest.raises(RaceError, match=r"ld\.global\.nc"):
        run(HEAD + "\tst.global.u32 [%d3], %r0;\n\tld.global.nc.u32 %r4, [%d3];", [x, y])


# ---- lanes ----------------------------------------------------------------------------------


def test_shuffles() -> None:
    x, y = numbers()[0], np.zeros(32 * 5, np.uint32)
    body = (
        HEAD
        + """
	ld.global.u32 %r3, [%d2];
	shfl.sync.bfly.b32 %r4, %r3, 5, 31, 0xffffffff;
	st.global.u32 [%d3], %r4;
	shfl.sync.down.b32 %r4|%p1, %r3, 3, 0x181f, 0xffffffff;
	st.global.u32 [%d3+128], %r4;
	selp.u32 %r5, 1, 0, %p1;
	st.global.u32 [%d3+256], %r5;
	shfl.sync.up.b32 %r4, %r3, 2, 0, 0xffffffff;
	st.global.u32 [%d3+384], %r4;
	shfl.sync.idx.b32 %r4, %r3, 9, 31, 0xffffffff;
	st.global.u32 [%d3+512], %r4;
"""
    )
    run(body, [x, y])
    lane, rows = np.arange(32), y.reshape(5, 32)
    np.testing.assert_array_equal(rows[0], x[lane ^ 5])
    inside = lane % 8 + 3 < 8
    np.testing.assert_array_equal(rows[1], np.where(inside, x[np.minimum(lane + 3, 31)], x))
    np.testing.assert_array_equal(rows[2], inside)
    np.testing.assert_array_equal(rows[3], np.where(lane >= 2, x[lane - 2], x))
    np.testing.assert_array_equal(rows[4], x[9])


def test_votes_matches_reductions_and_election() -> None:
    x, y = numbers()[0], np.zeros(32 * 8, np.uint32)
    body = (
        HEAD
        + """
	and.b32 %r3, %r0, 3;
	setp.eq.u32 %p0, %r3, 0;
	vote.sync.ballot.b32 %r4, %p0, 0xffffffff;
	st.global.u32 [%d3], %r4;
	vote.sync.any.pred %p1, !%p0, 0xffffffff;
	vote.sync.all.pred %p2, %p0, 0xffffffff;
	selp.u32 %r4, 1, 0, %p1;
	selp.u32 %r5, 2, 0, %p2;
	or.b32 %r4, %r4, %r5;
	st.global.u32 [%d3+128], %r4;
	match.any.sync.b32 %r4, %r3, 0xffffffff;
	st.global.u32 [%d3+256], %r4;
	redux.sync.add.u32 %r4, %r0, 0xffffffff;
	st.global.u32 [%d3+384], %r4;
	neg.s32 %r6, %r0;
	redux.sync.min.s32 %r4, %r6, 0xffffffff;
	st.global.u32 [%d3+512], %r4;
	elect.sync %r4|%p3, 0xffffffff;
	selp.u32 %r5, 1, 0, %p3;
	st.global.u32 [%d3+640], %r5;
	setp.lt.u32 %p4, %r0, 12;
	@!%p4 bra $end;
	activemask.b32 %r4;
	st.global.u32 [%d3+768], %r4;
	redux.sync.xor.b32 %r4, %r0, 0xfff;
	st.global.u32 [%d3+896], %r4;
$end:
"""
    )
    run(body, [x, y])
    rows = y.reshape(8, 32)
    assert (rows[0] == 0x11111111).all() and (rows[1] == 1).all()
    assert rows[2].tolist() == [0x11111111 << (lane % 4) for lane in range(32)]
    assert (rows[3] == 496).all() and (rows[4].view(np.int32) == -31).all()
    assert rows[5].tolist() == [1] + [0] * 31
    assert (rows[6][:12] == 0xFFF).all()
    assert (rows[7][:12] == np.bitwise_xor.reduce(range(12))).all()


def test_lanes_that_are_not_there() -> None:
    x, y = numbers()
    body = HEAD + "\tsetp.lt.u32 %p0, %r0, 16;\n\t@%p0 shfl.sync.bfly.b32 %r4, %r0, 1, 31, {};\n"
    run(body.format("0xffff"), [x, y])
    with pytest.raises(DivergenceError, match="0xffffffff are named"):
        run(body.format("0xffffffff"), [x, y])
    with pytest.raises(DivergenceError, match="bar"):
        run(HEAD + "\tsetp.lt.u32 %p0, %r0, 16;\n\t@%p0 bar.sync 0;", [x, y])


# ---- barriers -------------------------------------------------------------------------------

# warps 0 and 1 hand a value through shared memory by named barriers, warp 2 goes its own way
HANDING = (
    SHARED
    + """
	shr.u32 %r5, %r0, 5;
	and.b32 %r6, %r0, 31;
	shl.b32 %r6, %r6, 2;
	add.u32 %r7, %r6, %r1;
	setp.eq.u32 %p0, %r5, 0;
	setp.eq.u32 %p1, %r5, 1;
	@%p0 bra $give;
	@%p1 bra $take;
	bra $end;
$give:
	st.shared.u32 [%r7], %r0;
	bar.arrive 3, 64;
	bra $end;
$take:
	bar.sync 3, 64;
	ld.shared.u32 %r8, [%r7];
	cvt.u64.u32 %d5, %r6;
	add.s64 %d5, %d5, %d1;
	st.global.u32 [%d5], %r8;
$end:
"""
)


@pytest.mark.parametrize("policy", POLICIES)
def test_named_barriers(policy: str) -> None:
    x, y = numbers(96)
    run(HANDING, [x, y], threads=96, shared=512, policy=policy)
    np.testing.assert_array_equal(y[:32], np.arange(32))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("\tbar.arrive 3, 64;\n", "", DeadlockError),
        ("bar.sync 3, 64", "bar.sync 3, 96", (DeadlockError, BarrierError)),
        ("bar.sync 3, 64", "bar.sync 4, 64", DeadlockError),
        ("\tbar.sync 3, 64;\n", "", (RaceError, UninitialisedError)),
        ("bar.arrive 3, 64", "bar.arrive 3, 48", BarrierError),
        (
            "\tst.shared.u32 [%r7], %r0;\n\tbar.arrive 3, 64;\n",
            "\tbar.arrive 3, 64;\n\tst.shared.u32 [%r7], %r0;\n",
            (RaceError, UninitialisedError),
        ),
    ],
)
def test_named_barriers_used_wrongly(policy: str, old: str, new: str, error: type) -> None:
    assert old in HANDING
    x, y = numbers(96)
    with pytest.raises(error):
        run(
            HANDING.replace(old, new),
            [x, y],
            threads=96,
            shared=512,
            policy=policy,
            assembled=False,
        )


def test_a_deadlock_says_who_waits_for_what() -> None:
    x, y = numbers(64)
    body = (
        HEAD
        + """
	setp.lt.u32 %p0, %r0, 32;
	@%p0 bra $one;
	bar.sync 1, 64;
	bra $end;
$one:
	bar.sync 2, 64;
$end:
"""
    )
    with pytest.raises(DeadlockError, match=r"warp 0 .* barrier 2 \(32 of 64.*warp 1 .* barrier 1"):
        run(body, [x, y], threads=64)


def test_reducing_barriers() -> None:
    x, y = numbers(64)
    body = (
        HEAD
        + """
	setp.lt.u32 %p0, %r0, 40;
	bar.red.popc.u32 %r3, 0, %p0;
	bar.red.and.pred %p1, 1, %p0;
	bar.red.or.pred %p2, 2, %p0;
	selp.u32 %r4, 100, 0, %p1;
	selp.u32 %r5, 1000, 0, %p2;
	add.u32 %r3, %r3, %r4;
	add.u32 %r3, %r3, %r5;
	st.global.u32 [%d3], %r3;
"""
    )
    run(body, [x, y], threads=64)
    assert (y == 1040).all()


# mbarrier 0 at smem+256: warp 0 writes and arrives, warp 1 waits and reads
PHASES = (
    SHARED
    + """
	setp.eq.u32 %p3, %r0, 0;
	@%p3 mbarrier.init.shared::cta.b64 [%r1+256], 32;
	bar.sync 0;
	and.b32 %r6, %r0, 31;
	shl.b32 %r6, %r6, 2;
	add.u32 %r7, %r6, %r1;
	cvt.u64.u32 %d5, %r6;
	add.s64 %d5, %d5, %d1;
	setp.ge.u32 %p0, %r0, 32;
	@%p0 bra $take;
	st.shared.u32 [%r7], %r0;
	mbarrier.arrive.shared::cta.b64 %d6, [%r1+256];
	bra $end;
$take:
	mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1+256], 0;
	@!%p1 bra $take;
	ld.shared.u32 %r8, [%r7];
	st.global.u32 [%d5], %r8;
$end:
"""
)


@pytest.mark.parametrize("policy", POLICIES)
def test_mbarriers(policy: str) -> None:
    x, y = numbers(64)
    run(PHASES, [x, y], threads=64, shared=512, policy=policy)
    np.testing.assert_array_equal(y[:32], np.arange(32))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("\tbar.sync 0;\n", "", (RaceError, BarrierError)),
        ("+256], 0;", "+256], 1;", (RaceError, UninitialisedError, DeadlockError)),
        ("+256], 32;", "+256], 33;", DeadlockError),
        ("\tmbarrier.arrive.shared::cta.b64 %d6, [%r1+256];\n", "", DeadlockError),
        ("\tmbarrier.arrive", "\t@%p3 mbarrier.arrive", RaceError),
        ("\tmbarrier.arrive", "\tbar.warp.sync -1;\n\t@%p3 mbarrier.arrive", DeadlockError),
        (
            "mbarrier.init.shared::cta.b64 [%r1+256]",
            "mbarrier.init.shared::cta.b64 [%r1+260]",
            MisalignedError,
        ),
        (
            "mbarrier.init.shared::cta.b64 [%r1+256]",
            "mbarrier.init.shared::cta.b64 [%r1+264]",
            BarrierError,
        ),
        ("\tst.shared.u32 [%r7], %r0;\n", "\tst.shared.u32 [%r7+192], %r0;\n", BarrierError),
    ],
)
def test_mbarriers_used_wrongly(policy: str, old: str, new: str, error: type) -> None:
    assert old in PHASES
    x, y = numbers(64)
    with pytest.raises(error):
        run(
            PHASES.replace(old, new), [x, y], threads=64, shared=512, policy=policy, assembled=False
        )


def test_dropping_the_loop_of_a_wait_is_caught() -> None:
    x, y = numbers(64)
    with pytest.raises((RaceError, UninitialisedError)):
        run(
            PHASES.replace("@!%p1 bra $take;", "").replace(
                "bra $end;", "nanosleep.u32 100;\n\tbra $end;"
            ),
            [x, y],
            threads=64,
            shared=512,
            policy="random",
            seed=3,
        )


def test_one_lane_waits_for_its_warp() -> None:
    x, y = numbers(64)
    wait = PHASES[PHASES.index("$take:") : PHASES.index("\tld.shared.u32 %r8")]
    choice = "$take:\n\tsetp.eq.u32 %p4, %r6, 0;\n\t@!%p4 bra $met;\n$again:\n"
    alone = wait.replace("$take:\n", choice).replace("bra $take;", "bra $again;") + "$met:\n"
    together = PHASES.replace(wait, alone + "\tbar.warp.sync -1;\n")
    for policy in POLICIES:
        run(together, [x, y], threads=64, shared=512, policy=policy)
        np.testing.assert_array_equal(y[:32], np.arange(32))
        with pytest.raises(RaceError, match="reads shared memory"):
            run(PHASES.replace(wait, alone), [x, y], threads=64, shared=512, policy=policy)


def test_too_many_arrivals() -> None:
    x, y = numbers()
    body = (
        SHARED
        + """
	setp.eq.u32 %p3, %r0, 0;
	@!%p3 bra $end;
	mbarrier.init.shared::cta.b64 [%r1], 1;
	mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 64;
	{}
$end:
"""
    )
    run(body.format(""), [x, y], shared=512)
    with pytest.raises(BarrierError, match=r"more arrivals.*64 bytes to land"):
        run(body.format("mbarrier.arrive.shared::cta.b64 _, [%r1];"), [x, y], shared=512)


# ---- registers and dependent launches -------------------------------------------------------

REGISTERS = """
	ld.param.u64 %d0, [p0];
	mov.u32 %r0, %tid.x;
	setp.lt.u32 %p0, %r0, 128;
	@%p0 bra $producer;
	setmaxnreg.inc.sync.aligned.u32 240;
	bra $end;
$producer:
	setmaxnreg.dec.sync.aligned.u32 24;
$end:
"""


def test_setmaxnreg() -> None:
    y = np.zeros(4, np.uint32)
    run(REGISTERS, [y], threads=384, directives=".maxntid 384")
    for old, new, error in (
        ("240", "248", DeadlockError),
        ("240", "160", RegisterPoolError),
        ("240", "244", RegisterPoolError),
    ):
        with pytest.raises(error):
            run(REGISTERS.replace(old, new), [y], threads=384, assembled=False)
    with pytest.raises(WarpgroupError, match="different setmaxnreg"):
        run(REGISTERS.replace("%r0, 128", "%r0, 96"), [y], threads=384, assembled=False)


def test_dependent_launches() -> None:
    x, y = numbers()
    body = (
        HEAD + "\tgriddepcontrol.launch_dependents;\n\tld.global.u32 %r3, [%d2];\n"
        "\tgriddepcontrol.wait;\n\tst.global.u32 [%d3], %r3;\n"
    )
    run(body, [x, y], dependent=True)
    np.testing.assert_array_equal(y, x)
    without = body.replace("\tgriddepcontrol.wait;\n", "")
    run(without, [x, y])
    with pytest.raises(DependencyError, match="is written before"):
        run(without, [x, y], dependent=True)
    with pytest.raises(DependencyError, match="exit before"):
        run(HEAD, [x, y], dependent=True)
    run(body, [x, y], dependent=True, constants=[0])
    with pytest.raises(DependencyError, match="memory 0 is read before"):
        run(body, [x, y], dependent=True, constants=[1])


def test_one_lane_arrives_for_its_warp() -> None:
    x, y = numbers(64)
    one = PHASES.replace("+256], 32;", "+256], 1;").replace(
        "\tmbarrier.arrive", "\tbar.warp.sync -1;\n\t@%p3 mbarrier.arrive"
    )
    run(one, [x, y], threads=64, shared=512)
    np.testing.assert_array_equal(y[:32], np.arange(32))
    with pytest.raises(RaceError, match=r"no bar\.warp\.sync"):
        run(one.replace("\tbar.warp.sync -1;\n", ""), [x, y], threads=64, shared=512)


def test_entry_and_text_must_agree() -> None:
    x, y = numbers()
    with pytest.raises(TextError, match="allows 16"):
        run(HEAD, [x, y], directives=".maxntid 16", assembled=False)
    with pytest.raises(TextError, match="no register"):
        run("\tmov.u32 %q1, 0;", [x, y], assembled=False)
    with pytest.raises(TextError, match="no label"):
        run("\tbra $nowhere;", [x, y], assembled=False)
    with pytest.raises(SimulationError, match="policy"):
        run(HEAD, [x, y], policy="backwards")
