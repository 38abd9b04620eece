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
