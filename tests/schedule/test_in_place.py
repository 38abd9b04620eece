"""Elementwise results take over the storage of inputs that die, and only then."""

import numpy as np

from tilegrad.compiler.compile import compile_for, host, schedule_for
from tilegrad.core import dtype as dtypes
from tilegrad.graph import build, ops
from tilegrad.graph.interpret import interpret
from tilegrad.runtime.buffer import Buffer


def aliased(inputs, outputs):
    schedule = schedule_for(inputs, outputs, host())
    return sum(s.alias is not None for s in schedule.slots), schedule.arena_bytes


def check(inputs, outputs):
    rng = np.random.default_rng(0)
    data = [rng.standard_normal(i.shape).astype(np.float32) for i in inputs]
    found = compile_for(inputs, outputs, host()).run([Buffer.wrap(d) for d in data])
    wanted = interpret(outputs, dict(zip(inputs, data)))
    for node, buffer, reference in zip(outputs, found, wanted):
        got = buffer.array(node.shape, node.dtype)
        np.testing.assert_allclose(got, reference, rtol=2e-5, atol=2e-5)


def sorted_rows(x):
    """Something that must be stored, before and after."""
    return build.items(ops.sort(x, axis=1, descending=False))[0]


def test_values_stay_right_where_an_input_is_read_elsewhere() -> None:
    x = build.input_((48, 48), dtypes.float32)
    a = build.cast(build.matmul(x, x), dtypes.float32)
    outputs = [build.matmul(build.add(a, build.transpose(a)), x)]  # a is read turned, too
    count, _ = aliased([x], outputs)
    assert count == 0
    check([x], outputs)


def test_two_results_share_a_dying_input() -> None:
    x = build.input_((64, 64), dtypes.float32)
    s = sorted_rows(x)
    p, q = ops.exp(build.multiply(s, 0.1)), ops.sin(s)
    outputs = [build.matmul(p, q), build.matmul(q, p)]
    count, _ = aliased([x], outputs)
    assert count == 1  # one of the two, and it is written last
    check([x], outputs)


def test_another_shape_of_what_dies_is_no_launch() -> None:
    """A reshape between two things that are stored costs nothing, but not where both are read."""
    x = build.input_((32, 48), dtypes.float32)
    s = sorted_rows(x)
    flat = build.reshape(s, (48, 32))
    outputs = [sorted_rows(flat)]
    kernels = schedule_for([x], outputs, host()).kernels
    assert [len(k.steps) for k in kernels if k.kind == "loops"] == [0]
    check([x], outputs)
    both = [sorted_rows(flat), sorted_rows(build.multiply(s, 2.0))]
    check([x], both)
    wanted = [flat]  # a result has a place of its own
    assert all(k.steps for k in schedule_for([x], wanted, host()).kernels)
    check([x], wanted)
