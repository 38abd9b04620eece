"""Reductions over Tiles, and Tiles seen in other shapes.

A reduction combines what a thread holds, then lanes by shuffles, then warps through shared
memory; every thread that asks gets the result. Reductions side by side share one exchange
between warps. Invariant: the order of a sum depends on the
Spread alone, so it is the same in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...core.dtype import DType, float32, int64
from ...core.errors import InternalError
from ...ir.node import Node
from . import rules
from .emit_elements import ElementEmitter
from .spread import Spread

Part = tuple[list[str], str, DType]  # of a reduction: registers, its kind, their dtype


class ShapeEmitter(ElementEmitter):
    """Emits reduce, broadcast, reshape, transpose, part, extract and stack_rows of held Tiles."""

    def emit_reduce(self, node: Node) -> None:
        self.reduces([node])

    def reduces(self, nodes: Sequence[Node]) -> None:
        """Reductions that follow one another and do not need one another: those of Tiles that
        are spread alike meet once for all."""
        alike: dict[tuple[Spread, int], list[tuple[Node, Part]]] = {}
        for node in nodes:
            source, axis = self.spread_of(node.inputs[0]), node.attrs["axis"]
            alike.setdefault((source, axis), []).append((node, self.in_warps(node, source)))
        for (source, axis), found in alike.items():
            _, warps = self.reduced_bits(source, axis)
            parts = [part for _, part in found]
            if warps:
                parts = self.over_warps(parts, source, axis, warps)
            for (node, _), (registers, _, _) in zip(found, parts):
                self.leave_reduced(node, registers, source.drop(axis))

    def in_warps(self, node: Node, source: Spread) -> Part:
        """What each warp knows of a reduction."""
        x, axis, kind = node.inputs[0], node.attrs["axis"], node.attrs["kind"]
        dtype = self.dtype(node)
        if kind == "sum" and dtype is float32 and self.is_product(x, source):
            factors = zip(*(self.get(i, source) for i in x.inputs))
            groups = self.grouped(source, axis, list(factors))
            found = [self.fold_products(groups[at]) for at in source.drop(axis).registers]
        else:
            registers = self.of_dtype(x, self.get(x, source), dtype)
            groups = self.grouped(source, axis, registers)
            found = [self.fold(groups[at], kind, dtype) for at in source.drop(axis).registers]
        for bit in self.reduced_bits(source, axis)[0]:
            found = [
                rules.combine(self.w, kind, dtype, r, self.shuffle(r, 1 << bit, dtype))
                for r in found
            ]
        return found, kind, dtype

    def grouped(self, source: Spread, axis: int, values: list[Any]) -> dict[Any, list[Any]]:
        """What a thread holds, by the element of the result that it goes into."""
        groups: dict[tuple[int, ...], list[Any]] = {}
        for at, value in zip(source.registers, values):
            groups.setdefault(at[:axis] + at[axis + 1 :], []).append(value)
        return groups

    def is_product(self, x: Node, source: Spread) -> bool:
        """Whether a Tile is a product of two that threads hold as they hold it."""
        return x.op.name == "multiply" and all(
            i.shape == () or self.plan.free(i) or self.plan.spread(i) == source for i in x.inputs
        )

    def fold_products(self, factors: list[tuple[str, str]]) -> str:
        """Products of one thread added as they are made, in chains side by side."""
        count = 4 if len(factors) >= 16 else 2 if len(factors) >= 4 else 1
        chains = []
        for pairs in (factors[n::count] for n in range(count)):
            total = rules.apply(self.w, "multiply", float32, *pairs[0])
            for a, b in pairs[1:]:
                total = rules.apply(self.w, "multiply_add", float32, a, b, total)
            chains.append(total)
        return self.fold(chains, "sum", float32)

    def leave_reduced(self, node: Node, found: list[str], result: Spread) -> None:
        """Hold a reduction as its Node is to be spread."""
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
            pairs = [
                rules.combine(self.w, kind, dtype, a, b)
                for a, b in zip(registers[::2], registers[1::2])
            ]
            registers = pairs + ([registers[-1]] if len(registers) % 2 else [])
        return registers[0]

    def reduced_bits(self, spread: Spread, axis: int) -> tuple[list[int], list[int]]:
        """Bits of the thread's number that move along an axis: of the lane, of the warp."""
        bits = [
            shift + i for shift, width, a, _ in spread.fields if a == axis for i in range(width)
        ]
        return [b for b in bits if b < 5], [b for b in bits if b >= 5]

    def warp_bits(self, spread: Spread) -> int:
        """The bits of the warp's number that a Spread uses: others tell copies apart."""
        return sum(
            1 << (shift + i - 5)
            for shift, width, _, _ in spread.fields
            for i in range(width)
            if shift + i >= 5
        )

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
        self, parts: Sequence[Part], source: Spread, axis: int, bits: list[int]
    ) -> list[Part]:
        """Combine across warps: each leaves its parts, all read all parts of their group."""
        w = self.w
        size = max(max(4, dtype.size) if dtype.kind != "bool" else 4 for _, _, dtype in parts)
        warps = self.threads // 32
        count = sum(len(registers) for registers, _, _ in parts)
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
        flat = [(r, dtype) for registers, _, dtype in parts for r in registers]
        for i, (register, dtype) in enumerate(flat):
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
        result, place = [], 0
        for registers, kind, dtype in parts:
            found = []
            for i in range(place, place + len(registers)):
                read = [
                    self.get_word(f"[{start}+{t * stride + i * lanes * size}]", dtype)
                    for t in sorted(turns)
                ]
                found.append(self.fold(read, kind, dtype))
            result.append((found, kind, dtype))
            place += len(registers)
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
        self.held[node] = self.cut(
            node.inputs[0], node.attrs["start"], node.shape, self.plan.spread(node)
        )

    def cut(self, x: Node, start: tuple[int, ...], shape: tuple[int, ...], to: Spread) -> list[str]:
        """A rectangle of a Tile: by renaming, else through shared memory."""
        own = self.spread_of(x)
        registers = self.get(x, own)
        try:
            inside = own.part(start, shape)
        except InternalError:
            inside = None
        if inside is not None and inside.fields == to.fields:
            place = {
                at: registers[own.where[tuple(c + a for c, a in zip(at, start))]]
                for at in inside.registers
            }
            if all(at in place for at in to.registers):
                return [place[at] for at in to.registers]
        self.leave_in_scratch(registers, own, self.dtype(x))
        return self.take_from_scratch(own.shape, start, to, self.dtype(x))

    def emit_stack_rows(self, node: Node) -> None:
        own = self.spread_of(
            next((x for x in node.inputs if not self.plan.free(x)), node.inputs[0])
        )
        registers = [
            r for x in node.inputs for r in self.of_dtype(x, self.get(x, own), self.dtype(node))
        ]
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
