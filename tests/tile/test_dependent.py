"""tile/prove.py: the dependency wait comes first on all paths."""

from __future__ import annotations

from collections.abc import Callable

from looped import looped
from placed_builder import PlacedBuilder

from tilegrad.core.dtype import float32, int64
from tilegrad.ir.node import Node
from tilegrad.ir.types import Memory
from tilegrad.tile import placed
from tilegrad.tile.build import Body
from tilegrad.tile.check import Finding
from tilegrad.tile.prove import check_body

PARAMETERS = [
    ("x", Memory((64,), float32)),
    ("weight", Memory((64,), float32, use="constant")),
    ("out", Memory((64,), float32, use="result")),
    ("count", Memory((1,), int64, use="state")),
]


def wait(b: PlacedBuilder) -> None:
    """The dependency wait."""
    b.do(placed.grid_dependency_wait)


def found(*roles: Callable[[PlacedBuilder, Node, Node], object]) -> list[Finding]:
    """Findings of a Body of roles over a shared place (64,) and a barrier 'full'."""
    b = PlacedBuilder("dependent", PARAMETERS)
    place, full = b.allocate((64,), float32, "shared"), b.barrier("full", 1)
    for number, role in enumerate(roles):
        b.role(f"role{number}", 4, 0, lambda role=role: role(b, place, full))
    return check_body(b.finish((4,)))


def copies(name: int, early: bool) -> Callable[[PlacedBuilder, Node, Node], None]:
    """Copies a parameter, before or after the wait."""

    def role(b: PlacedBuilder, place: Node, full: Node) -> None:
        if not early:
            wait(b)
        b.expect(full, 0, 256)
        b.copy_async(place, (), b.parameters[name], (0,), (0,), full, 0)
        if early:
            wait(b)

    return role


def writes(b: PlacedBuilder, place: Node, full: Node) -> None:
    """Writes out what was copied; knows of the wait only through the barrier."""
    b.wait(full, 0, 0)
    b.store(b.parameters[2], b.read(place), (0,), (0,))


def test_a_barrier_carries_the_wait() -> None:
    """The consumer need not wait itself if the producer waited before it arrived."""
    assert not found(copies(0, early=False), writes)


def test_constants_may_come_early() -> None:
    """A copy of a constant before the wait is fine, but then it tells the consumer nothing."""
    (finding,) = found(copies(1, early=True), writes)
    assert finding.rule == "dependent" and "role1 writes out before" in finding.message

    def waits_too(b: PlacedBuilder, place: Node, full: Node) -> None:
        wait(b)
        writes(b, place, full)

    assert not found(copies(1, early=True), waits_too)


def test_other_reads_and_writes_may_not() -> None:
    """Loads, gathers, copies and atomics of what is not constant."""
    assert "role0 reads x before" in found(copies(0, early=True))[0].message

    def load(b: PlacedBuilder, place: Node, full: Node) -> None:
        b.load(b.parameters[0], (0,), (64,), (0,))
        wait(b)

    def gather(b: PlacedBuilder, place: Node, full: Node) -> None:
        b.gather(b.parameters[0], b.constant(0, int64, (4,)))
        wait(b)

    def atomic(b: PlacedBuilder, place: Node, full: Node) -> None:
        b.add(placed.atomic_add(b.parameters[3], b.constant(1, int64), b.constant(0, int64)))
        wait(b)

    for role in (load, gather, atomic):
        assert {f.rule for f in found(role)} == {"dependent"}


def test_no_wait_at_all_is_a_plain_launch() -> None:
    """The rule binds only who is launched dependent."""

    def role(b: PlacedBuilder, place: Node, full: Node) -> None:
        b.store(b.parameters[2], b.load(b.parameters[0], (0,), (64,), (0,)), (0,), (0,))

    assert not found(role)


def test_waits_on_some_paths() -> None:
    """Under a condition that other programs do not meet, or in a loop that may be empty."""

    def sometimes(kind: str) -> Body:
        b = PlacedBuilder("sometimes", PARAMETERS)
        program = b.program(0, 100)
        if kind == "branch":
            b.branch(b.apply("not_equal", b.index(program), b.index(17)), lambda: wait(b) or ())
        elif kind == "both":
            b.branch(b.less(program, 50), lambda: wait(b) or (), lambda: wait(b) or ())
        elif kind == "loop":
            looped(b, "i", 0, program + 1, 1, lambda i, _: wait(b) or [])
        else:  # a loop that runs, and a condition on its index alone
            looped(b, "i", 0, 3, 1, lambda i, _: b.branch(b.less(i, 1), lambda: wait(b) or ()))
        b.store(b.parameters[2], b.constant(0, float32), (0,))
        return b.finish((100,))

    for kind in ("branch", "loop"):
        (finding,) = [f for f in check_body(sometimes(kind)) if f.severity == "error"]
        assert "on some paths only" in finding.message and f"({kind})" in finding.other
    assert not check_body(sometimes("both")) and not check_body(sometimes("index"))


def test_the_end_of_the_program() -> None:
    """A program that leaves before the wait, as some paths do."""
    b = PlacedBuilder("ends", PARAMETERS)
    b.branch(b.less(b.program(0, 4), 3), lambda: wait(b) or ())
    assert any(
        "may end before grid_dependency_wait" in f.message for f in check_body(b.finish((4,)))
    )
