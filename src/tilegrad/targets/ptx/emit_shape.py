"""Reductions and running sums over Tiles, and Tiles seen in other shapes.

A reduction combines what a thread holds, then lanes by shuffles, then warps through shared memory;
every thread that asks gets the result. Reductions side by side share one exchange between warps. Of
a running sum each thread scans the neighbours it holds; then, digit by digit of the threads'
numbers, lower halves hand their totals to upper ones: lanes by shuffles, warps through shared
memory. Invariant: the order of a sum depends on the Spread, or on the shape and the threads, alone,
so it is the same in every run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ...core.dtype import DType, float32
from ...core.errors import InternalError
from ...ir.node import Node
from ...ir.types import Shape
from ...tile.numeric import COMBINE
from . import rules
from .emission import Emission
from .moves import read_run, shuffle, write_run
from .plan_spread import seen
from .spread import Spread, lines
from .write import Registers, Writer


@dataclass(frozen=True)
class Combining:
    """How values of a DType are combined, the earlier one first."""

    w: Writer
    kind: str
    dtype: DType

    def combine(self, a: str, b: str) -> str:
        """Two values made one."""
        return rules.apply(self.w, COMBINE[self.kind], self.dtype, a, b)

    def pick(self, mask: str, a: str, b: str) -> str:
        """a where the mask holds, else b."""
        return rules.apply(self.w, "where", self.dtype, mask, a, b)

    def fold(self, registers: Registers) -> str:
        """Registers of one thread combined, as a balanced tree."""
        while len(registers) > 1:
            pairs = [self.combine(a, b) for a, b in zip(registers[::2], registers[1::2])]
            registers = pairs + ([registers[-1]] if len(registers) % 2 else [])
        return registers[0]


Part = tuple[Registers, Combining]  # of a reduction


def reduces(e: Emission, nodes: Sequence[Node]) -> None:
    """Reductions that follow one another and do not need one another: those of Tiles that
    are spread alike meet once for all."""
    alike: dict[tuple[Spread, int], list[tuple[Node, Part]]] = {}
    for node in nodes:
        source, axis = e.values.spread_of(node.inputs[0]), node.attrs["axis"]
        alike.setdefault((source, axis), []).append((node, in_warps(e, node, source)))
    for (source, axis), found in alike.items():
        _, warps = reduced_bits(source, axis)
        parts = [part for _, part in found]
        if warps:
            parts = over_warps(e, parts, source, axis, warps)
        for (node, _), (registers, _) in zip(found, parts):
            e.values.held[node] = e.values.planned(node, registers, source.drop(axis))


def in_warps(e: Emission, node: Node, source: Spread) -> Part:
    """What each warp knows of a reduction."""
    (x,), axis, dtype = node.inputs, node.attrs["axis"], e.values.dtype(node)
    one = Combining(e, node.attrs["kind"], dtype)
    if one.kind == "sum" and dtype is float32 and is_product(e, x, source):
        factors = zip(*(e.values.get(i, source) for i in x.inputs))
        found = [fold_products(one, group) for group in grouped(source, axis, factors)]
    else:
        registers = e.values.get(x, source, dtype)
        found = [one.fold(group) for group in grouped(source, axis, registers)]
    for bit in reduced_bits(source, axis)[0]:
        found = [one.combine(r, shuffle(e, r, 1 << bit, dtype)) for r in found]
    return found, one


def grouped(source: Spread, axis: int, values: Iterable[Any]) -> list[list[Any]]:
    """What a thread holds, by the element of the result that it goes into."""
    groups: dict[Shape, list[Any]] = {}
    for at, value in zip(source.registers, values):
        groups.setdefault(at[:axis] + at[axis + 1 :], []).append(value)
    return list(groups.values())


def is_product(e: Emission, x: Node, source: Spread) -> bool:
    """Whether a Tile is a product of two that threads hold as they hold it."""
    return x.op.name == "multiply" and all(
        i.shape == () or e.plan.free(i) or e.plan.spread(i) == source for i in x.inputs
    )


def fold_products(one: Combining, factors: list[tuple[str, str]]) -> str:
    """Products of one thread added as they are made, in chains side by side."""
    count = 4 if len(factors) >= 16 else 2 if len(factors) >= 4 else 1
    chains = []
    for pairs in (factors[n::count] for n in range(count)):
        total = rules.apply(one.w, "multiply", float32, *pairs[0])
        for a, b in pairs[1:]:
            total = rules.apply(one.w, "multiply_add", float32, a, b, total)
        chains.append(total)
    return one.fold(chains)


def reduced_bits(spread: Spread, axis: int) -> tuple[list[int], list[int]]:
    """Bits of the thread's number that move along an axis: of the lane, of the warp."""
    bits = [shift + i for shift, width, a, _ in spread.fields if a == axis for i in range(width)]
    return [b for b in bits if b < 5], [b for b in bits if b >= 5]


def warp_bits(spread: Spread) -> int:
    """The bits of the warp's number that a Spread uses: others tell copies apart."""
    bits = (shift + i for shift, width, _, _ in spread.fields for i in range(width))
    return sum(1 << (bit - 5) for bit in bits if bit >= 5)


def over_warps(
    e: Emission, parts: Sequence[Part], source: Spread, axis: int, bits: list[int]
) -> list[Part]:
    """Combine across warps: each leaves its parts, all read all parts of their group."""
    warps = e.threads.count // 32
    size = max(max(4, one.dtype.size) for _, one in parts)
    flat = [(register, one) for registers, one in parts for register in registers]
    left = source.drop(axis)
    lanes = 32 if any(shift < 5 for shift, _, _, _ in left.fields) else 1
    base = e.shared.scratch(warps * len(flat) * lanes * size)
    lane = e.threads.bits(0, 5)
    warp = e.shr(e.threads.number, 5)
    step = lanes * size
    stride = len(flat) * step
    address = e.mad(warp, stride, base)
    if lanes > 1:
        address = e.mad(lane, size, address)
    first = "" if lanes > 1 else e.test("eq.s32", lane, 0)
    for i, (register, one) in enumerate(flat):
        write_run(e, f"[{address}+{i * step}]", "st.shared", one.dtype, [register], first)
    e.shared.written()
    kept = warp_bits(left)
    start = e.mad(e.mask(warp, kept), stride, base) if kept else base
    if lanes > 1:
        start = e.mad(lane, size, start)
    turns = [0]
    for b in bits:
        turns += [t | 1 << (b - 5) for t in turns]
    found = []
    for i, (_, one) in enumerate(flat):
        at = [f"[{start}+{t * stride + i * step}]" for t in sorted(turns)]
        met = [read_run(e, where, "ld.shared", one.dtype)[0] for where in at]
        found.append(one.fold(met))
    rest = iter(found)
    return [([next(rest) for _ in registers], one) for registers, one in parts]


# ---- shapes -------------------------------------------------------------------------------------


def reshape(e: Emission, node: Node) -> Registers:
    """A Tile in another row-major shape."""
    x, to = node.inputs[0], e.plan.spread(node)
    try:
        before = seen(node, to)
    except InternalError:
        own, registers = e.values.own(x)
        return e.shared.exchange(registers, own.reshape(node.shape), to, e.values.dtype(x))
    return e.values.get(x, before)


def extract(e: Emission, node: Node) -> Registers:
    """A row of a Tile, or an element of a line."""
    x, index = node.inputs[0], node.attrs["index"]
    if node.shape == ():
        return [pick(e, x, index)]
    start = (index,) + (0,) * len(node.shape)
    return cut(e, x, start, (1, *node.shape), e.plan.spread(node).stack(1))


def part(e: Emission, node: Node) -> Registers:
    """A rectangle of a Tile."""
    return cut(e, node.inputs[0], node.attrs["start"], node.shape, e.plan.spread(node))


def cut(e: Emission, x: Node, start: Shape, shape: Shape, to: Spread) -> Registers:
    """A rectangle of a Tile: by renaming, else through shared memory."""
    own, registers = e.values.own(x)
    with suppress(InternalError):  # where it is not cut between threads
        inside = own.part(start, shape)
        if inside.fields == to.fields and set(to.registers) <= set(inside.registers):
            wanted = [tuple(c + a for c, a in zip(at, start)) for at in to.registers]
            return [registers[own.where[at]] for at in wanted]
    return e.shared.exchange(registers, own, to, e.values.dtype(x), start)


def stack_rows(e: Emission, node: Node) -> Registers:
    """Tiles as the rows of a Tile."""
    values = e.values
    own = values.spread_of(next((x for x in node.inputs if not e.plan.free(x)), node.inputs[0]))
    dtype = values.dtype(node)
    registers = [r for x in node.inputs for r in values.get(x, own, dtype)]
    return values.change(registers, own.stack(len(node.inputs)), e.plan.spread(node), dtype)


def pick(e: Emission, x: Node, index: int) -> str:
    """One element of a line, for all threads."""
    own, registers = e.values.own(x)
    if not own.fields:
        return registers[own.where[(index,)]]

    def mine(at: Shape) -> str:
        here = e.test("eq.s32", e.threads.part(own, 0), index - at[0])
        return e.threads.and_guards(here, e.threads.owner(own))

    told = ((register, mine(at)) for at, register in zip(own.registers, registers))
    return e.shared.tell(told, e.values.dtype(x))


# ---- running sums -------------------------------------------------------------------------------


def cumulative(e: Emission, node: Node) -> Registers:
    """The running combination along an axis."""
    x, axis, dtype = node.inputs[0], node.attrs["axis"], e.values.dtype(node)
    one = Combining(e, node.attrs["kind"], dtype)
    own = lines(node.shape, e.threads.count, axis)
    registers = e.values.get(x, own, dtype)
    groups = [
        sorted(line, key=lambda n: own.registers[n][axis])
        for line in grouped(own, axis, range(len(registers)))
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
    e: Emission, totals: Registers, own: Spread, axis: int, one: Combining
) -> tuple[Registers, str]:
    """(what the threads before this one have, of each line; whether there are none)."""
    bits = sorted(
        (stride << i, shift + i)
        for shift, width, a, stride in own.fields
        if a == axis
        for i in range(width)
    )
    earlier, none = list[str](), ""
    for _, bit in bits:
        if bit < 5:
            other = [shuffle(e, t, 1 << bit, one.dtype) for t in totals]
        else:
            other = from_warp(e, totals, own, 1 << (bit - 5), one.dtype)
        upper = e.test("ne.s32", e.threads.bits(bit, 1), 0)
        if not earlier:
            earlier = other  # read only by threads that have some before
            none = e.value("not.pred", upper)
        else:
            grown = [one.pick(none, o, one.combine(o, b)) for o, b in zip(other, earlier)]
            earlier = [one.pick(upper, g, b) for g, b in zip(grown, earlier)]
            none = e.and_predicates(none, e.value("not.pred", upper))
        totals = [
            one.combine(one.pick(upper, o, t), one.pick(upper, t, o)) for o, t in zip(other, totals)
        ]
    return earlier, none


def from_warp(
    e: Emission, registers: Registers, spread: Spread, distance: int, dtype: DType
) -> Registers:
    """What the same lane of the warp whose number differs in one bit holds."""
    threads, size = e.threads, 8 if dtype.size == 8 else 4
    step = threads.count * size
    base = e.shared.scratch(len(registers) * step)
    at = e.mad(threads.number, size, base)
    for i, register in enumerate(registers):
        write_run(e, f"[{at}+{i * step}]", "st.shared", dtype, [register])
    e.shared.written()
    other = e.mask(threads.number, 31 | warp_bits(spread) << 5)
    other = e.mad(e.xor(other, 32 * distance), size, base)
    addresses = [f"[{other}+{i * step}]" for i in range(len(registers))]
    return [read_run(e, where, "ld.shared", dtype)[0] for where in addresses]
