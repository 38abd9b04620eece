"""The PTX simulator on scalar code, memory, lanes and barriers: hand-written PTX, known answers.

Every text is assembled by ptxas as well, so that it is PTX and not a dialect of the simulator.
"""

from __future__ import annotations

import numpy as np
import pytest
from ptx_text import run

from tilegrad.targets.ptx.simulate import POLICIES
from tilegrad.targets.ptx.simulate_errors import (
    RaceError,
    UninitialisedError,
)

REVERSE = """
	ld.param.u64 %d0, [p0];
	ld.param.u64 %d1, [p1];
	mov.u32 %r0, %ctaid.x;
	mov.u32 %r1, %tid.x;
	mad.lo.s32 %r2, %r0, 64, %r1;
	mul.wide.s32 %d2, %r2, 4;
	add.s64 %d3, %d0, %d2;
	add.s64 %d4, %d1, %d2;
	ld.global.f32 %r3, [%d3];
	mov.u32 %r10, smem;
	shl.b32 %r11, %r1, 2;
	add.u32 %r12, %r10, %r11;
	st.shared.f32 [%r12], %r3;
	bar.sync 0;
	xor.b32 %r13, %r11, 252;
	add.u32 %r13, %r13, %r10;
	ld.shared.f32 %r4, [%r13];
	mov.u32 %r20, 0;
$loop_1:
	add.rn.f32 %r4, %r4, 0f3F800000;
	add.u32 %r20, %r20, 1;
	setp.lt.u32 %p0, %r20, %r1;
	@%p0 bra $loop_1;
	setp.gt.s32 %p1, %r1, 40;
	@%p1 neg.f32 %r4, %r4;
	st.global.f32 [%d4], %r4;
"""


@pytest.mark.parametrize("policy", POLICIES)
def test_lanes_diverge_and_meet(policy: str) -> None:
    x, y = np.arange(256, dtype=np.float32), np.zeros(256, np.float32)
    run(REVERSE, [x, y], threads=64, grid=(4,), shared=256, policy=policy)
    lane = np.arange(64)
    expected = x.reshape(4, 64)[:, ::-1] + np.maximum(1, lane)
    np.testing.assert_array_equal(y.reshape(4, 64), np.where(lane > 40, -expected, expected))


@pytest.mark.parametrize("policy", POLICIES)
def test_missing_barrier_is_a_race(policy: str) -> None:
    x, y = np.arange(256, dtype=np.float32), np.zeros(256, np.float32)
    # a warp that runs ahead of the writer reads what nothing has written
    with pytest.raises((RaceError, UninitialisedError), match=r"PTX line \d+: `(ld|st).shared"):
        run(REVERSE.replace("\tbar.sync 0;\n", ""), [x, y], threads=64, grid=(4,), shared=256,
            policy=policy)  # fmt: skip
