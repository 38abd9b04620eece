"""tile/build.py: Exprs to Nodes, broadcasting, loops and branches."""

from __future__ import annotations

import numpy as np
import pytest
from looped import looped

from tilegrad.core.dtype import bool_, float32, int64
from tilegrad.core.errors import InternalError
from tilegrad.ir.symbol import Expr, loop_index, maximum, minimum, symbol
from tilegrad.ir.types import Memory, Tile
from tilegrad.tile import interpret, ops
from tilegrad.tile.build import BodyBuilder
from tilegrad.tile.check import verify_body, walk
from tilegrad.tile.text import body_text

OUT = ("out", Memory((8,), int64, use="result"))


def test_index_expressions() -> None:
    """Sums, quotients, remainders, minima and maxima of program numbers and Symbols."""
    n = symbol("n", 1, 100)
    b = BodyBuilder("indices", [OUT])
    p = b.program(0, 8)
    values = [
        3 * p + n,
        (p + n) // 3,
        (p + n) % 5,
        minimum(p, n),
        maximum(2 * p, n - 4),
        p * n,
        (p - 5) // 2,
        (p - 5) % 3,
    ]
    for at, value in enumerate(values):
        b.store(b.parameters[0], b.index(value), (at,))
    body = b.finish((8,))
    verify_body(body)
    for program in range(8):
        out = np.zeros(8, np.int64)
        interpret.run(body, [out], {"n": 7}, [program])
        i, k = program, 7
        assert out.tolist() == [
            3 * i + k,
            (i + k) // 3,
            (i + k) % 5,
            min(i, k),
            max(2 * i, k - 4),
            i * k,
            (i - 5) // 2,
            (i - 5) % 3,
        ]


def test_text_does_not_depend_on_what_was_built_before() -> None:
    """Terms stand in the same order whichever Exprs exist already."""

    def build() -> str:
        b = BodyBuilder("order", [("x", Memory((64, 64), float32))])
        i, j = b.program(0, 4), b.program(1, 7)
        b.load(b.parameters[0], (i * 3 + j * 2, minimum(i + 1, j)))
        return body_text(b.finish((4, 7)))

    loops: list[Expr] = []
    b = BodyBuilder("other", [])
    for size in (7, 4):  # the same atoms, in the other order
        b.serial = {7: 1, 4: 0}[size]
        loops.append(b.atom("p", b.index(0), 0, size - 1))
    assert [x.name for x in loops] == ["p2", "p1"]
    text = build()
    assert text.index("axis=0") < text.index("axis=1")
    first = next(line for line in text.splitlines() if "multiply(" in line)
    assert "%0" in first


def test_broadcasting() -> None:
    """Shapes meet from the right, as in NumPy."""
    b = BodyBuilder("broadcasts", [])
    row, column = b.constant(1, float32, (8,)), b.constant(2, float32, (4, 1))
    assert b.apply("add", row, column).shape == (4, 8)
    assert b.apply("add", b.constant(1, float32), row).shape == (8,)
    assert b.apply("where", b.constant(True, bool_), row, column).shape == (4, 8)
    with pytest.raises(InternalError, match="does not broadcast"):
        b.apply("add", row, b.constant(1, float32, (3,)))


def test_short_loops_are_written_out() -> None:
    """No trip gives the carried values, one trip no loop."""
    b = BodyBuilder("short", [])
    start = [b.constant(0, float32)]
    assert looped(b, "i", 3, 3, 1, lambda i, c: 1 / 0, start) == start
    one = b.constant(1, float32)
    (result,) = looped(b, "i", 0, 4, 4, lambda i, c: [b.apply("add", c[0], one)], start)
    assert result.op.name == "add"
    assert not [n for n, _ in walk(b.finish((1,)).block) if n.op.name == "loop"]


def test_unknown_index() -> None:
    """A loop index of nobody is an error."""
    b = BodyBuilder("unknown", [])
    with pytest.raises(InternalError, match="has no Node"):
        b.index(loop_index("stray", 9))


def test_masks() -> None:
    """A mask is bool, and broadcast to its tile."""
    b = BodyBuilder("masks", [("x", Memory((4, 8), float32))])
    mask = b.constant(True, bool_, (8,))
    tile = b.load(b.parameters[0], (0, 0), (4, 8), (0, 1), mask)
    assert tile.inputs[-1].type == Tile((4, 8), bool_)
    with pytest.raises(InternalError, match="not bool"):
        b.load(b.parameters[0], (0, 0), (8,), (1,), b.add(ops.iota(size=8, dtype=int64)))


def test_loops_and_conditions_as_statements() -> None:
    def built(statements: bool) -> BodyBuilder:
        b = BodyBuilder("sums", [("x", Memory((8,), float32)), ("out", Memory((2,), float32))])
        x, out = b.parameters
        total, most = b.constant(0.0, float32), b.constant(-1.0, float32)
        if statements:
            found = [total, most]
            for i in b.each("i", 0, 8, carried=found):
                value = b.load(x, (i,))
                found[:] = [b.apply("add", found[0], value), b.apply("maximum", found[1], value)]
            with b.when(b.apply("less", found[0], b.constant(100.0, float32))):
                for i, value in enumerate(found):
                    b.store(out, value, (i,))
            return b

        def step(i, carried):
            value = b.load(x, (i,))
            return [b.apply("add", carried[0], value), b.apply("maximum", carried[1], value)]

        last = looped(b, "i", 0, 8, 1, step, [total, most])

        def write() -> None:
            for i, value in enumerate(last):
                b.store(out, value, (i,))

        b.branch(b.apply("less", last[0], b.constant(100.0, float32)), write)
        return b

    body, other = (built(statements).finish((1,)) for statements in (True, False))
    assert body_text(body) == body_text(other)
    verify_body(body)
    given, found = np.arange(8, dtype=np.float32), np.zeros(2, np.float32)
    interpret.run(body, [given, found])
    assert found.tolist() == [28.0, 7.0]


def test_each_writes_short_loops_out() -> None:
    b = BodyBuilder("short", [("out", Memory((4,), float32))])
    assert list(b.each("none", 3, 3)) == []
    assert list(b.each("once", 1, 3, 4)) == [1]
    assert not b.finish((1,)).block.nodes
