"""Bounds and divisors of indices: what fits 32 bits, and what is aligned, in every run."""

from __future__ import annotations

import numpy as np
import pytest
from looped import looped

from tilegrad.core.dtype import float32, int32, int64
from tilegrad.ir.node import Node
from tilegrad.ir.symbol import combine, floor_divide, minimum, modulo, multiply, symbol
from tilegrad.ir.types import Memory
from tilegrad.tile import ops
from tilegrad.tile.bounds import Bounds, divisor_of
from tilegrad.tile.build import Body, BodyBuilder
from tilegrad.tile.row import compute


def finish(b: BodyBuilder, *nodes: Node, grid: tuple = (1,)) -> Bounds:
    for node in nodes:
        b.add(node)
    return Bounds(b.finish(grid))


def test_divisors_of_sizes() -> None:
    n = symbol("n", 1, 100)
    assert divisor_of(48) == 48 and divisor_of(0) == 0
    assert divisor_of(multiply(n, 8)) == 8
    assert divisor_of(combine(multiply(n, 8), 12, 1)) == 4
    assert divisor_of(minimum(multiply(n, 8), 32)) == 8
    assert divisor_of(floor_divide(n, 2)) == 1


def test_programs_symbols_and_loops() -> None:
    n = symbol("n", 0, 1000)
    b = BodyBuilder("b", [])
    p = b.program(0, 70)
    at, size = b.index(multiply(p, 128)), b.index(multiply(n, 16))
    inside: list[Node] = []
    looped(b, "i", 0, multiply(n, 64), 32, lambda i, c: inside.append(b.index(i)) or [], [])
    bounds = finish(b, grid=(70,))
    assert bounds.range(at) == (0, 69 * 128) and bounds.divisor(at) == 128
    assert bounds.range(size) == (0, 16000) and bounds.divisor(size) == 16
    assert bounds.range(inside[0]) == (0, 63999) and bounds.divisor(inside[0]) == 32
    assert all(bounds.narrow(x) for x in (at, size, inside[0]))


def test_wide_values_are_not_narrow() -> None:
    b = BodyBuilder("b", [("x", Memory((8,), int64)), ("y", Memory((8,), int32))])
    far = b.apply("multiply", b.index(b.program(0, 1 << 20)), b.constant(1 << 20, int64))
    loaded = b.load(b.parameters[0], (0,))
    cast = b.cast(b.load(b.parameters[1], (0,)), int64)
    bounds = finish(b, grid=(1 << 20,))
    assert not bounds.narrow(far) and not bounds.narrow(loaded) and bounds.narrow(cast)


def test_reductions_of_counts() -> None:
    b = BodyBuilder("b", [])
    count = b.add(ops.iota(size=1 << 20, dtype=int64))
    total, most = (b.add(ops.reduce(count, axis=0, kind=kind)) for kind in ("sum", "max"))
    bounds = finish(b)
    assert not bounds.narrow(total) and bounds.range(most) == (0, (1 << 20) - 1)


OPS = (
    "add",
    "subtract",
    "multiply",
    "minimum",
    "maximum",
    "floor_divide",
    "remainder",
    "unsigned_divide",
    "unsigned_remainder",
    "bit_and",
    "shift_right",
)


@pytest.mark.parametrize("seed", range(8))
def test_random_expressions_stay_within_their_bounds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    b = BodyBuilder("b", [("x", Memory((1,), float32))])
    program = b.index(b.program(0, 37))
    nodes = [
        program,
        b.index(symbol("n", 3, 90)),
        *(b.constant(int(c), int64) for c in rng.integers(0, 40, 4)),
    ]
    for _ in range(30):
        x, y = (nodes[int(i)] for i in rng.integers(0, len(nodes), 2))
        nodes.append(b.apply(str(rng.choice(OPS)), x, y))
    body: Body = b.finish((37,))
    bounds = Bounds(body)
    for run in range(25):
        given = {program: int(rng.integers(0, 37)), nodes[1]: int(rng.integers(3, 91))}
        values: dict[Node, np.ndarray] = {}
        for node in body.block.nodes:
            if node in given:
                values[node] = np.asarray(given[node], np.int64)
            elif node.op.name == "constant":
                values[node] = np.asarray(node.attrs["value"], np.int64)
            else:
                with np.errstate(all="ignore"):
                    values[node] = compute(node, [values[i] for i in node.inputs])
            value, (low, high) = int(values[node]), bounds.range(node)
            divisor = bounds.divisor(node)
            assert low <= value <= high, (run, node)
            if abs(value) < 1 << 62:
                assert value == 0 if divisor == 0 else value % (divisor & -divisor) == 0


def test_remainders_keep_what_divides_both() -> None:
    n = symbol("n", 1, 100)
    b = BodyBuilder("b", [])
    rest = b.index(modulo(multiply(n, 24), 64))
    assert finish(b).divisor(rest) % 8 == 0


def test_what_a_loop_carries() -> None:
    """A counter that wraps stays narrow; one that grows without end is as wide as its dtype."""
    b = BodyBuilder("b", [])
    seen: list[Node] = []

    def step(i: object, carried: list[Node]) -> list[Node]:
        seen.extend(carried)
        ring = b.atom("ring", carried[0], 0, 3)
        grows = b.apply("add", carried[1], b.constant(5, int64))
        return [b.index(modulo(combine(ring, 3, 1), 4)), grows]

    done = looped(b, "i", 0, 100, 1, step, [b.constant(0, int64), b.constant(0, int64)])
    bounds = finish(b)
    assert bounds.range(seen[0]) == (0, 3) and bounds.range(done[0]) == (0, 3)
    assert bounds.narrow(done[0])
    assert not bounds.narrow(seen[1]) and not bounds.narrow(done[1])


def test_what_a_branch_gives() -> None:
    b = BodyBuilder("b", [("x", Memory((8,), int32))])
    some = b.apply("less", b.load(b.parameters[0], (0,)), b.constant(3, int32))
    given = b.branch(some, lambda: [b.constant(7, int64)], lambda: [b.constant(-2, int64)])
    assert finish(b).range(given[0]) == (-2, 7)
