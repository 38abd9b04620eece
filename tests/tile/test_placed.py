"""tile/placed.py, concurrent.py and check.py: roles, barriers, races, deadlocks, levels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from looped import looped
from placed_builder import PlacedBuilder

from tilegrad.core.dtype import float32, int64
from tilegrad.core.errors import InternalError, UserError
from tilegrad.core.target import AVX512, MemorySpace, Target
from tilegrad.ir.node import Node
from tilegrad.ir.types import Memory, Tile
from tilegrad.tile import interpret, ops, placed
from tilegrad.tile.build import Body, BodyBuilder, fill
from tilegrad.tile.check import verify_body
from tilegrad.tile.concurrent import DeadlockError, RaceError
from tilegrad.tile.text import body_text, parse_body

X, OUT = ("x", Memory((8, 4), float32)), ("out", Memory((8, 4), float32, use="result"))
GPU = Target(
    "gpu",
    "ptx",
    limits={"threads_per_warp": 32},
    memories={
        "global": MemorySpace(1 << 30),
        "shared": MemorySpace(1024),
        "register": MemorySpace(1 << 16),
    },
)


def two_roles(
    build: Callable[[PlacedBuilder, Node, Node], tuple[Callable[[], object], Callable[[], object]]],
) -> Body:
    """A producer and a consumer over a shared place (4,) and a barrier 'full' of one arrival."""
    b = PlacedBuilder("roles", [X, OUT])
    place, full = b.allocate((4,), float32, "shared"), b.barrier("full", 1)
    for name, role in zip(("producer", "consumer"), build(b, place, full)):
        b.role(name, 4, 0, role)
    return b.finish((1,))


def run(body: Body, seed: int | None = None) -> np.ndarray:
    """Run on numbers 0 .. 31; gives the result."""
    out = np.zeros((8, 4), np.float32)
    interpret.run(body, [np.arange(32, dtype=np.float32).reshape(8, 4), out], seed=seed)
    return out


def copied(wait: bool = True, expect: int = 16) -> Body:
    """The producer copies a row, the consumer writes it out."""

    def build(b: PlacedBuilder, place: Node, full: Node) -> tuple[Callable[[], object], ...]:
        def producer() -> None:
            b.expect(full, 0, expect)
            b.copy_async(place, (), b.parameters[0], (2, 0), (1,), full, 0)

        def consumer() -> None:
            if wait:
                b.wait(full, 0, 0)
            b.store(b.parameters[1], b.read(place), (5, 0), (1,))

        return producer, consumer

    return two_roles(build)


@pytest.mark.parametrize("seed", [None, *range(6)])
def test_copy_and_wait(seed: int | None) -> None:
    """The row arrives whatever the interleaving; without the wait it is a race in all of them."""
    assert run(copied(), seed)[5].tolist() == [8, 9, 10, 11]
    with pytest.raises(RaceError, match="race"):
        run(copied(wait=False), seed)


def test_deadlock_names_roles_and_barriers() -> None:
    """Bytes that never land: who waits, on what, and what is missing."""
    with pytest.raises(DeadlockError) as caught:
        run(copied(expect=20))
    message = (
        "consumer waits on full[0] (phase 0: 1 of 1 arrivals, 20 bytes expected and 16 copied)"
    )
    assert message in str(caught.value)


def test_copy_outside_is_zero_and_store_is_clipped() -> None:
    """Boxes over the edge of the Memory."""
    b = PlacedBuilder("edges", [X, OUT])
    place, full = b.allocate((4, 4), float32, "shared"), b.barrier("full", 1)

    def only() -> None:
        b.expect(full, 0, 64)
        b.copy_async(place, (), b.parameters[0], (6, 2), (0, 1), full, 0)
        b.wait(full, 0, 0)
        b.copy_store(b.parameters[1], (5, 1), (0, 1), place)
        b.do(placed.commit_copies)
        b.do(placed.wait_copies, pending=0)

    b.role("only", 4, 0, only)
    out = run(b.finish((1,)))
    assert out[5].tolist() == [0, 26, 27, 0] and out[6].tolist() == [0, 30, 31, 0]
    assert not out[7].any()


def test_writing_while_an_other_reads_is_a_race() -> None:
    """Two roles on one place with nothing between them."""

    def build(b: PlacedBuilder, place: Node, full: Node) -> tuple[Callable[[], object], ...]:
        def one() -> None:
            b.write(place, b.constant(1, float32, (4,)))

        return one, one

    with pytest.raises(
        RaceError, match=r"(producer|consumer) writes the shared place 4 float32 while"
    ):
        run(two_roles(build))


def matrix_body(fence: bool, wait: bool, publish: bool) -> Body:
    """A role that stores its operands, multiplies them and writes the result."""
    b = PlacedBuilder("product", [("x", Memory((4, 4), float32)), ("out", Memory((4, 4), float32))])
    left = b.allocate((4, 4), float32, "shared")

    def only() -> None:
        total = b.register_tile((4, 4), float32, 1.0)
        b.write(left, b.load(b.parameters[0], (0, 0), (4, 4), (0, 1)))
        if publish:
            b.do(placed.fence, kind="async")
        b.do(placed.named_sync, number=0, threads=128)
        if fence:
            b.do(placed.matrix_fence)
        b.matrix_async(total, left, left, True, transpose_b=True)
        b.do(placed.matrix_commit)
        if wait:
            b.do(placed.matrix_wait, pending=0)
        b.store(b.parameters[1], b.read(total), (0, 0), (0, 1))

    b.role("only", 4, 0, only)
    return b.finish((1,))


def test_matrix_async_needs_fences_and_waits() -> None:
    """Each of the three is reported by name."""
    x = np.arange(16, dtype=np.float32).reshape(4, 4)
    out = np.zeros((4, 4), np.float32)
    interpret.run(matrix_body(True, True, True), [x, out])
    np.testing.assert_array_equal(out, x @ x.T + 1)
    for flags, message in (
        ((False, True, True), "without matrix_fence"),
        ((True, False, True), "race"),
        ((True, True, False), r"without fence\('async'\)"),
    ):
        with pytest.raises(RaceError, match=message):
            interpret.run(matrix_body(*flags), [x, out])


def test_named_barriers_order_roles() -> None:
    """A sync of both makes what one wrote known to the other."""
    for ordered in (True, False):

        def build(b: PlacedBuilder, place: Node, full: Node, ordered: bool = ordered) -> object:
            def first() -> None:
                b.write(place, b.constant(3, float32, (4,)))
                b.do(placed.named_arrive, number=1, threads=256)

            def second() -> None:
                if ordered:
                    b.do(placed.named_sync, number=1, threads=256)
                b.store(b.parameters[1], b.read(place), (0, 0), (1,))

            return first, second

        body = two_roles(build)  # type: ignore[arg-type]
        if ordered:
            assert run(body)[0].tolist() == [3, 3, 3, 3]
        else:
            with pytest.raises(RaceError):
                run(body)


def test_too_many_arrivals() -> None:
    """A phase that expects bytes takes no second arrival."""

    def build(b: PlacedBuilder, place: Node, full: Node) -> tuple[Callable[[], object], ...]:
        def producer() -> None:
            b.expect(full, 0, 16)
            b.arrive(full)

        return producer, lambda: None

    with pytest.raises(InternalError, match="more arrivals than it counts"):
        run(two_roles(build))


def test_dependent_launch() -> None:
    """Constants may be read before the dependency wait, other Memories may not."""
    for use, early in (("constant", True), ("value", True), ("value", False)):
        b = PlacedBuilder(
            "dependent", [("x", Memory((4,), float32, use=use)), ("out", Memory((4,), float32))]
        )
        if not early:
            b.do(placed.grid_dependency_wait)
        value = b.load(b.parameters[0], (0,), (4,), (0,))
        if early:
            b.do(placed.grid_dependency_wait)
        b.do(placed.grid_launch_dependents)
        b.store(b.parameters[1], value, (0,), (0,))
        memories = [np.ones(4, np.float32), np.zeros(4, np.float32)]
        if use == "value" and early:
            with pytest.raises(RaceError, match="reads x before it knows of grid_dependency_wait"):
                interpret.run(b.finish((1,)), memories)
        else:
            interpret.run(b.finish((1,)), memories)
            assert memories[1].all()


def test_atomic_add() -> None:
    """Adds across programs and gives the values before."""
    b = BodyBuilder(
        "counter", [("count", Memory((2,), int64, use="state")), ("seen", Memory((4, 2), int64))]
    )
    p = b.program(0, 4)
    lanes = b.add(ops.iota(size=2, dtype=int64))
    before = b.add(placed.atomic_add(b.parameters[0], b.constant(5, int64, (2,)), lanes))
    b.store(b.parameters[1], before, (p, 0), (1,))
    count, seen = np.zeros(2, np.int64), np.zeros((4, 2), np.int64)
    body = b.finish((4,))
    verify_body(body)
    interpret.run(body, [count, seen])
    assert count.tolist() == [20, 20] and seen[:, 0].tolist() == [0, 5, 10, 15]


# ---- holes, text, checks ------------------------------------------------------------------------


def holed() -> Body:
    """A Body that loads, has a hole inside of a loop, and stores."""
    b = PlacedBuilder("holed", [X, OUT])

    def row(i: object, _: list[Node]) -> list[Node]:
        value = b.load(b.parameters[0], (i, 0), (4,), (1,))
        result = b.hole("epilogue", Tile((4,), float32), value, b.index(i))
        b.store(b.parameters[1], result, (i, 0), (1,))
        return []

    looped(b, "i", 0, 8, 1, row)
    return b.finish((1,))


def test_fill() -> None:
    """A filler with a parameter of its own, inside of a loop; other holes stay."""

    def add_bias(b: PlacedBuilder, inputs: object, added: object) -> Node:
        value, _ = inputs
        return b.apply("add", value, b.load(added[0], (0,), (4,), (0,)))

    body = fill(holed(), "epilogue", add_bias, [("bias", Memory((4,), float32, use="constant"))])
    verify_body(body)
    x, out = np.arange(32, dtype=np.float32).reshape(8, 4), np.zeros((8, 4), np.float32)
    interpret.run(body, [x, out, np.array([1, 2, 3, 4], np.float32)])
    np.testing.assert_array_equal(out, x + [1, 2, 3, 4])
    with pytest.raises(InternalError, match="has no hole 'prologue'"):
        fill(holed(), "prologue", add_bias)
    with pytest.raises(InternalError, match="epilogue wants"):
        fill(holed(), "epilogue", lambda b, inputs, added: inputs[1])


def test_text_round_trip_with_notes() -> None:
    """Grid, notes, roles and barriers come back."""
    body = copied()
    body.notes.update(launch="persistent", stages=3, names=("a", "b"))
    parsed = parse_body(body_text(body))
    assert (parsed.grid, parsed.notes) == (body.grid, body.notes)
    assert body_text(parsed) == body_text(body)
    assert run(parsed)[5].tolist() == [8, 9, 10, 11]
    with pytest.raises(UserError, match="cannot read a Body"):
        parse_body("tilegrad-ir 1 tile\n")


def test_verify_body_refuses() -> None:
    """Levels, Scopes, marks, budgets, units and order of results."""
    verify_body(copied(), "placed", GPU)
    with pytest.raises(InternalError, match="no level 'other'"):
        verify_body(copied(), "other")
    with pytest.raises(InternalError, match="belongs to the placed level"):
        verify_body(copied())
    with pytest.raises(InternalError, match="has no Scope 'shared'"):
        verify_body(copied(), "placed", AVX512)

    def small(use: str, build: Callable[[BodyBuilder, Node], object]) -> Body:
        b = BodyBuilder("small", [("x", Memory((8,), float32, use=use))])
        build(b, b.parameters[0])
        return b.finish((1,))

    def store(b: BodyBuilder, x: Node) -> None:
        b.store(x, b.constant(1, float32), (0,))

    cases = [
        ("constant", store, "stores to a constant"),
        ("result", lambda b, x: b.load(x, (0,)), "reads a result that nothing has written"),
        ("other", store, "is marked 'other'"),
        ("value", lambda b, x: b.allocate((300,), float32, "shared"), "take 1200 bytes of shared"),
        (
            "value",
            lambda b, x: b.add(ops.matrix_zero(shape=(2, 2), dtype=float32, unit="u")),
            "no matrix unit 'u'",
        ),
        (
            "value",
            lambda b, x: b.add(ops.reshape(b.load(x, (0,), (8,), (0,)), shape=(3, 3))),
            "reshape of",
        ),
        ("value", lambda b, x: b.load(x, (0,), (8,), (1,)), "axes"),
        ("value", lambda b, x: b.gather(x, b.constant(1.0, float32)), "offsets are"),
    ]
    for use, build, message in cases:
        with pytest.raises(InternalError, match=message):
            verify_body(small(use, build), "portable", GPU)
    verify_body(small("result", lambda b, x: (store(b, x), b.load(x, (0,)))), "portable", GPU)


def test_roles_are_not_nested() -> None:
    """A role in a role is refused by the check and by the interpreter."""
    b = PlacedBuilder("nested", [X, OUT])
    b.role("outer", 4, 0, lambda: b.role("inner", 4, 0, lambda: None))
    body = b.finish((1,))
    with pytest.raises(InternalError, match="inside of a role"):
        verify_body(body, "placed", GPU)
    with pytest.raises(InternalError, match="inside of a role"):
        run(body)


def test_condition_of_a_branch_must_be_bool() -> None:
    """Control flow is checked."""
    b = BodyBuilder("branches", [X])
    b.branch(b.constant(1, int64), lambda: ())
    with pytest.raises(InternalError, match="the condition is"):
        verify_body(b.finish((1,)))
