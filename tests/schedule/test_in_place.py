"""Elementwise results take over the storage of inputs that die, and only then."""

import numpy as np

from tilegrad.compiler.compile import compile_for, host, schedule_for
from tilegrad.core import dtype as dtypes
from tilegrad.core.format import Q8_0
from tilegrad.graph import build, ops
from tilegrad.graph.interpret import interpret
from tilegrad.ir.types import Tuple
from tilegrad.kernels.quantised import cpu as kernels
from tilegrad.kernels.quantised.shape import QuantisedShape
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
    """A reshape between two kernels that are called costs nothing, but a result has its place."""
    first, second = (QuantisedShape(Q8_0, 16, c, t) for c, t in ((64, 9), (32, 18)))
    ids = build.input_((9,), dtypes.int32)
    parts = [[build.input_(s, d) for _, s, d in kernels.parts(shape)] for shape in (first, second)]
    rows = ops.call(ids, *parts[0], callee=kernels.take_callee(first, host()))
    flat = build.reshape(rows, (18, 32))
    out = ops.call(flat, *parts[1], callee=kernels.callee(second, host()))
    out = build.items(out)[0] if isinstance(out.type, Tuple) else out
    inputs = [ids, *parts[0], *parts[1]]
    steps = [len(k.steps) for k in schedule_for(inputs, [out], host()).kernels if k.kind == "loops"]
    assert steps == [0]
    values = np.random.default_rng(0).standard_normal((2, 16, 64)).astype(np.float32)
    raw = [Q8_0.pack(values[0]), Q8_0.pack(values[1][:, :32])]
    data = [np.arange(9, dtype=np.int32)]
    for shape, one in zip((first, second), raw):
        found = kernels.pack(shape, one)
        data += [found[n] for n, _, _ in kernels.parts(shape)]
    (got,) = compile_for(inputs, [out], host()).run([Buffer.wrap(d) for d in data])
    a, b = (Q8_0.to_float32(r) for r in raw)
    want = a[:9].reshape(18, 32) @ b.T
    np.testing.assert_allclose(got.array((18, 16), np.float32), want, atol=1e-3)
    kept = schedule_for(inputs[: 1 + len(parts[0])], [flat], host()).kernels
    assert all(k.steps for k in kept)
