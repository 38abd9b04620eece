"""Donated state: updates alias it, and a second reader is refused by name."""

from __future__ import annotations

import numpy as np
import pytest

from tilegrad.compiler.compile import executable_for, host, schedule_for
from tilegrad.core import dtype as dtypes
from tilegrad.core.errors import StateError
from tilegrad.graph import build, ops
from tilegrad.ir.types import Memory
from tilegrad.runtime.buffer import Buffer
from tilegrad.schedule.schedule import Copy
from tilegrad.tile.build import BodyBuilder
from tilegrad.tile.callee import KernelCallee, parse_callee

STATE = np.arange(40, dtype=np.float32).reshape(8, 5)
VALUE = np.full((3, 5), 100, np.float32)
INDEX = np.array([1, 4, 1])


def nodes():
    return (
        build.input_((8, 5), dtypes.float32),
        build.input_((3, 5), dtypes.float32),
        build.input_((3,), dtypes.int64),
    )


def buffers():
    return [Buffer.wrap(x.copy()) for x in (STATE, VALUE, INDEX)]


def expected() -> np.ndarray:
    found = STATE.copy()
    np.add.at(found, INDEX, VALUE)
    return found


def test_update_of_donated_state_is_in_place() -> None:
    state, value, index = nodes()
    result = build.update(state, value, [index], [0], "add")
    executable = executable_for((state, value, index), (result,), (0,))
    given = buffers()
    (out,) = executable.run(given)
    assert out.pointer == given[0].pointer
    np.testing.assert_array_equal(out.array((8, 5), np.float32), expected())
    assert not any(s.kind == "copy" for s in executable.recipe.steps)
    assert executable.recipe.arena_bytes == 0


def test_update_of_other_state_leaves_it() -> None:
    state, value, index = nodes()
    result = build.update(state, value, [index], [0], "add")
    given = buffers()
    (out,) = executable_for((state, value, index), (result,)).run(given)
    assert out.pointer != given[0].pointer
    np.testing.assert_array_equal(given[0].array((8, 5), np.float32), STATE)
    np.testing.assert_array_equal(out.array((8, 5), np.float32), expected())


def test_chain_of_updates_is_in_place() -> None:
    state, value, index = nodes()
    first = build.update(state, value, [index], [0], "add")
    second = build.update(first, build.negative(value), [index], [0], "add")
    executable = executable_for((state, value, index), (second,), (0,))
    given = buffers()
    (out,) = executable.run(given)
    assert out.pointer == given[0].pointer
    np.testing.assert_array_equal(out.array((8, 5), np.float32), STATE)


def test_readers_before_the_update_are_allowed() -> None:
    state, value, index = nodes()
    after = build.update(state, value, [index], [0], "add")
    before = build.sum_(build.unary(ops.negative, state), 1)
    given = buffers()
    out, total = executable_for((state, value, index), (after, before), (0,)).run(given)
    assert out.pointer == given[0].pointer
    np.testing.assert_allclose(total.array((8,), np.float32), -STATE.sum(1))


def test_reader_after_the_update_is_refused_by_name() -> None:
    state, value, index = nodes()
    after = build.update(state, value, [index], [0], "add")
    late = build.add(ops.cumulative(after, axis=0, kind="sum"), ops.reciprocal(state))
    with pytest.raises(StateError) as caught:
        executable_for((state, value, index), (late, after), (0,))
    text = str(caught.value)
    assert "a donated state is read after it is updated" in text
    assert "add at" in text and "test_state.py" in text and "hint:" in text


def test_state_that_is_also_a_result_is_refused() -> None:
    state, value, index = nodes()
    after = build.update(state, value, [index], [0], "add")
    with pytest.raises(StateError, match="it would be copied"):
        executable_for((state, value, index), (after, state), (0,))


def test_state_written_into_itself_is_refused() -> None:
    state, _, _ = nodes()
    turned = build.subtract(build.constant(7, dtypes.int64), build.iota(8))
    with pytest.raises(StateError, match="it would be copied"):
        executable_for((state,), (build.update(state, state, [turned], [0]),), (0,))


def test_donated_carry_that_is_read_later_is_refused() -> None:
    state, value, index = nodes()

    def body(c, s):
        return [build.update(c[0], value, [index], [0], "add")], []

    last, _ = build.scan(body, [state], [], 20)
    with pytest.raises(StateError, match="it would be copied"):
        executable_for((state, value, index), (last[0], state), (0,))


def test_temporary_state_is_overwritten() -> None:
    """What no one reads again needs no copy."""
    state, value, index = nodes()
    made = build.update(build.unary(ops.exp, state), value, [index], [0], "set")
    schedule = schedule_for((state, value, index), (made,), host())
    assert not any(isinstance(s, Copy) for k in schedule.kernels for s in k.steps)


# ---- kernels that write a state ---------------------------------------------------------------


def adder() -> KernelCallee:
    """(value, state) -> (double of the value, state with the value added to its first rows)."""
    b = BodyBuilder(
        "adder",
        [
            ("value", Memory((3, 5), dtypes.float32)),
            ("state", Memory((8, 5), dtypes.float32, use="state")),
            ("double", Memory((3, 5), dtypes.float32, use="result")),
        ],
    )
    value, state, double = b.parameters
    row = b.program(0, 3)
    new, old = (b.load(m, (row, 0), (5,), (1,)) for m in (value, state))
    b.store(double, b.apply("add", new, new), (row, 0), (1,))
    b.store(state, b.apply("add", old, new), (row, 0), (1,))
    return KernelCallee("adder", ((b.finish((3,)), (("read", 0), ("state", 1), ("store", 0))),))


def added() -> np.ndarray:
    found = STATE.copy()
    found[:3] += VALUE
    return found


def test_a_kernel_writes_donated_state_in_place() -> None:
    state, value, _ = nodes()
    double, after = build.items(ops.call(value, state, callee=adder()))
    again, last = build.items(ops.call(double, after, callee=adder()))
    executable = executable_for((state, value), (again, last), (0,))
    given = buffers()[:2]
    twice, out = executable.run(given)
    assert out.pointer == given[0].pointer
    assert not any(s.kind == "copy" for s in executable.recipe.steps)
    wanted = STATE.copy()
    wanted[:3] += 3 * VALUE
    np.testing.assert_array_equal(out.array((8, 5), np.float32), wanted)
    np.testing.assert_array_equal(twice.array((3, 5), np.float32), 4 * VALUE)


def test_a_kernel_leaves_other_state() -> None:
    state, value, _ = nodes()
    callee = parse_callee(adder().to_text())
    assert callee == adder() and callee.states == (1,)
    double, after = build.items(ops.call(value, state, callee=callee))
    for wanted in ((double, after, state), (after,), (double,)):
        given = buffers()[:2]
        found = executable_for((state, value), wanted).run(given)
        right = {double: 2 * VALUE, after: added(), state: STATE}
        for node, buffer in zip(wanted, found):
            np.testing.assert_array_equal(buffer.array(node.shape, np.float32), right[node])
        np.testing.assert_array_equal(given[0].array((8, 5), np.float32), STATE)
    held = STATE.copy()
    results = callee.interpret(VALUE, held)
    np.testing.assert_array_equal(results[1], added())
    np.testing.assert_array_equal(held, STATE)


def test_a_kernel_that_would_need_a_copy_is_refused() -> None:
    state, value, _ = nodes()
    after = build.items(ops.call(value, state, callee=adder()))[1]
    late = build.add(after, ops.reciprocal(state))
    with pytest.raises(StateError, match="a donated state is read after it is updated"):
        executable_for((state, value), (late, after), (0,))
    with pytest.raises(StateError, match="it would be copied"):
        executable_for((state, value), (after, state), (0,))
    before = build.sum_(build.unary(ops.negative, state), 1)  # can be read first
    given = buffers()[:2]
    out, total = executable_for((state, value), (after, before), (0,)).run(given)
    assert out.pointer == given[0].pointer
    np.testing.assert_allclose(total.array((8,), np.float32), -STATE.sum(1))


def test_a_kernel_writes_a_temporary_and_a_carry() -> None:
    state, value, _ = nodes()
    made = ops.call(value, build.unary(ops.negative, state), callee=adder())
    schedule = schedule_for((state, value), (build.items(made)[1],), host())
    assert not any(isinstance(s, Copy) for k in schedule.kernels for s in k.steps)
    wanted = -STATE
    wanted[:3] += VALUE
    (out,) = executable_for((state, value), (build.items(made)[1],)).run(buffers()[:2])
    np.testing.assert_array_equal(out.array((8, 5), np.float32), wanted)

    def body(carries, slices):
        return [build.items(ops.call(value, carries[0], callee=adder()))[1]], []

    last, _ = build.scan(body, [state], [], 20)
    for donated in ((), (0,)):
        given = buffers()[:2]
        (out,) = executable_for((state, value), (last[0],), donated).run(given)
        wanted = STATE.copy()
        wanted[:3] += 20 * VALUE
        np.testing.assert_array_equal(out.array((8, 5), np.float32), wanted)
        assert (out.pointer == given[0].pointer) is bool(donated)
        if not donated:
            np.testing.assert_array_equal(given[0].array((8, 5), np.float32), STATE)
    with pytest.raises(StateError, match="it would be copied"):
        executable_for((state, value), (last[0], state), (0,))
