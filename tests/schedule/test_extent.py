"""schedule/cost.py, order.py, join.py: long Graphs become Kernels of bounded size, in order."""

from __future__ import annotations

import numpy as np
import pytest
from judge import run

from tilegrad.compiler.compile import schedule_for
from tilegrad.core.dtype import float32, int32
from tilegrad.core.target import AVX512, H200, Target
from tilegrad.graph import build, ops
from tilegrad.ir.node import Node, topological
from tilegrad.schedule.cost import DEPTH, NODES, READS
from tilegrad.schedule.schedule import Copy, Launch, Schedule
from tilegrad.tile import numeric

TARGETS = [AVX512.with_cores(2), H200]


def chain(x: Node, count: int) -> Node:
    """x * 1.01 + 0.5, then its sine, `count` times."""
    for _ in range(count):
        x = build.unary(ops.sin, build.add(build.multiply(x, 1.01), 0.5))
    return x


def twice_read(x: Node, count: int) -> Node:
    """Each value is read by two others."""
    for _ in range(count):
        x = build.multiply(x, build.unary(ops.sin, x))
    return x


def total(xs: list[Node]) -> Node:
    """The sum of arrays, one after the other."""
    found = xs[0]
    for x in xs[1:]:
        found = build.add(found, x)
    return found


def depth_of(kernel: object) -> int:
    """Nodes between what a Kernel stores and what it reads."""
    reads, stored = kernel.region  # type: ignore[attr-defined]
    depth = dict.fromkeys(reads, 0)
    for node in topological(stored, stop=set(reads).__contains__):
        if node not in depth:
            depth[node] = 1 + max([depth[i] for i in node.inputs], default=-1)
    return max(depth[v] for v in stored)


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_no_function_alone_is_cut(target: Target) -> None:
    """What a function expands to shares much: shared Nodes count once."""
    for op in ops.graph.ops.values():
        if op.category in ("unary", "binary") and not op.attrs:
            dtype = int32 if numeric.wanted(op.name, float32) else float32
            x = [build.input_((4096,), dtype) for _ in range(1 + (op.category == "binary"))]
            assert len(schedule_for(x, [op(*x)], target, ()).kernels) <= 1, op.name


def check_bounds(schedule: Schedule) -> None:
    """No Kernel is deeper, larger or reads more than the bounds."""
    for kernel in schedule.kernels:
        reads, stored = kernel.region
        inside = topological(stored, stop=set(reads).__contains__)
        assert depth_of(kernel) <= DEPTH
        assert len(inside) <= NODES + READS
        assert len(reads) <= READS or all(isinstance(s, Copy) for s in kernel.steps[1::2])


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
@pytest.mark.parametrize("made", [chain, twice_read])
def test_a_long_chain_is_cut(made: object, target: Target) -> None:
    x = build.input_((4, 8), float32)
    counts = []
    for count in (200, 400, 800):
        schedule = schedule_for([x], [made(x, count)], target)  # type: ignore[operator]
        check_bounds(schedule)
        counts.append(len(schedule.kernels))
    assert counts[2] <= 2 * counts[1] <= 4 * counts[0] + 4
    bodies = {id(s.body) for k in schedule.kernels for s in k.steps if isinstance(s, Launch)}
    assert len(bodies) <= 4  # equal Regions share their Body


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_a_sum_of_many_arrays_is_cut(target: Target) -> None:
    xs = [build.input_((4, 8), float32) for _ in range(2000)]
    schedule = schedule_for(xs, [total(xs)], target)
    check_bounds(schedule)
    assert 2000 / READS <= len(schedule.kernels) <= 3 * 2000 / READS


def test_long_chains_compute_what_they_say() -> None:
    x = build.input_((4, 8), float32)
    value = np.random.default_rng(0).random((4, 8), np.float32)
    expected = value.copy()
    for _ in range(1000):
        expected = np.sin(expected * np.float32(1.01) + np.float32(0.5))
    (found,) = run([x], [chain(x, 1000)], [value])
    assert np.allclose(found, expected, atol=1e-5)
    xs = [build.input_((3,), float32) for _ in range(500)]
    values = [np.full(3, i, np.float32) for i in range(500)]
    (found,) = run(xs, [total(xs)], values)
    assert (found == sum(range(500))).all()


def test_order_is_one_where_each_comes_after_what_it_needs() -> None:
    """1,000 products in a row, each read by the next and by the last."""
    x, w = build.input_((4, 8), float32), build.input_((8, 8), float32)
    made = [x]
    for _ in range(300):
        made.append(build.dot(made[-1], w, batch=((), ()), contract=((1,), (0,))))
    schedule = schedule_for([x, w], [total(made)], TARGETS[0])
    written: set[Node] = {x, w}
    for kernel in schedule.kernels:
        reads, stored = kernel.region
        assert set(reads) <= written
        written |= set(stored)


# ---- concatenations of many parts ------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_many_parts(axis: int, target: Target) -> None:
    xs = [build.input_((1, 8) if axis == 0 else (8, 2), float32) for _ in range(300)]
    schedule = schedule_for(xs, [build.concatenate(xs, axis)], target)
    check_bounds(schedule)
    launches = [s for k in schedule.kernels for s in k.steps if isinstance(s, Launch)]
    copies = [s for k in schedule.kernels for s in k.steps if isinstance(s, Copy)]
    if axis == 0:
        assert len(copies) == 300 and not launches
    else:
        assert len(launches) <= 300 / 8 and len({id(s.body) for s in launches}) <= 8


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape, axis", [((3, 4), 0), ((3, 4), 1), ((1, 2, 3), 1), ((2,), 0)])
@pytest.mark.parametrize("count", [16, 17, 40, 260])
def test_parts_end_up_in_their_places(shape: tuple[int, ...], axis: int, count: int) -> None:
    random = np.random.default_rng(count)
    sizes = [
        tuple(int(random.integers(0, 4)) if i == axis else s for i, s in enumerate(shape))
        for _ in range(count)
    ]
    values = [random.standard_normal(s).astype(np.float32) for s in sizes]
    xs = [build.input_(s, float32) for s in sizes]
    mixed = [build.multiply(x, 2.0) if i % 3 == 0 else x for i, x in enumerate(xs)]
    whole = build.concatenate(mixed, axis)
    outputs = [whole, build.add(whole, 1.0), build.sum_(whole, (axis,))]
    expected = np.concatenate([2 * v if i % 3 == 0 else v for i, v in enumerate(values)], axis)
    found = run(xs, outputs, values)
    assert np.array_equal(found[0], expected)
    assert np.array_equal(found[1], expected + 1)
    assert np.allclose(found[2], expected.sum(axis), atol=1e-4)
