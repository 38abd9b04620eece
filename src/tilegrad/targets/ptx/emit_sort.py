"""The stable sort of keys in memory, by all threads of a program.

A sorting network whose pairs always rise: partners mirrored within a run, then halves nearer and
nearer. Pairs that reach past the count are left alone, as if what lies there were larger than
all keys, so any count is sorted. Equal keys are told apart by where they came from, which the
second scratch Memory keeps. Invariant: threads meet between steps, so that no pair is touched
by two of them.
"""

from __future__ import annotations

from collections.abc import Callable

from ...core.dtype import int32
from ...ir.node import Node
from . import rules
from .addresses import element_address, store_form
from .emission import Emission
from .emit_elements import element_at
from .moves import write_run

Item = tuple[str, ...]  # registers of key, place and origin


def sort(e: Emission, node: Node) -> None:
    """Sort keys, and places with them."""
    keys, numbers, _, origins, count_node = node.inputs
    for memory in (keys, numbers, origins):
        e.shared.touch(memory, writes=True)
    w, count = e.w, e.values.index32(count_node)
    each(
        e,
        count,
        lambda at: leave_at(e, origins, at, rules.convert(w, int32, origins.dtype, at)),
    )
    e.shared.sync()
    log_half, half = w.copy("b32", 0), w.copy("b32", 1)
    head, done, more = w.label("runs"), w.label("sorted"), w.new("pred")
    w.place(head)
    w.put("setp.ge.s32", more, half, count)
    w.put("bra.uni", done, guard=more)
    last = w.sub(w.shl(half, 1), 1)
    step(e, node, log_half, count, lambda low: w.xor(low, last))
    near = w.sub(log_half, 1)
    nearer, rest, left = w.label("halves"), w.label("next"), w.new("pred")
    w.place(nearer)
    w.put("setp.lt.s32", left, near, "0")
    w.put("bra.uni", rest, guard=left)
    distance = w.shl("1", near)
    step(e, node, near, count, lambda low: w.add(low, distance))
    w.put("sub.s32", near, near, "1")
    w.put("bra.uni", nearer)
    w.place(rest)
    w.put("add.s32", log_half, log_half, "1")
    w.put("shl.b32", half, half, "1")
    w.put("bra.uni", head)
    w.place(done)


def each(e: Emission, count: str, function: Callable[[str], None]) -> None:
    """Numbers below a count, spread over the threads."""
    w = e.w
    at = w.copy("b32", e.threads.number)
    head, done, more = w.label("each"), w.label("done"), w.new("pred")
    w.place(head)
    w.put("setp.ge.s32", more, at, count)
    w.put("bra", done, guard=more)
    with e.memo.inside():
        function(at)
    w.put("add.s32", at, at, str(e.threads.count))
    w.put("bra", head)
    w.place(done)


def step(e: Emission, node: Node, shift: str, count: str, partner: Callable[[str], str]) -> None:
    """All pairs whose lower one has a zero digit at `shift`."""
    w = e.w
    memories = node.inputs[0], node.inputs[1], node.inputs[3]

    def pair(number: str) -> None:
        above = w.shr(number, shift)
        inside = w.sub(number, w.shl(above, shift))
        low = w.add(w.shl(w.shl(above, shift), 1), inside)
        high = partner(low)
        skip = w.label("skip")
        w.put("bra", skip, guard=w.test("ge.s32", high, count))
        first, second = (
            tuple(element_at(e, memory, at, int32) for memory in memories) for at in (low, high)
        )
        w.put("bra", skip, guard=f"!{before(e, node, second, first)}")
        for at, item in ((low, second), (high, first)):
            for memory, register in zip(memories, item):
                leave_at(e, memory, at, register)
        w.place(skip)

    each(e, count, pair)
    e.shared.sync()


def leave_at(e: Emission, memory: Node, at: str, register: str) -> None:
    """Write an element at a number."""
    where = f"[{element_address(e, memory, at, int32)}]"
    write_run(e.w, where, store_form(memory), memory.dtype, [register], "")


def before(e: Emission, node: Node, a: Item, b: Item) -> str:
    """Whether one item comes before another; nan is larger than all numbers."""
    w, dtype = e.w, node.inputs[0].dtype
    small, large = (b[0], a[0]) if node.attrs["descending"] else (a[0], b[0])
    less = rules.apply(w, "less", dtype, small, large)
    same = rules.apply(w, "equal", dtype, a[0], b[0])
    if dtype.is_float:
        nan = [rules.apply(w, "not_equal", dtype, x, x) for x in (small, large)]
        number = w.value("not.pred", nan[0])
        less = w.value("or.pred", less, w.and_predicates(number, nan[1]))
        same = w.value("or.pred", same, w.and_predicates(*nan))
    sooner = rules.apply(w, "less", node.inputs[3].dtype, a[2], b[2])
    return w.value("or.pred", less, w.and_predicates(same, sooner))
