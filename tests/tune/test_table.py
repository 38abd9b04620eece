"""PlanTables on disk, Plans in a space, and the search over them."""

from __future__ import annotations

import logging

import pytest

from tilegrad.core.errors import UserError
from tilegrad.core.target import AVX512, H100, SSE2
from tilegrad.tile.plan import Plan, from_record
from tilegrad.tune.search import measure, plans_in
from tilegrad.tune.table import Entry, PlanTable, Trial


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


def test_a_space_is_walked_in_order():
    plans = plans_in({"BM": [16, 32], "stages": [1, 2]}, Plan().with_(warps=4))
    assert [(p.m, p.stages, p.warps) for p in plans] == [(16, 1, 4), (16, 2, 4), (32, 1, 4),
                                                         (32, 2, 4)]  # fmt: skip
    with pytest.raises(UserError, match="no choices for BM"):
        plans_in({"BM": []}, Plan())


def test_a_table_is_kept_and_read_back(tmp_path):
    entry = Entry(Plan().with_(BM=16, width=3), (Trial(Plan().with_(BM=16), 1.5),
                                                Trial(Plan(), None, "no time left")))  # fmt: skip
    PlanTable(str(tmp_path)).put("one", entry)
    assert PlanTable(str(tmp_path)).get("one") == entry
    assert PlanTable(str(tmp_path)).get("two") is None
    assert [p.name for p in tmp_path.iterdir()] == ["one.json"]
    assert "1.5000 ms  m=16" in str(entry.trials[0]) and "(no time left)" in str(entry.trials[1])


@pytest.mark.parametrize("text", ["", "{}", "[1, 2]", '{"plan": {"m": -3}, "trials": []}'])
def test_a_damaged_table_is_an_empty_one(tmp_path, caplog, text):
    (tmp_path / "one.json").write_text(text)
    with caplog.at_level(logging.WARNING):
        assert PlanTable(str(tmp_path)).get("one") is None
    assert "is not a Plan" in caplog.text


def test_a_folder_that_cannot_be_written(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    table = PlanTable(str(tmp_path / "file"))
    table.put("one", Entry(Plan()))
    assert table.get("one") == Entry(Plan()) and "was not kept" in caplog.text


def test_measuring_stops_at_its_budget():
    runs = []
    assert measure(lambda: runs.append(0), 1e-9) >= 0
    assert len(runs) == 2  # one to warm up
