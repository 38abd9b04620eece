"""Tuning the matmul: candidates, the search with a fake timer, trouble in trials, measuring on a
fake GPU (with the simulator in its place), and the command."""

from __future__ import annotations

import ctypes
import dataclasses
import json
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import timing_functions
from fake_cuda import ENCODER, FakeCuda
from product_bodies import wide_matmul
from simulator import simulate
from typer.testing import CliRunner

from tilegrad.cli import main
from tilegrad.cli import tune as command
from tilegrad.core.config import override
from tilegrad.core.dtype import bfloat16
from tilegrad.core.errors import UserError
from tilegrad.core.target import H200
from tilegrad.kernels import plan_table
from tilegrad.kernels.matmul.plan import choose, transposed
from tilegrad.kernels.matmul.shape import Operands, WidePlan
from tilegrad.kernels.matmul.table import fits, from_record, problem_key, to_record, tuned
from tilegrad.kernels.plan_table import PlanTable, read_table
from tilegrad.targets.ptx import context, cuda_api, driver
from tilegrad.targets.ptx.emit import emit
from tilegrad.targets.ptx.program import Entry
from tilegrad.tile.build import fill
from tilegrad.tune import matmul_search, measure
from tilegrad.tune.matmul_search import Machine, Search, Settings, product_of
from tilegrad.tune.measure import Code, Product
from tilegrad.tune.space import first_candidates, neighbours
from tilegrad.tune.trials import TrialLog
from tilegrad.tune.worker import Outcome, Worker

MACHINE = Machine(H200, "NVIDIA H200", "sm_90a")
ORIGIN = {"device": "NVIDIA H200", "date": "2026-11-15", "commit": "abc"}
PRODUCT = Product(512, 4096, 4096, "bfloat16")


@pytest.fixture(autouse=True)
def tables(tmp_path):
    plan_table.forget()
    with override(cache_folder=str(tmp_path / "cache")):
        yield
    plan_table.forget()


class Direct:
    """A worker that is this process; it can count."""

    def __init__(self) -> None:
        self.calls = 0

    def run(self, function, *arguments, seconds=30.0) -> Outcome:
        self.calls += 1
        if function is measure.open_gpu:
            return Outcome("NVIDIA H200")
        if function is measure.measure:  # the command knows no other
            function = timing_functions.timed
        return Outcome(function(*arguments))

    def close(self) -> None: ...

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None: ...


def as_code(self, x, candidate):
    """Stands for building: a Plan's record is its code."""
    text = json.dumps(to_record(*candidate), sort_keys=True)
    return matmul_search.Ready(candidate, text, Code(text.encode(), "", candidate[1]))


@pytest.fixture
def unbuilt(monkeypatch):
    monkeypatch.setattr(Search, "built", as_code)


def searched(products, table=None, log=None, **settings):
    """Results of a search, and its worker."""
    given = {"worker": Direct(), "run": timing_functions.timed, "budget": 1e9, **settings}
    made = Settings(**given)
    table = PlanTable("") if table is None else table
    search = Search(MACHINE, made, TrialLog(log, ORIGIN), table)
    return list(search.run(products)), made.worker, table


# ---- candidates -----------------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 40, 128, 512, 8192])
def test_candidates_fit_and_come_once(m):
    x = Operands(m, 6144, 4096, bfloat16, bfloat16)
    first = first_candidates(x, H200, 6)
    chosen = choose(x, H200)
    assert first[0] == (chosen.plan, chosen.turned) and len(set(first)) == len(first) == 6
    for candidate in first[:3]:
        near = neighbours(x, candidate, H200)
        assert len(near) >= 4 and len(set(near)) == len(near) and candidate not in near
        assert near == neighbours(x, candidate, H200)
        assert all(fits(x, *c, H200, m) for c in near)
        assert all(c[1] == candidate[1] for c in near)


def test_neighbours_can_be_built():
    for m in (8, 96, 512):
        x = Operands(m, 1024, 512, bfloat16, bfloat16)
        for plan, turned in neighbours(x, first_candidates(x, H200, 1)[0], H200):
            body = fill(
                wide_matmul(transposed(x) if turned else x, plan),
                "epilogue",
                lambda b, inputs, added: inputs[0],
            )
            _, entry = emit(body, "matmul", H200)
            assert entry.shared_bytes <= H200.memories["shared"].bytes


# ---- the search -----------------------------------------------------------------------------


def test_the_known_best_is_found(unbuilt):
    (result,), _, table = searched([PRODUCT])
    plan, turned = from_record(result.entry.plan)
    assert not turned and plan.tile[1] == 128 and (plan.split, plan.cluster) == (1, 1)
    assert (plan.stages, plan.early, plan.together) == (3, False, 1)
    assert plan.group == 2 and plan.programs == 128
    assert result.entry.seconds == pytest.approx(1e-5)  # no Plan is faster
    assert result.entry.seconds < result.untuned_seconds
    assert result.entry.origin == {**ORIGIN, "untuned_seconds": result.untuned_seconds}
    found = tuned(PRODUCT.operands, H200, table=table)
    assert (found.plan, found.seconds) == (plan, result.entry.seconds)
    assert result.trials == result.measured > 20


def test_the_models_choice_stays_unless_another_is_clearly_faster(unbuilt):
    def level(product, codes, number=0, rounds=5):
        first = to_record(*first_candidates(PRODUCT.operands, H200, 1)[0])
        return [
            measure.Timing(
                1e-5 * (1 if json.loads(c.code) == json.loads(json.dumps(first)) else 0.997), 0.0
            )
            for c in codes
        ]

    (result,), _, _ = searched([PRODUCT], run=level)
    assert from_record(result.entry.plan)[0] == choose(PRODUCT.operands, H200).plan
    assert result.entry.seconds == result.untuned_seconds == 1e-5


def test_a_search_goes_on_where_it_ended(unbuilt, tmp_path, caplog):
    log = tmp_path / "trials.jsonl"
    products = [PRODUCT, Product(8, 4096, 4096, "bfloat16")]
    results, _, table = searched(products, log=log)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(lines) == sum(r.measured for r in results)
    assert set(lines[0]) == {"problem", "plan", "seconds", "note", "error", "text", *ORIGIN}
    assert lines[0]["problem"] == problem_key(PRODUCT.operands, "h200")
    with open(log, "a") as file:
        file.write("{half a li\n")
    again, second, _ = searched(products, table, log)
    assert [r.entry for r in again] == [r.entry for r in results] and second.calls == 0
    assert "is not a Trial" in caplog.text and all(r.measured == 0 for r in again)
    kept = lines[:-3]  # a search that was cut short
    log.write_text("".join(json.dumps(line) + "\n" for line in kept))
    third = searched(products, log=log)[0]
    assert sum(r.measured for r in third) == 3
    assert [r.entry.plan for r in third] == [r.entry.plan for r in results]
    other = [{**line, "text": "of another compiler"} for line in kept]
    log.write_text("".join(json.dumps(line) + "\n" for line in other))
    assert sum(r.measured for r in searched(products, log=log)[0]) == len(lines)
    for line in lines:
        line["device"] = "NVIDIA H100"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert sum(r.measured for r in searched(products, log=log)[0]) == len(lines)


def test_a_budget_is_shared(unbuilt):
    products = [PRODUCT, Product(8, 4096, 4096, "bfloat16"), Product(64, 4096, 4096, "bfloat16")]
    assert [r.measured for r in searched(products, budget=0)[0]] == [1, 1, 1]
    ticks = iter(range(10**6))
    results = searched(products, budget=30, clock=lambda: float(next(ticks)))[0]
    assert all(2 <= r.measured <= 12 for r in results)
    chosen = choose(PRODUCT.operands, H200)
    told = []
    searched([PRODUCT], budget=0, report=told.append)
    assert [t.result is None for t in told] == [True, False]
    assert told[0].trial.plan == to_record(chosen.plan, chosen.turned)


def test_trials_that_hang_die_or_are_wrong(unbuilt, tmp_path):
    log = tmp_path / "trials.jsonl"
    with Worker() as worker:
        (result,), _, _ = searched(
            [PRODUCT],
            log=log,
            worker=worker,
            limit=2.0,
            count=2,
            run=timing_functions.timed_with_trouble,
        )
    trials = [json.loads(line) for line in log.read_text().splitlines()]
    hung, dead, wrong = (
        [t for t in trials if word in t["note"]] for word in ("timeout", "crash", "wrong")
    )
    assert [t["note"] for t in hung] == ["timeout: stopped after 2 s"]
    assert hung[0]["plan"]["stages"] == 6 and not hung[0]["plan"]["early"]
    assert {t["note"] for t in dead} == {"crash: the worker died (exit code 3)"}
    assert wrong and {t["note"] for t in wrong} == {"wrong: error 5.0e-01"}
    assert all(t["seconds"] is None for t in hung + dead + wrong)
    assert len(trials) > len(hung + dead + wrong) + 10  # the search went on
    assert result.entry.plan["stages"] == 3 and result.entry.seconds == pytest.approx(1e-5)
    again = searched([PRODUCT], log=log, count=2)[0]  # what hung is not tried again
    assert again[0].measured == 0


def test_plans_that_cannot_be_built_are_reported(monkeypatch):
    def refuse(self, x, candidate):
        ready = as_code(self, x, candidate)
        return dataclasses.replace(ready, text="", code=None, note="spills 8 bytes")

    monkeypatch.setattr(Search, "built", refuse)
    told = []
    results, worker, _ = searched([PRODUCT], report=told.append)
    assert results == [] and worker.calls == 0
    assert {t.trial.note for t in told} == {"spills 8 bytes"}


def test_products_without_a_plan(unbuilt):
    with pytest.raises(UserError, match="no Plan for this product"):  # tf32 goes along k only
        searched([Product(64, 64, 64, "float32", "kn")])


def test_building_gives_code_for_the_machine():
    x = Operands(8, 128, 128, bfloat16, bfloat16)
    search = Search(MACHINE, Settings(worker=Direct()), TrialLog(None, ORIGIN), PlanTable(""))
    good = search.built(x, first_candidates(x, H200, 1)[0])
    assert good.code is not None and good.code.turned and not good.note, good.note
    assert Entry.from_text(good.code.entry).name == "matmul"
    bad = search.built(x, (WidePlan(stages=1), False))
    assert bad.code is None and "two stages" in bad.note


# ---- measuring ------------------------------------------------------------------------------


class FakeGpu(FakeCuda):
    """A GPU whose tensor maps hold the pointer, and whose kernel is a Python function."""

    def __init__(self) -> None:
        super().__init__()

        def encode(place, _, __, address, *rest):
            ctypes.c_uint64.from_address(place).value = address
            return 0

        self._encoder = ENCODER(encode)
        where = ctypes.cast(self._encoder, ctypes.c_void_p).value
        self.addresses = {b"cuTensorMapEncodeTiled": where}

    def serve(self, entry: Entry, work) -> None:
        """work(pointers by parameter) for each launch of an Entry."""
        self.parameters["matmul"] = [128 if k == "map" else 8 for k, _ in entry.arguments]

        def kernel(*values):
            found = {}
            for (kind, what), value in zip(entry.arguments, values):
                if kind == "map":
                    found[what.parameter] = int.from_bytes(value[:8], "little")
                elif kind == "pointer":
                    found[what] = value
            work(found)

        self.kernels["matmul"] = kernel


@pytest.fixture
def gpu(monkeypatch):
    fake = FakeGpu()
    monkeypatch.setattr(driver, "_devices", {})
    monkeypatch.setattr(context, "_thread", type(context._thread)())
    monkeypatch.setattr(driver.Device, "target", H200)
    monkeypatch.setattr(measure, "PERIOD", 1021)
    with patch.object(cuda_api, "_api", fake):
        yield fake
        measure._held.clear()


def view(pointer, *shape):
    data = (ctypes.c_uint8 * (2 * int(np.prod(shape)))).from_address(pointer)
    return np.ctypeslib.as_array(data).view(bfloat16.numpy).reshape(shape)


def built(product, plan, turned):
    x = product.operands
    body = fill(
        wide_matmul(transposed(x) if turned else x, plan),
        "epilogue",
        lambda b, inputs, added: inputs[0],
    )
    text, entry = emit(body, "matmul", H200)
    return text, entry, Code(text.encode(), entry.to_text(), turned)


@pytest.mark.parametrize(
    ("plan", "turned", "layout"),
    [
        (WidePlan((64, 8, 64), 2, 2, 1, 8), True, "kk"),
        (WidePlan((64, 64, 64), 2, 2, 1, 64), False, "kk"),
        (WidePlan((64, 64, 64), 2, 2, 1, 64), False, "mn"),
    ],
)
def test_what_is_measured_is_judged(gpu, plan, turned, layout):
    m, n, k = (8, 72, 128) if layout == "kk" else (16, 72, 64)
    product = Product(m, n, k, "bfloat16", layout)
    text, entry, code = built(product, plan, turned)
    launches = []

    def work(pointers):
        launches.append(dict(pointers))
        if len(launches) == 1:  # the one that is judged
            a, b = (m, k) if layout[0] == "k" else (k, m), (n, k) if layout[1] == "k" else (k, n)
            shapes = ((b, a) if turned else (a, b)) + ((m, n),)
            memories = [view(pointers[i], *s).reshape(-1) for i, s in enumerate(shapes)]
            simulate(text, entry, memories)

    gpu.serve(entry, work)
    (timing,) = measure.measure(product, [code])
    assert timing.error < 1e-2 and timing.seconds == pytest.approx(1.5e-3 / 64)
    results = {one[2] for one in launches[1:]}
    assert len(results) == 64 and len(launches) == 1 + 64 * 7  # judged, warmed up twice, 5 rounds
    assert gpu.count("cuGraphLaunch") == 7


def test_wrong_results_get_no_seconds(gpu):
    product = Product(200, 64, 128, "bfloat16")
    _, entry, code = built(product, WidePlan((64, 64, 64), 2, 4, 1, 64), False)
    launches = []

    def work(pointers):
        launches.append(0)
        a, b = view(pointers[0], 200, 128), view(pointers[1], 64, 128)
        c = view(pointers[2], 200, 64)
        c[...] = (a.astype(np.float32) @ b.astype(np.float32).T).astype(c.dtype)
        if len(launches) == 2:
            c[128:192] *= 2  # one tile is wrong
        if len(launches) == 3:
            c.view(np.uint16)[128:192, 40] = 0xFFFF  # one column of it was never written

    gpu.serve(entry, work)
    good, wrong, missing = measure.measure(product, [code] * 3, rounds=1)
    assert good.seconds and good.error < 1e-2
    assert wrong.seconds is None and 0.1 < wrong.error < 2
    assert missing.seconds is None and missing.error == float("inf")


def test_operands_are_kept_between_plans_of_one_product(gpu):
    first = measure.inputs_for(Product(8, 64, 64, "bfloat16"), 0)
    assert measure.inputs_for(Product(8, 64, 64, "bfloat16"), 0) is first
    other = measure.inputs_for(Product(16, 64, 64, "bfloat16"), 0)
    assert other is not first and len(measure._held) == 1
    a = view(other.sets[1][0].pointer, 16, 64)
    assert np.array_equal(a.reshape(-1)[1021:], a.reshape(-1)[: 1024 - 1021])
    np.testing.assert_array_equal(other.left(np.array([0, 15])), a[[0, 15]].astype(np.float32))


# ---- asking for it --------------------------------------------------------------------------


def test_bad_problems():
    for shape, dtype, layout, message in (
        ((8, 64, 63), "bfloat16", "kk", "multiple of 16 bytes"),
        ((8, 64), "bfloat16", "kk", "bad"),
        ((8, 64, 64), "int8", "kk", "no wide matmul"),
        ((8, 64, 64), "bfloat16", "nn", "layout"),
        ((0, 64, 64), "bfloat16", "kk", "bad shape"),
        ((9, 64, 64), "bfloat16", "mk", "row of a"),
    ):
        with pytest.raises(UserError, match=message):
            product_of(shape, dtype, layout)


def test_machines(gpu):
    machine = matmul_search.machine_of("cuda:0")
    assert (machine.name, machine.arch, machine.number) == ("NVIDIA H200", "sm_90a", 0)
    with pytest.raises(UserError, match="no such GPU"):
        matmul_search.machine_of("cuda:1")
    with pytest.raises(UserError, match="no such GPU"):
        matmul_search.machine_of("cpu")


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(matmul_search, "devices", list)
    result = CliRunner().invoke(main.app, ["tune", "matmul", "--shape", "8x64x64"])
    assert result.exit_code == 1 and "a machine with an NVIDIA GPU" in result.stderr


def test_shapes_of_the_command():
    assert command.shapes_of(["8x64x128", "8x64x128"], [], "1") == [(8, 64, 128)]
    assert len(command.shapes_of([], ["llama3-8b"], "1,8")) == 8
    for shapes, models, sizes, message in (
        ([], [], "1", "nothing"),
        (["8x8"], [], "1", "bad shape"),
        ([], ["gpt"], "1", "unknown model"),
        ([], ["llama3-8b"], "1,", "bad sizes"),
    ):
        with pytest.raises(UserError, match=message):
            command.shapes_of(shapes, models, sizes)


def test_the_command_writes_what_ships(unbuilt, monkeypatch, tmp_path):
    monkeypatch.setattr(matmul_search, "machine_of", lambda device: MACHINE)
    monkeypatch.setattr(matmul_search, "Worker", Direct)
    out = tmp_path / "table.json"
    arguments = [
        "tune",
        "matmul",
        "--layers",
        "llama3-8b",
        "--sizes",
        "8,512",
        "--budget",
        "1000",
        "--out",
        str(out),
        "--commit",
        "abc",
    ]
    said = CliRunner().invoke(main.app, arguments, catch_exceptions=False).output
    assert "tuned over untuned: geometric mean 1." in said and "8 Plans are in" in said
    record = json.loads(out.read_text())
    assert record["about"]["commit"] == "abc" and record["about"]["device"] == "NVIDIA H200"
    table = read_table(out)
    assert len(table.known) == 8 and (tmp_path / "table.trials.jsonl").exists()
    x = Operands(512, 6144, 4096, bfloat16, bfloat16)
    with override(plan_table=str(out)):
        assert tuned(x, H200).seconds == table.get(problem_key(x, "h200")).seconds
    before = out.read_text()
    arguments[3:6] = ["llama3-8b", "--sizes", "8"]  # adds to what is there
    CliRunner().invoke(main.app, arguments, catch_exceptions=False)
    assert len(read_table(out).known) == 8
    assert out.read_text() == before
    CliRunner().invoke(
        main.app,
        ["tune", "matmul", "--shape", "16x64x64", "--commit", "abc"],
        catch_exceptions=False,
    )
    own = Operands(16, 64, 64, bfloat16, bfloat16)
    assert tuned(own, H200) is not None  # in the cache folder, where compile finds it
    trials = Path(plan_table.config().cache_folder) / "plans" / "trials.jsonl"
    assert trials.read_text().count("\n") >= 1
