"""Running sums, products, maxima and minima along an axis of a Tile.

Each thread scans the neighbours it holds; then, digit by digit of the threads' numbers, lower
halves hand their totals to upper ones: lanes by shuffles, warps through shared memory.
Invariant: the order of a sum depends on the shape and the threads alone.
"""

from __future__ import annotations

from itertools import pairwise

from ...core.dtype import DType
from ...ir.node import Node
from . import rules
from .emit_shape import ShapeEmitter
from .spread import Spread, lines

Line = tuple[int, ...]  # coordinates without the axis


class ScanEmitter(ShapeEmitter):
    """Emits cumulative."""

    def emit_cumulative(self, node: Node) -> None:
        x, axis, kind = node.inputs[0], node.attrs["axis"], node.attrs["kind"]
        dtype = self.dtype(node)
        own = lines(node.shape, self.threads, axis)
        registers = self.of_dtype(x, self.get(x, own), dtype)
        groups: dict[Line, list[int]] = {}
        for number, at in sorted(enumerate(own.registers), key=lambda n: n[1][axis]):
            groups.setdefault(at[:axis] + at[axis + 1 :], []).append(number)
        result = list(registers)
        for line in groups.values():
            for last, number in pairwise(line):
                result[number] = self.combined(kind, dtype, result[last], registers[number])
        totals = [result[line[-1]] for line in groups.values()]
        earlier, first = self.over_threads(totals, own, axis, kind, dtype)
        if earlier is not None:
            for before, line in zip(earlier, groups.values()):
                for number in line:
                    new = self.combined(kind, dtype, before, result[number])
                    result[number] = self.pick_one(dtype, first, result[number], new)
        to = self.plan.spread(node)
        self.held[node] = result if to == own else self.change(node, result, own, to)

    def combined(self, kind: str, dtype: DType, a: str, b: str) -> str:
        """Two values made one, the earlier first."""
        return rules.combine(self.w, kind, dtype, a, b)

    def pick_one(self, dtype: DType, mask: str, a: str, b: str) -> str:
        """a where the mask holds, else b."""
        return rules.apply(self.w, "where", dtype, mask, a, b)

    def over_threads(
        self, totals: list[str], own: Spread, axis: int, kind: str, dtype: DType
    ) -> tuple[list[str] | None, str]:
        """(what the threads before this one have, of each line; whether there are none)."""
        bits = sorted(
            (stride << i, shift + i)
            for shift, width, a, stride in own.fields
            if a == axis
            for i in range(width)
        )
        if not bits:
            return None, ""
        earlier: list[str] | None = None
        for _, bit in bits:
            if bit < 5:
                other = [self.shuffle(t, 1 << bit, dtype) for t in totals]
            else:
                other = self.from_warp(totals, own, 1 << (bit - 5), dtype)
            upper = self.w.value("pred", "setp.ne.s32", self.bits(bit, 1), "0")
            if earlier is None:
                earlier = other  # read only by threads that have some before
                none = self.w.value("pred", "not.pred", upper)
            else:
                grown = [
                    self.pick_one(dtype, none, o, self.combined(kind, dtype, o, e))
                    for o, e in zip(other, earlier)
                ]
                earlier = [self.pick_one(dtype, upper, g, e) for g, e in zip(grown, earlier)]
                lower = self.w.value("pred", "not.pred", upper)
                none = self.w.value("pred", "and.pred", none, lower)
            totals = [
                self.combined(
                    kind,
                    dtype,
                    self.pick_one(dtype, upper, o, t),
                    self.pick_one(dtype, upper, t, o),
                )
                for o, t in zip(other, totals)
            ]
        return earlier, none

    def from_warp(
        self, registers: list[str], spread: Spread, distance: int, dtype: DType
    ) -> list[str]:
        """What the same lane of the warp whose number differs in one bit holds."""
        w, size = self.w, 8 if dtype.size == 8 else 4
        base = self.scratch(len(registers) * self.threads * size)
        step = self.threads * size
        at = w.value("b32", "mad.lo.s32", self.thread, str(size), base)
        for i, register in enumerate(registers):
            self.put_word(f"[{at}+{i * step}]", register, dtype, "")
        self.scratch_written()
        other = w.value("b32", "and.b32", self.thread, str(31 | self.warp_bits(spread) << 5))
        other = w.value("b32", "xor.b32", other, str(32 * distance))
        other = w.value("b32", "mad.lo.s32", other, str(size), base)
        return [self.get_word(f"[{other}+{i * step}]", dtype) for i in range(len(registers))]
