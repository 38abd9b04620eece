"""Symbolic sizes at and around the edge of every op that needs something of them.

The table of `symbolic_cases` runs in a process of its own under `guard_pages`: a read or write
outside of a Buffer ends that process, and the case that was running fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from symbolic_cases import CASES

import tilegrad as tg
from tilegrad.compiler import compile as compiler
from tilegrad.core.errors import AxisError, ShapeError, UserError
from tilegrad.graph import build
from tilegrad.graph.sizes import size_requirements
from tilegrad.ir.requirement import Requirement, gathering, require
from tilegrad.ir.symbol import minimum, symbol
from tilegrad.runtime.recipe import Recipe
from tilegrad.tensor.jit import Jitted

HERE = Path(__file__).resolve().parent


def failures(side: str, step: int) -> list[str]:
    """What every `step`-th row of the table finds, with a guard page at `side` of Buffers."""
    found, first = [], 0
    paths = [str(HERE), str(Path(tg.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    while first < len(CASES):
        done = subprocess.run(
            [sys.executable, str(HERE / "symbolic_cases.py"), side, str(first), str(step)],
            capture_output=True,
            text=True,
            env=environment,
        )
        lines = done.stdout.splitlines()
        for line in lines:
            if line.startswith("wrong"):
                _, number, text = line.split(" ", 2)
                found.append(f"{CASES[int(number)].name}: {text}")
        if lines and lines[-1] == "end":
            break
        first = max([int(x.split()[1]) for x in lines if x.startswith("begin")], default=first)
        found.append(f"{CASES[first].name}: ended with {done.returncode} {done.stderr[-500:]}")
        first += step
    return found


@pytest.mark.parametrize("side", ["end", "start"])
@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow, id="all"), 4])
def test_every_case_is_as_static_and_touches_only_its_buffers(side: str, step: int) -> None:
    assert not failures(side, step)


def test_a_guard_page_is_felt() -> None:
    """The tool itself: one element past the end, or before the start, ends the process."""
    code = """if True:
        import sys, ctypes
        from guard_pages import install
        from tilegrad.runtime.buffer import Buffer
        install(sys.argv[1])
        b = Buffer.allocate(40)
        b.array((10,), "float32")[:] = 1
        print("inside", flush=True)
        ctypes.c_float.from_address(b.pointer + int(sys.argv[2])).value
        print("outside", flush=True)
    """
    paths = [str(HERE), str(Path(tg.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    for side, offset in (("end", "40"), ("start", "-4")):
        done = subprocess.run(
            [sys.executable, "-c", code, side, offset],
            capture_output=True,
            text=True,
            env=environment,
        )
        assert done.stdout.split() == ["inside"] and done.returncode < 0


# ---- requirements as data --------------------------------------------------------------------


def sixth(low: int = 1, high: int = 64) -> Jitted:
    return tg.jit(lambda x: x[5] * 2, dynamic={"x": {0: ("N", low, high)}})


def test_bounds_that_prove_it_leave_no_requirement() -> None:
    assert not sixth(6).lower(tg.zeros(8)).requirements
    assert len(sixth(5).lower(tg.zeros(8)).requirements) == 1


def test_a_size_that_is_never_enough_is_refused_while_tracing() -> None:
    with pytest.raises(AxisError, match="index 5 is out of range for axis 0 of size N"):
        sixth(1, 5).lower(tg.zeros(4))


def test_the_error_has_the_line_of_the_op() -> None:
    function = tg.jit(lambda x: x[5] * 2, dynamic={"x": {0: ("N", 1, 64)}})
    with pytest.raises(AxisError) as caught:
        function(tg.ones(4))
    assert caught.value.location is not None
    line = Path(caught.value.location.file).read_text().splitlines()[caught.value.location.line - 1]
    assert "lambda x: x[5] * 2" in line
    np.testing.assert_array_equal(function(tg.ones(6)).numpy(), 2.0)


def test_same_symbols_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    function, checked = sixth(), []
    check = Requirement.check
    monkeypatch.setattr(Requirement, "check", lambda r, s: (checked.append(dict(s)), check(r, s)))
    for size in (8, 8, 8, 9, 8):
        function(tg.ones(size))
    assert checked == [{"N": 8}, {"N": 9}]  # both are kept


def test_requirements_travel_with_the_recipe() -> None:
    size = symbol("N", 1, 64)
    x = build.input_((size,), tg.float32)
    found: dict = {}
    with gathering(found):
        require(size - 6, AxisError, 'no {n} where "it" is', op="a", expected="{s}", n=5, s=(size,))
        require(size % 2, ShapeError, "odd", op="b", exact=True)
    given = list(found.values())
    recipe = compiler.executable_for((x,), (build.add(x, 1.0),), requirements=given).recipe
    again = Recipe.from_text(recipe.to_text())
    assert again.requirements == recipe.requirements == given
    assert again.to_text() == recipe.to_text()
    again.requirements[0].check({"N": 6})
    with pytest.raises(AxisError, match=r'a: no 5 where "it" is\n  expected: \(4,\)'):
        again.requirements[0].check({"N": 4})
    with pytest.raises(ShapeError, match="odd"):
        again.requirements[1].check({"N": 7})


def test_requirements_survive_the_disk_cache() -> None:
    compiler.counters["loaded"] = 0
    for _ in range(2):
        function = sixth()
        with pytest.raises(AxisError, match="index 5 is out of range for axis 0 of size 3"):
            function(tg.ones(3))
        compiler._memory.clear()
    assert compiler.counters["loaded"] >= 1


def test_equal_functions_have_their_own_lines() -> None:
    first = tg.jit(lambda x: x[5] * 2, dynamic={"x": {0: ("N", 1, 63)}})
    other = tg.jit(lambda x: x[5] * 2, dynamic={"x": {0: ("N", 1, 63)}})
    lines = []
    for function in (first, other):
        with pytest.raises(AxisError) as caught:
            function(tg.ones(4))
        lines.append(caught.value.location.line)  # type: ignore[union-attr]
    assert lines[1] == lines[0] + 1


def test_donated_state_stays_where_a_requirement_fails() -> None:
    class Held:
        def __init__(self) -> None:
            self.total = tg.zeros(3)

        def tensors(self) -> dict[str, tg.Tensor]:
            return {"total": self.total}

    def add(held: Held, x: tg.Tensor, given: tg.Tensor) -> tg.Tensor:
        held.total.assign(held.total + x[5])
        return given + 1

    function = tg.jit(add, dynamic={"x": {0: ("N", 1, 64)}}, donate="given")
    held, given = Held(), tg.ones(4) + 0
    given.realize()
    with pytest.raises(AxisError):
        function(held, tg.ones(3), given)
    np.testing.assert_array_equal(held.total.numpy(), 0.0)
    np.testing.assert_array_equal(given.numpy(), 1.0)
    function(held, tg.ones(7), given)
    np.testing.assert_array_equal(held.total.numpy(), 1.0)


def test_a_bound_function_is_checked_where_it_is_bound() -> None:
    function = sixth()
    with pytest.raises(AxisError):
        function.bind(tg.ones(3))
    np.testing.assert_array_equal(function.bind(tg.ones(7)).run().numpy(), 2.0)


def test_a_function_that_computes_nothing_is_checked_too() -> None:
    function = tg.jit(lambda x: (x[5], 3)[1], dynamic={"x": {0: ("N", 1, 64)}})
    assert function(tg.ones(6)) == 3
    with pytest.raises(AxisError):
        function(tg.ones(3))


def test_op_by_op_is_checked_too() -> None:
    with tg.override(eager_debug=True):
        function = sixth()
        with pytest.raises(AxisError):
            function(tg.ones(3))
        np.testing.assert_array_equal(function(tg.ones(7)).numpy(), 2.0)


def test_explain_shows_them() -> None:
    text = str(tg.explain(sixth(), tg.ones(8)))
    assert "requires (N + -6) >= 0 (index)" in text


# ---- the net ---------------------------------------------------------------------------------


def test_nodes_that_nobody_spoke_for_are_held_to_their_operands() -> None:
    size = symbol("N", 0, 64)
    x = build.input_((size,), tg.float32)
    for node, enough in (
        (build.slice_axis(x, 0, 2, 5), 5),
        (build.slice_axis(x, 0, size - 3, size), 3),
        (build.slice_axis(x, 0, 1, size - 1), 2),
        (build.windows(x, 0, 4), 3),  # no windows at 3
        (build.pad(x, (size - 4,), (0,)), 4),
        (build.iota(size - 2), 2),
    ):
        found = size_requirements([x], [build.multiply(node, 2)])

        def holds(value: int, found: list[Requirement] = found) -> bool:
            try:
                for requirement in found:
                    requirement.check({"N": value})
            except UserError:
                return False
            return True

        assert [holds(n) for n in range(enough)] == [False] * enough, node
        assert all(holds(n) for n in range(enough, 65)), node
    held = build.slice_axis(x, 0, 0, minimum(size, 5))
    assert all(r.check({"N": n}) is None for r in size_requirements([x], [held]) for n in range(65))
