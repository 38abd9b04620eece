"""The text of Schedules round-trips, and their verifier sees what is wrong with them."""

from __future__ import annotations

import pytest
from random_graphs import CONTROL, random_graph

from tilegrad.compiler.compile import host, schedule_for
from tilegrad.compiler.flatten import recipe_of
from tilegrad.core import dtype as dtypes
from tilegrad.core.errors import InternalError, UserError
from tilegrad.graph import build, ops
from tilegrad.ir.symbol import symbol
from tilegrad.schedule.check import check_schedule
from tilegrad.schedule.schedule import Control, Copy, Label, Schedule
from tilegrad.schedule.text import parse_schedule, print_schedule


def scheduled(inputs, outputs) -> Schedule:
    return schedule_for(tuple(inputs), tuple(outputs), host())


def loop() -> Schedule:
    """A scan over a symbolic length, with a dot, a sort and an update inside."""
    n = symbol("N", 0, 32)
    h, x, w = (build.input_(s, dtypes.float32) for s in ((8, 16), (n, 8, 16), (16, 16)))

    def body(c, s):
        new = build.unary(ops.tanh, build.matmul(build.add(c[0], s[0]), w))
        ordered = build.items(ops.sort(new, axis=1, descending=False))[0]
        row = build.constant(3, dtypes.int64)
        return [build.update(new, build.max_(ordered, 0), [row], [0])], [build.sum_(ordered, 1)]

    last, stacked = build.scan(body, [h], [x], n)
    return scheduled([h, x, w], [last[0], build.add(stacked[0], 1.0)])


def check_round_trip(schedule: Schedule) -> None:
    text = print_schedule(schedule)
    parsed = parse_schedule(text)
    check_schedule(parsed)
    assert print_schedule(parsed) == text
    before, texts = recipe_of(schedule, host())
    after, again = recipe_of(parsed, host())
    assert after.to_text() == before.to_text()
    assert again == texts


@pytest.mark.parametrize("seed", range(300, 318))
def test_round_trip(seed: int) -> None:
    inputs, outputs, _ = random_graph(seed, 6, None, CONTROL)
    check_round_trip(scheduled(inputs, outputs))


def test_round_trip_of_a_symbolic_loop() -> None:
    check_round_trip(loop())


def test_text_shows_what_matters() -> None:
    text = print_schedule(loop())
    for part in (
        "symbols N in 0..32",
        'kind="jump_counter_less"',
        "graph.dot(",
        "launch(",
        "tilegrad-body 1",
        'kind="view"',
    ):
        assert part in text, part


def test_bad_text() -> None:
    text = print_schedule(loop())
    with pytest.raises(UserError, match="tilegrad-schedule 1"):
        parse_schedule("hello")
    with pytest.raises(UserError, match="a body"):
        parse_schedule(text.split("\nbody ")[0])


# ---- the verifier ---------------------------------------------------------------------------


def simple() -> Schedule:
    x = build.input_((64,), dtypes.float32)
    first = ops.cumulative(x, axis=0, kind="sum")
    second = ops.cumulative(build.multiply(first, first), axis=0, kind="max")
    return scheduled([x], [ops.cumulative(build.add(second, first), axis=0, kind="sum")])


def test_good_schedules_pass() -> None:
    check_schedule(simple())
    check_schedule(loop())


def test_reading_before_writing() -> None:
    schedule = simple()
    schedule.kernels.insert(0, schedule.kernels.pop(1))
    with pytest.raises(InternalError, match="before it is written"):
        check_schedule(schedule)


def test_output_never_written() -> None:
    schedule = simple()
    schedule.kernels.pop()
    with pytest.raises(InternalError, match="is never written"):
        check_schedule(schedule)


def test_sharing_bytes_while_alive() -> None:
    schedule = simple()
    for slot in schedule.slots:
        if slot.kind == "scratch":
            slot.offset = 0
    with pytest.raises(InternalError, match="share bytes while both live"):
        check_schedule(schedule)


def test_touched_outside_its_life() -> None:
    schedule = simple()
    next(s for s in schedule.slots if s.kind == "scratch").last = 0
    with pytest.raises(InternalError, match="which lives in"):
        check_schedule(schedule)


def test_arena_too_small() -> None:
    schedule = simple()
    schedule.arena_bytes = 64
    with pytest.raises(InternalError, match="ends after the arena"):
        check_schedule(schedule)


def test_jumps_and_labels() -> None:
    schedule = loop()
    steps = next(k.steps for k in schedule.kernels if any(isinstance(s, Label) for s in k.steps))
    found = next(s for s in steps if isinstance(s, Label))
    steps.append(Label(found.number))
    with pytest.raises(InternalError, match="there twice"):
        check_schedule(schedule)
    steps.pop()
    steps.append(Control("jump", label=999))
    with pytest.raises(InternalError, match="no Label"):
        check_schedule(schedule)


def test_copy_of_nothing_known() -> None:
    schedule = simple()
    schedule.kernels[0].steps.insert(0, Copy(schedule.outputs[0], schedule.outputs[0], 4))
    with pytest.raises(InternalError, match="before it is written"):
        check_schedule(schedule)
