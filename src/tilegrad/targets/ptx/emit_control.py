"""Loops and branches of a Body.

Conditions and bounds are scalars, so all threads go the same way. What a loop carries has
registers of its own, set at the end of each turn; an unrolled loop hands values from one copy of
its Block to the next and leaves what does not fill a whole round to a plain loop. Invariant: a
Block is emitted with the hazards that every way into it may bring.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ...core.dtype import int32, int64
from ...core.errors import InternalError
from ...ir.block import Block
from ...ir.node import Node
from . import rules
from .emit_dot import DotEmitter
from .emit_memory import all_nodes
from .emit_scan import ScanEmitter
from .emit_shared import Head
from .emit_sort import SortEmitter
from .emit_threads import ThreadsEmitter
from .spread import Spread

MOST_UNROLLED = 600  # Nodes


@dataclass
class Carried:
    """A value that a loop carries: the Block's argument and its registers.

    Elements of 16 bits are carried in pairs: alone each would take a register of 32.
    """

    argument: Node
    registers: list[str]
    kind: str
    paired: bool = False


class ControlEmitter(ScanEmitter, DotEmitter, SortEmitter, ThreadsEmitter):
    """Emits loop, branch and get."""

    def block(self, block: Block) -> None:
        """Every Node of a Block."""
        raise InternalError("ptx.emit", "nothing walks this Block")

    def inner(self, block: Block) -> None:
        """A Block within: what is made in it ends with it."""
        self.made.append({})
        self.block(block)

    def leave(self) -> None:
        """Forget what the inner Block made."""
        self.made.pop()

    # ---- loops ----------------------------------------------------------------------------

    def emit_loop(self, node: Node) -> None:
        w, block, step = self.w, node.blocks[0], node.attrs["step"]
        index = block.arguments[0]
        dtype = self.dtype(index)
        suffix, kind = ("s32", "b32") if dtype is int32 else ("s64", "b64")
        start, stop = (self.resize(self.scalar(i), self.dtype(i), dtype) for i in node.inputs[:2])
        carried = self.carried(node)
        counter = w.value(kind, f"mov.{kind}", start)
        times = self.times(node)
        if times > 1:
            limit = w.value(kind, f"sub.{suffix}", stop, str((times - 1) * step))
            self.turns(block, carried, counter, limit, suffix, step, times)
        self.turns(block, carried, counter, stop, suffix, step, 1)
        for number, one in enumerate(carried):
            self.give(node, number, self.unpacked(one))

    def times(self, node: Node) -> int:
        """Copies of a loop's Block in one turn."""
        times = max(1, node.attrs["unroll"])
        nodes = all_nodes(node.blocks[0])
        small = len(nodes) * times <= MOST_UNROLLED
        plain = not any(n.op.name in ("allocate", "barrier", "role") for n in nodes)
        return times if small and plain and not self.in_role else 1

    def carried(self, node: Node) -> list[Carried]:
        """Registers for what a loop carries, set to what it starts with."""
        found = []
        for argument, given in zip(node.blocks[0].arguments[1:], node.inputs[2:]):
            kind = rules.kind_of(self.dtype(argument))
            spread = self.plan.spread(argument)
            count = len(spread.registers)
            one = Carried(argument, [], kind, argument.dtype.size == 2 and count % 2 == 0)
            if one.paired:
                one.kind, count = "b32", count // 2
            one.registers = [self.w.new(one.kind) for _ in range(count)]
            start = self.packed(one, self.given(given, argument, spread))
            self.move(one.registers, start, one.kind)
            found.append(one)
        return found

    def packed(self, one: Carried, registers: list[str]) -> list[str]:
        """A value as it is carried."""
        if not one.paired:
            return registers
        return [
            self._join(registers[i : i + 2], one.argument.dtype)
            for i in range(0, len(registers), 2)
        ]

    def unpacked(self, one: Carried) -> list[str]:
        """A carried value as it is held."""
        if not one.paired:
            return list(one.registers)
        return [r for word in one.registers for r in self._split(word, one.argument.dtype, 2)]

    def turns(
        self,
        block: Block,
        carried: list[Carried],
        counter: str,
        stop: str,
        suffix: str,
        step: int,
        times: int,
    ) -> None:
        """A loop of so many copies of a Block."""
        w = self.w
        again, done, more = w.label("loop"), w.label("done"), w.new("pred")
        w.put(f"setp.ge.{suffix}", more, counter, stop)
        w.put("bra.uni", done, guard=more)
        w.place(again)
        before, head = self.hazards.state(), Head()
        self.hazards.heads.append(head)
        values = [self.unpacked(one) for one in carried]
        index = counter
        for copy in range(times):
            self.made.append({})
            self.held[block.arguments[0]] = [index]
            for one, registers in zip(carried, values):
                self.held[one.argument] = registers
            self.inner(block)
            values = [
                self.given(r, one.argument, self.plan.spread(one.argument))
                for r, one in zip(block.results, carried)
            ]
            self.leave()
            self.made.pop()
            if copy + 1 < times:
                kind = "b32" if suffix == "s32" else "b64"
                index = w.value(kind, f"add.{suffix}", index, str(step))
        values = [self.packed(one, new) for one, new in zip(carried, values)]
        self.swap([one.registers for one in carried], values, [one.kind for one in carried])
        if self.hazards.turns(head) and not self.swap_scratch(head):
            self.sync()
        self.hazards.heads.pop()
        w.put(f"add.{suffix}", counter, counter, str(step * times))
        w.put(f"setp.lt.{suffix}", more, counter, stop)
        w.put("bra.uni", again, guard=more)
        w.place(done)
        self.hazards.join(before, self.hazards.state())

    def given(self, value: Node, argument: Node, spread: Spread) -> list[str]:
        """A value as a carried argument holds it."""
        registers = self.get(value, spread)
        return [
            self.resize(r, self.dtype(value), self.dtype(argument)) if value.dtype is int64 else r
            for r in registers
        ]

    def swap(self, to: list[list[str]], values: list[list[str]], kinds: list[str]) -> None:
        """Set all carried registers at once: a value may be another's old register."""
        targets = {r for registers in to for r in registers}
        for registers, new, kind in zip(to, values, kinds):
            if any(r in targets and r != own for r, own in zip(new, registers)):
                form = "mov.pred" if kind == "pred" else f"mov.{kind}"
                new[:] = [self.w.value(kind, form, r) for r in new]
        for registers, new, kind in zip(to, values, kinds):
            self.move(
                [a for a, b in zip(registers, new) if a != b],
                [b for a, b in zip(registers, new) if a != b],
                kind,
            )

    # ---- results ----------------------------------------------------------------------------

    def emit_get(self, node: Node) -> None:
        if node not in self.held:
            raise InternalError("ptx.emit", f"{node!r} has no value")

    def give(self, node: Node, number: int, registers: list[str]) -> None:
        """Hand a result of a loop or branch to the `get` Nodes that read it."""
        for user in self.gets.get(node, ()):
            if user.attrs["index"] == number:
                self.held[user] = registers

    @cached_property
    def gets(self) -> dict[Node, list[Node]]:
        """The `get` Nodes of each loop and branch."""
        found: dict[Node, list[Node]] = {}
        for node in all_nodes(self.body.block):
            if node.op.name == "get":
                found.setdefault(node.inputs[0], []).append(node)
        return found

    # ---- branches ---------------------------------------------------------------------------

    def emit_branch(self, node: Node) -> None:
        w = self.w
        otherwise, done = w.label("else"), w.label("end")
        results: list[Carried] = []
        for number, value in enumerate(node.blocks[0].results):
            sample = next((g for g in self.gets.get(node, ()) if g.attrs["index"] == number), value)
            kind = rules.kind_of(self.dtype(sample))
            count = len(self.plan.spread(sample).registers) if not self.plan.free(sample) else 0
            results.append(Carried(sample, [w.new(kind) for _ in range(count)], kind))
        w.put("bra.uni", otherwise, guard=f"!{self.scalar(node.inputs[0])}")
        before, after = self.hazards.state(), []
        for number, block in enumerate(node.blocks):
            self.hazards.reset(before)
            self.inner(block)
            for one, value in zip(results, block.results):
                if one.registers:
                    spread = self.plan.spread(one.argument)
                    self.move(one.registers, self.given(value, one.argument, spread), one.kind)
            self.leave()
            after.append(self.hazards.state())
            if number == 0:
                w.put("bra.uni", done)
                w.place(otherwise)
        w.place(done)
        self.hazards.join(*after)
        for number, one in enumerate(results):
            self.give(node, number, one.registers)
