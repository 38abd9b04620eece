"""Values of a Body in registers: scalars, elementwise ops, and Tiles in the Spread asked for.

A Tile is a list of registers, one per register offset of its Spread; a scalar is one register
that every thread holds alike. int64 values whose bounds fit are held in 32 bits. Invariant: a
register is read only where the line that writes it has run: what is made inside of a Block is
forgotten at its end.
"""

from __future__ import annotations

from typing import Any

from ...core.dtype import DType, int32, int64
from ...core.errors import InternalError
from ...core.target import Target
from ...ir.node import Node
from ...ir.symbol import Expr, Size
from ...tile.bounds import Bounds
from ...tile.build import Body
from ...tile.magnitude import near_angle
from . import rules
from .division import DIVISIONS
from .plan_spread import ELEMENTWISE, SpreadPlan, broadcast_source
from .spread import Field, Spread
from .write import Writer


class Values:
    """Registers of Nodes."""

    def __init__(self, body: Body, target: Target) -> None:
        self.body, self.target = body, target
        self.w = Writer()
        self.warps = warps_of(body)
        self.bounds = Bounds(body)
        self.plan = SpreadPlan(body, self.warps)
        self.held: dict[Node, list[str]] = {}
        self.made: list[dict[Any, Any]] = [{}]  # what may be made again, by Block
        self.symbols: dict[str, str] = {}  # registers (s64) of Symbols
        self.thread = ""  # this thread's number within its role
        self.threads = 32 * self.warps  # of the role

    # ---- memo -----------------------------------------------------------------------------

    def known(self, key: Any) -> Any:
        """What was made under a key in this Block or around it."""
        for scope in reversed(self.made):
            if key in scope:
                return scope[key]
        return None

    def keep(self, key: Any, value: Any) -> Any:
        """Remember until the end of this Block."""
        self.made[-1][key] = value
        return value

    # ---- types ----------------------------------------------------------------------------

    def dtype(self, node: Node) -> DType:
        """What the registers of a value hold: int64 within 32 bits is held as int32."""
        if node.dtype is int64 and self.bounds.narrow(node):
            return int32
        return node.dtype

    def resize(self, register: str, source: DType, to: DType) -> str:
        """An integer index in another width."""
        if source is to:
            return register
        if to is int64:
            return self.w.value("b64", "cvt.s64.s32", register)
        return self.w.value("b32", "cvt.u32.u64", register)

    def index32(self, node: Node) -> str:
        """A scalar index as a 32-bit register."""
        return self.resize(self.scalar(node), self.dtype(node), int32)

    def constant32(self, value: int) -> str:
        """A 32-bit constant in a register."""
        key = ("constant", value)
        return self.known(key) or self.keep(key, self.w.value("b32", "mov.b32", str(value)))

    # ---- access ---------------------------------------------------------------------------

    def scalar(self, node: Node) -> str:
        """The register of a scalar."""
        if node in self.held:
            return self.held[node][0]
        raise InternalError("ptx.emit", f"{node!r} was not emitted before its use")

    def get(self, node: Node, spread: Spread) -> list[str]:
        """The registers of a Tile, held as `spread` says."""
        if node.shape == ():
            return [self.scalar(node)] * len(spread.registers)
        if self.plan.free(node):
            found = self.known((node, spread))
            return found or self.keep((node, spread), self.make(node, spread))
        own = self.plan.spread(node)
        registers = self.held[node]
        if own == spread:
            return registers
        found = self.known((node, spread))
        if found is None:
            found = self.keep((node, spread), self.change(node, registers, own, spread))
        return found

    def own(self, node: Node) -> list[str]:
        """The registers of a Tile in the Spread planned for it."""
        return self.get(node, self.plan.spread(node))

    def change(self, node: Node, registers: list[str], own: Spread, to: Spread) -> list[str]:
        """The same Tile held otherwise: by renaming, else through shared memory."""
        if own.fields == to.fields and all(at in own.where for at in to.registers):
            return [registers[own.where[at]] for at in to.registers]
        return self.exchange(registers, own, to, self.dtype(node))

    def exchange(self, registers: list[str], own: Spread, to: Spread, dtype: DType) -> list[str]:
        """Move a Tile between Spreads through shared memory."""
        raise InternalError("ptx.emit", "no shared memory here")

    # ---- free values ----------------------------------------------------------------------

    def make(self, node: Node, spread: Spread) -> list[str]:
        """A free value in a Spread."""
        name = node.op.name
        if name == "constant":
            value = rules.constant(self.w, node.attrs["value"], self.dtype(node))
            return [value] * len(spread.registers)
        if name == "iota":
            return self.positions(spread, 0, self.dtype(node))
        if name == "broadcast":
            return self.broadcast(node, spread)
        if name == "stack":
            return self.stack(node, spread)
        if name == "reshape":
            return self.get(node.inputs[0], spread.reshape(node.inputs[0].shape))
        if name == "transpose":
            order = node.attrs["order"]
            back = [order.index(i) for i in range(len(order))]
            return self.get(node.inputs[0], spread.permute(back))
        if node.op.group in ELEMENTWISE:
            return self.elementwise(node, spread)
        raise InternalError("ptx.emit", f"{name} is not free")

    def thread_part(self, fields: tuple[Field, ...], axis: int) -> str | None:
        """The thread's part of a coordinate (32 bits), or None where it has none."""
        mine = tuple(f for f in fields if f[2] == axis)
        if not mine:
            return None
        key = ("thread", self.thread, tuple((s, w, d) for s, w, _, d in mine))
        found = self.known(key)
        if found is None:
            for shift, width, _, stride in mine:
                part = self.bits(shift, width)
                if stride != 1:
                    part = self.w.value("b32", "mul.lo.s32", part, str(stride))
                found = part if found is None else self.w.value("b32", "add.s32", found, part)
            self.keep(key, found)
        return found

    def bits(self, shift: int, width: int) -> str:
        """Some bits of the thread's number."""
        value = self.thread
        if shift:
            value = self.w.value("b32", "shr.u32", value, str(shift))
        if (1 << shift + width) < self.threads:
            value = self.w.value("b32", "and.b32", value, str((1 << width) - 1))
        return value

    def positions(self, spread: Spread, axis: int, dtype: DType) -> list[str]:
        """The coordinate along an axis of every register."""
        part = self.thread_part(spread.fields, axis)
        found: dict[int, str] = {}
        for at in spread.registers:
            if at[axis] in found:
                continue
            if part is None:
                register = self.w.value("b32", "mov.b32", str(at[axis]))
            elif at[axis] == 0:
                register = part
            else:
                register = self.w.value("b32", "add.s32", part, str(at[axis]))
            if dtype is not int32:
                register = rules.convert(self.w, int32, dtype, register)
            found[at[axis]] = register
        return [found[at[axis]] for at in spread.registers]

    def broadcast(self, node: Node, spread: Spread) -> list[str]:
        """A Tile repeated along axes: registers shared between elements."""
        x = node.inputs[0]
        if x.shape == ():
            return [self.scalar(x)] * len(spread.registers)
        source = broadcast_source(spread, x.shape)
        registers = self.get(x, source)
        extra = len(spread.shape) - len(x.shape)
        flat = [a for a, size in enumerate(x.shape) if size == 1]

        def of(at: tuple[int, ...]) -> tuple[int, ...]:
            inner = list(at[extra:])
            for a in flat:
                inner[a] = 0
            return tuple(inner)

        return [registers[source.where[of(at)]] for at in spread.registers]

    def stack(self, node: Node, spread: Spread) -> list[str]:
        """Scalars as a column: chosen by the row."""
        dtype = self.dtype(node)
        scalars = [
            self.resize(self.scalar(x), self.dtype(x), dtype)
            if x.dtype is int64
            else self.scalar(x)
            for x in node.inputs
        ]
        if not any(f[2] == 0 for f in spread.fields):
            return [scalars[at[0]] for at in spread.registers]
        found = []
        for row in self.positions(spread, 0, int32):
            value = scalars[0]
            for number, other in enumerate(scalars[1:], 1):
                mine = self.w.value("pred", "setp.eq.s32", row, str(number))
                value = rules.apply(self.w, "where", dtype, mine, other, value)
            found.append(value)
        return found

    # ---- elementwise ----------------------------------------------------------------------

    def elementwise(self, node: Node, spread: Spread) -> list[str]:
        """An elementwise op on every register; equal operands are computed once."""
        inputs = [self.get(i, spread) for i in node.inputs]
        seen: dict[tuple[str, ...], str] = {}
        result: list[str] = []
        if node.op.name == "cast":
            pairs = self.cast_pairs(node, inputs[0])
            if pairs is not None:
                return pairs
        of = node.inputs[-1].dtype
        if node.op.name in rules.RARE and of.is_float and not near_angle(node):
            different = list(dict.fromkeys(zip(*inputs)))
            if len(different) > 1:
                seen.update(zip(different, rules.apply_all(self.w, node.op.name, of, different)))
        for operands in zip(*inputs):
            if operands not in seen:
                seen[operands] = self.one(node, operands)
            result.append(seen[operands])
        return result

    def cast_pairs(self, node: Node, registers: list[str]) -> list[str] | None:
        """Neighbours converted two at a time, where the machine does that."""
        source, to = self.dtype(node.inputs[0]), self.dtype(node)
        if len(registers) % 2 or len(set(registers)) != len(registers) or to.size != 2:
            return None
        result: list[str] = []
        for low, high in zip(registers[::2], registers[1::2]):
            packed = rules.convert_pair(self.w, source, to, low, high)
            if packed is None:
                return None
            first, second = self.w.new("b16"), self.w.new("b16")
            self.w.put("mov.b32", f"{{{first}, {second}}}", packed)
            result += [first, second]
        return result

    def one(self, node: Node, operands: tuple[str, ...]) -> str:
        """One element of an elementwise op."""
        w, name = self.w, node.op.name
        held = [self.dtype(i) for i in node.inputs]
        result = self.dtype(node)
        if name == "cast":
            if held[0] is int32 and node.inputs[0].dtype is int64 and node.dtype.is_integer:
                if node.dtype is int64:
                    return self.resize(operands[0], int32, result)
            return (
                operands[0] if held[0] is result else rules.convert(w, held[0], result, operands[0])
            )
        if name == "bitcast":
            wide = self.widened(node.inputs, operands)
            return rules.bitcast(w, node.inputs[0].dtype, node.dtype, wide[0])
        of = node.inputs[-1].dtype
        if of is not int64:
            given = self.literal_divisor(node, of, operands) if of.is_integer else operands
            return rules.apply(w, name, of, *given, near=near_angle(node))
        operands_held = held[1:] if name == "where" else held
        if all(h is int32 for h in operands_held) and (result is int32 or node.dtype is not int64):
            return rules.apply(w, name, int32, *self.literal_divisor(node, int32, operands))
        wide = self.widened(node.inputs, operands)
        value = rules.apply(w, name, int64, *self.literal_divisor(node, int64, wide))
        return self.resize(value, int64, result) if node.dtype is int64 else value

    def literal_divisor(self, node: Node, dtype: DType, operands: Any) -> list[str]:
        """A constant to divide by as a literal, so that it becomes a multiplication."""
        found = list(operands)
        if node.op.name in DIVISIONS:
            divisor = node.inputs[1]
            while divisor.op.name == "broadcast":
                divisor = divisor.inputs[0]
            if divisor.op.name == "constant":
                found[1] = rules.literal(divisor.attrs["value"], dtype)
        return found

    def widened(self, nodes: tuple[Node, ...], operands: tuple[str, ...]) -> list[str]:
        """Operands with int64 at full width."""
        return [
            self.resize(r, self.dtype(n), int64) if n.dtype is int64 else r
            for n, r in zip(nodes, operands)
        ]

    # ---- sizes ----------------------------------------------------------------------------

    def size64(self, size: Size) -> str:
        """A Size that depends on Symbols, as a 64-bit register."""
        key = ("size", size)
        found = self.known(key)
        return found or self.keep(key, self._size64(size))

    def _size64(self, size: Size) -> str:
        w = self.w
        if isinstance(size, int):
            return w.value("b64", "mov.b64", str(size))
        if size.kind == "symbol":
            return self.symbols[size.name]
        if size.kind == "sum":
            return self._sum64(size)
        a, b = (self.size64(x) for x in size.args)
        names = {"div": "floor_divide", "mod": "remainder", "min": "minimum", "max": "maximum"}
        return rules.apply(w, names[size.kind], int64, a, b)

    def _sum64(self, size: Expr) -> str:
        w = self.w
        total = w.value("b64", "mov.b64", str(size.constant))
        for product, factor in size.terms:
            term = w.value("b64", "mov.b64", str(factor))
            for atom in product:
                term = w.value("b64", "mul.lo.s64", term, self.size64(atom))
            total = w.value("b64", "add.s64", total, term)
        return total


def warps_of(body: Body) -> int:
    """Warps of a program: those of its roles, else what the Body notes, else four."""
    roles = [n.attrs["warps"] for n in body.block.nodes if n.op.name == "role"]
    return sum(roles) if roles else int(body.notes.get("warps", 4))
