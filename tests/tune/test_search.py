"""Plans of users' kernels, spaces of them, and the search over them."""

from __future__ import annotations

import pytest

from tilegrad.core.errors import UserError
from tilegrad.core.target import AVX512, H100, SSE2
from tilegrad.tile.plan import Plan, from_record
from tilegrad.tune.search import measure, plans_in


def test_plans_are_records():
    plan = Plan().with_(block=(64, 32), BK=16, warps=4, width=7)
    assert (plan.m, plan.n, plan.k, plan.warps, plan.sizes) == (64, 32, 16, 4, (("width", 7),))
    assert from_record(plan.to_record()) == plan
    assert str(Plan()) == "automatic" and "width=7" in str(plan)
    with pytest.raises(UserError, match="bad block"):
        plan.with_(block=64)
    with pytest.raises(UserError, match="bad BM"):
        plan.with_(BM="wide")


def test_defaults_follow_the_registers_of_a_target():
    gpu, cpu, small = (Plan().filled(t) for t in (H100, AVX512, SSE2))
    assert gpu.m == gpu.n == 128 and gpu.warps == 8 and gpu.swizzle == "xor"
    assert cpu.vector == 16 and small.vector == 4 and cpu.warps == small.warps == 1
    stated = Plan().with_(BM=16).filled(H100)
    assert stated.m == 16 and stated.n == 128
    assert set(gpu.notes()) == {"warps", "stages", "vector", "swizzle"}


def test_a_space_is_searched_in_order():
    plans = plans_in({"BM": [16, 32], "stages": [1, 2]}, Plan().with_(warps=4))
    assert [(p.m, p.stages, p.warps) for p in plans] == [
        (16, 1, 4),
        (16, 2, 4),
        (32, 1, 4),
        (32, 2, 4),
    ]
    with pytest.raises(UserError, match="no choices for BM"):
        plans_in({"BM": []}, Plan())


def test_measuring_stops_at_its_budget():
    runs = []
    assert measure(lambda: runs.append(0), 1e-9) >= 0
    assert len(runs) == 2  # one to warm up
