"""Elements at offsets that values give: gather, scatter, atomics, prefetch.

A scatter takes equal offsets of a Tile in order. Where it cannot be seen that offsets differ, the
Tile's offsets (and values, where they are combined) are laid out in shared memory: for each
element its thread looks for others with the same offset, and the last one writes, or the first
one combines them all. A Body noted as `distinct` says that no two offsets of a scatter are equal.
Invariant: what is in memory afterwards does not depend on which thread runs first.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ...core.dtype import DType, float16, int32, int64
from ...core.errors import InternalError
from ...ir.node import Node
from ...ir.symbol import high
from ...ir.types import Memory
from . import rules
from .emit_memory import MemoryEmitter
from .emit_shared import row_major_steps
from .spread import Spread, blocked

SCATTERS = {"add": "add", "multiply": "multiply", "max": "maximum", "min": "minimum"}
ATOMS = {
    "int32": "s32",
    "uint32": "u32",
    "int64": "u64",
    "uint64": "u64",
    "float32": "f32",
    "float64": "f64",
}


class ElementEmitter(MemoryEmitter):
    """Emits gather, scatter, atomic_add and prefetch."""

    def element_address(self, memory: Node, offset: str, dtype: DType) -> str:
        """The address of an element by its number."""
        w, size = self.w, max(1, memory.dtype.size)
        if memory.type.scope != "global":  # type: ignore[union-attr]
            low = self.resize(offset, dtype, int32)
            return w.value("b32", "mad.lo.s32", low, str(size), self.pointers[memory])
        form = "mad.wide.s32" if dtype is int32 else "mad.lo.s64"
        return w.value("b64", form, offset, str(size), self.pointers[memory])

    def load_form(self, memory: Node) -> str:
        """How an element is loaded."""
        type_ = memory.type
        assert isinstance(type_, Memory)
        if type_.scope != "global":
            return "ld.shared"
        return "ld.global.nc" if type_.use == "constant" else "ld.global"

    def store_form(self, memory: Node) -> str:
        """How an element is stored."""
        return "st.global" if memory.type.scope == "global" else "st.shared"  # type: ignore[union-attr]

    def emit_gather(self, node: Node) -> None:
        memory, offset = node.inputs[0], node.inputs[1]
        spread = self.spread_of(node)
        offsets = self.get(offset, spread)
        masks = self.get(node.inputs[2], spread) if len(node.inputs) > 2 else [""] * len(offsets)
        self.access(memory, writes=False)
        form, found = self.load_form(memory), []
        seen: dict[tuple[str, str], str] = {}
        for key in zip(offsets, masks):
            if key not in seen:
                address = self.element_address(memory, key[0], self.dtype(offset))
                seen[key] = self.read_run(f"[{address}]", form, memory.dtype, 1, key[1])[0]
            found.append(seen[key])
        if node.dtype is int64 and self.dtype(node) is int32:
            found = [self.resize(r, int64, int32) for r in found]
        self.held[node] = found

    # ---- scatter --------------------------------------------------------------------------

    def emit_scatter(self, node: Node) -> None:
        memory, value, offset = node.inputs[:3]
        spread = next(
            (
                self.plan.spread(n)
                for n in (value, offset, *node.inputs[3:])
                if n.shape and not self.plan.free(n)
            ),
            None,
        ) or self.spread_of(offset)
        self.access(memory, writes=True)
        if offset.shape and not (self.body.notes.get("distinct") or self.differ(offset)):
            self.in_order(node, spread)
            return
        registers = self.widened((value,) * len(spread.registers), tuple(self.get(value, spread)))
        offsets = self.get(offset, spread)
        masks = self.get(node.inputs[3], spread) if len(node.inputs) > 3 else [""] * len(offsets)
        owner = self.owner(spread)
        for register, at, mask in zip(registers, offsets, masks):
            where = f"[{self.element_address(memory, at, self.dtype(offset))}]"
            guard = self.both(mask, owner)
            if node.attrs["mode"] != "set":
                old = self.read_run(where, self.load_form(memory), memory.dtype, 1, guard)[0]
                name = SCATTERS[node.attrs["mode"]]
                register = rules.apply(self.w, name, memory.dtype, old, register)
            self.write_run(where, self.store_form(memory), memory.dtype, [register], guard)

    def differ(self, offset: Node) -> bool:
        """Whether all elements of a Tile are seen to differ: counted places, moved and scaled."""
        name = offset.op.name
        if name == "iota" or offset.shape == ():
            return True
        if name in ("reshape", "transpose", "cast"):
            return self.differ(offset.inputs[0])
        if name == "broadcast":
            grows = math.prod(offset.shape) != math.prod(offset.inputs[0].shape)
            return not grows and self.differ(offset.inputs[0])
        if name in ("add", "subtract", "multiply"):
            for one, other in (offset.inputs, offset.inputs[::-1]):
                while other.op.name == "broadcast":
                    other = other.inputs[0]
                low, most = self.bounds.range(other)
                fixed = other.shape == () and (name != "multiply" or low > 0 or most < 0)
                if fixed and self.differ(one):
                    return True
        return False

    def in_order(self, node: Node, spread: Spread) -> None:
        """A scatter whose offsets may be equal."""
        memory, value, offset = node.inputs[:3]
        plain = blocked(offset.shape, self.threads, 1)
        registers = self.widened((value,) * len(plain.registers), tuple(self.get(value, plain)))
        offsets = [self.resize(r, self.dtype(offset), int64) for r in self.get(offset, plain)]
        if len(node.inputs) > 3:
            none = self.w.value("b64", "mov.b64", "-1")
            masks = self.get(node.inputs[3], plain)
            offsets = [self.w.value("b64", "selp.b64", o, none, m) for o, m in zip(offsets, masks)]
        count = math.prod(offset.shape)
        combined = node.attrs["mode"] != "set"
        base = self.scratch(count * (16 if combined else 8))
        numbers = self.line_numbers(plain)
        owner = self.owner(plain)
        for number, at, x in zip(numbers, offsets, registers):
            address = self.w.value("b32", "mad.lo.s32", number, "8", base)
            self.w.put("st.shared.b64", f"[{address}]", at, guard=owner)
            if combined:
                self.put_word(f"[{address}+{8 * count}]", x, memory.dtype, owner)
        self.scratch_written()
        for number, at, x in zip(numbers, offsets, registers):
            self.one_in_order(node, base, count, number, at, x, owner)

    def line_numbers(self, spread: Spread) -> list[str]:
        """The place of every register's element in the Tile, row by row."""
        steps = row_major_steps(spread.shape)
        part = self.thread_offset(spread, steps) or self.constant32(0)
        return [
            self.w.value("b32", "add.s32", part, str(sum(c * s for c, s in zip(at, steps))))
            for at in spread.registers
        ]

    def one_in_order(
        self, node: Node, base: str, count: int, number: str, at: str, x: str, owner: str
    ) -> None:
        """Write one element if it is the last of its offset; or, if it is the first, all."""
        w, memory, mode = self.w, node.inputs[0], node.attrs["mode"]
        live = self.both(w.value("pred", "setp.ge.s64", at, "0"), owner)
        where = f"[{self.element_address(memory, at, int64)}]"
        if mode == "set":
            start, stop = w.value("b32", "add.s32", number, "1"), str(count)
            alone = self.search(base, start, stop, at, live)
            self.write_run(where, self.store_form(memory), memory.dtype, [x], alone)
            return
        alone = self.search(base, w.value("b32", "mov.b32", "0"), number, at, live)
        kind = rules.kind_of(memory.dtype)
        total = w.new(kind)
        self.move(
            [total], self.read_run(where, self.load_form(memory), memory.dtype, 1, alone), kind
        )

        def take(address: str, same: str) -> None:
            other = self.get_word(f"[{address}+{8 * count}]", memory.dtype)
            new = rules.apply(w, SCATTERS[mode], memory.dtype, total, other)
            w.put("mov.pred" if kind == "pred" else f"mov.{kind}", total, new, guard=same)

        self.over_offsets(base, w.value("b32", "mov.b32", number), str(count), at, take)
        self.write_run(where, self.store_form(memory), memory.dtype, [total], alone)

    def search(self, base: str, start: str, stop: str, at: str, live: str) -> str:
        """`live`, unless the offset occurs again between two places."""
        alone = self.w.value("pred", "mov.pred", live)
        never = self.w.value("pred", "setp.ne.s32", self.constant32(0), "0")

        def found(_: str, same: str) -> None:
            self.w.put("mov.pred", alone, never, guard=same)

        self.over_offsets(base, start, stop, at, found)
        return alone

    def over_offsets(
        self, base: str, start: str, stop: str, at: str, each: Callable[[str, str], None]
    ) -> None:
        """A loop over places of the Tile; each(address, whether its offset is the same)."""
        w = self.w
        address = w.value("b32", "mad.lo.s32", start, "8", base)
        again, done, more = w.label("look"), w.label("looked"), w.new("pred")
        w.put("setp.ge.s32", more, start, stop)
        w.put("bra", done, guard=more)
        w.place(again)
        self.made.append({})
        same = w.value("pred", "setp.eq.s64", w.value("b64", "ld.shared.b64", f"[{address}]"), at)
        each(address, same)
        self.made.pop()
        w.put("add.s32", address, address, "8")
        w.put("add.s32", start, start, "1")
        w.put("setp.lt.s32", more, start, stop)
        w.put("bra", again, guard=more)
        w.place(done)

    # ---- atomics --------------------------------------------------------------------------

    def emit_atomic_add(self, node: Node) -> None:
        memory, value, offset = node.inputs[:3]
        name = memory.dtype.name
        if name not in ATOMS and memory.dtype is not float16:
            raise InternalError("ptx.emit", f"no atomic addition of {memory.dtype}")
        spread = self.plan.spread(node)
        registers = self.widened((value,) * len(spread.registers), tuple(self.get(value, spread)))
        masks = self.get(node.inputs[3], spread) if len(node.inputs) > 3 else None
        space = "global" if memory.type.scope == "global" else "shared"  # type: ignore[union-attr]
        self.access(memory, writes=True)
        form = f"atom.relaxed.gpu.{space}.add.{ATOMS.get(name, 'noftz.f16')}"
        kind, owner, found = rules.kind_of(memory.dtype), self.owner(spread), []
        for i, at in enumerate(self.get(offset, spread)):
            address = self.element_address(memory, at, self.dtype(offset))
            before = self.w.value(kind, f"mov.{kind}", "0")
            self.w.put(
                form,
                before,
                f"[{address}]",
                registers[i],
                guard=self.both(masks[i] if masks else "", owner),
            )
            found.append(before)
        if owner:
            found = self.from_owner(found, spread, memory.dtype)
        self.held[node] = found

    def from_owner(self, registers: list[str], spread: Spread, dtype: DType) -> list[str]:
        """What the one thread of some copies holds, for all of them."""
        if spread.shape:
            return self.exchange(registers, spread, spread, dtype)
        base = self.scratch(8)
        self.put_word(f"[{base}]", registers[0], dtype, self.owner(spread))
        self.scratch_written()
        return [self.get_word(f"[{base}]", dtype)]

    # ---- prefetch -------------------------------------------------------------------------

    def emit_prefetch(self, node: Node) -> None:
        """One thread asks for the line, where the index is inside."""
        memory, index = node.inputs[0], node.inputs[1:]
        type_ = memory.type
        assert isinstance(type_, Memory)
        if type_.scope != "global":
            return
        w = self.w
        guard = w.value("pred", "setp.eq.s32", self.thread, "0")
        for at, size in zip(index, type_.shape):
            low, most = self.bounds.range(at)
            wide = self.resize(self.scalar(at), self.dtype(at), int64)
            if low < 0:
                guard = self.both(guard, w.value("pred", "setp.ge.s64", wide, "0"))
            if not isinstance(size, int) or most >= high(size):
                limit = str(size) if isinstance(size, int) else self.size64(size)
                guard = self.both(guard, w.value("pred", "setp.lt.s64", wide, limit))
        w.put("prefetch.global.L2", f"[{self.uniform_address(memory, index)}]", guard=guard)
