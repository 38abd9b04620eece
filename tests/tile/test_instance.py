"""tile/define.py and tile/define.py: a call holds a definition, Bodies are made for a Target."""

from __future__ import annotations

import types

import numpy as np
import pytest

import tilegrad as tg
from tilegrad import kernel, tile
from tilegrad.compiler.compile import schedule_for
from tilegrad.core.target import AVX512, H200, SSE2
from tilegrad.graph import ops
from tilegrad.ir.node import topological
from tilegrad.schedule.schedule import Launch
from tilegrad.tile.define import Instance, reached, stable
from tilegrad.tile.text import body_text

SCALE = 2.0


@tile.function
def scaled(x):
    return x * SCALE


@kernel
def doubled(x):
    t = tile.context()
    i = tile.grid(tile.ceil_divide(x.shape[0], t.m))
    tile.store(tile.result(x.shape), (i * t.m,), scaled(tile.load(x, (i * t.m,), (t.m,))))


def callee_of(tensor):
    (call,) = [n for n in topological([tensor.node]) if n.op is ops.call]
    return call.attrs["callee"]


def test_bodies_follow_the_target() -> None:
    made = doubled(tg.ones(1000))
    source = callee_of(made).source
    assert isinstance(source, Instance) and source.definition is doubled.definition
    inputs = [n for n in topological([made.node]) if n.op is ops.input_]
    grids = {}
    for target in (SSE2, AVX512, H200):
        schedule = schedule_for(inputs, [made.node], target)
        steps = [s for k in schedule.kernels for s in k.steps if isinstance(s, Launch)]
        (body,) = [s.body for s in steps if s.body.name == "doubled"]
        grids[target.name] = (body.grid, body.notes["warps"])
    assert grids == {"x86-64": ((32,), 1), "avx512": ((32,), 1), "h200": ((8,), 8)}
    np.testing.assert_array_equal(made.numpy(), 2.0)


def test_a_call_is_what_it_was_when_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    factor = 1.0

    @kernel
    def times(x):
        i = tile.grid(x.shape[0])
        tile.store(tile.result(x.shape), (i,), tile.load(x, (i,), (1,)) * factor)

    x, found = tg.ones(4), []
    for factor in (3.0, 5.0):  # noqa: B007
        found.append(times(x))
    assert [y.tolist() for y in found] == [[3.0] * 4, [5.0] * 4]
    before = doubled(x)
    monkeypatch.setitem(globals(), "SCALE", 7.0)
    after = doubled(x)
    assert callee_of(before).key != callee_of(after).key
    assert before.tolist() == [2.0] * 4 and after.tolist() == [7.0] * 4


def test_shapes_that_follow_from_the_plan() -> None:
    @kernel
    def parts(x):
        t = tile.context()
        count = -(-x.shape[0] // t.m)
        i = tile.grid(count)
        total = tile.sum(tile.load(x, (i * t.m,), (t.m,)))
        tile.store(tile.result((count,)), (i,), total)

    made = parts(tg.ones(100))
    for target in (AVX512, H200):  # which would take more rows
        ((body, _),) = callee_of(made).launches_for(target)
        assert body.grid == (4,)
    assert made.shape == (4,) and made.tolist() == [32.0, 32.0, 32.0, 4.0]
    assert parts.schedule(block=(50, 50))(tg.ones(100)).tolist() == [50.0, 50.0]


def test_the_key_covers_all_functions_that_are_reached() -> None:
    def program(constant: float, order: str = "a + b") -> types.FunctionType:
        space: dict[str, object] = {"C": constant}
        exec(f"def inner(a, b): return {order}\ndef middle(a): return inner(a, C)", space)
        exec("def outer(x): return [middle(v) for v in x]", space)
        return space["outer"]  # type: ignore[return-value]

    same, other = stable(reached(program(1.0))), stable(reached(program(2.0)))
    assert stable(reached(program(1.0))) == same != other
    assert stable(reached(program(1.0, "b + a"))) != same
    recursive: dict[str, object] = {}
    exec(
        "def even(n): return n == 0 or odd(n - 1)\ndef odd(n): return n and even(n - 1)", recursive
    )
    assert len(reached(recursive["even"])) == 2  # type: ignore[arg-type]


def test_text_comes_back_with_the_key() -> None:
    from tilegrad.tile.callee import parse_callee

    callee = callee_of(doubled(tg.ones(9)))
    read = parse_callee(callee.to_text())
    assert read.key == callee.key and read.source is None
    assert body_text(read.launches[0][0]) == body_text(callee.launches[0][0])
