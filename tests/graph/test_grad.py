"""Reverse mode against finite differences, to first and second order, and against PyTorch."""

import numpy as np
import pytest
from cases import (
    CASES,
    LOOPS,
    Case,
    cumulative_mix,
    evaluate,
    inner,
    normal,
    or_zeros,
    pieces,
    seeded,
    slope,
)

from tilegrad.compiler.share import share_scans
from tilegrad.core import dtype as dtypes
from tilegrad.core.errors import UserError
from tilegrad.graph import batch, build, grad, ops
from tilegrad.graph.interpret import interpret
from tilegrad.ir.callee import Callee
from tilegrad.ir.node import topological
from tilegrad.ir.rewrite import Log
from tilegrad.ir.symbol import symbol


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_first_order(case: Case) -> None:
    nodes, outputs, seeds, given, tangents = pieces(case)
    wrt = case.floats(nodes)
    found = or_zeros(grad.gradients(outputs, seeds, wrt), wrt)
    values = evaluate(found, given)
    expected = inner(slope(outputs, given, wrt, tangents), [given[s] for s in seeds])
    assert inner(values, tangents) == pytest.approx(expected, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_second_order(case: Case) -> None:
    nodes, outputs, seeds, given, tangents = pieces(case)
    wrt = case.floats(nodes)
    first = or_zeros(grad.gradients(outputs, seeds, wrt), wrt)
    probes = [build.input_(x.shape, x.dtype) for x in wrt]
    rng = seeded("second" + repr(case))
    given.update({p: np.asarray(rng.standard_normal(p.shape)) for p in probes})
    second = or_zeros(grad.gradients(first, probes, wrt), wrt)
    values = evaluate(second, given)
    expected = inner(slope(first, given, wrt, tangents), [given[p] for p in probes])
    assert inner(values, tangents) == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_while_loop_has_no_reverse() -> None:
    nodes = LOOPS[0].nodes()
    outputs = LOOPS[0].outputs(nodes)
    with pytest.raises(UserError, match="use scan"):
        grad.gradients(outputs, [build.like(o, 1) for o in outputs], nodes)


def test_none_where_nothing_flows() -> None:
    x, y = (build.input_((2,), dtypes.float64) for _ in range(2))
    out = ops.add(ops.stop_gradient(x), ops.floor(x))
    assert grad.gradients([out], [build.like(out, 1)], [x, y]) == [None, None]


def test_stop_cuts_the_path() -> None:
    x = build.input_((2,), dtypes.float64)
    middle = ops.exp(x)
    one = build.like(x, 1)
    found = grad.gradients([ops.sin(middle)], [one], [x, middle], stop={middle})
    assert found[0] is None and found[1] is ops.cos(middle)


def test_no_multiplication_by_ones() -> None:
    x, y = (build.input_((2,), dtypes.float64) for _ in range(2))
    total = build.sum_(ops.multiply(x, y))
    one = build.constant(1.0, dtypes.float64)
    assert grad.gradients([total], [one], [x, y]) == [y, x]


def test_integer_values_carry_nothing() -> None:
    x = build.input_((2,), dtypes.float64)
    out = ops.cast(ops.cast(x, dtype=dtypes.int32), dtype=dtypes.float64)
    assert grad.gradients([out], [build.like(out, 1)], [x]) == [None]


def test_depth_needs_no_recursion() -> None:
    x = build.input_((), dtypes.float64)
    y = x
    for _ in range(5000):
        y = ops.sin(y)
    (dx,) = grad.gradients([y], [build.constant(1.0, dtypes.float64)], [x])
    assert np.isfinite(interpret([dx], {x: np.array(0.5)})[0])


def test_dot_keeps_dtypes() -> None:
    a = build.input_((2, 3), dtypes.bfloat16)
    b = build.input_((3, 4), dtypes.bfloat16)
    out = build.dot(a, b, ((), ()), ((1,), (0,)), dtypes.float32)
    da, db = grad.gradients([out], [build.like(out, 1)], [a, b])
    assert da.type == a.type and db.type == b.type


def test_unwanted_inputs_cost_nothing() -> None:
    c, xs, w = (build.input_(s, dtypes.float64) for s in ((2,), (3, 2), (2,)))
    outputs = cumulative_mix(c, xs, w)
    (dc,) = grad.gradients(outputs, [build.like(o, 1) for o in outputs], [c])
    reverse = next(n for n in topological([dc]) if n.op is ops.scan and n.attrs["reverse"])
    assert reverse.attrs["carries"] == 1


def test_share_scans() -> None:
    values = [normal("s0", 2), normal("s1", 3, 2), normal("s2", 2)]
    c, xs, w = (build.input_(v.shape, dtypes.float64) for v in values)
    middle = cumulative_mix(c, xs, w)
    outputs = cumulative_mix(middle[0], middle[1], w)
    grads = grad.gradients(outputs, [build.like(o, 1) for o in outputs], [c, xs, w])
    roots = [*outputs, *grads]
    shared = share_scans((c, xs, w), roots, Log())
    given = dict(zip((c, xs, w), values))
    assert sum(n.op is ops.scan for n in topological(roots)) == 6
    assert sum(n.op is ops.scan for n in topological(shared)) == 4
    for a, b in zip(evaluate(shared, given), evaluate(roots, given)):
        np.testing.assert_allclose(a, b)


# ---- ties and edges, as PyTorch has them ----------------------------------------------------

TIED = np.array([1.0, 2.0, 2.0, -1.0])
OTHER = np.array([1.0, 2.0, 3.0, -2.0])
EDGES = {
    "sqrt0": (lambda x: ops.square_root(x), lambda t, x: x.sqrt(), [np.zeros(1)]),
    "abs0": (lambda x: ops.absolute(x), lambda t, x: x.abs(), [np.array([0.0, -1])]),
    "log0": (lambda x: ops.log(x), lambda t, x: x.log(), [np.zeros(1)]),
    "maximum": (ops.maximum, lambda t, a, b: t.maximum(a, b), [TIED, OTHER]),
    "minimum": (ops.minimum, lambda t, a, b: t.minimum(a, b), [TIED, OTHER]),
    "amax": (lambda x: build.max_(x), lambda t, x: x.amax(), [TIED]),
    "amin": (lambda x: ops.min_(x, axes=(0,)), lambda t, x: x.amin(), [-TIED]),
    "pow": (ops.power, lambda t, a, b: t.pow(a, b),
            [np.array([0.0, 0, 0, 2, -2]), np.array([0.0, 1, 2, 0, 2])]),
    "pow2": (lambda x: ops.power(x, build.like(x, 2.0)), lambda t, x: x**2, [np.zeros(2)]),
    "pow0": (lambda x: ops.power(x, build.like(x, 0.0)), lambda t, x: x**0, [np.zeros(2)]),
    "prod": (lambda x: ops.prod(x, axes=(0,)), lambda t, x: x.prod(), [np.array([0.0, 2, 3])]),
    "cumprod": (lambda x: ops.cumulative(x, axis=0, kind="prod"),
                lambda t, x: x.cumprod(0), [np.array([2.0, 0, 3, 0, 5])]),
    "cummax": (lambda x: ops.cumulative(x, axis=0, kind="max"),
               lambda t, x: x.cummax(0)[0], [np.array([1.0, 1, 0, 2, 2, 1])]),
    "cummin": (lambda x: ops.cumulative(x, axis=0, kind="min"),
               lambda t, x: x.cummin(0)[0], [-np.array([1.0, 1, 0, 2, 2, 1])]),
    "sort": (lambda x: ops.get(ops.sort(x, axis=0, descending=True), index=0),
             lambda t, x: t.sort(x, dim=0, descending=True, stable=True)[0], [TIED]),
    "remainder": (ops.remainder, lambda t, a, b: t.remainder(a, b),
                  [np.array([5.5, -5.5, 5.5]), np.array([2.0, 2.0, -2.0])]),
    "scatter_amax": (
        lambda s, v: build.update(s, v, [build.reshape(build.cast(build.multiply(
            build.iota(4), 0), dtypes.int64), (4,))], (0,), "max"),
        lambda t, s, v: s.scatter_reduce(0, t.zeros(4, dtype=t.int64), v, "amax"),
        [np.array([2.0, 1.0]), TIED]),
    "scatter_prod": (
        lambda s, v: build.update(s, v, [build.multiply(build.iota(4), 0)], (0,), "multiply"),
        lambda t, s, v: s.scatter_reduce(0, t.zeros(4, dtype=t.int64), v, "prod"),
        [np.array([2.0, 1.0]), np.array([3.0, 0, 2, 1])]),
}  # fmt: skip


@pytest.mark.parametrize("name", EDGES)
def test_edges_like_torch(name: str) -> None:
    torch = pytest.importorskip("torch")
    ours, theirs, values = EDGES[name]
    nodes = [build.input_(v.shape, dtypes.float64) for v in values]
    out = ours(*nodes)
    weight = np.asarray(np.arange(1.0, 1.0 + max(1, int(np.prod(out.shape)))))
    seed = build.input_(out.shape, dtypes.float64)
    given = {**dict(zip(nodes, values)), seed: weight.reshape(out.shape)}
    found = grad.gradients([out], [seed], nodes)
    got = evaluate(or_zeros(found, nodes), given)
    tensors = [torch.tensor(v, requires_grad=True) for v in values]
    result = theirs(torch, *tensors)
    result.backward(torch.tensor(weight.reshape(out.shape)))
    np.testing.assert_allclose(evaluate([out], given)[0], result.detach().numpy())
    for a, t in zip(got, tensors):
        np.testing.assert_allclose(a, t.grad.numpy(), rtol=1e-12)


def test_convolution_like_torch() -> None:
    torch = pytest.importorskip("torch")
    x, w = normal("x", 2, 3, 9, 8), normal("w", 4, 3, 3, 2)
    a, b = (build.input_(v.shape, dtypes.float64) for v in (x, w))
    rows = build.windows(build.pad(a, (0, 0, 1, 1), (0, 0, 1, 1)), 2, 3, 2, 1)
    both = build.windows(rows, 3, 2, 1, 2)  # (batch, channels, rows, columns, 3, 2)
    out = build.permute(build.dot(both, b, ((), ()), ((1, 4, 5), (1, 2, 3))), (0, 3, 1, 2))
    seed = build.input_(out.shape, dtypes.float64)
    ta, tb = (torch.tensor(v, requires_grad=True) for v in (x, w))
    expected = torch.nn.functional.conv2d(ta, tb, stride=(2, 1), padding=1, dilation=(1, 2))
    weight = normal("seed", *out.shape)
    expected.backward(torch.tensor(weight))
    found = grad.gradients([out], [seed], [a, b])
    got = evaluate([out, *found], {a: x, b: w, seed: weight})
    for mine, theirs in zip(got, (expected.detach(), ta.grad, tb.grad)):
        np.testing.assert_allclose(mine, theirs.numpy(), rtol=1e-10, atol=1e-12)
    made = {n.op for n in topological([found[0]])}
    assert ops.update not in made and ops.gather not in made


def test_symbolic_sizes() -> None:
    n = symbol("n", 4, 64)
    x = build.input_((n, 3), dtypes.float64)
    w = build.input_((3,), dtypes.float64)
    parts = build.windows(build.slice_(x, (1, 0), (n, 3), (2, 1)), 1, 2)
    _, (steps,) = build.scan(
        lambda c, s: ([ops.tanh(ops.add(ops.multiply(c[0], w), s[0]))], [c[0]]), [w], [x], n
    )
    running = ops.cumulative(x, axis=0, kind="prod")
    outputs = [build.sum_(ops.multiply(y, y)) for y in (parts, steps, running)]
    rows = build.concatenate([x, build.gather(x, [build.iota(n)], (0,))], 0)
    outputs.append(build.sum_(ops.sin(build.matmul(rows, build.transpose(rows)))))
    seeds = [build.like(o, 1) for o in outputs]
    found = grad.gradients(outputs, seeds, [x, w])
    given = {x: normal("symbolic", 6, 3) * 0.5, w: normal("w", 3)}
    values = interpret(found, given, {"n": 6})
    tangents = [normal("t", 6, 3), normal("u", 3)]
    ends = []
    for sign in (1, -1):
        moved = {k: given[k] + sign * 1e-5 * t for k, t in zip((x, w), tangents)}
        ends.append(sum(interpret(outputs, moved, {"n": 6})))
    assert inner(values, tangents) == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-6)


def test_call_uses_the_vjp_of_its_callee() -> None:
    class Square(Callee):
        key = name = "square"

        def result_types(self, argument_types):
            return argument_types

        def to_text(self):
            return "square"

        def interpret(self, *arrays):
            return (arrays[0] ** 2,)

        def vjp(self, inputs, outputs, cotangents):
            return [build.multiply(ops.multiply(inputs[0], cotangents[0]), 2.0)]

    x = build.input_((3,), dtypes.float64)
    out = ops.call(x, callee=Square())
    found = grad.gradients([out], [build.like(out, 1)], [x])
    value = normal("call", 3)
    np.testing.assert_allclose(evaluate([out, *found], {x: value}), [value**2, 2 * value])
    old = build.input_((3,), dtypes.float64)
    ((many, on),) = batch.batched(
        [ops.call(old, callee=Square())], {old: build.input_((2, 3), dtypes.float64)}, 2
    )
    assert on and many.shape == (2, 3)
    del Square.vjp
    with pytest.raises(UserError, match="no reverse derivative"):
        grad.gradients([out], [build.like(out, 1)], [x])
