"""Lower control: scan, while_loop and cond as jumps around the Kernels of their Blocks.

A Block is lowered by a nested Lowering whose Kernels go into the same list and whose Slots are
in the same plan. A carry has two Slots that change places after each step, unless the Block
updates it in place; slices of inputs and stacked outputs are Slots pointed into the whole array,
so nothing is copied. Invariant: all copies of a step come before its swaps, and a Slot that
control moves is named by one number wherever it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.dtype import bool_
from ..graph import ops
from ..ir.block import Block
from ..ir.node import Node, needs
from ..ir.symbol import Size, high
from ..ir.types import Array
from .lowering import Lowering
from .region import Region
from .schedule import Control, Copy, Kernel, Label, Launch
from .state import is_updated

GUESS = 16  # steps of a loop whose length is not known


def lower_control(outer: Lowering, region: Region) -> None:
    """Add the Kernels of a control Region."""
    node = region.anchor
    wanted = {v.attrs["index"]: v for v in region.stored if v.op is ops.get}
    lowering = ControlLowering(outer, node, wanted)
    if node.op is ops.cond:
        lowering.lower_cond()
    elif node.op is ops.scan:
        lowering.lower_scan()
    else:
        lowering.lower_while()


class ControlLowering:
    """Lowers one control Node."""

    def __init__(self, outer: Lowering, node: Node, wanted: dict[int, Node]) -> None:
        self.outer, self.node, self.wanted = outer, node, wanted
        self.frame = outer.frame
        self.carries: list[int] = []

    # ---- pieces ---------------------------------------------------------------------------

    def add(self, name: str, steps: list[Any], depth: int = 0) -> int:
        """A Kernel of control steps; gives its number."""
        region: Any = ((), ())
        if name in ("start", "test"):
            region = (needs(self.node), tuple(self.wanted.values()))
        name = f"{self.node.op.name}_{name}"
        depth += self.outer.depth
        self.frame.kernels.append(Kernel(name, "control", region, steps, name, depth=depth))
        return len(self.frame.kernels) - 1

    def body(
        self,
        block: Block,
        slots: Sequence[int],
        targets: dict[int, Any],
        may_overwrite: Sequence[int] = (),
    ) -> list[int]:
        """Add the Kernels of a Block; targets: result number -> function that gives its Slot.

        Gives the Slots where the results with a number in targets are found.
        """
        captured = block.captures()
        numbers = sorted(targets)
        results = list(dict.fromkeys(block.results[i] for i in numbers))
        inner = self.outer.nested([*block.arguments, *captured], results)
        inner.slot_of = dict(zip(block.arguments, slots))
        inner.slot_of.update({c: self.outer.slot(c) for c in captured})
        assert inner.targets is not None
        for i in reversed(numbers):
            inner.targets[block.results[i]] = targets[i]
        inner.donated = {block.arguments[i] for i in may_overwrite}
        promised = [i for i in may_overwrite if self.node.inputs[i] in self.outer.strict]
        inner.strict = {block.arguments[i] for i in promised if is_updated(block, i)}
        inner.lower_all()
        return [inner.slot_of[block.results[i]] for i in numbers]

    # ---- carries --------------------------------------------------------------------------

    def start_carries(self) -> list[Any]:
        """Slots of the carries, holding their first values; gives the steps for that."""
        self.steps: list[Any] = []
        steps, outer = self.steps, self.outer
        for i in range(self.node.attrs["carries"]):
            first = self.node.inputs[i]
            current = outer.new_slot(first.type, "scratch")
            if (self.node, i) in outer.in_place:
                self.frame.slots[current].alias = outer.slot(first)
                steps.append(Control("set_slot", (current, outer.slot(first)), (-1, 0, 0)))
            else:
                steps.append(Copy((outer.slot(first), current)))
            self.carries.append(current)
            self.frame.moved.add(current)
        self.following: dict[int, int] = {}
        return steps

    def next_slot(self, number: int) -> int:
        """The Slot of a carry's next value."""
        if number not in self.following:
            type_ = self.node.inputs[number].type
            slot = home = self.outer.new_slot(type_, "scratch")
            if (self.node, number) in self.outer.in_place and self.outer.depth:
                slot = self.outer.new_slot(type_, "view")  # the loop may be entered again
                self.frame.slots[slot].alias = home
                self.steps.append(Control("set_slot", (slot, home), (-1, 0, 0)))
            self.following[number] = slot
            self.frame.moved.add(slot)
        return self.following[number]

    def carry_targets(self) -> dict[int, Any]:
        """Where the Block writes the next carries."""
        return {i: (lambda i=i: self.next_slot(i)) for i in range(self.node.attrs["carries"])}

    def pass_carries(self, found: Sequence[int]) -> list[Any]:
        """Steps that make the next carries the current ones: copies, then swaps."""
        moved, swaps = [], []
        for i, slot in enumerate(found):
            if slot == self.carries[i]:
                continue  # unchanged, or updated in place
            own = self.next_slot(i)
            moved += copies([slot], [own])
            swaps.append(Control("swap_slots", (self.carries[i], own)))
            self.frame.pairs.append((self.carries[i], own))
            self.frame.swapped |= {self.carries[i], own}
        return [*moved, *swaps]

    def end_carries(self) -> list[Any]:
        """Say where the last carries are; outputs whose Slots were swapped are copied."""
        steps: list[Any] = []
        outer = self.outer
        for i, current in enumerate(self.carries):
            node = self.wanted.get(i)
            if node is None:
                continue
            outer.slot_of[node] = current
            if outer.targets is not None or node not in outer.wanted:
                continue
            chain = self._aliases(current)
            if self.frame.swapped.isdisjoint(chain):
                self.frame.moved.discard(current)
                owner = self.frame.slots[chain[-1]]
                owner.kind = "output" if owner.kind == "scratch" else owner.kind
            else:
                out = outer.new_slot(node.type, "output")
                steps.append(Copy((current, out)))
                outer.slot_of[node] = out
        return steps

    def _aliases(self, number: int) -> list[int]:
        found = [number]
        while (alias := self.frame.slots[found[-1]].alias) is not None:
            found.append(alias)
        return found

    # ---- the three ------------------------------------------------------------------------

    def lower_scan(self) -> None:
        """for counter in range(length): point views, run the Block, turn the carries."""
        node, frame, outer = self.node, self.frame, self.outer
        count, length = node.attrs["carries"], node.attrs["length"]
        held = frame.counters
        counter = frame.counter()
        top, test = frame.label(), frame.label()
        start = self.start_carries()
        views = Views(self, counter, length, node.attrs["reverse"])
        sliced = ops.scan_slices(node)
        slots = list(self.carries)
        for i in range(count, count + sliced):
            slots.append(views.point(node.blocks[0].arguments[i], outer.slot(node.inputs[i])))
        slots += [outer.slot(i) for i in node.inputs[count + sliced :]]
        targets, stacked = self.carry_targets(), {}
        for i, result in enumerate(node.blocks[0].results[count:], count):
            if i in self.wanted:
                whole = outer.place(self.wanted[i])
                outer.slot_of[self.wanted[i]] = whole
                stacked[i] = views.point(result, whole)
                targets[i] = lambda i=i: stacked[i]
        start += [
            *views.start,
            Control("set_counter", (), (counter, 0)),
            Control("jump", label=test),
        ]
        self.add("start", start)
        first = self.add("step", [Label(top), *views.steps], 1)
        found = self.body(node.blocks[0], slots, targets, range(count))
        end: list[Any] = []
        end += copies(found[count:], [stacked[i] for i in sorted(stacked)])
        end += self.pass_carries(found[:count])
        end += [
            *views.advance,
            Control("add_counter", (), (counter, 1)),
            Label(test),
            Control("jump_counter_less", (), (counter, length), top),
        ]
        self.close_loop(first, end, high(length))
        frame.counters = held

    def lower_while(self) -> None:
        """while condition(carries): carries = body(carries)."""
        node, frame = self.node, self.frame
        top, done = frame.label(), frame.label()
        self.add("start", self.start_carries())
        shared = [self.outer.slot(i) for i in node.inputs[node.attrs["carries"] :]]
        first = self.add("step", [Label(top)], 1)
        holds = self.outer.new_slot(Array((), bool_), "scratch")
        test, body = node.blocks
        (holds,) = self.body(test, [*self.carries, *shared], {0: lambda: holds})
        frame.always.add(holds)
        self.add("unless", [Control("jump_unless", (holds,), label=done)], 1)
        before = len(frame.kernels)
        found = self.body(
            body, [*self.carries, *shared], self.carry_targets(), range(node.attrs["carries"])
        )
        end = self.pass_carries(found)
        steps = [*end, *(s for k in frame.kernels[before:] for s in k.steps)]
        if not any(isinstance(s, (Launch, Copy)) for s in steps):  # no worker may run ahead of
            barrier = self.outer.new_slot(Array((), bool_), "scratch")  # one that still tests
            end.insert(0, Copy((holds, barrier)))
        end += [Control("jump", label=top), Label(done)]
        self.close_loop(first, end, GUESS)

    def close_loop(self, first: int, end: list[Any], times: int) -> None:
        """End each step; note which Kernels the loop is, and what follows it."""
        last = self.add("next", end, 1)
        self.frame.loops.append((first, last))
        for kernel in self.frame.kernels[first : last + 1]:
            kernel.times *= max(1, times)
        steps = self.end_carries()
        if steps:
            self.add("end", steps)

    def lower_cond(self) -> None:
        """One of two Blocks, both writing the same Slots."""
        node, frame, outer = self.node, self.frame, self.outer
        otherwise, done = frame.label(), frame.label()
        condition = self.outer.slot(node.inputs[0])
        frame.always.add(condition)
        results = {i: outer.place(n) for i, n in self.wanted.items()}
        for i, n in self.wanted.items():
            outer.slot_of[n] = results[i]
        shared = [self.outer.slot(i) for i in node.inputs[1:]]
        targets = {i: (lambda s=s: s) for i, s in results.items()}
        self.add("test", [Control("jump_unless", (condition,), label=otherwise)])
        ends: list[list[Any]] = [[Control("jump", label=done), Label(otherwise)], [Label(done)]]
        for block, end in zip(node.blocks, ends):
            found = self.body(block, shared, targets)
            wanted = [results[i] for i in sorted(results)]
            self.add(block.name, [*copies(found, wanted), *end])


def copies(found: Sequence[int], wanted: Sequence[int]) -> list[Copy]:
    """Copies of values to the Slots where they are wanted, where they are elsewhere."""
    return [Copy(pair) for pair in zip(found, wanted) if pair[0] != pair[1]]


class Views:
    """Slots that point at one step's part of whole arrays."""

    def __init__(self, control: ControlLowering, counter: int, length: Size, reverse: bool) -> None:
        self.control, self.counter, self.length, self.reverse = control, counter, length, reverse
        self.start: list[Any] = []  # before the loop
        self.steps: list[Any] = []  # at the start of each step
        self.advance: list[Any] = []  # at its end
        self.counters: dict[Size, int] = {}  # bytes of a part -> counter of the place, in bytes

    def point(self, part: Node, whole: int) -> int:
        """A Slot that is part number `counter` of a whole Slot."""
        outer = self.control.outer
        slot = outer.new_slot(part.type, "view")
        outer.slots[slot].alias = whole
        self.control.frame.moved.add(slot)
        stride = part.bytes
        if isinstance(stride, int) and not self.reverse:
            numbers: tuple[Size, ...] = (self.counter, stride, 0)
        elif isinstance(stride, int) and isinstance(self.length, int):
            numbers = (self.counter, -stride, stride * (self.length - 1))
        else:
            numbers = (self.place(stride), 1, 0)
        self.steps.append(Control("set_slot", (slot, whole), numbers))
        return slot

    def place(self, stride: Size) -> int:
        """A counter that holds the place of the part in bytes, where that is not known now."""
        if stride not in self.counters:
            counter = self.counters[stride] = self.control.frame.counter()
            last = (self.length - 1) * stride
            self.start.append(Control("set_counter", (), (counter, last if self.reverse else 0)))
            move = stride * (-1 if self.reverse else 1)
            self.advance.append(Control("add_counter", (), (counter, move)))
        return self.counters[stride]
