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
from .emission import Emission
from .emit_shape import grouped, warp_bits
from .moves import get_word, put_word, shuffle
from .spread import Spread, lines
from .write import Writer


class Combining:
    """How values are combined, the earlier one first."""

    def __init__(self, w: Writer, kind: str, dtype: DType) -> None:
        self.w, self.kind, self.dtype = w, kind, dtype

    def combine(self, a: str, b: str) -> str:
        """Two values made one."""
        return rules.combine(self.w, self.kind, self.dtype, a, b)

    def pick(self, mask: str, a: str, b: str) -> str:
        """a where the mask holds, else b."""
        return rules.apply(self.w, "where", self.dtype, mask, a, b)


def cumulative(e: Emission, node: Node) -> list[str]:
    """The running combination along an axis."""
    x, axis, dtype = node.inputs[0], node.attrs["axis"], e.values.dtype(node)
    one = Combining(e.w, node.attrs["kind"], dtype)
    own = lines(node.shape, e.threads.count, axis)
    registers = e.values.sized(x, e.values.get(x, own), dtype)
    numbers = list(range(len(registers)))
    groups = [
        sorted(line, key=lambda n: own.registers[n][axis])
        for line in grouped(own, axis, numbers).values()
    ]
    result = list(registers)
    for line in groups:
        for last, number in pairwise(line):
            result[number] = one.combine(result[last], registers[number])
    earlier, first = over_threads(e, [result[line[-1]] for line in groups], own, axis, one)
    for before, line in zip(earlier, groups):
        for number in line:
            new = one.combine(before, result[number])
            result[number] = one.pick(first, result[number], new)
    return e.values.planned(node, result, own)


def over_threads(
    e: Emission, totals: list[str], own: Spread, axis: int, one: Combining
) -> tuple[list[str], str]:
    """(what the threads before this one have, of each line; whether there are none)."""
    bits = sorted(
        (stride << i, shift + i)
        for shift, width, a, stride in own.fields
        if a == axis
        for i in range(width)
    )
    w, earlier, none = e.w, list[str](), ""
    for _, bit in bits:
        if bit < 5:
            other = [shuffle(w, t, 1 << bit, one.dtype) for t in totals]
        else:
            other = from_warp(e, totals, own, 1 << (bit - 5), one.dtype)
        upper = w.test("ne.s32", e.threads.bits(bit, 1), 0)
        if not earlier:
            earlier = other  # read only by threads that have some before
            none = w.value("not.pred", upper)
        else:
            grown = [one.pick(none, o, one.combine(o, b)) for o, b in zip(other, earlier)]
            earlier = [one.pick(upper, g, b) for g, b in zip(grown, earlier)]
            none = w.and_predicates(none, w.value("not.pred", upper))
        totals = [
            one.combine(one.pick(upper, o, t), one.pick(upper, t, o)) for o, t in zip(other, totals)
        ]
    return earlier, none


def from_warp(
    e: Emission, registers: list[str], spread: Spread, distance: int, dtype: DType
) -> list[str]:
    """What the same lane of the warp whose number differs in one bit holds."""
    w, threads, size = e.w, e.threads, 8 if dtype.size == 8 else 4
    step = threads.count * size
    base = e.shared.scratch(len(registers) * step)
    at = w.mad(threads.number, size, base)
    for i, register in enumerate(registers):
        put_word(w, f"[{at}+{i * step}]", register, dtype)
    e.shared.written()
    other = w.mask(threads.number, 31 | warp_bits(spread) << 5)
    other = w.mad(w.xor(other, 32 * distance), size, base)
    return [get_word(w, f"[{other}+{i * step}]", dtype) for i in range(len(registers))]
