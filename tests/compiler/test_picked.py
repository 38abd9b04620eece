"""Products with picked weights: both ways to compute them, against the reference of the op."""

import ml_dtypes
import numpy as np
import pytest

import tilegrad as tg
from tilegrad.compiler.compile import host
from tilegrad.compiler.pipeline import run_pipeline
from tilegrad.core import dtype as dtypes
from tilegrad.core.config import override
from tilegrad.core.errors import ShapeError, UserError
from tilegrad.core.target import H200
from tilegrad.graph import build, ops
from tilegrad.graph.interpret import interpret
from tilegrad.graph.picked import by_all, by_rows
from tilegrad.ir.node import topological
from tilegrad.tensor.matmul import picked_dot

RANDOM = np.random.default_rng(2)


def given(rows=7, count=3, axis=1, dtype=np.float32):
    """x (T, 20), weights (S, 20, 6) or (S, 6, 20), ids with none and repeats."""
    shape = (count, 20, 6) if axis == 1 else (count, 6, 20)
    x, weights = RANDOM.standard_normal((rows, 20)), RANDOM.standard_normal(shape)
    ids = RANDOM.integers(-1, count, rows).astype(np.int32)
    ids[0] = -1
    return x.astype(dtype), weights.astype(dtype), ids


def expected(x, weights, ids, axis):
    wide = weights.astype(np.float64) if axis == 1 else weights.astype(np.float64).swapaxes(1, 2)
    rows = [x[t].astype(np.float64) @ wide[i] * (i >= 0) for t, i in enumerate(ids)]
    return np.stack(rows)


def node(rows, count, axis):
    shape = (count, 20, 6) if axis == 1 else (count, 6, 20)
    x, weights = build.input_((rows, 20), dtypes.float32), build.input_(shape, dtypes.float32)
    ids = build.input_((rows,), dtypes.int32)
    return (x, weights, ids), ops.picked_dot(x, weights, ids, axis=axis)


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("way", [None, by_rows, by_all])
def test_ways_mean_the_same(axis, way):
    inputs, made = node(7, 3, axis)
    arrays = given(7, 3, axis)
    made = made if way is None else way(made)
    found = interpret([made], dict(zip(inputs, arrays)))[0]
    np.testing.assert_allclose(found, expected(*arrays, axis), atol=1e-5)


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("level", ["reproducible", "invariant"])
def test_on_this_machine(axis, count, level):
    arrays = given(9, count, axis)
    with override(determinism=level):
        found = tg.jit(picked_dot, static=("axis",))(*map(tg.tensor, arrays), axis=axis).numpy()
        np.testing.assert_allclose(found, expected(*arrays, axis), atol=1e-5)
        assert (found[arrays[2] < 0] == 0).all()


def test_half_precision_is_added_up_in_float32():
    arrays = given(5, 4, 2, ml_dtypes.bfloat16)
    found = tg.jit(picked_dot, static=("axis",))(*map(tg.tensor, arrays), axis=2).numpy()
    exact = expected(*arrays, 2)
    np.testing.assert_allclose(found.astype(np.float64), exact, rtol=2**-8, atol=1e-6)


def test_a_row_depends_on_its_own_weights_alone():
    x, weights, ids = given(6, 3, 1)
    ids[:] = [0, 1, 2, 0, 1, -1]
    with override(determinism="invariant"):
        together = tg.jit(picked_dot)(*map(tg.tensor, (x, weights, ids))).numpy()
        for row in range(6):
            others = ids.copy()
            others[np.arange(6) != row] = RANDOM.integers(-1, 3, 5)
            alone = tg.jit(picked_dot)(*map(tg.tensor, (x, weights, others))).numpy()
            assert (alone[row] == together[row]).all()


@pytest.mark.parametrize(
    ("target", "rows", "count", "level", "dots"),
    [
        (H200, 3, 8, "reproducible", 0),  # fewer rows than weights
        (H200, 64, 8, "reproducible", 1),
        (H200, 64, 8, "invariant", 0),
        (host(), 64, 8, "reproducible", 0),
        (host(), 64, 1, "reproducible", 1),
    ],
)
def test_which_way(target, rows, count, level, dots):
    inputs, made = node(rows, count, 1)
    with override(determinism=level):
        results, stages = run_pipeline(list(inputs), [made], target, ["dots of a row"])
    first = next(s for s in stages if s.name == "choose kernels")
    assert list(first.fired.values()) == [1]
    kinds = [n.op for n in topological(results)]
    assert ops.picked_dot not in kinds
    if dots or level == "invariant":
        assert kinds.count(ops.dot) == dots


def test_what_does_not_fit_is_refused():
    x, weights, ids = map(tg.tensor, given())
    for wrong in ((x, weights, ids[:3]), (x[:, :4], weights, ids), (x, weights[0], ids)):
        with pytest.raises(ShapeError):
            picked_dot(*wrong)
    with pytest.raises(ShapeError):
        picked_dot(x, weights, ids, axis=2)
    with pytest.raises(UserError, match="inference"):
        tg.grad(lambda x: picked_dot(x, weights, ids).sum())(x)
