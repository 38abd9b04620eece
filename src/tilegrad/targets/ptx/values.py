"""Values of a Body in registers: scalars, elementwise ops, and Tiles in the Spread asked for.

A Tile is a list of registers, one per register offset of its Spread; a scalar is one register
that every thread holds alike. int64 values whose bounds fit are held in 32 bits. Invariant: what
is asked for is held as asked, whatever way led to it: renamed, made again, or exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ...core.dtype import DType, bool_, float8_e4m3, float16, float32, int32, int64
from ...core.errors import InternalError
from ...ir.node import Node
from ...ir.symbol import Size, fold
from ...tile.bounds import Bounds
from ...tile.row import constant_of
from . import rules
from .division import DIVISIONS
from .element import bitcast, constant, convert, convert_pair, cut_pair, kind_of, literal, uncut
from .moves import packed, split, unpacked
from .plan_spread import DERIVED, ELEMENTWISE, SpreadPlan, seen
from .shared import Shared
from .spread import SCALAR, Spread, blocked, repeated
from .write import Registers, Writer, braced, halves_of, several


@dataclass
class Carried:
    """Registers of its own for what a loop carries, a branch gives or a place holds: a Node that is
    held alike, and its registers.

    Elements of 16 and 8 bits are carried in words: alone each would take a register of 32.
    """

    like: Node
    registers: Registers
    kind: str
    in_words: bool

    def packed(self, w: Writer, registers: Registers) -> Registers:
        """A value as it is carried."""
        return packed(w, registers, self.like.dtype) if self.in_words else registers

    def held(self, w: Writer) -> Registers:
        """A carried value as it is held."""
        if self.in_words:
            return unpacked(w, self.registers, self.like.dtype)
        return list(self.registers)


class Values:
    """Registers of Nodes."""

    def __init__(self, bounds: Bounds, plan: SpreadPlan, shared: Shared) -> None:
        self.bounds, self.plan, self.shared = bounds, plan, shared
        self.w, self.threads, self.memo = shared.w, shared.threads, shared.threads.memo
        self.held: dict[Node, Registers] = {}

    # ---- types ----------------------------------------------------------------------------

    def dtype(self, node: Node) -> DType:
        """What the registers of a value hold: int64 within 32 bits is held as int32."""
        if node.dtype is int64 and self.bounds.narrow(node):
            return int32
        return node.dtype

    def loaded(self, node: Node, registers: Registers) -> Registers:
        """Registers as memory gave them, in the width that a value is held in."""
        return [convert(self.w, node.dtype, self.dtype(node), r) for r in registers]

    def index32(self, node: Node) -> str:
        """A scalar index as a 32-bit register."""
        return self.get(node, SCALAR, int32)[0]

    # ---- access ---------------------------------------------------------------------------

    def scalar(self, node: Node) -> str:
        """The register of a scalar."""
        if node in self.held:
            return self.held[node][0]
        raise InternalError("ptx.emit", f"{node!r} was not emitted before its use")

    def get(self, node: Node, spread: Spread, to: DType | None = None) -> Registers:
        """The registers of a Tile, held as `spread` says and, if asked for, as another DType. Its
        own is what memory takes: int64 in 64 bits."""
        if to is not None:
            held = self.dtype(node)
            return [convert(self.w, held, to, r) for r in self.get(node, spread)]
        if node.shape == ():
            return [self.scalar(node)] * len(spread.registers)
        if self.plan.free(node):
            return self.memo.once((node, spread), lambda: self.make(node, spread))
        own, registers = self.plan.spread(node), self.held[node]
        if own == spread:
            return registers
        return self.memo.once(
            (node, spread), lambda: self.change(registers, own, spread, self.dtype(node))
        )

    def spread_of(self, value: Node) -> Spread:
        """The planned Spread; a default for values that are free."""
        if value.shape == ():
            return SCALAR
        if self.plan.free(value):
            return blocked(value.shape, self.threads.count, 16 // value.dtype.size)
        return self.plan.spread(value)

    def own(self, value: Node, to: DType | None = None) -> tuple[Spread, Registers]:
        """The planned Spread of a value, and its registers."""
        spread = self.spread_of(value)
        return spread, self.get(value, spread, to)

    def change(self, registers: Registers, own: Spread, to: Spread, dtype: DType) -> Registers:
        """The same Tile held otherwise: by renaming, else through shared memory."""
        if own.fields == to.fields and all(at in own.where for at in to.registers):
            return [registers[own.where[at]] for at in to.registers]
        return self.shared.exchange(registers, own, to, dtype)

    def planned(self, node: Node, registers: Registers, own: Spread) -> Registers:
        """What an op gave in a Spread of its own, as the plan has it."""
        to = self.plan.spread(node)
        if own == to or node.shape == ():
            return registers
        return self.change(registers, own, to, self.dtype(node))

    # ---- values in registers of their own ---------------------------------------------------

    def carried(self, like: Node) -> Carried:
        """Registers for values that are held as a Node is."""
        kind, count = kind_of(self.dtype(like)), len(self.plan.spread(like).registers)
        each = 1 if like.dtype is bool_ else 4 // like.dtype.size  # elements of a word
        in_words = each > 1 and count % each == 0
        if in_words:
            kind, count = "b32", count // each
        return Carried(like, several(self.w, kind, count), kind, in_words)

    def given(self, value: Node, like: Node) -> Registers:
        """A value as another one is held."""
        return self.get(value, self.plan.spread(like), self.dtype(like))

    def put(self, carried: Carried, value: Node) -> None:
        """Set what is carried to a value."""
        registers = carried.packed(self.w, self.given(value, carried.like))
        self.w.move(carried.registers, registers, carried.kind)

    # ---- free values ----------------------------------------------------------------------

    def make(self, node: Node, spread: Spread) -> Registers:
        """A free value in a Spread."""
        name = node.op.name
        if name == "constant":
            value = constant(self.w, node.attrs["value"], self.dtype(node))
            return [value] * len(spread.registers)
        if name == "iota":
            return self.positions(spread, 0, self.dtype(node))
        if name == "broadcast":
            return self.broadcast(node, spread)
        if name == "stack":
            return self.stack(node, spread)
        if name in DERIVED:
            found = self.get(node.inputs[0], seen(node, spread))
            return packed(self.w, found, node.inputs[0].dtype) if name == "words" else found
        if node.op.category in ELEMENTWISE:
            return self.elementwise(node, spread)
        raise InternalError("ptx.emit", f"{name} is not free")

    def positions(self, spread: Spread, axis: int, dtype: DType) -> Registers:
        """The coordinate along an axis of every register."""
        part = self.threads.part(spread, axis)
        found: dict[int, str] = {}
        for at in spread.registers:
            if at[axis] in found:
                continue
            if not part:
                register = self.w.copy("b32", at[axis])
            else:
                register = self.w.add(part, at[axis]) if at[axis] else part
            if dtype is not int32:
                register = convert(self.w, int32, dtype, register)
            found[at[axis]] = register
        return [found[at[axis]] for at in spread.registers]

    def broadcast(self, node: Node, spread: Spread) -> Registers:
        """A Tile repeated along axes: registers shared between elements."""
        x, source = node.inputs[0], seen(node, spread)
        registers = self.get(x, source)
        return [registers[source.where[repeated(at, x.shape)]] for at in spread.registers]

    def stack(self, node: Node, spread: Spread) -> Registers:
        """Scalars as a column: chosen by the row."""
        dtype = self.dtype(node)
        scalars = [self.get(x, SCALAR, dtype)[0] for x in node.inputs]
        if not any(f[2] == 0 for f in spread.fields):
            return [scalars[at[0]] for at in spread.registers]
        found = []
        for row in self.positions(spread, 0, int32):
            value = scalars[0]
            for number, other in enumerate(scalars[1:], 1):
                mine = self.w.test("eq.s32", row, number)
                value = rules.apply(self.w, "where", dtype, mine, other, value)
            found.append(value)
        return found

    # ---- elementwise ----------------------------------------------------------------------

    def elementwise(self, node: Node, spread: Spread) -> Registers:
        """An elementwise op on every register; equal operands are computed once."""
        inputs = [self.get(i, spread) for i in node.inputs]
        seen: dict[tuple[str, ...], str] = {}
        result: Registers = []
        if node.op.name == "cast":
            pairs = self.cast_cut(node, spread) or self.cast_pairs(node, inputs[0])
            if pairs is not None:
                return pairs
        of = node.inputs[-1].dtype
        if node.op.name in rules.RARE and of.is_float and not self.bounds.near_angle(node):
            different = list(dict.fromkeys(zip(*inputs)))
            seen.update(zip(different, rules.apply_all(self.w, node.op.name, of, different)))
        for operands in zip(*inputs):
            if operands not in seen:
                seen[operands] = self.one(node, operands)
            result.append(seen[operands])
        return result

    def cast_pairs(self, node: Node, registers: Registers) -> Registers | None:
        """Neighbours converted two at a time, where the machine does that."""
        source, to = self.dtype(node.inputs[0]), self.dtype(node)
        if len(registers) % 2 or len(set(registers)) != len(registers):
            return None
        if source is float8_e4m3 and to is float32:  # by way of halves
            halves = self.pairs_of(source, float16, registers)
            return halves and [convert(self.w, float16, to, half) for half in halves]
        return self.pairs_of(source, to, registers) if to.size == 2 else None

    def pairs_of(self, source: DType, to: DType, registers: Registers) -> Registers | None:
        """Neighbours as 16-bit registers, converted two at a time; None where one cannot be."""
        result: Registers = []
        for low, high in zip(registers[::2], registers[1::2]):
            word = convert_pair(self.w, source, to, low, high)
            if word is None:
                return None
            result += halves_of(self.w, word)
        return result

    def cast_cut(self, node: Node, spread: Spread) -> Registers | None:
        """Floats of 8 bits of what was cut at the largest of them: the instruction cuts by itself;
        four neighbours are a word."""
        to = self.dtype(node)
        x = uncut(node.inputs[0], to)
        registers = [] if x is None else self.get(x, spread)
        if not registers or len(registers) % 4 or len(set(registers)) != len(registers):
            return None
        found: Registers = []
        for at in range(0, len(registers), 4):
            some = registers[at : at + 4]
            halves = [cut_pair(self.w, to, *some[i : i + 2]) for i in (0, 2)]
            word = self.w.value("mov.b32", braced(halves))
            found += split(self.w, word, to, 4)
        return found

    def one(self, node: Node, operands: tuple[str, ...]) -> str:
        """One element of an elementwise op."""
        w, name, of, result = self.w, node.op.name, node.inputs[-1].dtype, self.dtype(node)
        held = [self.dtype(i) for i in node.inputs]
        if name == "cast":
            return convert(w, held[0], result, operands[0])
        if name == "bitcast":
            return bitcast(w, of, node.dtype, convert(w, held[0], of, operands[0]))
        if name == "repeat_bits":
            return w.value("mov.b32", braced((operands[0], operands[0])))
        given = list(operands)
        narrow = of is int64 and all(h is int32 for h in (held[1:] if name == "where" else held))
        if narrow and (result is int32 or node.dtype is not int64):
            of = int32
        else:
            given = [convert(w, h, i.dtype, r) for h, i, r in zip(held, node.inputs, operands)]
        divisor = constant_of(node.inputs[1]) if name in DIVISIONS and of.is_integer else None
        if divisor is not None:  # as a literal, so that the division becomes a multiplication
            given[1] = literal(divisor, of)
        value = rules.apply(w, name, of, *given, near=self.bounds.near_angle(node))
        return convert(w, int64, result, value) if of is node.dtype is int64 else value

    # ---- sizes ----------------------------------------------------------------------------

    def size64(self, size: Size) -> str:
        """A Size that depends on Symbols, as a 64-bit register; the frame knows those."""
        names = {"div": "floor_divide", "mod": "remainder", "min": "minimum", "max": "maximum"}

        def apply(name: str, a: str, b: str) -> str:
            return rules.apply(self.w, names.get(name, name), int64, a, b)

        def make() -> str:
            number = partial(self.w.copy, "b64")
            return number(size) if isinstance(size, int) else fold(size, number, self.size64, apply)

        return self.memo.once(("size", size), make)
