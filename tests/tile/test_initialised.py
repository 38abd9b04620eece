"""tile/prove.py: places of portable Bodies that are read before they are written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from looped import looped

from tilegrad.core.dtype import float32
from tilegrad.ir.node import Node
from tilegrad.ir.types import Memory
from tilegrad.tile import ops, placed
from tilegrad.tile.build import BodyBuilder
from tilegrad.tile.prove import check_body


def found(build: Callable[[BodyBuilder, Node], object]) -> list[tuple[str, str]]:
    """(level, rule) of the Findings of a Body over a place of 8 numbers."""
    b = BodyBuilder("places", [("x", Memory((8,), float32, use="state"))])
    build(b, b.allocate((8,), float32, "l1"))
    findings = check_body(b.finish((2,)))
    assert all("(allocate)" in f.other for f in findings)
    return [(f.severity, f.rule) for f in findings]


def read(b: BodyBuilder, place: Node) -> None:
    """place -> x"""
    b.store(b.parameters[0], b.load(place, (0,), (8,), (0,)), (0,), (0,))


def write(b: BodyBuilder, place: Node) -> None:
    """x -> place"""
    b.store(place, b.load(b.parameters[0], (0,), (8,), (0,)), (0,), (0,))


def in_loop(*steps: Callable[[BodyBuilder, Node], None], count: int = 4) -> Callable:
    """The steps in every trip of a loop."""

    def build(b: BodyBuilder, place: Node) -> None:
        looped(b, "i", 0, count, 1, lambda i, _: [s(b, place) for s in steps] and [])

    return build


def in_branch(*arms: Callable[[BodyBuilder, Node], None] | None) -> Callable:
    """Arms of a branch on the program."""

    def build(b: BodyBuilder, place: Node) -> None:
        condition = b.less(b.program(0, 2), 1)
        b.branch(condition, *[lambda arm=arm: (arm and arm(b, place)) or () for arm in arms])

    return build


def after(first: Callable, second: Callable) -> Callable:
    """One after the other."""
    return lambda b, place: (first(b, place), second(b, place))


GOOD = {
    "straight": after(write, read),
    "trip": in_loop(write, read),
    "after a loop": after(in_loop(write), read),
    "both arms": after(in_branch(write, write), read),
}
BAD = {
    "never": read,
    "too late": after(read, write),
    "in the first trip": in_loop(read, write),
}


@pytest.mark.parametrize("name", GOOD)
def test_written_first(name: str) -> None:
    assert found(GOOD[name]) == []


@pytest.mark.parametrize("name", BAD)
def test_read_first(name: str) -> None:
    assert found(BAD[name]) == [("error", "uninitialised")]


def test_on_some_paths() -> None:
    """One arm writes: its programs may read, others not."""
    assert found(after(in_branch(write, None), in_branch(read, None))) == []
    assert found(after(in_branch(write, None), read)) == [("error", "uninitialised")]


def rows(*turn: Callable[[BodyBuilder, Node, Node], None]) -> Callable:
    """A place of 2 rows, row 0 written first, and a loop whose turns take these steps."""

    def build(b: BodyBuilder, _: Node) -> None:
        place = b.allocate((2, 8), float32, "l1")
        move(b, place, 0, True)
        looped(b, "i", 0, 4, 1, lambda i, _: [step(b, place, i) for step in turn] and [])

    return build


def move(b: BodyBuilder, place: Node, row: int, writes: bool) -> None:
    """Write a row of x, or x of a row."""
    x = b.parameters[0]
    if writes:
        b.store(place, b.load(x, (0,), (8,), (0,)), (row, 0), (1,))
    else:
        b.store(x, b.load(place, (row, 0), (8,), (1,)), (0,), (0,))


def test_what_the_turn_before_wrote() -> None:
    """A read that not every turn makes may come after a write that stands behind it."""

    def later(b: BodyBuilder, place: Node, i: Node) -> None:
        b.branch(b.less(0, i), lambda: move(b, place, 1, False) or (), lambda: ())

    def inner(b: BodyBuilder, place: Node, i: Node) -> None:
        looped(b, "j", 0, i, 1, lambda j, _: move(b, place, 1, False) or [])

    def always(b: BodyBuilder, place: Node, i: Node) -> None:
        move(b, place, 1, False)

    def last(b: BodyBuilder, place: Node, i: Node) -> None:
        move(b, place, 1, True)

    error = [("error", "uninitialised")]
    assert found(rows(later, last)) == found(rows(inner, last)) == []
    assert found(rows(always, last)) == error, "in the first turn it is read before"
    assert found(rows(later)) == found(rows(inner)) == error
    assert found(in_loop(in_branch(read, None), write)) == error
    assert found(in_loop(in_branch(read, None))) == error


def test_combining_reads() -> None:
    """An atomic addition reads what is there; a scatter does not."""
    for op, expected in ((ops.scatter, []), (placed.atomic_add, [("error", "uninitialised")])):
        assert (
            found(
                lambda b, place, op=op: b.do(
                    op,
                    place,
                    b.constant(1, float32, (8,)),
                    b.add(ops.iota(size=8, dtype=ops.int64)),
                )
            )
            == expected
        )
