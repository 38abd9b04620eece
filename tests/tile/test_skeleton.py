"""tile/skeleton.py and scalars.py: traces of roles without data, and loops cut short."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "golden"))

import bodies
from looped import looped
from placed_builder import PlacedBuilder

from tilegrad.core.dtype import float32, int64
from tilegrad.ir.node import Node
from tilegrad.ir.symbol import Size, maximum, symbol
from tilegrad.ir.types import Memory
from tilegrad.tile import placed
from tilegrad.tile.build import Body
from tilegrad.tile.prove import check_body
from tilegrad.tile.skeleton import Skeleton, TooLong


def one_role(build: Callable[[PlacedBuilder, Node], object], grid: tuple[Size, ...] = (4,)) -> Body:
    """A role over the barrier 'ring' of 3 stages."""
    b = PlacedBuilder("one", [("x", Memory((64,), int64))])
    ring = b.barrier("ring", 1, 3)
    b.role("only", 4, 0, lambda: build(b, ring))
    return b.finish(grid)


def arrivals(body: Body, scenario: int = 0, whole: bool = False) -> list[int]:
    """Stages of all arrivals."""
    skeleton = Skeleton(body)
    trace = skeleton.trace(skeleton.scenarios()[scenario], whole)
    return [
        next(iter(values.values()))
        for item in trace
        if item[0] == "roles"
        for node, values in item[1][0][1]
        if node.op.name == "arrive"
    ]


def loop(count: Size, stage: Callable[[PlacedBuilder, Size], Size], step: int = 1) -> Body:
    """Arrives once a trip."""
    return one_role(
        lambda b, ring: looped(
            b, "i", 0, count, step, lambda i, _: b.arrive(ring, stage(b, i)) or []
        )
    )


def test_the_middle_is_a_whole_number_of_periods() -> None:
    """Stages go on as if nothing was left out, to the last trip."""
    for count in (5, 50, 51, 52, 53, 1000):
        short = arrivals(loop(count, lambda b, i: i % 3))
        whole = arrivals(loop(count, lambda b, i: i % 3), whole=True)
        assert whole == [i % 3 for i in range(count)]
        assert len(short) <= 24 and short == [i % 3 for i in range(len(short))]
        assert short[-1] == whole[-1]


def test_steps_share_what_is_left_out() -> None:
    """Taking every index, or the even and the odd ones: the same indices are kept."""

    def kept_of(start: int, step: int) -> set[int]:
        def build(b: PlacedBuilder, ring: Node) -> None:
            looped(b, "other", 0, 100, 2, lambda i, _: b.arrive(ring, i % 3) or [])
            looped(b, "i", start, 100, step, lambda i, _: b.wait(ring, i % 3, i // 3 % 2) or [])

        skeleton = Skeleton(one_role(build))
        node = [n for n in skeleton.periods.depths if n.attrs["step"] == step][-1]
        first, skipped, _ = skeleton.periods.middle(node, start, 100)
        return {i for i in range(start, 100, step) if not first <= i < first + skipped}

    assert kept_of(0, 1) == kept_of(0, 2) | kept_of(1, 2) and len(kept_of(0, 1)) < 50


@pytest.mark.parametrize(
    "condition",
    [
        lambda b, i: b.apply("equal", b.index(i), b.index(500)),
        lambda b, i: b.less(i, 500),
    ],
)
def test_what_turns_in_the_middle_is_seen(condition: Callable) -> None:
    """A comparison that changes where trips would be left out: the loop is run whole."""

    def build(b: PlacedBuilder, ring: Node) -> None:
        def trip(i: Size, _: list[Node]) -> list[Node]:
            b.branch(
                condition(b, i), lambda: b.arrive(ring, 2) or (), lambda: b.arrive(ring, 0) or ()
            )
            return []

        looped(b, "i", 0, 1000, 1, trip)

    found = arrivals(one_role(build))
    assert len(found) == 1000 and found == arrivals(one_role(build), whole=True)


def test_carried_counters_repeat() -> None:
    """A stage computed from a carried count that grows by one."""

    def build(b: PlacedBuilder, ring: Node) -> None:
        def trip(i: Size, carried: list[Node]) -> list[Node]:
            count = b.atom("count", carried[0], 0, 1000)
            b.arrive(ring, count % 3)
            return [b.apply("add", carried[0], b.constant(1, int64))]

        looped(b, "i", 0, 900, 1, trip, [b.constant(0, int64)])

    found = arrivals(one_role(build))
    assert len(found) < 30 and found == [i % 3 for i in range(len(found))]


def test_programs_symbols_and_data() -> None:
    """The ends of what a program may see; one program where all do the same."""
    same = Skeleton(loop(9, lambda b, i: i % 3))
    assert [s.program for s in same.scenarios()] == [(3,)]
    different = Skeleton(
        one_role(
            lambda b, ring: looped(
                b, "i", 0, b.program(0, 4), 1, lambda i, _: b.arrive(ring, i % 3) or []
            )
        )
    )
    assert [(s.program, s.extra) for s in different.scenarios()] == [
        ((3,), False),
        ((0,), False),
        ((1,), True),
        ((2,), True),
    ]
    n = symbol("n", 2, 40)
    sized = loop(n, lambda b, i: i % 3)
    lengths = [len(arrivals(sized, number, whole=True)) for number in range(3)]
    assert lengths == [2, 3, 40]

    def counted(b: PlacedBuilder, ring: Node) -> None:
        count = b.atom("count", b.load(b.parameters[0], (0,)), 0, 64)
        looped(b, "i", 0, count, 1, lambda i, _: b.arrive(ring, i % 3) or [])

    assert [len(arrivals(one_role(counted), n, whole=True)) for n in range(3)] == [0, 1, 3001]


def test_both_arms_of_a_branch_on_data() -> None:
    """Loaded conditions are taken both ways, and results of the arms follow."""

    def build(b: PlacedBuilder, ring: Node) -> None:
        flag = b.apply("less", b.constant(0, int64), b.load(b.parameters[0], (0,)))
        (stage,) = b.branch(flag, lambda: (b.constant(1, int64),), lambda: (b.constant(2, int64),))
        b.arrive(ring, b.atom("stage", stage, 0, 2))

    assert [arrivals(one_role(build), n) for n in range(2)] == [[2], [1]]


def test_too_long_is_said() -> None:
    """A loop that cannot be cut and never seems to end gives a warning, not a hang."""

    def build(b: PlacedBuilder, ring: Node) -> None:
        def trip(i: Size, carried: list[Node]) -> list[Node]:
            b.write(place, b.constant(0, float32, (4,)))
            flag = b.load(b.parameters[0], (i % 64,))
            b.branch(b.apply("less", flag, b.index(i)), lambda: b.arrive(ring, 0) or ())
            return []

        place = b.register_tile((4,), float32)
        looped(b, "i", 0, 1 << 20, 1, trip)

    body = one_role(build)
    with pytest.raises(TooLong):
        arrivals(body, whole=True)
    assert {f.rule for f in check_body(body) if f.severity == "warning"} == {"unproved"}


def test_real_sizes_stay_short() -> None:
    """Events do not grow with the problem."""
    for body in (
        bodies.ping_pong_matmul(8192, 8192, 4096, (64, 256, 64), 4, 128),
        bodies.flash_attention(8, 32768, 128, 64, 128, 2),
    ):
        skeleton = Skeleton(body)
        for scenario in skeleton.scenarios():
            skeleton.trace(scenario)
        assert skeleton.events < 4000 * len(skeleton.scenarios())


def ring(count: Size, peeled: bool, steps: Size = 1) -> Body:
    """A producer and a consumer over two stages; the consumer's last trip may stand apart."""
    b = PlacedBuilder("ring", [("x", Memory((64,), float32))])
    place = b.allocate((2, 4), float32, "shared")
    full, empty = b.barrier("full", 1, 2), b.barrier("empty", 1, 2)

    def fill(turn: Size) -> None:
        b.wait(empty, turn % 2, (turn // 2 + 1) % 2)
        b.expect(full, turn % 2, 16)
        b.copy_async(place, (turn % 2,), b.parameters[0], (0,), (0,), full, turn % 2)

    def drain(turn: Size) -> None:
        b.wait(full, turn % 2, turn // 2 % 2)
        b.read(place, turn % 2)
        b.do(placed.fence, kind="async")
        b.arrive(empty, turn % 2)

    def nest(upper: Size, each: Callable[[Size], None]) -> None:
        def inner(i: Size, _: list[Node]) -> list[Node]:
            looped(b, "s", 0, steps, 1, lambda s, _: each(i * steps + s) or [])
            return []

        looped(b, "i", 0, upper, 1, inner)

    def consumer() -> None:
        nest(count - 1 if peeled else count, drain)
        if peeled:
            drain(count - 1)

    b.role("producer", 4, 0, lambda: nest(count, fill))
    b.role("consumer", 4, 0, consumer)
    return b.finish((1,))


def test_loops_with_a_trip_apart() -> None:
    """Bounds that differ by one may leave out different ranges: the whole loop then decides."""
    for count in range(2, 40):
        assert not check_body(ring(count, peeled=True)), count


def test_symbolic_strides_repeat_too() -> None:
    """Turns counted as tile * steps + step with a symbolic number of steps."""
    body = ring(symbol("tiles", 1, 300), False, symbol("steps", 1, 300))
    assert not check_body(body)
    skeleton = Skeleton(body)
    for scenario in skeleton.scenarios():
        assert len(skeleton.periods_of(scenario).repeating) == 4
        skeleton.trace(scenario)
    assert skeleton.events < 10_000


def test_extremes_settle() -> None:
    """The larger of a falling value and 0 is 0 in the middle, unless it turns there."""
    for start, short in ((2, True), (700, False), (2000, True)):
        body = loop(1000, lambda b, i, start=start: maximum(start - i, 0) % 3)
        found, whole = arrivals(body), arrivals(body, whole=True)
        assert whole == [max(start - i, 0) % 3 for i in range(1000)]
        assert (len(found) < 30 and found == whole[: len(found)]) if short else found == whole


def test_loops_of_a_depth_are_cut_together() -> None:
    """Where one role's long loop does not repeat, no other of its depth is cut."""

    def build(b: PlacedBuilder, ring: Node) -> None:
        looped(b, "i", 0, 100, 1, lambda i, _: b.arrive(ring, i % 3) or [])
        looped(b, "i", 0, 100, 1, lambda i, _: b.arrive(ring, i * i % 3) or [])

    assert len(arrivals(one_role(build))) == 200
