"""The PTX simulator's asynchronous copies, clusters and whole kernels, with their rules broken.

The rules are shown by mutation: a kernel that obeys passes under every policy, and each change
of it that drops or moves a wait, a fence, an arrival or a count raises.
"""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ptx_text import run

from ptxsim import POLICIES, TensorMap
from ptxsim.errors import (
    BarrierError,
    DeadlockError,
    ExitedPeerError,
    MisalignedError,
    OutOfBoundsError,
    PendingError,
    ProxyFenceError,
    RaceError,
    SimulationError,
    UninitialisedError,
)

TMA = "cp.async.bulk.tensor.{}d.shared::cluster.global.mbarrier::complete_tx::bytes"


def caught(
    body: str, changes: list[tuple[str, str, Any]], arrays: list[np.ndarray], **options: Any
) -> None:
    """Every change of a text raises its error under every policy."""
    for old, new, error in changes:
        assert old in body, old
        for policy in POLICIES:
            with pytest.raises(error):
                run(body.replace(old, new), arrays, policy=policy, assembled=False, **options)
                pytest.fail(f"not caught ({policy}): {old!r} -> {new!r}")


# ---- tensor copies --------------------------------------------------------------------------


def loading(rank: int, bytes_: int, coordinates: tuple[int, ...], threads: int = 32) -> str:
    """Load one box by TMA, then write shared memory to p1 as it lies."""
    numbers = ", ".join(map(str, coordinates))
    return f"""
	ld.param.u64 %d1, [p1];
	mov.b64 %d2, p2;
	cvta.param.u64 %d2, %d2;
	mov.u32 %r0, %tid.x;
	mov.u32 %r1, smem;
	add.u32 %r9, %r1, {bytes_};
	setp.eq.u32 %p0, %r0, 0;
	@!%p0 bra $wait;
	prefetch.tensormap [%d2];
	mbarrier.init.shared::cta.b64 [%r9], 1;
	fence.proxy.async.shared::cta;
	mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r9], {bytes_};
	{TMA.format(rank)} [%r1], [%d2, {{{numbers}}}], [%r9];
$wait:
	bar.sync 0;
$again:
	mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r9], 0;
	@!%p1 bra $again;
	shl.b32 %r2, %r0, 4;
$copy:
	setp.ge.u32 %p2, %r2, {bytes_};
	@%p2 bra $end;
	add.u32 %r3, %r1, %r2;
	ld.shared.v4.b32 {{%r10, %r11, %r12, %r13}}, [%r3];
	cvt.u64.u32 %d3, %r2;
	add.s64 %d4, %d1, %d3;
	st.global.v4.b32 [%d4], {{%r10, %r11, %r12, %r13}};
	add.u32 %r2, %r2, {16 * threads};
	bra $copy;
$end:
"""


BOXES = [
    ((100,), (32,), (80,), 0),
    ((20, 64), (16, 64), (5, 0), 128),
    ((20, 72), (8, 32), (15, 16), 64),
    ((9, 40), (8, 16), (-3, 32), 32),
    ((4, 6, 64), (2, 4, 64), (3, -1, 8), 128),
    ((3, 4, 5, 16), (2, 2, 4, 16), (1, 3, 2, 0), 32),
    ((2, 3, 2, 5, 8), (1, 2, 2, 4, 8), (1, 2, 0, -2, 0), 0),
]


@pytest.mark.parametrize(("sizes", "box", "at", "swizzle"), BOXES)
def test_tensor_loads(sizes: Any, box: Any, at: Any, swizzle: int) -> None:
    x = np.random.default_rng(0).standard_normal(sizes).astype(ml_dtypes.bfloat16)
    strides = tuple(s // 2 for s in x.strides)
    bytes_ = 2 * int(np.prod(box))
    y = np.zeros(bytes_ // 2, ml_dtypes.bfloat16)
    map_ = TensorMap(0, np.dtype(ml_dtypes.bfloat16), tuple(sizes), strides, tuple(box), swizzle)
    body = loading(len(box), bytes_, at[::-1])
    run(body, [x, y], maps=[map_], shared=bytes_ + 64, threads=32)
    expected = np.zeros(bytes_ // 2, ml_dtypes.bfloat16)
    for number, place in enumerate(itertools.product(*map(range, box))):
        index = tuple(a + p for a, p in zip(at, place))
        byte = 2 * number + 1024  # where shared memory begins
        row = byte >> 7
        byte ^= (row % {0: 1, 32: 2, 64: 4, 128: 8}[swizzle]) << 4
        if all(0 <= i < s for i, s in zip(index, sizes)):
            expected[(byte - 1024) // 2] = x[index]
    np.testing.assert_array_equal(y.view(np.uint16), expected.view(np.uint16))


def test_tensor_loads_used_wrongly() -> None:
    x = np.ones((64, 64), ml_dtypes.bfloat16)
    y = np.zeros(64 * 64, ml_dtypes.bfloat16)
    map_ = TensorMap(0, np.dtype(ml_dtypes.bfloat16), (64, 64), (64, 1), (64, 64), 128)
    body = loading(2, 8192, (0, 0), 64)
    options: dict[str, Any] = {"maps": [map_], "shared": 8192 + 64, "threads": 64}
    run(body, [x, y], **options)
    wait = body[body.index("$again:") : body.index("\tshl.b32 %r2, %r0, 4;")]
    caught(
        body,
        [
            (wait, "", (RaceError, UninitialisedError, ExitedPeerError)),
            ("[%r9], 8192", "[%r9], 8191", BarrierError),
            ("[%r9], 8192", "[%r9], 8208", DeadlockError),
            ("\tfence.proxy.async.shared::cta;\n", "", ProxyFenceError),
            ("\tbar.sync 0;\n", "", (RaceError, BarrierError)),
            ("[%r1], [%d2", "[%r1+64], [%d2", MisalignedError),
            ("[%r1], [%d2", "[%r1+128], [%d2", (OutOfBoundsError, BarrierError)),
            ("\tcvta.param.u64 %d2, %d2;\n", "", SimulationError),
            (
                "mbarrier.init.shared::cta.b64 [%r9], 1",
                "mbarrier.init.shared::cta.b64 [%r9], 2",
                DeadlockError,
            ),
            (wait, "$again:\n\texit;\n", ExitedPeerError),
        ],
        [x, y],
        **options,
    )
    with pytest.raises(SimulationError, match="outside of memory 0"):
        far = TensorMap(0, np.dtype(ml_dtypes.bfloat16), (128, 64), (64, 1), (64, 64), 128)
        run(loading(2, 8192, (0, 64)), [x, y], **{**options, "maps": [far]})
    for bad in ({"box": (64, 32)}, {"strides": (60, 1)}, {"box": (512, 64)}):
        fields = {"sizes": (64, 64), "strides": (64, 1), "box": (64, 64), **bad}
        with pytest.raises(SimulationError, match="tensor map"):
            run(
                body,
                [x, y],
                **{
                    **options,
                    "maps": [TensorMap(0, np.dtype(ml_dtypes.bfloat16), swizzle=128, **fields)],
                },
            )


# %r1: a tile of 16 rows of 64 bf16 filled by threads with their numbers, then stored by TMA twice
STORING = """
	mov.b64 %d2, p1;
	cvta.param.u64 %d2, %d2;
	mov.u32 %r0, %tid.x;
	mov.u32 %r1, smem;
	shl.b32 %r2, %r0, 5;
	add.u32 %r2, %r2, %r1;
	mov.u32 %r5, 0;
$tile:
	mad.lo.u32 %r4, %r0, 2, %r5;
	st.shared.v4.b32 [%r2], {%r4, %r4, %r4, %r4};
	st.shared.v4.b32 [%r2+16], {%r0, %r0, %r0, %r0};
	fence.proxy.async.shared::cta;
	bar.sync 0;
	setp.ne.u32 %p0, %r0, 0;
	@%p0 bra $stored;
	shl.b32 %r6, %r5, 4;
	cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d2, {0, %r6}], [%r1];
	cp.async.bulk.commit_group;
	cp.async.bulk.wait_group.read 0;
$stored:
	bar.sync 0;
	add.u32 %r5, %r5, 1;
	setp.lt.u32 %p1, %r5, 2;
	@%p1 bra $tile;
"""


@pytest.mark.parametrize("policy", POLICIES)
def test_tensor_stores(policy: str) -> None:
    y = np.zeros((24, 64), np.uint16)
    map_ = TensorMap(0, np.dtype(np.uint16), (24, 64), (64, 1), (16, 64), 128)
    run(STORING, [y], maps=[map_], shared=2048, threads=64, policy=policy)
    for tile in range(2):
        for thread in range(64):
            row = 16 * tile + thread // 4
            for chunk in range(2):
                column = (thread % 4 * 2 + chunk) ^ (thread // 4 % 8)
                if row < 24:
                    value = thread if chunk else 2 * thread + tile
                    np.testing.assert_array_equal(
                        y[row, 8 * column : 8 * column + 8], [value, 0] * 4
                    )


def test_tensor_stores_used_wrongly() -> None:
    y = np.zeros((24, 64), np.uint16)
    map_ = TensorMap(0, np.dtype(np.uint16), (24, 64), (64, 1), (16, 64), 128)
    wait = "\tcp.async.bulk.wait_group.read 0;\n"
    caught(
        STORING,
        [
            ("\tfence.proxy.async.shared::cta;\n", "", ProxyFenceError),
            (
                "\tfence.proxy.async.shared::cta;\n\tbar.sync 0;\n",
                "\tbar.sync 0;\n\tfence.proxy.async.shared::cta;\n",
                ProxyFenceError,
            ),
            (
                "\tfence.proxy.async.shared::cta;\n",
                "\tfence.proxy.async.global;\n",
                ProxyFenceError,
            ),
            (
                "\tfence.proxy.async.shared::cta;\n",  # by one lane for all of its warp
                "\tsetp.eq.u32 %p3, %r0, 0;\n\t@%p3 fence.proxy.async.shared::cta;\n",
                ProxyFenceError,
            ),
            (wait, "", (RaceError, PendingError)),
            (wait, "\tcp.async.bulk.wait_group.read 1;\n", (RaceError, PendingError)),
            ("\tcp.async.bulk.commit_group;\n", "", (RaceError, PendingError)),
            ("$stored:\n\tbar.sync 0;\n", "$stored:\n", RaceError),
            (
                "\tfence.proxy.async.shared::cta;\n\tbar.sync 0;\n",
                "\tfence.proxy.async.shared::cta;\n",
                (RaceError, UninitialisedError),
            ),
        ],
        [y],
        maps=[map_],
        shared=2048,
        threads=64,
    )


def test_reducing_tensor_stores() -> None:
    y = np.arange(24 * 64, dtype=np.float32).reshape(24, 64)
    before = y.copy()
    map_ = TensorMap(0, np.dtype(np.float32), (24, 64), (64, 1), (16, 32), 0)
    body = STORING.replace("cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor")
    body = body.replace("::cta.bulk_group", "::cta.add.bulk_group")
    body = (
        body.replace("{%r4, %r4, %r4, %r4}", "{%r8, %r8, %r8, %r8}")
        .replace("{%r0, %r0, %r0, %r0}", "{%r8, %r8, %r8, %r8}")
        .replace("\tmov.u32 %r5, 0;\n", "\tmov.u32 %r5, 0;\n\tmov.b32 %r8, 0f40000000;\n")
    )
    run(body, [y], maps=[map_], shared=2048, threads=64)
    before[:, :32] += 2
    np.testing.assert_array_equal(y, before)


# ---- bulk copies ----------------------------------------------------------------------------

# 512 bytes from p0 to shared memory, plus one, and back to p1
BULK = """
	ld.param.u64 %d0, [p0];
	ld.param.u64 %d1, [p1];
	mov.u32 %r0, %tid.x;
	mov.u32 %r1, smem;
	setp.ne.u32 %p0, %r0, 0;
	@%p0 bra $ready;
	mbarrier.init.shared::cta.b64 [%r1+512], 1;
	fence.mbarrier_init.release.cluster;
	mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1+512], 512;
	cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d0], 512, [%r1+512];
$ready:
	bar.sync 0;
$again:
	mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1+512], 0;
	@!%p1 bra $again;
	shl.b32 %r2, %r0, 2;
	add.u32 %r2, %r2, %r1;
	ld.shared.u32 %r3, [%r2];
	add.u32 %r3, %r3, 1;
	st.shared.u32 [%r2], %r3;
	fence.proxy.async;
	bar.sync 0;
	@%p0 bra $end;
	cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r1], 512;
	cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%d1+512], [%r1], 256;
	cp.async.bulk.commit_group;
	cp.async.bulk.wait_group 0;
$end:
"""


@pytest.mark.parametrize("policy", POLICIES)
def test_bulk_copies(policy: str) -> None:
    x, y = np.arange(128, dtype=np.uint32), np.full(192, 1000, np.uint32)
    run(BULK, [x, y], threads=128, shared=1024, policy=policy)
    np.testing.assert_array_equal(y[:128], x + 1)
    np.testing.assert_array_equal(y[128:], 1000 + x[:64] + 1)


def test_bulk_copies_used_wrongly() -> None:
    x, y = np.arange(128, dtype=np.uint32), np.full(192, 1000, np.uint32)
    caught(
        BULK,
        [
            ("\tfence.proxy.async;\n", "", ProxyFenceError),
            ("\tfence.mbarrier_init.release.cluster;\n", "", ProxyFenceError),
            ("[%r1], 256", "[%r1], 260", MisalignedError),
            ("[%d1+512], [%r1], 256", "[%d1+768], [%r1], 256", OutOfBoundsError),
            ("[%d0], 512", "[%d0], 256", DeadlockError),
            ("\tcp.async.bulk.wait_group 0;\n", "", PendingError),
            (
                "\tcp.async.bulk.wait_group 0;\n",
                "\tcp.async.bulk.wait_group.read 0;\n\tld.global.u32 %r9, [%d1];\n",
                RaceError,
            ),
        ],
        [x, y],
        threads=128,
        shared=1024,
    )
    late = BULK.replace(
        "\tcp.async.bulk.wait_group 0;\n",
        "\tcp.async.bulk.wait_group 0;\n\tld.global.u32 %r9, [%d1];\n",
    )
    run(late, [x, y], threads=128, shared=1024)


def test_global_memory_written_by_stores_and_read_by_copies_needs_a_fence() -> None:
    x, y = np.arange(128, dtype=np.uint32), np.full(192, 1000, np.uint32)
    body = BULK.replace(
        "\tsetp.ne.u32 %p0, %r0, 0;\n",
        """
	setp.ne.u32 %p0, %r0, 0;
	mul.wide.u32 %d5, %r0, 4;
	add.s64 %d5, %d5, %d0;
	st.global.u32 [%d5], %r0;
	fence.proxy.async.global;
	bar.sync 1;
""",
    )
    run(body, [x, y], threads=128, shared=1024)
    changes = [
        ("\tfence.proxy.async.global;\n", "", ProxyFenceError),
        ("\tbar.sync 1;\n", "", RaceError),
    ]
    caught(body, changes, [x, y], threads=128, shared=1024)


# ---- cp.async -------------------------------------------------------------------------------

# each thread copies 16 bytes twice, in two groups, and reads those of the thread beside it
COPIES = """
	ld.param.u64 %d0, [p0];
	ld.param.u64 %d1, [p1];
	mov.u32 %r0, %tid.x;
	mov.u32 %r1, smem;
	shl.b32 %r2, %r0, 4;
	cvt.u64.u32 %d2, %r2;
	add.s64 %d3, %d0, %d2;
	add.s64 %d4, %d1, %d2;
	add.u32 %r3, %r1, %r2;
	cp.async.cg.shared.global [%r3], [%d3], 16;
	cp.async.commit_group;
	mov.u32 %r9, 6;
	cp.async.ca.shared.global [%r3+1024], [%d3+1024], 8, %r9;
	cp.async.commit_group;
	cp.async.wait_group 1;
	bar.sync 0;
	xor.b32 %r4, %r2, 512;
	add.u32 %r4, %r4, %r1;
	ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r4];
	st.global.v4.b32 [%d4], {%r10, %r11, %r12, %r13};
	cp.async.wait_group 0;
	ld.shared.v2.b32 {%r10, %r11}, [%r3+1024];
	st.global.v2.b32 [%d4+1024], {%r10, %r11};
"""


@pytest.mark.parametrize("policy", POLICIES)
def test_cp_async(policy: str) -> None:
    x = np.random.default_rng(1).integers(0, 256, 2048, np.uint8)
    y = np.zeros(2048, np.uint8)
    run(COPIES, [x, y], threads=64, shared=2048, target="sm_80", policy=policy)
    (first, second), (got_first, got_second) = (v.reshape(2, 64, 16) for v in (x, y))
    np.testing.assert_array_equal(got_first, first[np.arange(64) ^ 32])
    np.testing.assert_array_equal(got_second[:, :6], second[:, :6])
    assert not got_second[:, 6:].any()


def test_cp_async_used_wrongly() -> None:
    x, y = np.ones(2048, np.uint8), np.zeros(2048, np.uint8)
    caught(
        COPIES,
        [
            ("\tcp.async.wait_group 1;\n", "", (RaceError, UninitialisedError)),
            ("\tcp.async.wait_group 1;\n", "\tcp.async.wait_group 2;\n", RaceError),
            ("\tbar.sync 0;\n", "", (RaceError, UninitialisedError)),
            (
                "\tcp.async.wait_group 1;\n\tbar.sync 0;\n",
                "\tbar.sync 0;\n\tcp.async.wait_group 1;\n",
                RaceError,
            ),
            ("\tcp.async.wait_group 0;\n", "", RaceError),
            ("[%d3], 16", "[%d3+8], 16", MisalignedError),
            ("[%d3+1024], 8", "[%d3+2048], 8", OutOfBoundsError),
        ],
        [x, y],
        threads=64,
        shared=2048,
        target="sm_80",
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_cp_async_arrives_on_an_mbarrier(policy: str) -> None:
    x = np.random.default_rng(1).integers(0, 256, 512, np.uint8)
    y = np.zeros(512, np.uint8)
    body = """
	ld.param.u64 %d0, [p0];
	ld.param.u64 %d1, [p1];
	mov.u32 %r0, %tid.x;
	mov.u32 %r1, smem;
	and.b32 %r2, %r0, 31;
	shl.b32 %r2, %r2, 4;
	cvt.u64.u32 %d2, %r2;
	add.s64 %d3, %d0, %d2;
	add.s64 %d4, %d1, %d2;
	add.u32 %r3, %r1, %r2;
	setp.eq.u32 %p0, %r0, 0;
	@%p0 mbarrier.init.shared::cta.b64 [%r1+512], 32;
	bar.sync 0;
	setp.lt.u32 %p1, %r0, 32;
	@!%p1 bra $again;
	cp.async.cg.shared.global [%r3], [%d3], 16;
	cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r1+512];
	bra $end;
$again:
	mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1+512], 0;
	@!%p2 bra $again;
	ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r3];
	st.global.v4.b32 [%d4], {%r10, %r11, %r12, %r13};
$end:
"""
    run(body, [x, y], threads=64, shared=1024, policy=policy)
    np.testing.assert_array_equal(y, x)
    with pytest.raises((DeadlockError, RaceError)):
        run(
            body.replace("\tcp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r1+512];\n", ""),
            [x, y],
            threads=64,
            shared=1024,
            policy=policy,
        )


# ---- clusters -------------------------------------------------------------------------------

# Each CTA of a pair multicasts one half of a 16 x 64 tile to both, reads all of it, and tells
# the other by a remote arrival that it is done; nobody exits before the other is done.
CLUSTER = f"""
	ld.param.u64 %d1, [p1];
	mov.b64 %d2, p2;
	cvta.param.u64 %d2, %d2;
	mov.u32 %r0, %tid.x;
	mov.u32 %r1, smem;
	mov.u32 %r20, %cluster_ctarank;
	xor.b32 %r21, %r20, 1;
	setp.ne.u32 %p0, %r0, 0;
	@%p0 bra $made;
	mbarrier.init.shared::cta.b64 [%r1+2048], 1;
	mbarrier.init.shared::cta.b64 [%r1+2056], 32;
	fence.mbarrier_init.release.cluster;
$made:
	barrier.cluster.arrive.release.aligned;
	barrier.cluster.wait.acquire.aligned;
	@%p0 bra $again;
	mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1+2048], 2048;
	shl.b32 %r5, %r20, 3;
	shl.b32 %r6, %r20, 10;
	add.u32 %r6, %r6, %r1;
	mov.u16 %h1, 3;
	{TMA.format(2)}.multicast::cluster [%r6], [%d2, {{0, %r5}}], [%r1+2048], %h1;
$again:
	mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1+2048], 0;
	@!%p1 bra $again;
	mov.u32 %r2, %r0;
	shl.b32 %r2, %r2, 6;
	add.u32 %r3, %r2, %r1;
	mad.lo.u32 %r4, %r20, 2048, %r2;
	cvt.u64.u32 %d3, %r4;
	add.s64 %d3, %d3, %d1;
	mov.u32 %r7, 0;
$copy:
	ld.shared.v4.b32 {{%r10, %r11, %r12, %r13}}, [%r3];
	st.global.v4.b32 [%d3], {{%r10, %r11, %r12, %r13}};
	add.u32 %r3, %r3, 16;
	add.s64 %d3, %d3, 16;
	add.u32 %r7, %r7, 1;
	setp.lt.u32 %p2, %r7, 4;
	@%p2 bra $copy;
	mapa.shared::cluster.u32 %r8, %r1, %r21;
	mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r8+2056];
$drain:
	mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1+2056], 0;
	@!%p1 bra $drain;
"""


@pytest.mark.parametrize("policy", POLICIES)
def test_clusters(policy: str) -> None:
    x = np.random.default_rng(2).integers(0, 65536, (16, 64), np.uint16)
    y = np.zeros((4, 16, 64), np.uint16)
    maps = [TensorMap(0, np.dtype(np.uint16), (16, 64), (64, 1), (8, 64), 0)]
    body = CLUSTER.replace("%r4, %r20, 2048", "%r4, %r22, 2048").replace(
        "\tmov.u32 %r20, %cluster_ctarank;\n",
        "\tmov.u32 %r20, %cluster_ctarank;\n\tmov.u32 %r22, %ctaid.x;\n",
    )
    run(body, [x, y], maps=maps, threads=32, shared=4096, grid=(4,), cluster=(2,), policy=policy)
    for copy in y:
        np.testing.assert_array_equal(copy, x)


def test_clusters_used_wrongly() -> None:
    x = np.random.default_rng(2).integers(0, 65536, (16, 64), np.uint16)
    y = np.zeros((2, 16, 64), np.uint16)
    maps = [TensorMap(0, np.dtype(np.uint16), (16, 64), (64, 1), (8, 64), 0)]
    options: dict[str, Any] = {
        "maps": maps,
        "threads": 32,
        "shared": 4096,
        "grid": (2,),
        "cluster": (2,),
    }
    run(CLUSTER, [x, y], **options)
    drain = CLUSTER[CLUSTER.index("$drain:") :]
    both = "\tbarrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;\n"
    caught(
        CLUSTER,
        [
            (drain, "", ExitedPeerError),
            (both, "", (ProxyFenceError, RaceError, BarrierError)),
            (
                "\tbarrier.cluster.wait.acquire.aligned;\n",
                "",
                (ProxyFenceError, RaceError, BarrierError),
            ),
            ("\tbarrier.cluster.arrive.release.aligned;\n", "", BarrierError),
            ("arrive.release.aligned", "arrive.relaxed.aligned", RaceError),
            ("\tfence.mbarrier_init.release.cluster;\n", "", ProxyFenceError),
            ("%h1, 3", "%h1, 1", (DeadlockError, BarrierError)),
            ("%h1, 3", "%h1, 7", OutOfBoundsError),
            ("+2048], 2048", "+2048], 1024", (BarrierError, RaceError, UninitialisedError)),
            ("[%r8+2056];", "[%r8+2064];", BarrierError),
        ],
        [x, y],
        **options,
    )


# every thread adds its number to a word of the other CTA, which is then read there
REMOTE = """
	ld.param.u64 %d1, [p0];
	mov.u32 %r0, %tid.x;
	mov.u32 %r1, smem;
	mov.u32 %r20, %cluster_ctarank;
	xor.b32 %r21, %r20, 1;
	shl.b32 %r2, %r0, 2;
	add.u32 %r2, %r2, %r1;
	mapa.shared::cluster.u32 %r3, %r2, %r21;
	mad.lo.u32 %r4, %r20, 100, %r0;
	barrier.cluster.arrive.aligned;
	barrier.cluster.wait.aligned;
	st.shared::cluster.u32 [%r3], %r4;
	barrier.cluster.arrive.aligned;
	barrier.cluster.wait.aligned;
	ld.shared.u32 %r5, [%r2];
	ld.shared::cluster.u32 %r6, [%r3];
	add.u32 %r5, %r5, %r6;
	mad.lo.u32 %r7, %r20, 32, %r0;
	mul.wide.u32 %d2, %r7, 4;
	add.s64 %d2, %d2, %d1;
	st.global.u32 [%d2], %r5;
	barrier.cluster.arrive.aligned;
	barrier.cluster.wait.aligned;
"""


def test_shared_memory_of_a_peer() -> None:
    y = np.zeros(64, np.uint32)
    options: dict[str, Any] = {"shared": 256, "grid": (2,), "cluster": (2,)}
    for policy in POLICIES:
        run(REMOTE, [y], policy=policy, **options)
        np.testing.assert_array_equal(y, np.tile(100 + 2 * np.arange(32), 2))
    pair = "\tbarrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;\n"
    parts = REMOTE.split(pair)
    with pytest.raises((RaceError, UninitialisedError)):
        run(parts[0] + pair + parts[1] + parts[2] + pair, [y], **options)
    with pytest.raises(ExitedPeerError):
        run(parts[0] + pair + parts[1] + pair + parts[2], [y], **options)
    with pytest.raises(OutOfBoundsError, match="not in shared::cta"):
        run(REMOTE.replace("st.shared::cluster", "st.shared"), [y], **options)


def test_st_async() -> None:
    y = np.zeros(64, np.uint32)
    body = """
	ld.param.u64 %d1, [p0];
	mov.u32 %r0, %tid.x;
	mov.u32 %r1, smem;
	mov.u32 %r20, %cluster_ctarank;
	xor.b32 %r21, %r20, 1;
	shl.b32 %r2, %r0, 2;
	add.u32 %r2, %r2, %r1;
	mapa.shared::cluster.u32 %r3, %r2, %r21;
	mapa.shared::cluster.u32 %r8, %r1, %r21;
	mad.lo.u32 %r4, %r20, 100, %r0;
	setp.eq.u32 %p0, %r0, 0;
	@!%p0 bra $made;
	mbarrier.init.shared::cta.b64 [%r1+128], 1;
	fence.mbarrier_init.release.cluster;
	mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1+128], 128;
$made:
	barrier.cluster.arrive.aligned;
	barrier.cluster.wait.aligned;
	st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r3], %r4, [%r8+128];
$again:
	mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p1, [%r1+128], 0;
	@!%p1 bra $again;
	ld.shared.u32 %r5, [%r2];
	mad.lo.u32 %r7, %r20, 32, %r0;
	mul.wide.u32 %d2, %r7, 4;
	add.s64 %d2, %d2, %d1;
	st.global.u32 [%d2], %r5;
	barrier.cluster.arrive.aligned;
	barrier.cluster.wait.aligned;
"""
    options: dict[str, Any] = {"shared": 256, "grid": (2,), "cluster": (2,)}
    run(body, [y], **options)
    np.testing.assert_array_equal(y, [*range(100, 132), *range(32)])
    wait = body[body.index("$again:") : body.index("\tld.shared.u32 %r5")]
    caught(
        body,
        [
            (wait, "", (RaceError, UninitialisedError, ExitedPeerError)),
            ("parity.acquire.cluster.", "parity.", RaceError),
            ("parity.acquire.cluster.", "parity.acquire.cta.", RaceError),
            ("[%r1+128], 128", "[%r1+128], 124", (BarrierError, RaceError, UninitialisedError)),
        ],
        [y],
        **options,
    )


def test_reducing_into_a_peer() -> None:
    y = np.zeros(64, np.uint32)
    body = """
	ld.param.u64 %d1, [p0];
	mov.u32 %r0, %tid.x;
	mov.u32 %r1, smem;
	mov.u32 %r20, %cluster_ctarank;
	xor.b32 %r21, %r20, 1;
	shl.b32 %r2, %r0, 2;
	add.u32 %r2, %r2, %r1;
	mapa.shared::cluster.u32 %r8, %r1, %r21;
	mad.lo.u32 %r4, %r20, 100, %r0;
	st.shared.u32 [%r2], %r4;
	mov.u32 %r5, 7;
	st.shared.u32 [%r2+256], %r5;
	fence.proxy.async.shared::cta;
	setp.eq.u32 %p0, %r0, 0;
	@!%p0 bra $made;
	mbarrier.init.shared::cta.b64 [%r1+128], 1;
	fence.mbarrier_init.release.cluster;
	mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1+128], 128;
$made:
	barrier.cluster.arrive.aligned;
	barrier.cluster.wait.aligned;
	@!%p0 bra $again;
	cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u32 [%r8+256],
		[%r1], 128, [%r8+128];
$again:
	mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p1, [%r1+128], 0;
	@!%p1 bra $again;
	ld.shared.u32 %r5, [%r2+256];
	mad.lo.u32 %r7, %r20, 32, %r0;
	mul.wide.u32 %d2, %r7, 4;
	add.s64 %d2, %d2, %d1;
	st.global.u32 [%d2], %r5;
	barrier.cluster.arrive.aligned;
	barrier.cluster.wait.aligned;
"""
    options: dict[str, Any] = {"shared": 512, "grid": (2,), "cluster": (2,)}
    for policy in POLICIES:
        run(body, [y], policy=policy, **options)
        np.testing.assert_array_equal(y, [*range(107, 139), *range(7, 39)])
