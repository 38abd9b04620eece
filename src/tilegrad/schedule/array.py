"""Families of an array beside the CPU: products, and what its vector unit does to sums of integers.

The array takes a product with the ops that follow it, or ops alone, where its vector unit has them;
everything else is the host's, in the same memory and the same Schedule. A Body of the array has an
ArrayWork in its notes, operands with their views, steps, what is stored; the Body itself computes
the same values on the CPU, to the bit: of 16-bit floats a tile of the unit's depth is summed from
zero, k after k, and added to the tiles before it; with sums in place the unit's depth is that of
the whole product. Subnormal numbers are zero of their sign: operands, products and sums.

Invariant: what is refused is refused in words, and the host takes it; values are those of the
array's simulator, NaNs' bits apart; views are movement alone, from what is stored in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace as replaced
from typing import Any

import numpy as np

from ..core.dtype import float16, int8
from ..core.target import MatrixUnit, Target
from ..graph import build, ops
from ..graph.interpret import interpret
from ..ir.block import argument, pure_block
from ..ir.node import Node
from ..ir.rewrite import replace
from ..ir.symbol import Size, evaluate, high, loop_index, low
from ..ir.text import parse_block, print_block
from ..ir.types import Array, product
from ..runtime.language import language_of
from ..tile.array import FULL, HELD, LEFT, RIGHT, SPARSE, ArrayWork, Operand, Output, VectorStep
from .access import strides_of
from .array_steps import ALONG, VECTOR, Reader, Refused, takes_product
from .dot import DotLowering, VectorProducts
from .family import Bodies, ByFunction, Family, Offer, Offers
from .loops import lower_loops
from .plan import Plan
from .problem import Problem
from .region import Cut, Region


def refuses_value(node: Node, cut: Cut, before: Sequence[Node] = ()) -> str:
    """Why the vector unit does not compute a value, after some of its Region; '' if it does."""
    dot = before[0] if before and before[0].op is ops.dot else None
    values = [*before, node]
    outside = {leaf for v in values for leaf in cut.leaves(v)} - set(before)
    try:
        Reader(values, outside, cut.target, dot).value(node)
    except Refused as why:
        return str(why)
    return ""


class ArrayFamily(Family):
    """What both Families of an array share."""

    def offers(self, region: Region) -> Offers:
        """The array's own rate, where it has all that the Region needs."""
        target = region.target
        try:
            works = work_of_region(region)
        except Refused as why:
            return f"the array {why}"
        seconds = language_of(target).seconds
        if seconds is None:
            return f"nobody counts the time of an array in {target.language}"
        made = [(seconds(work.at_most().to_text(), target), work) for work in works]
        offers = [Offer(s, work, "closed form") for s, work in made if not isinstance(s, str)]
        return offers or str(made[0][0])

    def lower(self, region: Region, offer: Offer) -> Bodies:
        """The host's Body, with the array's work beside it."""
        region.name = f"array_{region.name}"
        bodies = self.on_host(region, offer.plan)
        for body, _ in bodies:
            body.notes["array"] = offer.plan.to_text()
        return bodies

    def on_host(self, region: Region, work: ArrayWork) -> Bodies:
        """The same values on the CPU, to the bit."""
        return lower_loops(region)


class ArrayProducts(ArrayFamily, VectorProducts):
    """Products on the array, with what its vector unit does to sums."""

    def why_not(self, node: Node, target: Target) -> str:
        """By the dtypes of the multipliers."""
        return takes_product(node, target)

    def grow(self, region: Region, node: Node, cut: Cut) -> bool:
        """Whether the vector unit can go on with the sums."""
        if takes_product(region.anchor, cut.target) or not cut.follows(node, region):
            return False
        return not refuses_value(node, cut, region.values)

    def on_host(self, region: Region, work: ArrayWork) -> Bodies:
        """Floats in the array's order."""
        unit = region.target.array
        floats = unit is not None and unit.accumulator.is_float
        return [(ArrayDot(region, work.rate) if floats else DotLowering(region)).lower()]


class ArrayLoops(ArrayFamily):
    """Elements through the vector unit of the array."""

    def grow(self, region: Region, node: Node, cut: Cut) -> bool:
        """Whether all of it is the vector unit's."""
        if not cut.fits_loops(node, region) or refuses_value(region.anchor, cut):
            return False
        return not refuses_value(node, cut, region.values)

    def offers(self, region: Region) -> Offers:
        """Where it takes all of it."""
        if region.kind != "loops" or region.order != "row":
            return "the array has no sums along an axis but rows"
        return super().offers(region)


class HostProducts(VectorProducts):
    """Products that the array has not, on the CPU beside it."""

    fallback = True

    def grow(self, region: Region, node: Node, cut: Cut) -> bool:
        """As without an array, unless the product is the array's."""
        return bool(takes_product(region.anchor, cut.target)) and super().grow(region, node, cut)


class HostLoops(ByFunction):
    """Loops that the array has not, on the CPU beside it."""

    fallback = True

    def __init__(self) -> None:
        super().__init__(lower_loops)

    def grow(self, region: Region, node: Node, cut: Cut) -> bool:
        """As without an array; what the array takes is left to it."""
        if not super().grow(region, node, cut):
            return False
        if node.op in VECTOR or node.op in ALONG or node.op in (ops.cast, ops.fixed):
            if not refuses_value(node, cut):
                return False
        return bool(refuses_value(region.anchor, cut))


# ---- products in the array's order ---------------------------------------------------------------

TINY, HALF_TINY = 2.0**-126, 2.0**-14  # the smallest normal fp32, fp16


class ArrayDot(DotLowering):
    """Lowers one product in the order of the array at a rate."""

    def __init__(self, region: Region, rate: str) -> None:
        super().__init__(region)
        self.rate = rate

    @property
    def unit(self) -> MatrixUnit:
        """The array as it multiplies at this rate."""
        return next(u for u in self.target.array_rates if u.name == self.rate or not self.rate)

    def choose(self) -> Plan:
        """The host's, with blocks of k that are tiles of the array."""
        depth = min(self.unit.k, high(self.problem.sizes[2]))
        return replaced(super().choose(), block_k=depth, unroll=1)

    def flushed(self, x: Node, least: float = TINY) -> Node:
        """x without subnormal numbers."""
        b = self.b
        small = b.apply("less", b.apply("absolute", x), least)
        return b.where(small, b.apply("multiply", x, 0), x)

    def multiplied(self, left: Node, line: Node, sums: Node) -> Node:
        """A product, then a sum, each rounded."""
        half = float16 in [x.dtype for x in self.region.anchor.inputs]
        given = [self.flushed(x, HALF_TINY if half else TINY) for x in (left, line)]
        product = self.flushed(self.b.apply("multiply", *given))
        return self.flushed(self.b.apply("add", sums, product))

    def with_earlier(self, acc: Node, at: Size, rows: list[Size], start: Size) -> Node:
        """The tiles before it and this one; rows of the array that have no k add zeros."""
        b, k = self.b, self.problem.sizes[2]
        unit = self.unit
        whole = unit.k if unit.k <= 2 * unit.m else 2 if self.rate else 1  # of k, without zeros
        if k % whole != 0:
            zero = b.apply("add", acc, 0)
            acc = b.branch(b.less(k, at + unit.k), lambda: [zero], lambda: [acc])[0]
        return self.flushed(super().with_earlier(acc, at, rows, start))

    def epilogue(self, row: Size, lane: Size, acc: Node) -> None:
        """Sums as they are stored: fp16 has no subnormal numbers either."""
        half = self.region.anchor.dtype is float16
        super().epilogue(row, lane, self.flushed(acc, HALF_TINY) if half else acc)


# ---- a Region as the work of the array -----------------------------------------------------------

SATURATES = (("max", -128), ("max", 0), ("min", 127))  # what storing int8 does itself
Sizes = tuple[Size, Size, Size, Size]  # batch, M, N, K


def work_of_region(region: Region) -> list[ArrayWork]:
    """A Region in the terms of the array, both ways round; raises Refused where it has none."""
    dot = region.anchor if region.anchor.op is ops.dot else None
    reads, stored, target = list(region.inputs), region.arrays, region.target
    sizes = _elements(region, stored)
    operands: list[Operand] = []
    if dot is not None:
        why = takes_product(dot, target)
        if why:
            raise Refused(why)
        sizes, operands = _factors(dot, reads)
    reader = Reader(region.values, set(reads), target, dot)
    values = [reader.value(v)[0] for v in stored]
    if (dot is None and not reader.steps) or any(v[0] == "#" for v in values):
        raise Refused("has nothing to compute here")
    batch, m, n, k = sizes
    further: list[tuple[Operand, bool, bool]] = []  # whether it is the same for all rows, columns
    for node in reader.operands:
        if node.size != product((batch, m, n)):
            raise Refused("has no operand of one number a row")
        one = _operand(FULL, node, reads, (batch, m, n))
        elements = _elements_read(one)
        rows, columns = (bool((elements == elements.take([0], axis)).all()) for axis in (1, 2))
        further.append((one, high(m) > 1 and rows, high(n) > 1 and columns))
    uses = Counter([x for _, a, b, _ in reader.steps for x in (a, b)] + values)
    ends = [saturated(v, value, reader.steps, uses) for v, value in zip(stored, values)]
    gone = {at for *_, steps in ends for at in steps}
    kept = [at for i in range(len(reader.steps)) if (at := ("step", i)) not in gone]
    order = [*([] if dot is None else [("product",)]), *(("operand", n) for n in reader.operands)]
    numbers: dict[Any, int] = {value: n for n, value in enumerate([*order, *kept])}
    steps = tuple(
        VectorStep(kind, numbers[a], b[1] if b[0] == "#" else numbers[b], b[0] == "#", shift)
        for kind, a, b, shift in (reader.steps[i] for _, i in kept)
    )
    outputs = tuple(
        Output(numbers[at], len(reads) + i, v.dtype.name, tuple(v.shape), **how)
        for i, (v, (at, how, _)) in enumerate(zip(stored, ends))
    )
    made = []
    for turned in (False, True)[: 1 if region.rows is not None else 2]:
        held = [replaced(o, role=HELD) if (c if turned else r) else o for o, r, c in further]
        given = (batch, m, n, k, (*operands, *held), steps, outputs, turned)
        made += [ArrayWork(*given, rate) for rate in _rates(operands, target)]
    return made


def _rates(operands: list[Operand], target: Target) -> list[str]:
    """The rates that weights may have, the fastest first; floats are never left out, for infinities
    times 0 are none."""
    found = []
    for unit in target.array_rates[1:] if operands else ():
        kinds = tuple(o.dtype for o in operands)
        names = tuple(kind.name for kind in unit.inputs)
        pruned = any(o.pruned for o in operands) and not unit.accumulator.is_float
        if pruned if unit.name == SPARSE else kinds in (names, names[::-1]):
            found.append(unit.name)
    return [*found, ""]


def _elements(region: Region, stored: list[Node]) -> Sizes:
    """Sizes of elements alone: rows as they are summed, else along the last axis."""
    if region.rows is not None:
        return 1, region.rows, region.columns, 0
    shape = max((v.shape for v in stored), key=len)
    return 1, product(shape[:-1]), shape[-1] if shape else 1, 0


def _factors(dot: Node, reads: list[Node]) -> tuple[Sizes, list[Operand]]:
    """Sizes and operands of a product."""
    found = Problem(dot)
    batch, m, k, n = found.sizes
    a, b = dot.inputs
    left = [*found.batch[0], *found.free[0], *found.contract[0]]
    right = [*found.batch[1], *found.contract[1], *found.free[1]]
    return (batch, m, n, k), [
        _operand(LEFT, build.permute(a, left), reads, (batch, m, k)),
        _operand(RIGHT, build.permute(b, right), reads, (batch, k, n)),
    ]


def _operand(role: str, node: Node, reads: list[Node], shape: tuple[Size, ...]) -> Operand:
    base, pruned = node, False
    while base not in reads:
        pruned, base = base.op is ops.pruned, base.inputs[0]
    kind = base.type
    assert isinstance(kind, Array)
    given = argument("x", kind)
    moved = replace([build.reshape(node, shape)], {base: given})[0]
    view = print_block(pure_block("view", (given,), (moved,)), "graph")
    strides = _strides(moved, given)
    if pruned:  # of an operand that is read with its fours whole
        along = {LEFT: 2, RIGHT: 1}.get(role, 0)
        apart = [s for i, s in enumerate(strides) if i != along]
        fours = all(isinstance(s, int) and s % 4 == 0 for s in apart)
        pruned = bool(strides) and strides[along] == 1 and fours
    return Operand(reads.index(base), role, kind.dtype.name, kind.shape, view, strides, pruned)


def _strides(moved: Node, base: Node) -> tuple[Size, ...]:
    """Where the elements of a moved value lie in its base, if that is linear."""
    index = tuple(
        loop_index(name, size) for name, size in zip(("batch", "row", "column"), moved.shape)
    )
    found = strides_of(moved, index, {base}, index)
    return () if found is None else (*found[1], found[2])


def _elements_read(one: Operand) -> np.ndarray[Any, Any]:
    """For every place of an Operand the element of the parameter that it reads; Symbols are small,
    for which places are the same does not depend on them."""
    block = parse_block(one.view.replace(f": {one.dtype}[", ": int32["))
    some = {s.name: min(high(s), max(low(s), 3)) for s in ops.symbols(list(block.nodes))}
    shape = tuple(evaluate(s, some) for s in block.arguments[0].shape)
    numbers = np.arange(1, int(np.prod(shape)) + 1, dtype=np.int32).reshape(shape)
    return interpret(list(block.results), {block.arguments[0]: numbers}, some)[0]


def saturated(
    node: Node, value: Any, steps: Sequence[tuple[str, Any, Any, int]], uses: Counter[Any]
) -> tuple[Any, dict[str, Any], list[Any]]:
    """What is stored of a Node before the steps that storing it does (the bounds of int8, and a
    scale before them), how it is stored then, and those steps."""
    at, gone = value, []
    clipped: dict[str, int] = {}
    while node.dtype is int8 and at[0] == "step" and uses[at] == 1:
        kind, before, second, _ = steps[at[1]]
        if second[0] != "#" or kind in clipped or (kind, second[1]) not in SATURATES:
            break
        clipped[kind] = second[1]
        gone.append(at)
        at = before
    if len(clipped) < 2:  # stored whole, or within int8 without it
        return value, {}, []
    how: dict[str, Any] = {"relu": clipped["max"] == 0}
    if at[0] == "step" and uses[at] == 1:
        kind, before, second, shift = steps[at[1]]
        if kind == "mul" and second[0] == "#" and 0 <= second[1] < 1 << 15 <= 1 << shift:
            gone.append(at)
            at, how["scale"], how["shift"] = before, second[1], shift
    return at, how, gone
