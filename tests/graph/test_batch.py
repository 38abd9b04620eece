"""Batching against a loop, alone and together with both derivative modes."""

import itertools

import numpy as np
import pytest
from cases import CASES, LOOPS, Case, evaluate, or_zeros, seeded

from tilegrad.core import dtype as dtypes
from tilegrad.graph import batch, build, forward, grad, ops
from tilegrad.graph.interpret import interpret

SIZE = 3


def examples(case: Case, flags) -> list[np.ndarray]:
    """Inputs with a batch axis where flagged: near the case's own, which is smooth there."""
    rng = seeded("batch" + repr(case))
    result = []
    for x, on in zip(case.inputs, flags):
        if not on:
            result.append(x)
        elif x.dtype == np.float64:
            result.append(x + 0.01 * rng.uniform(-1, 1, (SIZE, *x.shape)))
        elif x.dtype == np.bool_:
            result.append(np.stack([x, ~x, x]))
        else:
            result.append(np.stack([x, np.flip(x), x]))
    return result


def one_by_one(results, nodes, values, flags) -> list[np.ndarray]:
    """The results of each example, stacked."""
    rows = []
    for i in range(SIZE):
        row = [v[i] if on else v for v, on in zip(values, flags)]
        rows.append(interpret(results, dict(zip(nodes, row))))
    return [np.stack(r) for r in zip(*rows)]


def run_batched(results, nodes, values, flags) -> list[np.ndarray]:
    """The results of the batched Graph."""
    new = [build.input_(v.shape, dtypes.BY_NUMPY[v.dtype]) for v in values]
    inputs = {n: m for n, m, on in zip(nodes, new, flags) if on}
    found = batch.batched(results, inputs, SIZE)
    given = {(m if on else n): v for n, m, v, on in zip(nodes, new, values, flags)}
    made = [batch.with_batch(x, on, SIZE) for x, on in found]
    return evaluate(made, given)


def choices(case: Case):
    count = len(case.inputs)
    return [f for f in itertools.product((True, False), repeat=count) if any(f)][:8]


@pytest.mark.parametrize("case", CASES + LOOPS, ids=repr)
def test_like_a_loop(case: Case) -> None:
    nodes = case.nodes()
    outputs = case.outputs(nodes)
    for flags in choices(case):
        values = examples(case, flags)
        expected = one_by_one(outputs, nodes, values, flags)
        for a, b in zip(run_batched(outputs, nodes, values, flags), expected):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_gradients_like_a_loop(case: Case) -> None:
    nodes = case.nodes()
    outputs = case.outputs(nodes)
    wrt = case.floats(nodes)
    seeds = [build.like(o, 1.5) for o in outputs]
    found = or_zeros(grad.gradients(outputs, seeds, wrt), wrt)
    for flags in choices(case)[:3]:
        values = examples(case, flags)
        expected = one_by_one(found, nodes, values, flags)
        for a, b in zip(run_batched(found, nodes, values, flags), expected):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_gradient_of_the_batched(case: Case) -> None:
    flags = [x.dtype == np.float64 for x in case.inputs]
    values = examples(case, flags)
    nodes = case.nodes()
    outputs = case.outputs(nodes)
    wrt = case.floats(nodes)
    per_example = or_zeros(grad.gradients(outputs, [build.like(o, 1.5) for o in outputs], wrt), wrt)
    expected = one_by_one(per_example, nodes, values, flags)
    new = [
        build.input_(v.shape, dtypes.BY_NUMPY[v.dtype]) if on else n
        for v, n, on in zip(values, nodes, flags)
    ]
    pairs = batch.batched(outputs, {n: m for n, m, on in zip(nodes, new, flags) if on}, SIZE)
    made = [batch.with_batch(x, on, SIZE) for x, on in pairs]
    moving = case.floats(new)
    found = or_zeros(grad.gradients(made, [build.like(o, 1.5) for o in made], moving), moving)
    for a, b in zip(evaluate(found, dict(zip(new, values))), expected):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("case", [c for c in CASES if c.op is ops.custom], ids=repr)
def test_custom_rules_over_a_batch(case: Case) -> None:
    """One input shared by the batch: its cotangents add up, its tangent is shared."""
    values = examples(case, [True, False])
    x, y = (build.input_(v.shape, dtypes.float64) for v in values)
    old, _ = nodes = case.nodes()
    outputs = case.function(old, y)
    ((made, _),) = batch.batched(outputs, {old: x}, SIZE)
    given = {x: values[0], y: values[1], nodes[1]: values[1]}
    plain = ops.multiply(x, ops.sin(build.broadcast_to(y, x.shape)))
    one = build.like(made, 1.0)
    for a, b in zip(
        evaluate(grad.gradients([made], [one], [x, y]), given),
        evaluate(grad.gradients([plain], [one], [x, y]), given),
    ):
        np.testing.assert_allclose(a, b)
    moved = [build.like(x, 0.5), build.like(y, 2.0)]
    for a, b in zip(
        evaluate(forward.tangents([made], [x, y], moved), given),
        evaluate(forward.tangents([plain], [x, y], moved), given),
    ):
        np.testing.assert_allclose(a, b)


def test_random_bits_differ_along_the_batch() -> None:
    key, offset = (build.input_((), dtypes.uint32) for _ in range(2))
    bits = ops.random_bits(key, offset, shape=(4,))
    x = build.input_((4,), dtypes.uint32)
    ((made, on),) = batch.batched([bits], {x: build.input_((SIZE, 4), dtypes.uint32)}, SIZE)
    assert on and made is ops.random_bits(key, offset, shape=(SIZE, 4))


def test_random_bits_with_keys_of_their_own() -> None:
    key = build.input_((), dtypes.uint32)
    bits = ops.random_bits(key, build.constant(7, dtypes.uint32), shape=(4,))
    values = [np.arange(SIZE).astype(np.uint32)]
    expected = one_by_one([bits], [key], values, [True])
    np.testing.assert_array_equal(run_batched([bits], [key], values, [True])[0], expected[0])


def test_random_bits_inside_a_scan() -> None:
    def body(carries, slices):
        key, zero = build.constant(3, dtypes.uint32), build.constant(0, dtypes.uint32)
        return [carries[0]], [ops.random_bits(key, zero, shape=(2,))]

    _, (bits,) = build.scan(body, [build.constant(0.0, dtypes.float64)], [], 2)
    ((made, on),) = batch.batched([bits], {}, SIZE)
    assert on and made.shape == (SIZE, 2, 2)


@pytest.mark.parametrize("op", [ops.argmax, ops.equal, ops.bit_xor, ops.shift_left, ops.floor])
def test_ops_without_derivatives(op) -> None:
    rng = seeded(op.name)
    kind = np.int32 if op is not ops.floor else np.float64
    values = [rng.integers(0, 9, s).astype(kind) for s in ((SIZE, 4, 2), (4, 2))]
    nodes = [build.input_((4, 2), dtypes.BY_NUMPY[np.dtype(kind)]) for _ in values]
    if op is ops.argmax:
        out = op(nodes[0], axis=0)
    else:
        out = op(*nodes) if op is not ops.floor else op(nodes[0])
    expected = one_by_one([out], nodes, values, [True, False])
    np.testing.assert_array_equal(run_batched([out], nodes, values, [True, False])[0], expected[0])
