"""Rules and passes of the compiler that are not plain algebra: each fires and keeps values."""

import numpy as np
import pytest

from tilegrad.compiler.pipeline import run_pipeline
from tilegrad.compiler.row_dots import ROWS, SHORT_ROWS
from tilegrad.compiler.split import SPLIT
from tilegrad.core import dtype as dtypes
from tilegrad.core.config import override
from tilegrad.core.errors import UserError
from tilegrad.core.target import AVX512, H200, Target
from tilegrad.graph import build, ops
from tilegrad.graph.interpret import interpret
from tilegrad.graph.strength import STRENGTH
from tilegrad.ir.node import topological
from tilegrad.ir.rewrite import Log, rewrite


def matrix(*shape, dtype=dtypes.float32):
    return build.input_(shape, dtype)


def picked():
    """The derivative of x[rows, labels]: one value a row scattered into zeros."""
    labels, value = matrix(6, dtype=dtypes.int64), matrix(6)
    rows = build.iota(6)
    zeros = build.full((6, 11), 0.0, dtypes.float32)
    return [labels, value], build.update(zeros, value, [rows, labels], [0, 1], "add")


def kept_axis():
    labels, value = matrix(4, 1, 3, dtype=dtypes.int64), matrix(4, 1, 3)
    zeros = build.full((4, 11, 3), 0.0, dtypes.float32)
    indices = [build.iota_along((4, 1, 3), 0), labels, build.iota_along((4, 1, 3), 2)]
    return [labels, value], build.update(zeros, value, indices, [0, 1, 2], "add")


def softmax():
    x = matrix(5, 9)
    e = ops.exp(build.subtract(x, build.max_(x, 1, True)))
    return [x], build.divide(e, build.sum_(e, 1, True))


def row_times_matrix():
    a, b = matrix(1, 8), matrix(8, 5)
    return [a, b], build.matmul(a, b)


def matrix_times_column():
    a, b = matrix(3, 4, 8), matrix(3, 8, 1)
    return [a, b], build.matmul(a, b)


def turned_matrix():
    a, b = matrix(1, 8), matrix(5, 8)
    return [a, b], build.dot(a, b, ((), ()), ((1,), (1,)))


def half_row():
    a, b = matrix(1, 64, dtype=dtypes.bfloat16), matrix(64, 5, dtype=dtypes.bfloat16)
    return [a, b], build.matmul(a, b)


def outer():
    a, b = matrix(4, 7, dtype=dtypes.bfloat16), matrix(4, 5, dtype=dtypes.bfloat16)
    return [a, b], build.dot(a, b, ((0,), (0,)), ((), ()), dtypes.float32)


def element_by_element():
    a, b = matrix(4, 7), matrix(4, 7)
    return [a, b], build.dot(a, b, ((0, 1), (0, 1)), ((), ()), dtypes.float32)


def long(op):
    x = matrix(3, 1 << 15)
    return [x], build.reduce(op, x, 1)


CASES = [
    (STRENGTH, "update_one_place", picked),
    (STRENGTH, "update_one_place", kept_axis),
    (STRENGTH, "exp_over_repeated", softmax),
    (ROWS, "dot_of_a_row", row_times_matrix),
    (ROWS, "dot_of_a_row", matrix_times_column),
    (ROWS, "dot_of_a_row", turned_matrix),
    (ROWS, "dot_of_a_row", half_row),
    (ROWS, "dot_of_a_row", outer),
    (ROWS, "dot_of_a_row", element_by_element),
    (SHORT_ROWS, "dot_of_a_short_row", row_times_matrix),
    (SHORT_ROWS, "dot_of_a_short_row", outer),
    (SHORT_ROWS, "dot_of_a_short_row", element_by_element),
    (SPLIT, "split_sum", lambda: long(ops.sum_)),
    (SPLIT, "split_max", lambda: long(ops.max_)),
    (SPLIT, "split_min", lambda: long(ops.min_)),
    (SPLIT, "split_prod", lambda: long(ops.prod)),
]


@pytest.mark.parametrize("rules, name, make", CASES)
def test_rule_fires_and_keeps_values(rules, name, make) -> None:
    inputs, root = make()
    log = Log()
    (new,) = rewrite([root], rules, log)
    assert log.fired.get(name), f"{name} did not fire"
    rng = np.random.default_rng(1)
    for _ in range(3):
        data = {
            n: rng.standard_normal(n.shape).astype(n.dtype.numpy)
            if n.dtype.is_float
            else rng.integers(-1, 12, n.shape)
            for n in inputs
        }
        if name == "split_prod":
            data = {n: np.sign(v) for n, v in data.items()}
        before, after = (interpret([r], data)[0].astype(np.float64) for r in (root, new))
        loose = 1e-2 if root.dtype.bits == 16 else 2e-5
        np.testing.assert_allclose(after, before, rtol=loose, atol=loose)


def test_every_rule_has_a_case() -> None:
    covered = {(r.name, name) for r, name, _ in CASES}
    for rules in (STRENGTH, ROWS, SHORT_ROWS, SPLIT):
        assert {(rules.name, rule.name) for rule in rules.rules} <= covered


@pytest.mark.parametrize(
    "make",
    [
        lambda s, v, r, c: build.update(s, v, [r, c], [0, 1], "max"),
        lambda s, v, r, c: build.update(build.add(s, 1.0), v, [r, c], [0, 1], "add"),
        lambda s, v, r, c: build.update(s, v, [c, c], [0, 1], "add"),
    ],
)
def test_other_updates_stay(make) -> None:
    zeros = build.full((6, 6), 0.0, dtypes.float32)
    root = make(zeros, matrix(6), build.iota(6), matrix(6, dtype=dtypes.int64))
    log = Log()
    rewrite([root], STRENGTH, log)
    assert not log.fired


def test_pipeline_makes_a_dot_and_then_a_stream() -> None:
    a, b = matrix(7, 5), matrix(5)
    product = build.multiply(a, b)
    (result,), stages = run_pipeline([a, b], [build.sum_(product, 1)])
    fired = {name for stage in stages for name in stage.fired}
    assert "sum_of_product" in fired and "dot_of_a_row" in fired
    assert not any(n.op is ops.dot for n in topological([result]))


def test_eager_debugging_names_op_and_line() -> None:
    import tilegrad

    with override(eager_debug=True):
        x = tilegrad.tensor([1.0, 0.0, 2.0])
        good = (x + 1).log()
        np.testing.assert_allclose(good.numpy(), np.log([2.0, 1.0, 3.0]), rtol=1e-6)
        with pytest.raises(UserError) as error:
            (x - 1).log().sum().item()
    text = str(error.value)
    assert "log" in text and "first NaN" in text and "test_passes.py" in text


def test_rows_of_a_norm_are_not_split() -> None:
    """A few rows that one program can hold stay one reduction each."""
    total = build.reduce(ops.sum_, matrix(8, 4096), 1)
    assert rewrite([total], SPLIT, Log()) == [total]


def test_long_rows_stay_dots_on_a_gpu() -> None:
    x = build.input_((1, 14336), dtypes.bfloat16)
    w = build.input_((4096, 14336), dtypes.bfloat16)
    dot = build.dot(x, w, batch=((), ()), contract=((1,), (1,)))

    def kinds(target: Target) -> set[str]:
        (result,), _ = run_pipeline([x, w], [dot], target)
        return {n.op.name for n in topological([result])}

    assert "dot" in kinds(H200) and "dot" not in kinds(AVX512)
