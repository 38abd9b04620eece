"""Costly expressions below what holds many elements a thread: no program spills or takes long.

Reductions of every kind, scans and sorts hold many elements of a row in a thread's registers; an
expression that takes hundreds of instructions is stored before them (schedule/cost.py), and a
thread of an elementwise program has fewer elements of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from recorded import SECONDS, processor_seconds

import tilegrad as tg
from tilegrad.compiler.compile import schedule_for
from tilegrad.core.target import A100, H200
from tilegrad.schedule.schedule import Launch
from tilegrad.targets.ptx.assemble import assemble, find_ptxas
from tilegrad.targets.ptx.emit import emit

pytestmark = pytest.mark.skipif(find_ptxas() is None, reason="no ptxas here")
Function = Callable[[Any], Any]


def powers(x: Any) -> Any:
    """Powers, divisions and roots."""
    for _ in range(6):
        x = (x.abs() + 0.5) ** (x * 0.25) / (1 + x * x).sqrt()
    return x


EXPRESSIONS: dict[str, Function] = {
    "running logsumexp": lambda x: tg.logcumsumexp(tg.xlogy(x, x.abs() + 0.5), -1),
    "digamma": lambda x: tg.digamma(x.abs() + 0.5) * tg.lgamma(x.abs() + 0.1),
    "powers": powers,
}
USES: dict[str, Function] = {
    "sum of rows": lambda y: y.sum(-1),
    "sum of columns": lambda y: y.sum(0),
    "sum of all": lambda y: y.sum(),
    "sums both ways": lambda y: (y.sum(0), y.sum(1)),
    "softmax": lambda y: y.softmax(-1),
    "logsumexp of columns": lambda y: tg.logsumexp(y, 0),
    "argmax": lambda y: (y.argmax(-1), y.argmax(0)),
    "layer norm": lambda y: tg.nn.functional.layer_norm(y, (y.shape[-1],)),
    "several": lambda y: (y.sum(-1), y.amax(-1), (y * y).sum(-1)),
    "running sums": lambda y: (y.cumsum(-1), y.cumsum(0)),
    "sort": lambda y: tg.sort(y, -1)[0],
    "largest": lambda y: tg.topk(y, 2, -1)[0],
    "added by index": lambda y: tg.zeros(y.shape).index_add(0, tg.arange(y.shape[0]) % 3, y),
}
SHAPES = ((24, 13), (300, 40), (40, 300), (4, 20000), (600, 2000))
SAMPLE = {
    ("digamma", "sum of columns", (300, 40)),
    ("digamma", "softmax", (4, 20000)),
    ("digamma", "sort", (600, 2000)),
    ("digamma", "running sums", (24, 13)),
    ("running logsumexp", "sum of all", (300, 40)),
    ("running logsumexp", "logsumexp of columns", (24, 13)),
    ("powers", "sum of all", (40, 300)),
    ("powers", "sums both ways", (600, 2000)),
}
CASES = [(e, u, s) for e in EXPRESSIONS for u in USES for s in SHAPES if e[0] != "r" or s[1] < 100]


@pytest.mark.parametrize(
    "expression, use, shape",
    [pytest.param(*c, marks=[pytest.mark.slow] * (c not in SAMPLE)) for c in CASES],
)
def test_no_spills(expression: str, use: str, shape: tuple[int, int]) -> None:
    x = tg.tensor(np.ones(shape, np.float32))
    fits(tg.jit(lambda x: USES[use](EXPRESSIONS[expression](x))).lower(x))


def test_no_spills_beside_bytes() -> None:
    """Bytes are read in vectors of many elements; of float64 a thread holds few of them."""

    def gradient(x: Any, mask: Any) -> Any:
        return tg.grad(lambda x: tg.where(mask, tg.lgamma(x.abs() + 1), 0.5).sum())(x)

    fits(tg.jit(gradient).lower(tg.ones(7, 13, 4), tg.ones(7, 13, 4, dtype=tg.bool)))


@pytest.mark.parametrize("count", [3, 6, 9])
def test_no_spills_of_float64_beside_bytes(count: int) -> None:
    """Vectors of bytes have 16 elements, which are two registers each in float64."""

    def function(mask: Any, *given: Any) -> Any:
        total, product = given[0], given[0]
        for x in given[1:]:
            total, product = total + x.exp(), product * (x + 1)
        return tg.where(mask, total, product), mask.logical_not()

    given = [tg.ones(2106, dtype=tg.float64) for _ in range(count)]
    fits(tg.jit(function).lower(tg.ones(2106, dtype=tg.bool), *given))


DOUBLES: list[tuple[Function, Function, tuple[int, int]]] = [
    (tg.nn.functional.softplus, USES["sum of rows"], (4, 2000)),
    (tg.nn.functional.softplus, lambda y: tg.relu(y.amin()), (64, 16)),
    (tg.nn.functional.softplus, USES["logsumexp of columns"], (300, 40)),
    (tg.nn.functional.gelu, USES["sum of all"], (300, 40)),
    (lambda x: (x.abs() + 0.5) ** (x * 0.25), USES["argmax"], (300, 40)),
    (lambda x: (x.abs() + 0.5) ** (x * 0.25), USES["softmax"], (4, 2000)),
]


@pytest.mark.parametrize("number", range(len(DOUBLES)))
def test_no_spills_of_float64(number: int) -> None:
    """Functions of float64 take more steps, and a value two registers."""
    expression, use, shape = DOUBLES[number]
    x, mask = tg.ones(*shape, dtype=tg.float64), tg.ones(*shape, dtype=tg.bool)
    fits(tg.jit(lambda x, mask: use(tg.where(mask, 1, expression(x)))).lower(x, mask))


@pytest.mark.parametrize("shape", [(65, 17), (30, 30), (7, 120), (200, 9)])
def test_no_spills_where_float64_is_read_at_several_places(shape: tuple[int, int]) -> None:
    """A derivative of a pad reads its gradient, in float64 here, at two places."""

    def loss(x: Any, scale: Any, weights: Any) -> Any:
        angle = tg.atan2(tg.nn.functional.softmax(x, dim=1), scale * scale + 0.5)
        return (tg.nn.functional.pad(angle, (1, 0), mode="replicate") * weights).sum()

    x, scale = tg.ones(*shape), tg.ones((), dtype=tg.float32)
    weights = tg.ones(shape[0], shape[1] + 1, dtype=tg.float64)
    fits(tg.jit(tg.grad(loss, argnums=(0, 1))).lower(x, scale, weights))


@pytest.mark.parametrize("shape", [(2, 9000), (3, 20000)])
@pytest.mark.parametrize("count", [2, 3])
def test_no_spills_of_long_rows_that_read_much(count: int, shape: tuple[int, int]) -> None:
    """An element reads several arrays of float64, each at two places; a vector has 8 elements."""

    def centred(x: Any, *given: Any) -> Any:
        total = x.float()
        for y in given:
            total = total / (y + 1.5).float() + y.flip(-1).float()
        return (total - total.mean(-1, keepdim=True)).half()

    given = [tg.ones(*shape, dtype=tg.float64) for _ in range(count)]
    fits(tg.jit(centred).lower(tg.ones(*shape, dtype=tg.float16), *given))


def gradient_of_ratios(y: Any, other: Any) -> Any:
    """The derivative of functions of which many values are read again."""

    def loss(y: Any) -> Any:
        z = tg.maximum(y, other)
        z = tg.nn.functional.log_softmax(z + 0.5 * z * other, 0)
        return tg.logaddexp(z, y).sum()

    return tg.grad(loss)(y)


def many_at_once(count: int) -> Callable[[Any, Any], Any]:
    """So many values are read again in the opposite order."""

    def function(y: Any, other: Any) -> Any:
        values = [(y * (0.1 * i)).exp() / (1 + y * y + i) for i in range(count)]
        for value in reversed(values):
            y = y / (value + y.abs() + other)
        return y

    return function


BEHIND: list[tuple[Callable[[Any, Any], Any], str, tuple[int, int, int]]] = [
    (gradient_of_ratios, "bfloat16", (45, 2, 33)),
    (gradient_of_ratios, "float32", (45, 2, 33)),
    (gradient_of_ratios, "float64", (45, 20, 33)),
    *((many_at_once(n), "bfloat16", (200, 30, 100)) for n in (2, 4, 6, 9)),
    *((many_at_once(n), "float32", (20, 30, 10)) for n in (3, 5)),
    *((many_at_once(n), "float64", (45, 20, 33)) for n in (1, 2, 4)),
    *((many_at_once(n), "float16", (512, 256, 512)) for n in (3, 6)),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", range(len(BEHIND)))
def test_no_spills_behind_products(number: int) -> None:
    """A thread of a product's kernel has many sums, and the values of an epilogue for each."""
    function, dtype, (m, k, n) = BEHIND[number]
    x, w = (tg.ones(*shape, dtype=getattr(tg, dtype)) for shape in ((m, k), (k, n)))
    other = tg.ones(m, n, dtype=getattr(tg, dtype))
    fits(tg.jit(lambda x, w, other: function(x @ w, other)).lower(x, w, other))


def test_no_spills_where_a_product_is_computed_anew() -> None:
    """A derivative reads the product, rows of it and matrices beside it: eleven values at once."""

    def loss(x: Any, w: Any, row: Any, other: Any, column: Any) -> Any:
        y = tg.maximum(tg.tensordot(x, w, dims=1), row)
        y = tg.nn.functional.log_softmax(tg.addcmul(y, other, y, value=0.5), dim=-4)
        return (tg.logaddexp(y, column) * weights).sum()

    shapes = ((1, 5, 9, 2), (2, 33), (1, 1, 1, 33), (1, 5, 9, 33), (1, 5, 1, 33))
    given = [tg.ones(*shape, dtype=tg.bfloat16) for shape in shapes]
    weights = tg.tensor(np.ones((1, 5, 9, 33)))
    fits(tg.jit(lambda *given: tg.grad(loss, argnums=tuple(range(5)))(*given)).lower(*given))


def fits(lowered: Any) -> None:
    """Every program has all it holds in registers, and is assembled soon."""
    for target in (A100, H200):
        schedule = schedule_for(lowered.inputs, lowered.outputs, target, ())
        for step in (s for k in schedule.kernels for s in k.steps if isinstance(s, Launch)):
            start = processor_seconds()
            made = assemble(emit(step.body, "entry", target)[0], target.cpu)
            assert processor_seconds() - start < SECONDS, step.body.name
            for report in made.reports.values():
                assert not report.spill_stores and not report.stack_bytes, step.body.name
