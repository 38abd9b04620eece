"""PlanTables: on disk and in one file, damaged ones, what compile reads, the wide matmul's keys."""

from __future__ import annotations

import dataclasses
import json
import logging
import subprocess
import sys

import pytest
from product_bodies import wide_matmul

from tilegrad.compiler import compile as compiler
from tilegrad.core.config import override, read_environment
from tilegrad.core.dtype import bfloat16, float32
from tilegrad.core.errors import UserError
from tilegrad.core.target import H100, H200
from tilegrad.graph import build
from tilegrad.ir.symbol import symbol
from tilegrad.kernels import plan_table
from tilegrad.kernels.matmul.plan import choose, ranked, transposed
from tilegrad.kernels.matmul.shape import Operands, WidePlan
from tilegrad.kernels.matmul.table import (
    fits,
    from_record,
    in_shape,
    problem_key,
    shared_bytes,
    to_record,
    tuned,
)
from tilegrad.kernels.plan_table import Entry, PlanTable, Trial, plans, read_table, shipped, text_of
from tilegrad.targets.ptx.emit import emit
from tilegrad.tile.build import fill
from tilegrad.tile.plan import Plan
from tilegrad.tile.plan import from_record as kernel_plan


@pytest.fixture(autouse=True)
def tables(tmp_path):
    """A cache folder of its own, and tables read anew before and after."""
    plan_table.forget()
    with override(cache_folder=str(tmp_path / "cache")):
        yield
    plan_table.forget()


def entry_for(x: Operands, number: int) -> Entry:
    choice = ranked(x, H200)[number]
    return Entry(to_record(choice.plan, choice.turned), 1e-5)


# ---- the table ------------------------------------------------------------------------------


def test_a_table_is_kept_and_read_back(tmp_path):
    tried = (Trial({"m": 16}, 1.5e-3), Trial({}, None, "no time left"))
    entry = Entry({"m": 16, "width": 3}, 1.5e-3, {"date": "2026-11-15"}, tried)
    PlanTable(str(tmp_path)).put("one-1", entry)
    assert PlanTable(str(tmp_path)).get("one-1") == entry
    assert PlanTable(str(tmp_path)).get("two-1") is None
    assert [p.name for p in tmp_path.iterdir()] == ["one-1.json"]
    assert "1.5000 ms  {'m': 16}" in str(tried[0]) and "(no time left)" in str(tried[1])
    assert str(Trial(Plan().with_(BM=16), 1.5e-3)).endswith("1.5000 ms  m=16")
    assert tried[0].milliseconds == 1.5 and tried[1].milliseconds is None


def test_one_file_holds_many_problems_in_order(tmp_path):
    keys = ["matmul-h200-m8", "matmul-h200-m128", "matmul-h200-m16"]
    text = text_of({key: Entry({"n": i}, 1e-6 * i) for i, key in enumerate(keys)}, {"by": "hand"})
    assert [line.split('"')[1] for line in text.splitlines() if "matmul" in line] == [
        "matmul-h200-m8",
        "matmul-h200-m16",
        "matmul-h200-m128",
    ]
    (tmp_path / "table.json").write_text(text)
    table = read_table(tmp_path / "table.json")
    assert table.get(keys[1]) == Entry({"n": 1}, 1e-6)
    assert json.loads(text)["about"] == {"by": "hand"}
    (tmp_path / "matmul-all.json").write_text(text)  # also in a folder of problems
    assert PlanTable("").read_all(tmp_path, "matmul-*").digest == table.digest != ""
    assert json.loads(text_of({}))["plans"] == {}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[1, 2]",
        '{"format": 7, "plans": {}}',
        '{"format": 1, "plans": {"one": {"plan": 3}}}',
        '{"format": 1, "plans": {"one": {"plan": {"m": -3}}}}',
    ],
)
def test_a_damaged_table_is_an_empty_one(tmp_path, caplog, text):
    (tmp_path / "one.json").write_text(text)
    with caplog.at_level(logging.WARNING):
        assert PlanTable(str(tmp_path)).get("one", kernel_plan) is None
    assert "is not a Plan" in caplog.text


def test_a_folder_that_cannot_be_written(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    table = PlanTable(str(tmp_path / "file"))
    table.put("one", Entry({}))
    assert table.get("one") == Entry({}) and "was not kept" in caplog.text


def test_the_digest_is_that_of_keys_and_plans():
    def table(**plans):
        made = PlanTable("")
        for key, (plan, seconds) in plans.items():
            made.put(key, Entry(plan, seconds))
        return made.digest

    one = table(a=({"m": 1}, 1.0), b=({"m": 2}, 1.0))
    assert one == table(b=({"m": 2}, 3.0), a=({"m": 1}, None))
    assert (
        len({one, table(), table(a=({"m": 2}, 1.0), b=({"m": 1}, 1.0)), table(a=({"m": 1}, 1.0))})
        == 4
    )
    assert table() == ""
    script = "from tilegrad.kernels.plan_table import shipped; print(shipped().digest)"
    said = subprocess.check_output([sys.executable, "-c", script], text=True)
    assert said.strip() == shipped().digest


def test_what_the_config_asks_for(tmp_path):
    assert read_environment({}).plan_table is None
    assert read_environment({"TILEGRAD_PLANS": ""}).plan_table == ""
    x = Operands(512, 1024, 1024, bfloat16, bfloat16)
    key, own = problem_key(x, "h200"), entry_for(x, 1)
    assert plans().digest == shipped().digest
    PlanTable(None).put(key, own)  # what a person tuned is read at once
    assert plans().get(key) == own and tuned(x, H200).plan == from_record(own.plan)[0]
    with override(plan_table=""):
        assert plans().digest == "" and tuned(x, H200) is None
    file = tmp_path / "other.json"
    file.write_text(text_of({key: entry_for(x, 2)}))
    with override(plan_table=str(file)):
        assert tuned(x, H200).plan == ranked(x, H200)[2].plan
    with override(plan_table=str(tmp_path / "none.json")), pytest.raises(UserError, match="none"):
        plans()


# ---- the wide matmul in it ------------------------------------------------------------------


def test_plans_are_records():
    for m in (1, 64, 512, 8192):
        for choice in ranked(Operands(m, 4096, 4096, bfloat16, bfloat16), H200):
            record = json.loads(json.dumps(to_record(choice.plan, choice.turned)))
            assert from_record(record) == (choice.plan, choice.turned)
    good = to_record(WidePlan(), False)
    assert from_record({"tile": good["tile"], "turned": False}) == (WidePlan(), False)
    for wrong in ({"tile": [1, 2]}, {"stages": 0}, {"stages": True}, {"across": 1}, {"warps": 3}):
        with pytest.raises(UserError, match="not the Plan"):
            from_record({**good, **wrong})


def test_keys_tell_problems_apart():
    x = Operands(512, 4096, 1024, bfloat16, bfloat16)
    others = [
        dataclasses.replace(x, **change)
        for change in (
            {"m": 513},
            {"n": 4104},
            {"k": 1032},
            {"batch": 2},
            {"result": float32},
            {"dtype": float32},
            {"a_along_k": False},
            {"b_along_k": False},
        )
    ]
    keys = {problem_key(o, "h200") for o in [x, *others]}
    keys |= {problem_key(x, "h100"), problem_key(x, "h200", "reads")}
    assert len(keys) == 11
    assert problem_key(x, "h200") == "matmul-h200-bfloat16-bfloat16-kk-plain-b1-n4096-k1024-m512"
    bounded = dataclasses.replace(x, m=symbol("rows", 1, 512))
    assert problem_key(bounded, "h200") == problem_key(x, "h200")


def test_lookup_by_exact_size_then_by_bucket():
    x = Operands(512, 4096, 1024, bfloat16, bfloat16)
    plan = WidePlan((128, 128, 64), 6, 128, 8, 64)
    table = PlanTable("")
    table.put(problem_key(x, "h200"), Entry(to_record(plan, False), 2e-5))
    found = tuned(x, H200, table=table)
    assert (found.plan, found.turned, found.seconds) == (plan, False, 2e-5)

    def at(**change):
        return tuned(dataclasses.replace(x, **change), H200, table=table)

    assert at(m=385).plan == plan  # four rows of tiles too
    assert at(m=384) is None  # three: the model knows better
    assert at(m=256) is None and at(m=513) is None and at(n=4104) is None
    assert tuned(x, H200, "reads", table).plan == plan  # no class of its own
    other = dataclasses.replace(plan, stages=5)
    table.put(problem_key(x, "h200", "reads"), Entry(to_record(other, False)))
    assert tuned(x, H200, "reads", table).plan == other
    assert tuned(x, H200, "several", table).plan == plan
    table.put(problem_key(dataclasses.replace(x, m=400), "h200"), Entry(to_record(other, False)))
    assert at(m=400).plan == other  # its own entry comes before the bucket's


def test_h100_takes_the_plans_of_h200():
    x = Operands(512, 4096, 1024, bfloat16, bfloat16)
    plan, own = WidePlan((128, 128, 64), 6, 128), WidePlan((128, 128, 64), 4, 128)
    table = PlanTable("")
    table.put(problem_key(x, "h200"), Entry(to_record(plan, False)))
    assert tuned(x, H100, table=table).plan == plan
    table.put(problem_key(x, "h100"), Entry(to_record(own, False)))
    assert tuned(x, H100, table=table).plan == own and tuned(x, H200, table=table).plan == plan
    assert tuned(x, H200.with_cores(64), table=table) is None  # more programs than cores


@pytest.mark.parametrize(
    "change",
    [
        {"stages": 9},
        {"programs": 133},
        {"cluster": 2, "programs": 127},
        {"split": 2},
        {"stages": 1},
        {"staged": 48},
        {"tile": (128, 128, 32)},
        {"tile": (100, 128, 64)},
    ],
)
def test_plans_that_do_not_fit_are_not_taken(change):
    x = Operands(512, 4096, 1024, bfloat16, bfloat16)
    plan = dataclasses.replace(WidePlan((128, 128, 64), 6, 128), **change)
    table = PlanTable("")
    table.put(problem_key(x, "h200"), Entry(to_record(plan, False)))
    assert tuned(x, H200, table=table) is None


def test_shared_memory_is_counted_as_it_is_emitted():
    for m, number in ((8, 0), (64, 1), (512, 0), (8192, 3)):
        x = Operands(m, 1024, 1024, bfloat16, bfloat16)
        choice = ranked(x, H200)[number]
        own = transposed(x) if choice.turned else x
        body = fill(wide_matmul(own, choice.plan), "epilogue", lambda b, inputs, added: inputs[0])
        _, entry = emit(body, "matmul", H200)
        assert 0 <= shared_bytes(own, choice.plan) - entry.shared_bytes <= 1536
        assert fits(x, choice.plan, choice.turned, H200, m)


def test_the_shipped_table():
    table = shipped()
    for key, entry in table.known.items():
        _, machine, dtype, result, layout, epilogue, batch, n, k, m = key.split("-")
        assert (machine, dtype, result, layout, batch) == (
            "h200",
            "bfloat16",
            "bfloat16",
            "kk",
            "b1",
        ), key
        assert {"device", "date"} <= set(entry.origin) and entry.seconds > 0
        x = Operands(int(m[1:]), int(n[1:]), int(k[1:]), bfloat16, bfloat16)
        assert problem_key(x, machine, epilogue) == key
        plan, turned = from_record(entry.plan)
        assert in_shape(transposed(x) if turned else x, plan) and tuned(x, H200, table=table), key
        wide_matmul(transposed(x) if turned else x, plan)
    assert (plan_table.SHIPPED / "h200.json").exists()


# ---- compile --------------------------------------------------------------------------------


def product(m: int = 512, n: int = 4096, k: int = 1024):
    a, w = build.input_((m, k), bfloat16), build.input_((n, k), bfloat16)
    return (a, w), (build.matmul(a, build.transpose(w)),)


def scheduled_plan(**size) -> WidePlan:
    schedule = compiler.schedule_for(*product(**size), H200)
    (plan,) = [step.body.notes["plan"] for kernel in schedule.kernels for step in kernel.steps]
    return plan


def test_compile_reads_the_table():
    x = Operands(512, 4096, 1024, bfloat16, bfloat16)
    with override(plan_table=""):
        assert tuned(x, H200) is None
        assert scheduled_plan() == choose(x, H200).plan
    for number in (1, 2):  # a changed table is another compile, in one process
        PlanTable(None).put(problem_key(x, "h200"), entry_for(x, number))
        assert (
            scheduled_plan()
            == ranked(x, H200)[number].plan
            == (tuned(x, H200) or choose(x, H200)).plan
        )
    with override(plan_table=""):
        assert scheduled_plan() == choose(x, H200).plan


def test_the_key_of_an_executable_has_the_table(monkeypatch):
    asked = []
    monkeypatch.setattr(compiler, "_memory", {})
    monkeypatch.setattr(compiler, "_make", lambda key, *rest: asked.append(key) or key)
    monkeypatch.setattr(compiler, "target_for", lambda device: H200)
    inputs, outputs = product()
    x = Operands(512, 4096, 1024, bfloat16, bfloat16)

    def both():
        return [compiler.executable_for(inputs, outputs, device=d) for d in ("cpu", "cuda:0")]

    cpu, gpu = both()
    assert both() == [cpu, gpu] and len(asked) == 2
    PlanTable(None).put(problem_key(x, "h200"), entry_for(x, 1))
    assert both()[0] == cpu and both()[1] != gpu and len(asked) == 3
    with override(plan_table=""):
        both()
    assert len(asked) == 3 + bool(shipped().digest)  # an empty table, which may be shipped
