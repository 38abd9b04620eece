"""Reductions over Tiles, and Tiles seen in other shapes.

A reduction combines what a thread holds, then lanes by shuffles, then warps through shared
memory; every thread that asks gets the result. Invariant: the order of a sum depends on the
Spread alone, so it is the same in every run.
"""

from __future__ import annotations

from ...core.dtype import DType, int64
from ...core.errors import InternalError
from ...ir.node import Node
from . import rules
from .emit_elements import ElementEmitter
from .spread import Spread


class ShapeEmitter(ElementEmitter):
    """Emits reduce, broadcast, reshape, transpose, part, extract and stack_rows of held Tiles."""

    def emit_reduce(self, node: Node) -> None:
        x, axis, kind = node.inputs[0], node.attrs["axis"], node.attrs["kind"]
        source = self.spread_of(x)
        dtype = self.dtype(node)
        registers = self.of_dtype(x, self.get(x, source), dtype)
        result = source.drop(axis)
        groups: dict[tuple[int, ...], list[str]] = {}
        for at, register in zip(source.registers, registers):
            groups.setdefault(at[:axis] + at[axis + 1 :], []).append(register)
        found = [self.fold(groups[at], kind, dtype) for at in result.registers]
        lanes, warps = self.reduced_bits(source, axis)
        for bit in lanes:
            found = [rules.combine(self.w, kind, dtype, r, self.shuffle(r, 1 << bit, dtype))
                     for r in found]  # fmt: skip
        if warps:
            found = self.over_warps(found, source, axis, warps, kind, dtype)
        if node.shape == () or self.plan.spread(node) == result:
            self.held[node] = found
        else:
            self.held[node] = self.change(node, found, result, self.plan.spread(node))

    def of_dtype(self, x: Node, registers: list[str], dtype: DType) -> list[str]:
        """Registers of a value as its result is held: int64 may be in 32 or 64 bits."""
        if x.dtype is not int64:
            return registers
        return [self.resize(r, self.dtype(x), dtype) for r in registers]

    def fold(self, registers: list[str], kind: str, dtype: DType) -> str:
        """Registers of one thread combined, as a balanced tree."""
        while len(registers) > 1:
            pairs = [rules.combine(self.w, kind, dtype, a, b)
                     for a, b in zip(registers[::2], registers[1::2])]  # fmt: skip
            registers = pairs + ([registers[-1]] if len(registers) % 2 else [])
        return registers[0]

    def reduced_bits(self, spread: Spread, axis: int) -> tuple[list[int], list[int]]:
        """Bits of the thread's number that move along an axis: of the lane, of the warp."""
        bits = [shift + i for shift, width, a, _ in spread.fields if a == axis
                for i in range(width)]  # fmt: skip
        return [b for b in bits if b < 5], [b for b in bits if b >= 5]

    def warp_bits(self, spread: Spread) -> int:
        """The bits of the warp's number that a Spread uses: others tell copies apart."""
        return sum(1 << (shift + i - 5) for shift, width, _, _ in spread.fields
                   for i in range(width) if shift + i >= 5)  # fmt: skip

    def shuffle(self, register: str, distance: int, dtype: DType) -> str:
        """The register of the lane whose number differs in some bits."""
        w, kind = self.w, rules.kind_of(dtype)
        if kind == "pred":
            word = w.value("b32", "selp.b32", "1", "0", register)
            other = self.shuffle_word(word, distance)
            return w.value("pred", "setp.ne.s32", other, "0")
        if kind == "b64":
            low, high = w.new("b32"), w.new("b32")
            w.put("mov.b64", f"{{{low}, {high}}}", register)
            low, high = self.shuffle_word(low, distance), self.shuffle_word(high, distance)
            return w.value("b64", "mov.b64", f"{{{low}, {high}}}")
        if kind == "b16":
            other = self.shuffle_word(w.value("b32", "cvt.u32.u16", register), distance)
            return w.value("b16", "cvt.u16.u32", other)
        return self.shuffle_word(register, distance)

    def shuffle_word(self, register: str, distance: int) -> str:
        """A 32-bit register of another lane."""
        return self.w.value("b32", "shfl.sync.bfly.b32", register, str(distance), "31", "-1")

    def over_warps(
        self, registers: list[str], source: Spread, axis: int, bits: list[int], kind: str,
        dtype: DType,
    ) -> list[str]:  # fmt: skip
        """Combine across warps: each leaves its part, all read all parts of their group."""
        w, size = self.w, max(4, dtype.size) if dtype.kind != "bool" else 4
        warps = self.threads // 32
        count = len(registers)
        held = source.drop(axis)
        lanes = 32 if any(shift < 5 for shift, _, _, _ in held.fields) else 1
        base = self.scratch(warps * count * lanes * size)
        lane = self.bits(0, 5)
        warp = w.value("b32", "shr.u32", self.thread, "5")
        stride = count * lanes * size
        address = w.value("b32", "mad.lo.s32", warp, str(stride), base)
        if lanes > 1:
            address = w.value("b32", "mad.lo.s32", lane, str(size), address)
        first = "" if lanes > 1 else w.value("pred", "setp.eq.s32", lane, "0")
        for i, register in enumerate(registers):
            self.put_word(f"[{address}+{i * lanes * size}]", register, dtype, first)
        self.scratch_written()
        kept = self.warp_bits(source) & ~sum(1 << (b - 5) for b in bits)
        own = w.value("b32", "and.b32", warp, str(kept)) if kept else ""
        start = w.value("b32", "mad.lo.s32", own, str(stride), base) if own else base
        if lanes > 1:
            start = w.value("b32", "mad.lo.s32", lane, str(size), start)
        turns = [0]
        for b in bits:
            turns += [t | 1 << (b - 5) for t in turns]
        result = []
        for i in range(count):
            parts = [self.get_word(f"[{start}+{t * stride + i * lanes * size}]", dtype)
                     for t in sorted(turns)]  # fmt: skip
            result.append(self.fold(parts, kind, dtype))
        return result

    # ---- shapes ---------------------------------------------------------------------------

    def emit_broadcast(self, node: Node) -> None:
        self.held[node] = self.broadcast(node, self.plan.spread(node))

    def emit_reshape(self, node: Node) -> None:
        x = node.inputs[0]
        to = self.plan.spread(node)
        if x.shape == ():
            self.held[node] = self.get(x, to)
            return
        try:
            seen = to.reshape(x.shape)
        except InternalError:
            seen, own = self.plan.spread(x), self.get(x, self.plan.spread(x))
            self.held[node] = self.exchange(own, seen.reshape(node.shape), to, self.dtype(x))
            return
        self.held[node] = self.get(x, seen)

    def emit_transpose(self, node: Node) -> None:
        order = node.attrs["order"]
        back = [order.index(i) for i in range(len(order))]
        self.held[node] = self.get(node.inputs[0], self.plan.spread(node).permute(back))

    def emit_extract(self, node: Node) -> None:
        x, index = node.inputs[0], node.attrs["index"]
        if node.shape == ():
            self.held[node] = [self.pick(x, index)]
            return
        start = (index,) + (0,) * len(node.shape)
        self.held[node] = self.cut(x, start, (1, *node.shape), self.plan.spread(node).stack(1))

    def emit_part(self, node: Node) -> None:
        self.held[node] = self.cut(node.inputs[0], node.attrs["start"], node.shape,
                                   self.plan.spread(node))  # fmt: skip

    def cut(
        self, x: Node, start: tuple[int, ...], shape: tuple[int, ...], to: Spread
    ) -> list[str]:
        """A rectangle of a Tile: by renaming, else through shared memory."""
        own = self.spread_of(x)
        registers = self.get(x, own)
        try:
            inside = own.part(start, shape)
        except InternalError:
            inside = None
        if inside is not None and inside.fields == to.fields:
            place = {at: registers[own.where[tuple(c + a for c, a in zip(at, start))]]
                     for at in inside.registers}  # fmt: skip
            if all(at in place for at in to.registers):
                return [place[at] for at in to.registers]
        self.leave_in_scratch(registers, own, self.dtype(x))
        return self.take_from_scratch(own.shape, start, to, self.dtype(x))

    def emit_stack_rows(self, node: Node) -> None:
        own = self.spread_of(next((x for x in node.inputs if not self.plan.free(x)),
                                  node.inputs[0]))  # fmt: skip
        registers = [r for x in node.inputs
                     for r in self.of_dtype(x, self.get(x, own), self.dtype(node))]  # fmt: skip
        stacked, to = own.stack(len(node.inputs)), self.plan.spread(node)
        self.held[node] = self.change(node, registers, stacked, to)

    def pick(self, x: Node, index: int) -> str:
        """One element of a line, for all threads."""
        own, dtype = self.spread_of(x), self.dtype(x)
        registers = self.get(x, own)
        if not own.fields:
            return registers[own.where[(index,)]]
        base = self.scratch(8)
        for at, register in zip(own.registers, registers):
            part = self.thread_part(own.fields, 0)
            assert part is not None
            mine = self.w.value("pred", "setp.eq.s32", part, str(index - at[0]))
            owner = self.owner(own)
            guard = self.w.value("pred", "and.pred", mine, owner) if owner else mine
            self.put_word(f"[{base}+0]", register, dtype, guard)
        self.scratch_written()
        return self.get_word(f"[{base}+0]", dtype)
