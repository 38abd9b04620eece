"""Profiles: tables, traces, and what the CPU measures of a bound function."""

from __future__ import annotations

import json

import numpy as np
import pytest

import tilegrad as tg
from tilegrad.runtime.profile import Profile, Record, in_order
from tilegrad.runtime.recipe import Recipe


def small() -> Profile:
    records = in_order(
        [
            ("dot", "dot -> a", 10.0, 4000, 8),
            ("norm", "sum -> b", 2.0, 100, 0),
            ("dot", "dot -> a", 30.0, 4000, 8),
        ]
    )
    return Profile("step", "cpu", "by hand", records, 35.0)


def test_a_table_gathers_launches_by_kernel() -> None:
    first, second = small().table(1e9)
    assert (first.kernel, first.calls, first.us, first.bytes) == ("dot", 2, 40.0, 8000)
    assert first.flops == 16 and first.rate == pytest.approx(2e8)
    assert first.percent == pytest.approx(20.0) and second.percent == pytest.approx(5.0)
    assert small().us == 42.0 and small().bytes == 8100
    assert [r.percent for r in small().table()] == [0.0, 0.0]
    text = small().text(1e9)
    assert "3 launches" in text and "20.0%" in text and "by hand" in text
    assert "1 more kernels" in small().text(1e9, rows=1)


def test_bytes_that_are_known_better() -> None:
    found = small().with_bytes({"do": 50})
    assert [r.bytes for r in found.records] == [50, 100, 50]
    assert found.us == small().us and small().bytes == 8100


def test_a_trace_is_what_perfetto_reads(tmp_path) -> None:
    path = small().save(tmp_path / "trace.json")
    trace = json.loads(path.read_text())
    kernels = [e for e in trace["traceEvents"] if e.get("cat") == "kernel"]
    assert [(e["name"], e["ts"], e["dur"]) for e in kernels] == [
        ("dot", 0.0, 10.0),
        ("norm", 10.0, 2.0),
        ("dot", 12.0, 30.0),
    ]
    assert all(e["ph"] == "X" and e["pid"] == 1 and e["tid"] == 1 for e in kernels)
    assert kernels[0]["args"] == {"region": "dot -> a", "bytes": 4000, "flops": 8, "GB/s": 0.4}
    (run,) = [e for e in trace["traceEvents"] if e.get("cat") == "run"]
    assert run["dur"] == 42.0 and run["args"]["us in a run"] == 35.0
    named = [e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"]
    assert named == ["cpu: step", "kernels", "runs"]
    assert Profile("none", "cpu", "").perfetto()["traceEvents"]


class State:
    """A table of rows and a count."""

    def __init__(self) -> None:
        self.count = (tg.tensor(np.zeros(4, np.int32)) + 0).realize()

    def tensors(self) -> dict[str, tg.Tensor]:
        return {"count": self.count}


ROWS, WIDTH, OUT = 5000, 64, 128


def step(state, table, ids, weight):
    state.count.assign(state.count + 1)
    x = table.index_select(0, ids)  # (8, WIDTH)
    return (x @ weight).relu().sum(0)


def bound():
    draw = np.random.default_rng(0)
    table, weight = (
        tg.tensor(draw.standard_normal(s).astype(np.float32)) for s in ((ROWS, WIDTH), (WIDTH, OUT))
    )
    state = State()
    return state, tg.jit(step).bind(state, table, tg.tensor(np.arange(8, dtype=np.int64)), weight)


def test_kernels_of_a_bound_function_are_timed_and_counted() -> None:
    state, made = bound()
    made.run()
    wanted = made.read()
    found = made.profile(runs=3)
    assert found.device == "cpu" and "by itself" in found.how and found.run_us > 0
    assert len(found.records) == made.launches and found.us >= 0
    assert all(isinstance(r, Record) and r.us >= 0 and r.region for r in found.records)
    assert state.count.numpy().tolist() == [1] * 4  # put back
    assert np.array_equal(made.read(), wanted)
    product = max(found.records, key=lambda r: r.flops)
    assert product.flops >= 2 * 8 * WIDTH * OUT and "dot" in product.region
    assert product.bytes >= 4 * (WIDTH * OUT + 8 * WIDTH)
    assert found.bytes < 4 * ROWS * WIDTH  # rows that are gathered count, not the table
    assert found.records[-1].region == "copy of state to its place"
    made.run()
    assert state.count.numpy().tolist() == [2] * 4


def test_loops_are_one_record() -> None:
    made = tg.jit(lambda x: tg.scan(lambda c, v: (c + v, c * 2), x[0] * 0, x)[0]).bind(
        tg.ones(5, 3)
    )
    found = made.profile(runs=2)
    assert made.run().numpy().tolist() == [5.0] * 3
    control = any(s.kind not in ("kernel", "copy") for s in made._executable.recipe.steps)
    assert len(found.records) == (1 if control else made.launches)


def test_a_recipe_keeps_its_notes() -> None:
    _, made = bound()
    recipe = made._executable.recipe
    again = Recipe.from_text(recipe.to_text())
    assert again.steps == recipe.steps and any(s.bytes for s in again.steps)
