"""Long sums of floats are added in blocks: their error does not grow with their length.

Equal values are the worst case, since every addition to one accumulator rounds the same way. The
judge is float64, and the error may be at most torch's own or 1e-6 of the result; of float64 it is
`math.fsum`.
"""

from __future__ import annotations

import math

import judge
import numpy as np
import pytest
from interpreted import run_interpreted
from simulated import assembled, check_graph  # noqa: F401

import tilegrad as tg
from tilegrad.core.target import H200
from tilegrad.graph import build
from tilegrad.schedule import lines, loops

torch = pytest.importorskip("torch")
N = 1 << 22
CASES = {
    "sum": ((N,), lambda m, x: m.sum(x)),
    "mean": ((N + 5,), lambda m, x: m.mean(x)),
    "rows": ((3, N // 4), lambda m, x: m.sum(x, 1)),
    "many rows": ((40, 100_001), lambda m, x: m.sum(x, 1)),
    "columns": ((200_000, 16), lambda m, x: m.sum(x, 0)),
    "wide columns": ((5_001, 700), lambda m, x: m.sum(x, 0)),
    "middle": ((30, 20_000, 4), lambda m, x: m.sum(x, 1)),
    "ends": ((1_000, 3, 1_000), lambda m, x: m.sum(x, (0, 2))),
    "long lines": ((20, 3, 70_000), lambda m, x: m.sum(x, (0, 2))),
    "norm": ((N,), lambda m, x: m.norm(x)),
    "var": ((N,), lambda m, x: m.var(x)),
    "logsumexp": ((4, N // 4), lambda m, x: m.logsumexp(x, 1)),
    "dot": ((N,), lambda m, x: m.dot(x, x)),
    "matrix and vector": ((8, N // 8), lambda m, x: m.matmul(x, x[0])),
    "vector and matrix": ((N // 8, 8), lambda m, x: m.matmul(x[:, 0], x)),
    "running": ((N,), lambda m, x: m.cumsum(x, 0)),
}


def error(found, exact):
    found, exact = (np.asarray(v, np.float64) for v in (found, exact))
    return float(np.max(np.abs(found - exact) / np.abs(exact)))


@pytest.mark.parametrize("value", ["equal", "random"])
@pytest.mark.parametrize("name", CASES)
def test_error_of_long_sums(name, value):
    shape, function = CASES[name]
    x = np.full(shape, 0.1, np.float32)
    if value == "random" or name == "var":
        x = np.random.default_rng(0).random(shape, np.float32)
    exact = function(torch, torch.from_numpy(x).double())
    theirs = error(function(torch, torch.from_numpy(x)), exact)
    ours = error(function(tg, tg.tensor(x)).numpy(), exact)
    assert ours <= max(theirs, 1e-6), (ours, theirs)


DOUBLES = {  # shape, and the axes that are added up
    "row": ((70_001,), (0,)),
    "rows": ((3, 70_001), (1,)),
    "columns": ((20_000, 5), (0,)),
    "wide columns": ((3_001, 70), (0,)),
    "middle": ((3, 20_000, 4), (1,)),
    "ends": ((300, 3, 100), (0, 2)),
    "lead": ((8, 13, 17, 3), (0, 1, 2)),
}


@pytest.mark.parametrize("name", DOUBLES)
def test_error_of_doubles(name):
    """Sums, means and variances of float64 beside exactly rounded sums."""
    shape, axes = DOUBLES[name]
    x = np.random.default_rng(0).random(shape)
    kept = [a for a in range(x.ndim) if a not in axes]
    count = int(np.prod([shape[a] for a in axes]))
    lines_ = x.transpose(*kept, *axes).reshape(-1, count)
    sums = np.array([math.fsum(line) for line in lines_])
    squares = [math.fsum((line - total / count) ** 2) for line, total in zip(lines_, sums)]
    spread = np.array(squares) / count
    given = tg.tensor(x)
    for found, exact in (
        (given.sum(axes), sums),
        (given.mean(axes), sums / count),
        (tg.var(given, dim=axes, correction=0), spread),
    ):
        assert error(found.numpy().reshape(-1), exact) <= 12 * 2.0**-52


def test_infinities_and_nans_stay():
    x = np.full(1 << 20, 0.1, np.float32)
    x[5] = np.inf
    assert tg.tensor(x).sum().item() == np.inf
    x[1 << 19] = -np.inf
    assert np.isnan(tg.tensor(x).sum().item())
    assert np.isnan((tg.tensor(x) * 0).sum().item())
    assert np.signbit(tg.tensor(np.full(1 << 18, -0.0, np.float32)).sum().item())


@pytest.mark.parametrize(
    "shape,axes", [((300_000,), (0,)), ((2, 280_001), (1,)), ((20_000, 64), (0,))], ids=str
)
def test_error_on_threads(shape, axes):
    x = np.full(shape, 0.1, np.float32)
    node = build.input_(shape, judge.BY_NUMPY[x.dtype])
    (found,) = run_interpreted(H200, [node], [build.sum_(node, axes)], [x])
    assert error(found, x.astype(np.float64).sum(axes)) <= 1e-6


@pytest.mark.usefixtures("assembled")
@pytest.mark.parametrize(
    "shape,axis", [((1, 40_000), 1), ((3, 17_003), 1), ((600, 40), 0)], ids=str
)
def test_blocks_on_the_simulator(shape, axis, monkeypatch):
    for module in (lines, loops):
        monkeypatch.setattr(module, "CHAIN", 2)
    x = np.random.default_rng(1).random(shape).astype(np.float32)
    check_graph(lambda x: [build.sum_(x, axis), build.max_(x, axis)], x)


def test_short_rows_have_no_blocks():
    for size, blocks in ((512, False), (1 << 15, True)):
        found = tg.explain(lambda a: a.sum(1), tg.zeros(64, size), level="tile")
        assert ("float64" in str(found.programs[0].tile)) == blocks
