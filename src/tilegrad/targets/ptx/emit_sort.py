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
from .emit_shape import ShapeEmitter

Item = tuple[str, ...]  # registers of key, place and origin


class SortEmitter(ShapeEmitter):
    """Emits sort."""

    def emit_sort(self, node: Node) -> None:
        keys, places, _, origins, count_node = node.inputs
        for memory in (keys, places, origins):
            self.touch(memory, writes=True)
        w, count = self.w, self.index32(count_node)
        self.each(
            count, lambda at: self.leave_at(origins, at, rules.convert(w, int32, origins.dtype, at))
        )
        self.sync()
        level, half = w.value("b32", "mov.b32", "0"), w.value("b32", "mov.b32", "1")
        again, done, more = w.label("runs"), w.label("sorted"), w.new("pred")
        w.place(again)
        w.put("setp.ge.s32", more, half, count)
        w.put("bra.uni", done, guard=more)
        block = w.value("b32", "shl.b32", half, "1")
        last = w.value("b32", "sub.s32", block, "1")
        self.step(node, level, count, lambda low: w.value("b32", "xor.b32", low, last))
        near = w.value("b32", "sub.s32", level, "1")
        nearer, rest, left = w.label("halves"), w.label("next"), w.new("pred")
        w.place(nearer)
        w.put("setp.lt.s32", left, near, "0")
        w.put("bra.uni", rest, guard=left)
        distance = w.value("b32", "shl.b32", "1", near)
        self.step(node, near, count, lambda low: w.value("b32", "add.s32", low, distance))
        w.put("sub.s32", near, near, "1")
        w.put("bra.uni", nearer)
        w.place(rest)
        w.put("add.s32", level, level, "1")
        w.put("shl.b32", half, half, "1")
        w.put("bra.uni", again)
        w.place(done)

    def each(self, count: str, function: Callable[[str], None]) -> None:
        """Numbers below a count, spread over the threads."""
        w = self.w
        at = w.value("b32", "mov.b32", self.thread)
        again, done, more = w.label("each"), w.label("done"), w.new("pred")
        w.place(again)
        w.put("setp.ge.s32", more, at, count)
        w.put("bra", done, guard=more)
        self.made.append({})
        function(at)
        self.made.pop()
        w.put("add.s32", at, at, str(self.threads))
        w.put("bra", again)
        w.place(done)

    def step(self, node: Node, shift: str, count: str, partner: Callable[[str], str]) -> None:
        """All pairs whose lower one has a zero digit at `shift`."""
        w = self.w

        def pair(number: str) -> None:
            above = w.value("b32", "shr.u32", number, shift)
            inside = w.value("b32", "sub.s32", number, w.value("b32", "shl.b32", above, shift))
            above = w.value("b32", "shl.b32", w.value("b32", "shl.b32", above, shift), "1")
            low = w.value("b32", "add.s32", above, inside)
            high = partner(low)
            skip = w.label("skip")
            w.put("bra", skip, guard=w.value("pred", "setp.ge.s32", high, count))
            first, second = self.item(node, low), self.item(node, high)
            w.put("bra", skip, guard=f"!{self.before(node, second, first)}")
            for at, item in ((low, second), (high, first)):
                for memory, register in zip(self.memories(node), item):
                    self.leave_at(memory, at, register)
            w.place(skip)

        self.each(count, pair)
        self.sync()

    def memories(self, node: Node) -> tuple[Node, ...]:
        """Keys, places and origins."""
        return node.inputs[0], node.inputs[1], node.inputs[3]

    def item(self, node: Node, at: str) -> Item:
        """What stands at a number."""
        return tuple(
            self.read_run(
                f"[{self.element_address(memory, at, int32)}]",
                self.load_form(memory),
                memory.dtype,
                1,
            )[0]
            for memory in self.memories(node)
        )

    def leave_at(self, memory: Node, at: str, register: str) -> None:
        """Write an element at a number."""
        where = f"[{self.element_address(memory, at, int32)}]"
        self.write_run(where, self.store_form(memory), memory.dtype, [register], "")

    def before(self, node: Node, a: Item, b: Item) -> str:
        """Whether one item comes before another; nan is larger than all numbers."""
        w, dtype = self.w, node.inputs[0].dtype
        small, large = (b[0], a[0]) if node.attrs["descending"] else (a[0], b[0])
        less = rules.apply(w, "less", dtype, small, large)
        same = rules.apply(w, "equal", dtype, a[0], b[0])
        if dtype.is_float:
            nan = [rules.apply(w, "not_equal", dtype, x, x) for x in (small, large)]
            number = w.value("pred", "not.pred", nan[0])
            less = w.value("pred", "or.pred", less, w.value("pred", "and.pred", number, nan[1]))
            same = w.value("pred", "or.pred", same, w.value("pred", "and.pred", *nan))
        sooner = rules.apply(w, "less", node.inputs[3].dtype, a[2], b[2])
        return w.value("pred", "or.pred", less, w.value("pred", "and.pred", same, sooner))
