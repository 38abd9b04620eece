"""Loops and branches of a Body.

Conditions and bounds are scalars, so all threads go the same way. What a loop carries has
registers of its own, set at the end of each turn; an unrolled loop hands values from one copy of
its Block to the next and leaves what does not fill a whole round to a plain loop. Invariant: a
Block is emitted with the hazards that every way into it may bring.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...core.dtype import int32
from ...core.errors import InternalError
from ...ir.block import Block
from ...ir.node import Node
from . import rules
from .emission import Emission
from .moves import packed, unpacked
from .write import Writer

MOST_UNROLLED = 600  # Nodes


@dataclass
class Carried:
    """A value that a loop carries or a branch gives: a Node that is held alike, and its registers.

    Elements of 16 bits are carried in pairs: alone each would take a register of 32.
    """

    like: Node
    registers: list[str]
    kind: str
    paired: bool = False

    def packed(self, w: Writer, registers: list[str]) -> list[str]:
        """A value as it is carried."""
        return packed(w, registers, self.like.dtype) if self.paired else registers

    def held(self, w: Writer) -> list[str]:
        """A carried value as it is held."""
        if self.paired:
            return unpacked(w, self.registers, self.like.dtype)
        return list(self.registers)


@dataclass(frozen=True)
class Counter:
    """The index of a loop: its register, the type of its instructions, and the step."""

    register: str
    type: str
    kind: str
    step: int


def loop(e: Emission, node: Node) -> None:
    """A Block in turns."""
    w, values, step = e.w, e.values, node.attrs["step"]
    dtype = values.dtype(node.blocks[0].arguments[0])
    type_, kind = ("s32", "b32") if dtype is int32 else ("s64", "b64")
    start, stop = (values.resize(values.scalar(i), values.dtype(i), dtype) for i in node.inputs[:2])
    carried = [
        _carried(e, argument, given)
        for argument, given in zip(node.blocks[0].arguments[1:], node.inputs[2:])
    ]
    counter = Counter(w.copy(kind, start), type_, kind, step)
    times = copies(e, node)
    if times > 1:
        limit = w.value(f"sub.{type_}", stop, str((times - 1) * step))
        turns(e, node.blocks[0], carried, counter, limit, times)
    turns(e, node.blocks[0], carried, counter, stop, 1)
    give(e, node, [one.held(w) for one in carried])


def copies(e: Emission, node: Node) -> int:
    """Copies of a loop's Block in one turn."""
    times = max(1, node.attrs["unroll"])
    nodes = list(node.blocks[0].all_nodes())
    small = len(nodes) * times <= MOST_UNROLLED
    plain = not any(n.op.name in ("allocate", "barrier", "role") for n in nodes)
    return times if small and plain and e.threads.role < 0 else 1


def _carried(e: Emission, argument: Node, given: Node) -> Carried:
    """Registers for what a loop carries, set to what it starts with."""
    count = len(e.plan.spread(argument).registers)
    one = Carried(argument, [], rules.kind_of(e.values.dtype(argument)))
    if argument.dtype.size == 2 and count % 2 == 0:
        one.paired, one.kind, count = True, "b32", count // 2
    one.registers = [e.w.new(one.kind) for _ in range(count)]
    e.w.move(one.registers, one.packed(e.w, given_to(e, given, argument)), one.kind)
    return one


def given_to(e: Emission, value: Node, like: Node) -> list[str]:
    """A value as another one is held."""
    registers = e.values.get(value, e.plan.spread(like))
    return e.values.sized(value, registers, e.values.dtype(like))


def turns(
    e: Emission, block: Block, carried: list[Carried], counter: Counter, stop: str, times: int
) -> None:
    """A loop of so many copies of a Block."""
    w, held, type_ = e.w, e.values.held, counter.type
    head, done, more = w.label("loop"), w.label("done"), w.new("pred")
    w.put(f"setp.ge.{type_}", more, counter.register, stop)
    w.put("bra.uni", done, guard=more)
    w.place(head)
    with e.shared.loop():
        values = [one.held(w) for one in carried]
        index = counter.register
        for copy in range(times):
            with e.memo.inside():
                held[block.arguments[0]] = [index]
                held.update((one.like, registers) for one, registers in zip(carried, values))
                e.block(block)
                values = [given_to(e, r, one.like) for r, one in zip(block.results, carried)]
            if copy + 1 < times:
                index = w.value(f"add.{type_}", index, str(counter.step))
        values = [one.packed(w, new) for one, new in zip(carried, values)]
        swap(w, carried, values)
    w.put(f"add.{type_}", counter.register, counter.register, str(counter.step * times))
    w.put(f"setp.lt.{type_}", more, counter.register, stop)
    w.put("bra.uni", head, guard=more)
    w.place(done)


def swap(w: Writer, carried: list[Carried], values: list[list[str]]) -> None:
    """Set all carried registers at once: a value may be another's old register."""
    targets = {r for one in carried for r in one.registers}
    for one, new in zip(carried, values):
        if any(r in targets and r != own for r, own in zip(new, one.registers)):
            new[:] = [w.copy(one.kind, r) for r in new]
    for one, new in zip(carried, values):
        for own, register in zip(one.registers, new):
            if own != register:
                w.put(f"mov.{one.kind}", own, register)


# ---- results and branches -----------------------------------------------------------------------


def get(e: Emission, node: Node) -> None:
    """A result of a loop or branch, which gave it."""
    if node not in e.values.held:
        raise InternalError("ptx.emit", f"{node!r} has no value")


def give(e: Emission, node: Node, results: list[list[str]]) -> None:
    """Hand the results of a loop or branch to the `get` Nodes that read them."""
    for user in e.gets.get(node, ()):
        e.values.held[user] = results[user.attrs["index"]]


def branch(e: Emission, node: Node) -> None:
    """One Block or the other."""
    w, hazards = e.w, e.shared.hazards
    otherwise, done = w.label("else"), w.label("end")
    results: list[Carried] = []
    for number, value in enumerate(node.blocks[0].results):
        sample = next((g for g in e.gets.get(node, ()) if g.attrs["index"] == number), value)
        kind = rules.kind_of(e.values.dtype(sample))
        count = len(e.plan.spread(sample).registers) if not e.plan.free(sample) else 0
        results.append(Carried(sample, [w.new(kind) for _ in range(count)], kind))
    w.put("bra.uni", otherwise, guard=f"!{e.values.scalar(node.inputs[0])}")
    before, after = hazards.state(), []
    for number, block in enumerate(node.blocks):
        hazards.join(before)
        with e.memo.inside():
            e.block(block)
            for one, value in zip(results, block.results):
                if one.registers:
                    w.move(one.registers, given_to(e, value, one.like), one.kind)
        after.append(hazards.state())
        if number == 0:
            w.put("bra.uni", done)
            w.place(otherwise)
    w.place(done)
    hazards.join(*after)
    give(e, node, [one.registers for one in results])
